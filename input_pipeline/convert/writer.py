"""Writes the files of a split, several at once, and reads them back."""

import concurrent.futures
import itertools
import math
import sys
import threading
from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from towers.input_pipeline.convert import serialize
from towers.input_pipeline.convert.folder import (
    READ_AT_ONCE,
    SplitFiles,
    until_whole,
)
from towers.input_pipeline.sources import Source
from towers.input_pipeline.sources.base import IndexedSource
from towers.machine import limits
from towers.program import whole_file, words

# Files to write at once, each read and prepared by all threads.
_WRITERS = min(limits.cpu_count(), 8)


class Writer:
    """Writes the missing files of one split, several at once."""

    def __init__(
        self,
        source: Source,
        files: SplitFiles,
        form: serialize.Form,
        progress: "Progress",
    ):
        """Initializes the writer.

        Args:
            source: the source to write.
            files: the files to write.
            form: the form of images.
            progress: shows the progress.
        """
        self._source, self._files, self._form = source, files, form
        self._progress = progress
        self._stop = threading.Event()

    def run(self) -> None:
        """Writes the missing files.

        Raises:
            ValueError: a file does not read back as it was written.
            tf.errors.OpError: a record or a file system is bad.
        """
        # Other threads finish written files, so that these do not queue up behind files
        # that have yet to be written.
        pools = [concurrent.futures.ThreadPoolExecutor(_WRITERS) for _ in "12"]
        writers, self._finishers = pools
        try:
            # Existing files are read once more: the disk may have been full.
            shards = range(len(self._files.paths))
            kept = [*writers.map(self._is_whole, shards)]
            self._progress.add(
                sum(map(self._files.count, itertools.compress(shards, kept)))
            )
            missing = [shard for shard in shards if not kept[shard]]
            jobs = [writers.submit(self._write, run) for run in self._runs(missing)]
            done, _ = concurrent.futures.wait(jobs, return_when="FIRST_EXCEPTION")
            for finishing in itertools.chain.from_iterable(j.result() for j in done):
                finishing.result()
        finally:
            self._stop.set()
            for pool in pools:
                pool.shutdown(cancel_futures=True)

    def _runs(self, missing: list[int]) -> list[list[int]]:
        """Returns runs of consecutive files, each read in one go from its own start."""
        # A stream is read from its beginning each time.
        parts = _WRITERS if isinstance(self._source, IndexedSource) else 1
        size = max(math.ceil(len(missing) / parts), 1)
        chunks = [missing[i : i + size] for i in range(0, len(missing), size)]
        return [run for chunk in chunks for run in _in_a_row(chunk)]

    def _write(self, shards: list[int]) -> list[concurrent.futures.Future]:
        """Writes files with consecutive records."""
        first, end = self._files.bounds[shards[0]], self._files.bounds[shards[-1] + 1]
        batches = serialize.serialized(
            self._source, self._files.split, self._form, first, end - first
        )
        records = self._until_stopped(batches.as_numpy_iterator())
        jobs = []
        for shard in shards:
            path = until_whole(self._files.paths[shard])
            with tf.io.TFRecordWriter(path) as writer:
                for record in itertools.islice(records, self._files.count(shard)):
                    writer.write(record)
            jobs.append(self._finishers.submit(self._finish, shard))
        return jobs

    def _until_stopped(self, batches: Iterable[np.ndarray]) -> Iterator[bytes]:
        for batch in batches:
            if self._stop.is_set():
                raise concurrent.futures.CancelledError
            self._progress.add(len(batch))
            yield from batch

    def _finish(self, shard: int) -> None:
        """Flushes a file to the disk, reads it back and gives it its name."""
        path, count = self._files.paths[shard], self._files.count(shard)
        whole_file.flush(until_whole(path))
        if not self._is_whole(shard, until_whole(path)):
            raise ValueError(
                f"{path} was not read back as it was written: expected {count} "
                "records; look for a full disk, or for a source that has changed "
                "meanwhile"
            )
        whole_file.rename(until_whole(path), path)
        self._progress.say(path, count)

    def _is_whole(self, shard: int, path: str | None = None) -> bool:
        """Tells whether a file has all records, with checksums and good labels."""
        path = path or self._files.paths[shard]
        if not tf.io.gfile.exists(path):
            return False
        field = {"image/class/label": tf.io.FixedLenFeature([], tf.int64)}
        count = 0
        try:
            for records in tf.data.TFRecordDataset(path).batch(READ_AT_ONCE):
                (labels,) = tf.io.parse_example(records, field).values()
                labels = labels.numpy()
                if labels.min() < 0 or labels.max() >= self._source.num_classes:
                    return False
                count += len(labels)
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError):
            return False
        return count == self._files.count(shard)


class Progress:
    """A bar on a terminal, else a line for each file."""

    def __init__(self, total: int):
        from tqdm import tqdm

        self._shown = sys.stderr.isatty()
        self._bar = tqdm(total=total, unit=" examples", disable=not self._shown)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()

    def add(self, examples: int) -> None:
        """Counts examples that are written, or were written before."""
        self._bar.update(examples)

    def say(self, path: str, examples: int) -> None:
        """Reports that a file is whole."""
        if not self._shown:
            size = words.size(tf.io.gfile.stat(path).length)
            print(f"{path}: {words.count(examples, 'example')}, {size}", flush=True)


def _in_a_row(shards: list[int]) -> list[list[int]]:
    """Divides rising numbers into runs of consecutive ones."""
    groups = itertools.groupby(enumerate(shards), lambda pair: pair[1] - pair[0])
    return [[shard for _, shard in group] for _, group in groups]
