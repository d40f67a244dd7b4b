"""Finds the records of a TFRecord file, and those that cannot be read.

A record consists of its length (8 bytes), a checksum of the length (4), the data, and a
checksum of the data (4). TensorFlow's reader gives up a file at the first error. Its
own way to begin at a byte (`byte_offsets`) is lost when a dataset is serialized, but
not in a function.
"""

import contextlib
import itertools
import mmap
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.files.record import Record, fault_of

HEADER = 12
_AROUND = 16
# One read fetches several of the records that are smaller than this.
_SMALL, _AT_ONCE = 2**13, 2**16


def walk(path: str) -> Iterator[Record]:
    """Reads one file eagerly; `raw` is the serialized record.

    A record with a wrong checksum is skipped by its length. If that leads nowhere, it
    stands for the rest of the file.
    """
    number = offset = 0
    bad = None
    while bad is None or (bad.count is not None and offset < _size(path)):
        with _from(path, offset) as rest:
            begin, bad = offset, None
            records = iter(tf.data.TFRecordDataset(rest))
            while bad is None:
                place = f"record {number} (byte offset {offset})"
                record = Record(path, place, number)
                number += 1
                try:
                    serialized = next(records, None)
                except tf.errors.DataLossError as error:
                    bad = _bad(record, offset, str(error), offset - begin)
                except tf.errors.OpError as error:
                    gap = (offset, offset)
                    bad = record.with_fault(fault_of(error), gap=gap, count=None)
                else:
                    if serialized is None:
                        # TensorFlow takes a truncated header for the end.
                        if surplus := _size(path) - offset:
                            fault = f"corrupted: truncated after {surplus} bytes"
                            gap = (offset, offset + surplus)
                            yield record.with_fault(fault, gap=gap)
                        return
                    yield record.with_raw(serialized)
                    offset += len(serialized.numpy()) + _AROUND
        yield bad
        offset = bad.gap[1]


def is_whole(path: str) -> bool:
    """Tells whether a file ends at the end of a record, by lengths alone."""
    end, size = 0, _size(path)
    if "://" in path or not size:
        for offset, length in headers(path):
            end = offset + length + _AROUND
        return end == size
    # There may be a million: a call to read each takes ten times longer than a lookup.
    length_at = struct.Struct("<Q").unpack_from
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        while end + HEADER <= size:
            end += length_at(content, end)[0] + _AROUND
    return end == size


def readable(path: str, bad: Collection[Record]) -> list[tuple[int, int, int]]:
    """Returns numbers, byte offsets and lengths of the data around gaps.

    Args:
        path: the path of the file.
        bad: all its records that have a gap, numbered as by `walk`.
    """
    ends = {record.number: record.gap[1] for record in bad}
    left = [record.number for record in bad if record.count is None]
    intact = []
    if 0 in left:  # the file may be missing
        return intact
    for number, (offset, length) in enumerate(headers(path, ends)):
        if number in left:
            break
        if number not in ends:
            intact.append((number, offset + HEADER, length))
    return intact


def begins(path: str, begin: int, most: int) -> tuple[np.ndarray, int]:
    """Returns byte offsets of records, by lengths alone.

    After a wrong length there may be none: reading that record is an error.

    Args:
        path: the path of the file.
        begin: the beginning of the first record.
        most: the most records to return.

    Returns:
        int64 offsets [N], and the beginning of the next record.
    """
    size = _size(path)
    records = [*itertools.islice(headers(path, begin=begin), most)]
    end = min(sum(records[-1]) + _AROUND, size) if records else size
    # TensorFlow takes a truncated header for the end.
    offsets = [offset for offset, _ in records if offset + HEADER <= size]
    return np.array(offsets, np.int64), np.int64(end)


def count(path: str) -> int:
    """Counts the records of a file, by lengths alone."""
    size = _size(path)
    # TensorFlow takes a truncated header for the end.
    return sum(offset + HEADER <= size for offset, _ in headers(path))


def headers(
    path: str, ends: Mapping[int, int] = {}, begin: int = 0
) -> Iterator[tuple[int, int]]:
    """Yields offset and length of each record; the data of large ones are not read.

    Args:
        path: the path of the file.
        ends: the ends of records with a wrong length, by their numbers.
        begin: the beginning of the first record.
    """
    size, offset, number = _size(path), begin, 0
    part, first, most = b"", begin, HEADER
    with _open(path) as file:
        while offset < size:
            if offset + HEADER > first + len(part):
                file.seek(offset)
                part, first = file.read(most), offset
            header = part[offset - first : offset - first + HEADER].ljust(HEADER, b"\0")
            (length,) = struct.unpack("<Q", header[:8])
            yield offset, length
            most = _AT_ONCE if length < _SMALL else HEADER
            offset = ends[number] if number in ends else offset + length + _AROUND
            number += 1


def _bad(record, offset, message, read_offset):
    """Returns a bad record, with its fault and its gap."""
    size = _size(record.path)
    with _open(record.path) as file:
        file.seek(offset)
        header = file.read(HEADER)
    end = offset + struct.unpack("<Q", header[:8])[0] + _AROUND
    if "truncated" in message:
        return record.with_fault("corrupted: truncated", gap=(offset, size))
    # TensorFlow names the place: the data, or the length before them.
    if re.search(rf"\b{read_offset + HEADER}\b", message):
        fault = "corrupted: its data have another checksum"
        return record.with_fault(fault, gap=(offset, end))
    fault = "corrupted: its length has another checksum"
    end = _find_next(record.path, offset)
    if end is not None:
        return record.with_fault(fault, gap=(offset, end))
    if offset == 0:
        fault = f"no header of a TFRecord, but {header!r}"
    return record.with_fault(fault, gap=(offset, size), count=None)


def _find_next(path, offset):
    """Finds the first byte after a header from which lengths lead to the end."""
    with _open(path) as file:
        file.seek(offset)
        rest = file.read()
    # Positions where the upper half of a length is 0: no record has 4 GB.
    zero = np.frombuffer(rest, np.uint8) == 0
    zeros = zero[4:-3] & zero[5:-2] & zero[6:-1] & zero[7:]
    leads_nowhere = set()
    for start in np.flatnonzero(zeros):
        at = int(start)
        while _AROUND <= at <= len(rest) - _AROUND and at not in leads_nowhere:
            leads_nowhere.add(at)
            at += struct.unpack_from("<Q", rest, at)[0] + _AROUND
        if at == len(rest):
            return offset + int(start)
    return len(rest) + offset if _only_one(rest) else None


def _only_one(rest):
    """Tells whether the record is the last, by its length."""
    return struct.unpack_from("<Q", rest.ljust(8, b"\0"))[0] + _AROUND == len(rest)


@contextlib.contextmanager
def _from(path, offset):
    """A context that yields a file of the bytes from an offset on, for TensorFlow."""
    if not offset:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        rest = os.path.join(folder, "rest")
        with _open(path) as file, open(rest, "wb") as copy:
            file.seek(offset)
            shutil.copyfileobj(file, copy)
        yield rest


def _open(path):
    # TensorFlow's own file is slow where it is not needed. Without a buffer, as a
    # header is a few bytes of what a buffer would read.
    if "://" in path:
        return tf.io.gfile.GFile(path, "rb")
    return open(path, "rb", buffering=0)


def _size(path):
    return tf.io.gfile.stat(path).length
