"""Reads files through a local store, within a graph, and in TensorFlow's order.

TensorFlow separates records and lines, and checks them, as it does without a store: it
gets a copy of one part of a file at a time, which ends at the end of a record.
"""

import functools
import io
import os
import struct
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.local_store.ahead import Group
from towers.input_pipeline.local_store.store import StoredFiles
from towers.input_pipeline.sources.files import in_python

# A TFRecord: its length and a checksum of it, the data, a checksum of these.
_HEADER, _AROUND = 12, 16
# Records to look ahead, each in its own file; at least two batches.
_RECORDS_AHEAD = 512
# Copies are in memory if possible.
_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class StoredFile(io.RawIOBase):
    """A file with random access, for readers such as pyarrow.

    Args:
        files: the files of the data set.
        path: the path of the file.
    """

    def __init__(self, files: StoredFiles, path: str):
        super().__init__()
        self._files, self._path, self._at = files, path, 0

    def readable(self) -> bool:
        """Returns True; see ``io.IOBase``."""
        return True

    def seekable(self) -> bool:
        """Returns True; see ``io.IOBase``."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves the position; see ``io.IOBase``."""
        size = self._files.size(self._path)
        begins = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: size}
        self._at = begins[whence] + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        """Reads bytes into a buffer; see ``io.RawIOBase``."""
        data = self._files.read_at(self._path, self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def read_file(files: StoredFiles, path: tf.Tensor) -> tf.Tensor:
    """Reads a file, as ``tf.io.read_file`` does."""

    def read(path):
        return [np.array(_call(files.read_file, _text(path)), object)]

    (content,) = in_python.call(read, [path], [tf.string])
    return tf.ensure_shape(content, [])


def announced(
    files: StoredFiles,
    batches: tf.data.Dataset,
    paths: Callable[[tf.Tensor], tuple[tf.Tensor, ...]],
    split: str,
    seeds: tf.Tensor | None,
    batch_size: int,
) -> tf.data.Dataset:
    """Starts reading the files of records, some batches ahead.

    Args:
        files: the files of the data set.
        batches: has batches of numbers of records, and further values.
        paths: returns the paths of the files that each record of a batch needs.
        split: the split of the records.
        seeds: int64 [2], which identify the epoch; None if its order is fixed.
        batch_size: number of records in a batch.
    """

    def announce(numbers, epoch, *_paths):
        group = Group(split, epoch.tobytes())
        for some in zip(*_paths, strict=True):
            files.announce((path.decode() for path in some), group)
        return [numbers]

    def look(numbers, *beside):
        epoch = tf.zeros([0], tf.int64) if seeds is None else seeds
        given = [numbers, epoch, *paths(numbers)]
        (same,) = in_python.call(announce, given, [tf.int64])
        return tf.ensure_shape(same, numbers.shape), *beside

    look = tf.autograph.experimental.do_not_convert(look)
    return batches.map(look).prefetch(max(_RECORDS_AHEAD // batch_size, 2))


def records(files: StoredFiles, path: str | tf.Tensor) -> tf.data.Dataset:
    """Reads the records of one file, as ``tf.data.TFRecordDataset`` does."""
    return _parts(files, path, _end_of_records, tf.data.TFRecordDataset)


def is_whole(files: StoredFiles, path: str) -> bool:
    """Tells whether a TFRecord file ends at the end of a record, by lengths."""
    begin, size = 0, files.size(path)
    while begin < size:
        part, end = _whole(files, path, begin, _end_of_records)
        # As if there were more data, to notice an early end.
        if not part or _end_of_records(part, 2**64) != len(part):
            return False
        begin = int(end)
    return True


def _parts(files, path, find_end, dataset):
    take_apart = _take_apart(dataset)

    def read(path, begin):
        part, end = _call(_whole, files, _text(path), int(begin), find_end)
        if not part:
            return np.array([], object), end
        with tempfile.NamedTemporaryFile(dir=_FOLDER, prefix="towers-") as copy:
            copy.write(part)
            copy.flush()
            return _call(take_apart, copy.name, len(part)).numpy(), end

    def following(begin, _):
        items, end = in_python.call(read, [path, begin], [tf.string, tf.int64])
        return tf.ensure_shape(end, []), tf.ensure_shape(items, [None])

    following = tf.autograph.experimental.do_not_convert(following)
    parts = tf.data.Dataset.counter().scan(np.int64(0), following)
    return parts.take_while(lambda items: tf.size(items) > 0).unbatch()


@functools.cache
def _take_apart(dataset: Callable) -> Callable:
    """Returns a function that makes a tensor of all records of a file."""

    @tf.function(
        input_signature=[tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)]
    )
    def take_apart(path, most):
        return dataset(path).batch(most).get_single_element()

    return take_apart


def _whole(
    files: StoredFiles, path: str, begin: int, find_end: Callable
) -> tuple[bytes, np.int64]:
    """Returns whole records from a byte on, at least one, and their end."""
    part, left, end = bytearray(), files.size(path) - begin, 0
    while not end and len(part) < left:
        part += files.read_from(path, begin + len(part))
        end = find_end(part, left)
    return bytes(part[:end]), np.int64(begin + end)


def _end_of_records(part: bytes | bytearray, left: int) -> int:
    """Finds the end of the last whole record; 0 if there is none.

    Args:
        part: the bytes read.
        left: number of bytes up to the end of the file.
    """
    end, size = 0, len(part)
    while end + _HEADER <= size:
        (length,) = struct.unpack_from("<Q", part, end)
        if end + length + _AROUND > size:
            # TensorFlow reports a record that does not end.
            return end or (size if length + _AROUND > left else 0)
        end += length + _AROUND
    return end


def _text(path: Any) -> str:
    """Returns a path, which has another form if TensorFlow is eager."""
    return np.asarray(path).item().decode()


def _call(function: Callable, *arguments):
    try:
        return function(*arguments)
    except (OSError, tf.errors.OpError) as error:
        text = error.message if isinstance(error, tf.errors.OpError) else error
        raise ValueError(str(text).splitlines()[0]) from error
