"""Drops TensorFlow's log lines of errors that Python raises as well.

`startup` runs this file as a process, so it imports no module of ours.
"""

import re
import sys
from collections.abc import Iterable, Iterator

# Lines as TensorFlow loads a kept result of XLA: it reads the file as text first, and
# takes two wishes of the compiler for abilities of a CPU.
LOADING = (
    r"text_format\.cc:[0-9]+\] Error parsing text-format tensorflow\.XlaSerialized"
    r"|Target machine feature \+prefer-no-(scatter|gather) is not"
)
# A line of an error, of a check that XLA drops, of a node's attribute that is ignored,
# or one that names a node.
_TWICE = re.compile(
    LOADING.encode() + b"|"
    rb"local_rendezvous\.cc:\d+\] |op_kernel\.cc:\d+\] (OP_REQUIRES failed|[A-Z_]+: )"
    rb"|assert_op\.cc:\d+\] Ignoring Assert operator"
    rb"|Unknown attributes will be ignored|^\s+\[\[\{?\{?[A-Za-z]"
)
_LOGGED = re.compile(rb"[IWEF]\d{4} .*\.cc:\d+\] ")
# Lines that follow an error without an empty line, such as the end of a crash.
_OTHERS = re.compile(_LOGGED.pattern + rb"|Fatal Python error")
_TRACEBACK = b"Traceback (most recent call last):"
_REMOTE = b"multiprocessing.pool.RemoteTraceback:"
_QUOTES = b'"""'
_BETWEEN = (b"The above exception was ", b"During handling of the above exception")


def sift(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines to show.

    A traceback that TensorFlow logs has empty lines between its lines. Those of Python
    itself do not, and are shown.
    """
    lines, before = iter(lines), b""
    line = next(lines, b"")
    while line:
        if line.startswith(_TRACEBACK):
            following = next(lines, b"")
            if following.strip():
                yield line
                line = following
            else:
                line = _after_traceback(lines)
            continue
        if line.startswith(_REMOTE) and _LOGGED.match(before):
            line = _after_remote(lines)
            continue
        if not _TWICE.search(line):
            yield line
        before, line = line, next(lines, b"")


def _after_traceback(lines):
    """Returns the first line after the frames, the error and its empty lines."""
    is_frame = True
    for line in lines:
        if _OTHERS.match(line):
            return line
        is_text = bool(line.strip())
        if is_frame:
            is_frame = not is_text or line.startswith(b" ")
        elif not is_text:
            break
    return _after_blank(lines)


def _after_remote(lines):
    """Returns the first line after the quoted traceback of a pool's process."""
    quotes = 0
    for line in lines:
        if _OTHERS.match(line):
            return line
        quotes += line.startswith(_QUOTES)
        if quotes == 2:
            break
    return _after_blank(lines)


def _after_blank(lines):
    for line in lines:
        if line.strip() and not line.startswith(_BETWEEN):
            return line
    return b""


if __name__ == "__main__":
    for _line in sift(sys.stdin.buffer):
        sys.stdout.buffer.write(_line)
        sys.stdout.buffer.flush()
