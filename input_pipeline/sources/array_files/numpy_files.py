"""Reads ``.npz`` and ``.npy`` files, mapped into memory if possible."""

import math
import os
import zipfile
import zlib

import numpy as np

from towers.program import words

SUFFIXES = (".npz", ".npy")
# Compressed arrays above this size are reported.
_LARGE = 10**9
# The header of a member of a zip file. The lengths of its name and extra field are at
# 26; both follow the header.
_ZIP_HEADER, _LENGTHS = 30, 26
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def load(path: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Reads the arrays of a file; uncompressed ones stay on disk.

    Nothing is unpickled: a pickle may run any code.

    Args:
        path: the path of the file.

    Returns:
        The arrays by their names, in the order of the file, the only one of a ``.npy``
        file as ""; and sentences on arrays that take much memory.

    Raises:
        ValueError: the file has no arrays of numbers or texts, or is damaged.
    """
    if "://" in path:
        raise ValueError(
            f"{path} is not on this machine: expected a local file, which can be "
            "mapped into memory, so copy it first"
        )
    path = os.path.expanduser(path)
    try:
        if not zipfile.is_zipfile(path):
            with open(path, "rb") as file:
                return {"": _array(path, file)}, []
        return _members(path)
    except (ValueError, OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ValueError(
            f"{path} cannot be read: {reason}: expected a whole file that numpy.save "
            "or numpy.savez wrote"
        ) from error


def _members(path):
    arrays, notes = {}, []
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if member.compress_type == zipfile.ZIP_STORED:
                file.seek(member.header_offset)
                header = file.read(_ZIP_HEADER)
                lengths = np.frombuffer(header, "<u2", 2, _LENGTHS)
                file.seek(int(lengths.sum()), os.SEEK_CUR)
                arrays[name] = _array(path, file, name)
                continue
            with archive.open(member) as unpacked:
                _check(_header(unpacked)[2], name)
            with archive.open(member) as unpacked:
                arrays[name] = np.lib.format.read_array(unpacked, allow_pickle=False)
            if member.file_size > _LARGE:
                notes.append(
                    f"{name!r} of {path} is compressed, and takes "
                    f"{words.size(member.file_size)} of memory; numpy.savez writes "
                    "arrays that stay on the disk."
                )
    return arrays, notes


def _array(path, file, name=""):
    """Maps the array that begins at the file's position."""
    shape, is_fortran, dtype = _header(file)
    _check(dtype, name)
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    order = "F" if is_fortran else "C"
    return np.memmap(path, dtype, "r", file.tell(), shape, order)


def _header(file):
    version = np.lib.format.read_magic(file)
    read = _HEADERS.get(version)
    if read is None:
        raise ValueError(f"it has format {version}, which is for arrays of records")
    return read(file)


def _check(dtype, name):
    if dtype.hasobject:
        raise ValueError(
            f"the array {name!r} has Python objects, such as lists of different "
            "lengths, which only pickle reads, and a pickle may run any code; save "
            "numbers or texts of one shape instead"
        )
