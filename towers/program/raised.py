"""Errors that Python code raised inside a TensorFlow graph, such as a generator's."""

import re

_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
_FIRST = "Traceback (most recent call last):"
_PACKAGES = ("/site-packages/", "/dist-packages/")


def in_graph(message: str) -> str | None:
    """Finds the user's line in the message of an error of TensorFlow's.

    Args:
        message: of the error. TensorFlow writes Python's traceback into it, among its
            own nodes.

    Returns:
        A sentence with file, line and error; None where no user's code has raised one.
    """
    _, begun, rest = message.partition(_FIRST)
    if not begun:
        return None
    frames, error = [], ""
    for line in rest.splitlines():
        if frame := _FRAME.match(line):
            frames.append(frame)
        elif frames and line and not line.startswith((" ", "\t")):
            error = line
            break
    own = [frame for frame in frames if not any(p in frame["path"] for p in _PACKAGES)]
    if not own or not error:
        return None
    path, line, name = own[-1].group("path", "line", "name")
    return f"{path}:{line}, in {name}: {error}"
