"""Reads records of TFRecord files at their places, and nothing in between.

Finding the places only reads the headers of records. TensorFlow reads the records, and
checks them as always.

With several hosts, places travel through a stream instead of records; otherwise each
host would read all files. That takes some 0.1 ms a record, so small records are read in
full.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.examples import framing
from towers.input_pipeline.sources.files import in_python

# Two pages of memory: most pages hold some needed record if records are smaller.
LEAST_BYTES = 2**13
_HEADERS_AT_ONCE = 256
# Reads of each thread: a file system on a network answers several at once.
_RECORDS_AT_ONCE = 4
# Slower storage, such as a mounted object store, is not suited to jumps.
_MOST_SECONDS = 0.005
_TRIES = 8


class RecordIndex:
    """The places of all records of some files.

    They are found once, and kept: 8 bytes a record.

    Args:
        paths: the paths of the files.
    """

    def __init__(self, paths: Sequence[str]):
        self._paths = [*paths]
        self._known = {}
        self._whole = None

    def reads_whole(
        self,
        record_bytes: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
    ) -> str:
        """Returns why files are read whole, or ""; cached. See ``Source.reads_whole``.

        Args:
            record_bytes: returns the approximate size of a record.
            clock: returns seconds.
        """
        if self._whole is None:
            self._whole = self._reads_whole(record_bytes, clock)
        return self._whole

    def _reads_whole(self, record_bytes, clock):
        if any("://" in path for path in self._paths):
            return "TensorFlow reads a remote file by the megabyte"
        if record_bytes() < LEAST_BYTES:
            return f"records have less than {LEAST_BYTES // 2**10} KB"
        seconds = _seconds(self._paths[0], clock)
        if seconds > _MOST_SECONDS:
            return f"the file system takes {1000 * seconds:.0f} ms to go to a record"
        return ""

    def of_file(self, file: tf.Tensor) -> tf.data.Dataset:
        """Returns the places of one file's records, in order.

        Args:
            file: the index of the file in `paths`.

        Returns:
            A dataset of int64 [2]: the file, and the byte at which a record begins.
        """

        def following(begin, _):
            types = [tf.int64, tf.int64]
            offsets, end = in_python.call(self._find, [file, begin], types)
            offsets = tf.ensure_shape(offsets, [None])
            return tf.ensure_shape(end, []), at(file, offsets)

        some = tf.data.Dataset.counter().scan(np.int64(0), following)
        return some.take_while(lambda batch: tf.size(batch) > 0).unbatch()

    def read(
        self, record_places: tf.Tensor, parse: Callable[[tf.Tensor], Any] | None = None
    ) -> Any:
        """Returns the records at places [B, 2], at least one.

        Args:
            record_places: places from `of_file`.
            parse: parses each serialized record; None leaves it as it is.
        """
        paths = tf.constant(self._paths)

        def one(place):
            # Without a buffer, so that nothing else is read.
            records = tf.raw_ops.TFRecordDatasetV2(
                filenames=[paths[place[0]]],
                compression_type="",
                buffer_size=tf.constant(0, tf.int64),
                byte_offsets=[place[1]],
            )
            spec = tf.TensorSpec([], tf.string)
            record = tf.data.experimental.from_variant(records, spec).take(1)
            return record if parse is None else record.map(parse)

        records = tf.data.Dataset.from_tensor_slices(record_places).interleave(
            one,
            cycle_length=_RECORDS_AT_ONCE,
            num_parallel_calls=_RECORDS_AT_ONCE,
            deterministic=True,
        )
        # No record may be missing.
        count = tf.shape(record_places, tf.int64)[0]
        return records.batch(count, drop_remainder=True).get_single_element()

    def _find(self, file, begin):
        """Returns the places after a byte of a file, and the end of these records."""
        key = int(file), int(begin)
        if key not in self._known:
            path = self._paths[file]
            try:
                self._known[key] = framing.begins(path, int(begin), _HEADERS_AT_ONCE)
            except (OSError, tf.errors.OpError) as error:
                raise ValueError(f"{path}: {error}") from error
        return self._known[key]


def at(file: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
    """Returns the places of records that begin at some bytes of a file."""
    return tf.stack([tf.fill(tf.shape(offsets), file), offsets], axis=-1)


def _seconds(path, clock):
    """Returns the seconds to go to a record, at best: pauses do not count."""
    times = [clock()]
    # Using the record will report the error.
    with contextlib.suppress(OSError, tf.errors.OpError):
        for _ in itertools.islice(framing.headers(path), _TRIES):
            times.append(clock())
    return min((b - a for a, b in itertools.pairwise(times)), default=0.0)
