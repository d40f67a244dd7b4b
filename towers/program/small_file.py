"""Reads the small files that our programs write: of a run, a queue, a cache.

Such a folder may come from anyone. A name in it may be that of a pipe, which blocks a
reader forever, of a device, of a folder, or of a file that fills the memory. JSON may
be nested too deeply for Python. Here, each of these is an error of one sentence. Links
are followed, because stores of downloaded files consist of links.
"""

import json
import os
import stat
from typing import Any

MOST_BYTES = 2**28
"""Maximum size of a file in memory; the largest of our files hold vocabularies."""
# In Keras's configurations, a model within a model is some four levels deeper.
_MOST_LEVELS = 200
_KINDS = {dict: "object", list: "list"}


class FileError(ValueError):
    """A file is not one that our programs write; the message says why, as a clause."""


def is_name(name: object) -> bool:
    """Returns whether a value is the name of a file in a folder, not a path."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return name == os.path.basename(name) and "\0" not in name


def read_bytes(path: str | os.PathLike, most_bytes: int = MOST_BYTES) -> bytes:
    """Reads a regular file without waiting for a writer.

    Args:
        path: The file.
        most_bytes: Maximum size of the file.

    Raises:
        FileNotFoundError: The file does not exist.
        FileError: It is not a regular file, is too large, or cannot be read.
    """
    try:
        # Without this flag, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileError("it is no regular file")
            with open(descriptor, "rb", closefd=False) as file:
                # The file may grow meanwhile.
                content = file.read(most_bytes + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileError(error.strerror or str(error)) from error
    if len(content) > most_bytes:
        raise FileError(f"it has more than {most_bytes:,} bytes")
    return content


def read_text(
    path: str | os.PathLike, most_bytes: int = MOST_BYTES, errors: str = "strict"
) -> str:
    """Reads a file of text.

    Args:
        path: The file.
        most_bytes: Maximum size of the file.
        errors: How to treat bytes that are not UTF-8; see `bytes.decode`.

    Raises:
        FileNotFoundError: The file does not exist.
        FileError: See `read_bytes`; or the file is not UTF-8.
    """
    return _decode(read_bytes(path, most_bytes), errors)


def read_json(
    path: str | os.PathLike, kind: type = object, most_bytes: int = MOST_BYTES
) -> Any:
    """Reads a file of JSON.

    Args:
        path: The file.
        kind: The expected type of its content: `dict`, `list`, or `object` for any.
        most_bytes: Maximum size of the file.

    Raises:
        FileNotFoundError: The file does not exist.
        FileError: See `read_text`; or the file is not JSON, or holds another type.
    """
    return parse_json(read_bytes(path, most_bytes), kind)


def parse_json(text: bytes, kind: type = object) -> Any:
    """Parses the bytes of a JSON file; see `read_json`.

    Raises:
        FileError: The text is not UTF-8, not JSON, or of another type.
    """
    decoded = _decode(text)
    try:
        content = json.loads(decoded)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise FileError(f"it is no JSON: {error}") from error
    if not isinstance(content, kind):
        raise FileError(f"it holds no {_KINDS[kind]}")
    if _is_deep(content):
        raise _too_deep()
    return content


def _decode(content: bytes, errors: str = "strict") -> str:
    try:
        return content.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise FileError("it is not UTF-8") from error


def _is_deep(content: Any) -> bool:
    """Returns whether functions that recurse into each level would fail."""
    level = [content]
    for _ in range(_MOST_LEVELS):
        inner = [value for value in level if isinstance(value, dict | list)]
        if not inner:
            return False
        level = [
            part
            for value in inner
            for part in (value.values() if isinstance(value, dict) else value)
        ]
    return True


def _too_deep():
    return FileError("it is nested too deeply")
