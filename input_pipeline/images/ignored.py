"""Finds out from the first bytes of a picture what decoding ignores."""

import itertools
from collections.abc import Iterable, Mapping

# The number of pictures to look at, and the bytes of each: cameras write tags first.
MOST, HEAD = 20, 4096

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
# The mark before the EXIF data of a file.
_MARKS = {_JPEG: b"Exif\0\0", _PNG: b"eXIf"}
_ORIENTATION = 0x112
# The position in a PNG of the bits of a sample.
_DEPTH = 24


def notes(heads: Iterable[tuple[str, bytes]]) -> list[str]:
    """Describes what reading pictures ignores: a sentence each, with an example.

    Args:
        heads: names and first bytes of pictures, of which the first ``MOST`` are used.
    """
    some = dict(itertools.islice(heads, MOST))
    return [*_of_turned(some), *_of_deep(some)]


def _of_turned(heads: Mapping[str, bytes]) -> list[str]:
    return [
        f"Pictures are read as they are stored: the EXIF orientation of {name} turns "
        "it where it is shown, and is ignored here."
        for name, head in heads.items()
        if _is_turned(head)
    ][:1]


def _of_deep(heads: Mapping[str, bytes]) -> list[str]:
    return [
        f"Pictures are read with 8 bits a channel: of the 16 bits of {name}, the lower "
        "8 are ignored."
        for name, head in heads.items()
        if head.startswith(_PNG) and head[_DEPTH : _DEPTH + 1] == b"\x10"
    ][:1]


def _is_turned(head: bytes) -> bool:
    """Tells whether EXIF data has another orientation than upright."""
    mark = next((_MARKS[kind] for kind in _MARKS if head.startswith(kind)), None)
    if mark is None or mark not in head:
        return False
    exif = head.partition(mark)[2]
    order = "little" if exif.startswith(b"II") else "big"

    def number(offset, size):
        return int.from_bytes(exif[offset : offset + size], order)

    first = number(4, 4)
    entries = (first + 2 + 12 * k for k in range(number(first, 2)))
    return any(
        number(entry, 2) == _ORIENTATION and number(entry + 8, 2) > 1
        for entry in entries
    )
