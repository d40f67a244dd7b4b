"""Where loaded libraries keep the addresses of the functions that they import."""

import contextlib
import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Callable, Iterator

import numpy as np

# <elf.h>: entries of the dynamic section, and kinds of segments.
_STRTAB, _SYMTAB, _STRSZ, _RELA, _RELASZ, _PLTRELSZ, _JMPREL = 5, 6, 10, 7, 8, 2, 23
_DYNAMIC = 2
# Relocations that write a function's address: JUMP_SLOT and GLOB_DAT.
_KINDS = {"x86_64": (7, 6), "aarch64": (1026, 1025)}
_RELOCATION = np.dtype(
    [("offset", "<u8"), ("kind", "<u4"), ("symbol", "<u4"), ("addend", "<i8")]
)
_SYMBOL = np.dtype(
    [("name", "<u4"), ("kind", "<u2"), ("section", "<u2"), ("rest", "<u8", 2)]
)
_ELSEWHERE = 0  # The section of a symbol that another library defines.
# <sys/mman.h>: read, write, execute, as /proc/self/maps has them.
_PROTECTIONS = (1, 2, 4)


class _Segment(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("offset", "address", "physical")),
        *((name, ctypes.c_uint64) for name in ("in_file", "in_memory", "align")),
    )


class _Library(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("segments", ctypes.POINTER(_Segment)),
        ("count", ctypes.c_uint16),
    )


@contextlib.contextmanager
def replaced(function: str, library: str, address: int) -> Iterator[None]:
    """Has libraries call another function until the context ends.

    Args:
        function: The name of the function that they import.
        library: A part of the libraries' paths.
        address: Of the function to call.

    Raises:
        OSError: If this is not possible here.
    """
    if platform.system() != "Linux" or platform.machine() not in _KINDS:
        raise OSError(
            f"libraries of {platform.system()} on {platform.machine()} are of an "
            f"unknown kind (known is Linux on {' and '.join(_KINDS)})"
        )
    entries = _find(function, library)
    if not entries:
        raise OSError(f"no library with {library!r} in its path imports {function}()")
    before = {entry: ctypes.c_uint64.from_address(entry).value for entry in entries}
    try:
        for entry in entries:
            _write(entry, address)
        yield
    finally:
        for entry, value in before.items():
            _write(entry, value)


def _find(function: str, library: str) -> list[int]:
    """Finds where libraries keep the address of a function that they import."""
    found: list[int] = []

    def visit(info: _Library) -> None:
        if library in os.fsdecode(info.name or b""):
            found.extend(_entries(info, function.encode()))

    _visit_libraries(visit)
    return found


def _visit_libraries(visit: Callable[[_Library], None]) -> None:
    @ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p
    )
    def callback(info, size, data):
        visit(info.contents)
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(callback, None)


def _entries(library: _Library, function: bytes) -> Iterator[int]:
    dynamic = _dynamic(library)
    for table, size in ((_JMPREL, _PLTRELSZ), (_RELA, _RELASZ)):
        if table not in dynamic:
            continue
        # TensorFlow has a million.
        count = dynamic[size] // _RELOCATION.itemsize
        found = _read(dynamic[table], _RELOCATION, count)
        found = found[np.isin(found["kind"], _KINDS[platform.machine()])]
        symbols = _read(dynamic[_SYMTAB], _SYMBOL, found["symbol"].max(initial=0) + 1)
        found = found[symbols["section"][found["symbol"]] == _ELSEWHERE]
        names = _read(dynamic[_STRTAB], np.dtype(np.uint8), dynamic[_STRSZ])
        for place, letter in enumerate(function + b"\0"):
            letters = names[symbols["name"][found["symbol"]] + place]
            found = found[letters == letter]
        yield from (library.base + int(offset) for offset in found["offset"])


def _read(address: int, kind: np.dtype, count: int) -> np.ndarray:
    memory = (ctypes.c_uint8 * (int(count) * kind.itemsize)).from_address(address)
    return np.frombuffer(memory, kind)


def _dynamic(library: _Library) -> dict[int, int]:
    """Reads the dynamic section, with addresses in memory."""
    read = {}
    for segment in library.segments[: library.count]:
        if segment.kind == _DYNAMIC:
            start = library.base + segment.address
            section = ctypes.string_at(start, segment.in_memory)
            read.update(struct.iter_unpack("<QQ", section))
    for tag in read.keys() & {_STRTAB, _SYMTAB, _RELA, _JMPREL}:
        # glibc has added the base already, musl has not.
        if read[tag] < library.base:
            read[tag] += library.base
    return read


def _write(entry: int, value: int) -> None:
    protection = _protection(entry)
    _protect(entry, protection | _PROTECTIONS[0] | _PROTECTIONS[1])
    ctypes.c_uint64.from_address(entry).value = value
    _protect(entry, protection)


def _protection(address: int) -> int:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            place, letters = line.split()[:2]
            start, end = (int(bound, 16) for bound in place.split("-"))
            if start <= address < end:
                pairs = zip(_PROTECTIONS, letters, strict=False)
                return sum(bit for bit, letter in pairs if letter != "-")
    raise OSError(f"/proc/self/maps does not have the address {address:#x}")


def _protect(address: int, protection: int) -> None:
    page = ctypes.c_void_p(address // mmap.PAGESIZE * mmap.PAGESIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), protection):
        raise OSError(ctypes.get_errno(), "mprotect of a library's page failed")
