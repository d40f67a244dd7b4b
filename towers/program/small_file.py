"""Reads the small files that our programs write: of a run, a queue, a cache.

Such a folder may come from anybody. A name in it may be that of a pipe, on which a
reader waits without end, of a device, of a folder, or of a file that fills the memory.
JSON may be nested so deeply that Python gives up. Here, each of these is an error of
one sentence. Links are followed, because stores of downloaded files consist of them.
"""

import json
import os
import stat
from typing import Any

MOST_BYTES = 2**28
"""Bounds what is read into memory; the largest of our files hold vocabularies."""
# Keras describes a model within a model some four levels further down.
_MOST_LEVELS = 200
_KINDS = {dict: "object", list: "list"}


class FileError(ValueError):
    """A file is not one that our programs write; the message says why, in a clause."""


def is_name(name: object) -> bool:
    """Tells whether something names a file in a folder, and nothing outside of it."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return name == os.path.basename(name) and "\0" not in name


def read_bytes(path: str | os.PathLike, most_bytes: int = MOST_BYTES) -> bytes:
    """Reads a regular file without waiting for a writer.

    Args:
        path: Its name.
        most_bytes: How long it may be.

    Raises:
        FileNotFoundError: There is none.
        FileError: It is something else, too long, or cannot be read.
    """
    try:
        # To open a pipe that nobody writes to waits for a writer, without this flag.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileError("it is no regular file")
            with open(descriptor, "rb", closefd=False) as file:
                # Somebody may make it longer meanwhile.
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
        path: Its name.
        most_bytes: How long it may be.
        errors: What to do about bytes that are not UTF-8; see `bytes.decode`.

    Raises:
        FileNotFoundError: There is none.
        FileError: As of `read_bytes`, or it is not UTF-8.
    """
    return _decode(read_bytes(path, most_bytes), errors)


def read_json(
    path: str | os.PathLike, kind: type = object, most_bytes: int = MOST_BYTES
) -> Any:
    """Reads a file of JSON.

    Args:
        path: Its name.
        kind: What has to be in it: `dict`, `list`, or `object` for anything.
        most_bytes: How long it may be.

    Raises:
        FileNotFoundError: There is none.
        FileError: As of `read_text`, or it is no JSON, or of another kind.
    """
    return parse_json(read_bytes(path, most_bytes), kind)


def parse_json(text: bytes, kind: type = object) -> Any:
    """Reads JSON of which somebody else has read the bytes; see `read_json`.

    Raises:
        FileError: It is not UTF-8, no JSON, or of another kind.
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
    """Tells whether functions that call themselves for each level would give up."""
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
