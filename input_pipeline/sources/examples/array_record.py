"""``array_record:GLOB``: tf.Examples in ArrayRecord files, with random access."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.base import IndexedSource
from towers.input_pipeline.sources.examples.fields import (
    LABELS_AT_ONCE,
    ExampleFiles,
    check_kind,
)
from towers.input_pipeline.sources.files import in_python
from towers.input_pipeline.sources.files.record import Record
from towers.program.extras import install_command


class ArrayRecordSource(ExampleFiles, IndexedSource):
    """ArrayRecord files.

    Records are read by their numbers, so a shuffle is complete and an epoch begins
    anywhere at once; write the files with ``group_size:1``. They must be on a local
    disk. Python reads them: the workers of a tf.data service cannot.

    Args:
        pattern: see ``FileSource``.
        **options: see ``ExampleFiles``.

    Raises:
        ValueError: no package, no file, no record, another format, or a negative label.
    """

    kind = "array_record"
    in_graph = False

    def __init__(self, pattern: str, **options: Any):
        try:
            from array_record.python import array_record_data_source as reader
        except ImportError as error:
            raise ValueError(
                f"'array_record:{pattern}' needs the package array-record, which is "
                f"not installed: {install_command('array_record')}"
            ) from error
        super().__init__(pattern, **options)
        self._places = {}  # each file's first number and count
        first = 0
        for split, paths in self._files.items():
            counts = [_count_records(path) for path in paths]
            self.splits[split] = sum(counts)
            for path, count in zip(paths, counts, strict=True):
                self._places[path] = first, count
                first += count
        self._data = reader.ArrayRecordDataSource(
            [f"{path}[0:{count}]" for path, (_, count) in self._places.items()]
        )
        self._check_first(
            lambda where, number: self._check_example(where, self._data[int(number)])
        )
        self._count_classes()

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Fetches and parses examples by their numbers; see ``Source.parse``."""
        return self._parse_examples(self._fetch(records))

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """Yields the records of a file, including bad ones; see ``Source.walk``."""
        first, count = self._places[path]
        for index in range(count):
            record = Record(path, f"record {index}", first + index)
            try:
                serialized = self._data[first + index]
            except RuntimeError as error:
                yield record.with_fault(str(error))
                continue
            record = check_kind(record.with_raw(serialized))
            if not record.fault:
                record = record.with_raw(tf.constant(record.number, tf.int64))
            yield record

    def labels(self, path: str, limit: int | None = None) -> tf.data.Dataset:
        """Returns the labels of a file, in batches; see ``Source.labels``."""
        first, count = self._places[path]
        count = count if limit is None else min(count, limit)
        numbers = tf.data.Dataset.range(first, first + count).batch(LABELS_AT_ONCE)
        return numbers.map(lambda batch: self._parse_labels(self._fetch(batch)))

    def _fetch(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns serialized tf.Examples [B]."""

        def read(numbers):
            try:
                records = self._data.__getitems__(numbers.tolist())
            except RuntimeError as error:
                raise ValueError(f"{self.name}: {error}") from error
            return [np.array(records, object)]

        (records,) = in_python.call(read, [numbers], [tf.string])
        return tf.ensure_shape(records, [None])


def _count_records(path: str) -> int:
    from array_record.python import array_record_module

    try:
        if not tf.io.gfile.stat(path).length:
            return 0
        reader = array_record_module.ArrayRecordReader(path)
        # A truncated or damaged file is no error, but has no records.
        if reader.ok():
            return reader.num_records()
        reason = "its end is missing or damaged"
    except (RuntimeError, tf.errors.OpError) as error:
        reason = error
    raise ValueError(
        f"{path} cannot be read: {reason}; expected a whole ArrayRecord file on a "
        "local disk: copy or write it again"
    )
