"""``tfrecord:GLOB``: TFRecord files of tf.Examples with an image and a label."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline import json_file
from towers.input_pipeline.local_store.store import LocalStore
from towers.input_pipeline.sources.base import Places
from towers.input_pipeline.sources.examples import (
    compressed,
    framing,
    record_index,
)
from towers.input_pipeline.sources.examples.fields import (
    LABELS_AT_ONCE,
    ExampleFiles,
    check_kind,
)
from towers.input_pipeline.sources.examples.record_index import RecordIndex
from towers.input_pipeline.sources.files import stored
from towers.input_pipeline.sources.files.file_source import StreamFiles, numbered
from towers.input_pipeline.sources.files.record import FILE, Record

# The file that `convert` writes beside the records. The mark keeps its first value, so
# that older files are recognised.
INFO = "dataset_info.json"
CONVERTER = "input_pipeline.convert"

# Makes numbers and raw records, or places, from a file's index in a split and its path.
_Reader = Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]


class TFRecordSource(ExampleFiles, StreamFiles):
    """TFRecord files.

    If ``towers.input_pipeline.convert`` has written them, sizes and classes are read
    from the file beside them. Files may be compressed by GZIP or ZLIB.

    Args:
        pattern: see ``FileSource``.
        **options: see ``ExampleFiles``.

    Raises:
        ValueError: no file, no record, another format, or a negative label.
    """

    kind = "tfrecord"
    ends_need_checking = True

    def __init__(self, pattern: str, **options: Any):
        super().__init__(pattern, **options)
        self._index = {
            split: RecordIndex(paths) for split, paths in self._files.items()
        }
        info = _read_info(self._all_files())
        if info:
            self._take_over(info, options.get("num_classes"))
        self._check_first(lambda where, raw: self._check_example(where, raw.numpy()))
        self._count_classes()

    @functools.cached_property
    def _compressed(self) -> dict[str, str]:
        return compressed.kinds(self._all_files())

    def _store(self, local_store: LocalStore) -> None:
        if not self._compressed:
            return super()._store(local_store)
        self._note(
            f"{self.name} has compressed files, which have no parts: no store is used."
        )

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Parses serialized examples; see ``Source.parse``."""
        return self._parse_examples(records)

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """Yields the records of a file, including bad ones; see ``Source.walk``."""
        first = self._first_number(path)
        kind = self._compressed.get(path)
        for record in compressed.walk(path, kind) if kind else framing.walk(path):
            if not record.fault:
                raw = record.raw
                record = check_kind(record.with_raw(raw.numpy()))
                record = record if record.fault else record.with_raw(raw)
            yield dataclasses.replace(record, number=first + record.number)

    def is_whole(self, path: str) -> bool:
        """Tells whether a file is complete, by its end; see ``Source.is_whole``."""
        if self._stored is not None:
            return stored.is_whole(self._stored, path)
        if path in self._compressed:
            return compressed.is_whole(path)
        return framing.is_whole(path)

    def labels(self, path: str, limit: int | None = None) -> Iterator[tf.Tensor]:
        """Returns the labels of a file, in batches; see ``Source.labels``."""
        records = self._read(path, self._compressed.get(path, ""))
        records = records.take(-1 if limit is None else limit)
        # Eagerly: tracing a function takes longer than parsing some records, and each
        # file would need a trace.
        return map(self._parse_labels, records.batch(LABELS_AT_ONCE).prefetch(2))

    def _read(
        self, path: str | tf.Tensor, kind: str | tf.Tensor = ""
    ) -> tf.data.Dataset:
        if self._stored is not None:
            return stored.records(self._stored, path)
        return tf.data.TFRecordDataset(path, kind)

    def _reader(self, split: str) -> _Reader:
        """Makes a reader that skips unreadable parts; see ``StreamFiles``."""
        kinds = [self._compressed.get(path, "") for path in self.files(split)]

        def whole(file, path):
            return numbered(file, self._read(path, tf.gather(kinds, file)))

        def pieces(_, path, rows):
            # Given its rows, a damaged file is read as a whole, and cut up.
            path_if_any = tf.data.Dataset.from_tensors(path).take(
                tf.shape(rows, tf.int64)[0]
            )
            return path_if_any.map(tf.io.read_file).flat_map(
                lambda content: tf.data.Dataset.from_tensor_slices(rows).map(
                    lambda row: (row[0], tf.strings.substr(content, row[1], row[2]))
                )
            )

        return self._around(split, whole, pieces)

    def reads_whole(self, split: str) -> str:
        """Returns why files are read whole, or ""; see ``Source.reads_whole``."""
        if self._stored is not None:
            return "a local store has parts of files"
        if self._compressed:
            return "files are compressed"
        record_bytes = functools.partial(self.record_bytes, split)
        return self._index[split].reads_whole(record_bytes)

    def places(self, split: str) -> Places:
        """Returns the places of a split's records; see ``StreamSource.places``."""
        index = self._index[split]

        def whole(file, _):
            return numbered(file, index.of_file(file))

        def pieces(file, _, rows):
            record_places = record_index.at(file, rows[:, 1] - framing.HEADER)
            return tf.data.Dataset.from_tensor_slices((rows[:, 0], record_places))

        read = self._around(split, whole, pieces)
        return Places(functools.partial(self._interleaved, split, read), index.read)

    def numbers(self, split: str) -> np.ndarray:
        """Returns the numbers of a split's records, from their lengths alone."""
        paths = self.files(split)
        if self._stored or self._compressed or any("://" in path for path in paths):
            return super().numbers(split)
        gaps = [record for record in self.passed_over.get(split, ()) if record.gap]
        _, ends, rows = self._damaged(split, gaps)
        damaged = {gap.path for gap in gaps}
        of_files = [
            rows[ends[file] : ends[file + 1], 0]
            if path in damaged
            else file * FILE + np.arange(self._count(path))
            for file, path in enumerate(paths)
        ]
        return self._good_of_split(self._in_turns(of_files), split)

    def _count(self, path: str) -> int:
        """Returns the number of records of a file."""
        known = self._counts.get(path)
        return framing.count(path) if known is None else known

    def _around(self, split: str, read_whole: _Reader, pieces: Callable) -> _Reader:
        """Makes a reader that reads damaged files around unreadable parts.

        Args:
            split: one of ``splits``.
            read_whole: reads undamaged files.
            pieces: reads a damaged file, given its index in the split, its path, and
                rows of its readable parts: int64 number, byte offset and length of the
                data.
        """
        gaps = [record for record in self.passed_over.get(split, ()) if record.gap]
        if not gaps:
            return read_whole
        counts, ends, table = map(tf.constant, self._damaged(split, gaps))

        def read(file, path):
            rows = table[ends[file] : ends[file + 1]]
            whole = read_whole(file, path).take(counts[file])
            return whole.concatenate(pieces(file, path, rows))

        return read

    def _damaged(self, split: str, gaps: Sequence[Record]) -> list[np.ndarray]:
        """Describes the readable parts of damaged files.

        Returns:
            int64: the number of records before each file's gap, where it is read from
                front to back, -1 for all [F]; the bounds of each file's rows [F + 1];
                rows of number, byte offset and length.
        """
        counts, ends, rows = [], [0], []
        for file, path in enumerate(self.files(split)):
            first = file * FILE
            bad = [
                dataclasses.replace(gap, number=gap.number - first)
                for gap in gaps
                if gap.path == path
            ]
            counts.append(0 if bad else -1)
            if bad and path in self._compressed:
                counts[-1] = bad[0].number
            elif bad:
                intact = framing.readable(path, bad)
                rows += [(first + number, *place) for number, *place in intact]
            ends.append(len(rows))
        table = np.array(rows, np.int64).reshape(-1, 3)
        return [np.array(counts, np.int64), np.array(ends, np.int64), table]

    def _take_over(self, info: dict[str, Any], num_classes: int | None) -> None:
        """Takes sizes and classes from the converter's file."""
        self.num_classes = num_classes or info["num_classes"]
        if info["class_names"] and self.num_classes == info["num_classes"]:
            self.class_names = tuple(info["class_names"])
        self.image_shape = tuple(info["image_shape"])
        if len(self.image_shape) == 1:
            self.image_fields = info["fields"]
        for split, paths in self._files.items():
            for path in paths:
                self._counts[path] = info["files"][os.path.basename(path)]["examples"]
            self.splits[split] = sum(self._counts[path] for path in paths)


def _read_info(paths: list[str]) -> dict[str, Any] | None:
    """Reads the converter's file beside some files, if there is one.

    Raises:
        ValueError: a file has changed since the converter has written it.
    """
    (folder, *others) = {os.path.dirname(path) for path in paths}
    path = os.path.join(folder, INFO)
    if others or not tf.io.gfile.exists(path):
        return None
    try:
        info = json_file.read(path, dict)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; convert again") from error
    # TFDS writes a file with this name, too.
    if info.get("written_by") != CONVERTER:
        return None
    for path in paths:
        known = info["files"].get(os.path.basename(path))
        if known is None:
            return None
        if (size := tf.io.gfile.stat(path).length) != known["bytes"]:
            raise ValueError(
                f"{path} has {size} bytes, but {INFO} beside it says {known['bytes']}: "
                "copy or convert it again"
            )
    return info
