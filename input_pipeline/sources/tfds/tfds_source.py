"""``tfds:NAME``: sets of TensorFlow Datasets: images or numbers, and a target."""

import contextlib
import copy
import dataclasses
import difflib
import functools
import itertools
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tensorflow_datasets as tfds

from towers.input_pipeline.sources.base import Places, Source, StreamSource
from towers.input_pipeline.sources.examples import framing
from towers.input_pipeline.sources.examples.record_index import RecordIndex
from towers.input_pipeline.sources.files.record import FAULTS, Record, fault_of
from towers.input_pipeline.sources.files.splits import held_out
from towers.input_pipeline.sources.tables import categories
from towers.input_pipeline.sources.targets import TargetKind
from towers.input_pipeline.sources.tfds import columns, features, network, order

_CYCLE_LENGTH = 16
# Records whose texts are read together.
_AT_ONCE = 4096


def open_tfds(
    name: str, data_dir: str | os.PathLike | None, **options: Any
) -> "TFDSSource":
    """Opens a set by its TFDS name; downloads nothing.

    Args:
        name: a name such as ``mnist`` or ``imagenet2012:5.1.0``.
        data_dir: TFDS's folder, or None for its default one.
        **options: the other arguments of ``TFDSSource``.

    Returns:
        The source; call ``prepare()`` before reading.

    Raises:
        ValueError: TFDS has no such set, or it is not one of labelled images.
    """
    try:
        builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
    except tfds.core.DatasetNotFoundError as error:
        near = " or ".join(near_names(name))
        raise ValueError(
            f"TFDS has no data set {name!r}: "
            + (f"did you mean {near}?" if near else "see tensorflow.org/datasets")
        ) from error
    # In TFDS, a wrong version is an AssertionError, a wrong config a ValueError.
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        raise ValueError(f"TFDS cannot open {name!r}: {_reason(error)}") from error
    return TFDSSource(builder, f"tfds:{name}", **options)


def near_names(name: str) -> list[str]:
    """Returns the names of TFDS with the most similar spelling, best first."""
    # Community sets would have to be listed over the network.
    known = tfds.list_builders(with_community_datasets=False)
    return difflib.get_close_matches(name, known, n=3)


class TFDSSource(StreamSource):
    """A TFDS builder as a source.

    Args:
        builder: a builder with the features ``image`` and ``label``, or supervised
            keys.
        name: the name of the source.
        num_shards: number of files to write for each split; None lets TFDS choose.
        train_split: a split in TFDS's syntax, such as ``train[:90%]``; None for
            ``train``.
        eval_split: a split such as ``train[90%:]``; None for the set's own.
        shard: (index, count): this source has one of ``count`` even parts of each
            split, whose numbers of examples differ by one at most; None for all.
        read_config: TFDS's configuration of interleaving; orders and caching are fixed.
        target: kind of target: "class", "numbers" or "mask"; None for the obvious one.
        num_classes: number of classes of a mask's pixels, if the set does not tell.
        label_column: name of the target, for a set of columns; see ``columns.choose``.
        feature_columns: names of the columns to learn from.
        vocabularies: see ``Source``; None for those of the training data, once
            prepared.

    Raises:
        ValueError: the features cannot be read, or, once prepared, there is no such
            split.
    """

    ends_need_checking = True

    def __init__(
        self,
        builder: tfds.core.DatasetBuilder,
        name: str,
        num_shards: int | None = None,
        *,
        train_split: str | None = None,
        eval_split: str | None = None,
        shard: tuple[int, int] | None = None,
        read_config: tfds.ReadConfig | None = None,
        target: TargetKind | None = None,
        num_classes: int | None = None,
        label_column: str | Sequence[str] | None = None,
        feature_columns: Sequence[str] | None = None,
        vocabularies: Mapping[str, Sequence[str]] | None = None,
    ):
        if shard is not None and not 0 <= shard[0] < shard[1]:
            raise ValueError(
                f"shard is {tuple(shard)}: expected (index, count), an index from 0 to "
                "count - 1"
            )
        self.name = name
        chosen = None
        if label_column is None and feature_columns is None:
            chosen = features.choose(builder, name, target, num_classes)
        if chosen is None:
            asked = target, label_column, feature_columns
            chosen = columns.choose(builder, name, *asked)
        if chosen is None:
            raise features.no_such(builder, name, target)
        self._features = chosen
        self._take_target(chosen.target)
        self.image_shape, self.encoded = chosen.image_shape, chosen.encoded
        self.label_field, self.image_fields = chosen.y, chosen.fields
        self.notes = chosen.notes
        self._take_vocabularies(vocabularies or dict.fromkeys(chosen.texts, ()))
        self._known = vocabularies is not None or not chosen.texts
        self._builder = builder
        self._num_shards = num_shards
        self._asked = {"train": train_split, "test": eval_split}
        self._shard = shard
        self._asked_config, self._index = read_config is not None, {}
        self.reads = (*self.reads, train_split, eval_split, shard)
        self._read_config = read_config or tfds.ReadConfig(
            interleave_cycle_length=_CYCLE_LENGTH,
            num_parallel_calls_for_interleave_files=tf.data.AUTOTUNE,
            num_parallel_calls_for_decode=tf.data.AUTOTUNE,
        )
        self._left = None
        self._check_splits()

    @property
    def splits(self) -> dict[str, int | None]:
        """Number of examples for each split; empty until prepared."""
        return self._left or {
            split: self._info(split).num_examples for split in self._names()
        }

    @splits.setter
    def splits(self, left: dict[str, int]) -> None:
        self._left = left

    def without(
        self, bad: Mapping[str, Sequence[Record]], splits: Mapping[str, int]
    ) -> Source:
        """Returns the source without records; TFDS must rewrite unreadable files."""
        for record in itertools.chain.from_iterable(bad.values()):
            if record.gap:
                raise ValueError(
                    f"{record}; TFDS has written this file, so remove "
                    f"{self._builder.data_dir}, and it is written again"
                )
        return super().without(bad, splits)

    def prepare(self) -> None:
        """Downloads the set and writes its shards, unless that was done before.

        Raises:
            ValueError: no network, no permission, or an error of the builder.
        """
        config = tfds.download.DownloadConfig(
            num_shards=self._num_shards, try_download_gcs=False
        )
        if os.environ.get("TQDM_DISABLE") == "1":
            # tqdm has read the variable when it was imported, which may have been
            # before.
            tfds.disable_progress_bar()
        try:
            with network.no_waiting():
                self._builder.download_and_prepare(download_config=config)
        # A builder is somebody else's program and may raise anything.
        except Exception as error:
            # Another process may have been faster: each writes to its own folder and
            # renames it, which only the first can do.
            if not tf.io.gfile.exists(self._builder.data_dir):
                if isinstance(error, network.Unreachable):
                    raise ValueError(
                        f"{self.name} is not in {self._builder.data_dir} yet, and "
                        f"cannot be downloaded: {error}; connect this machine to the "
                        "network, or copy that folder from a machine that has it"
                    ) from error
                raise ValueError(
                    f"{self.name} cannot be prepared in {self._builder.data_dir}: "
                    f"{type(error).__name__}: {_reason(error)}"
                ) from error
        # A copy reads again what is on disk, whoever has written it.
        self._builder = copy.copy(self._builder)
        self._check_splits()
        if self._is_of_tfrecords:
            split = "train" if "train" in self.splits else "test"
            records = itertools.chain.from_iterable(map(self.walk, self.files(split)))
            notes_of_pictures = self._notes_of_pictures(records)
            self.notes = (*self._features.notes, *notes_of_pictures)
        if self._features.texts and not self._known:
            self._take_vocabularies(self._read_vocabularies())
            self._known = True

    def _take_vocabularies(self, vocabularies: Mapping[str, Sequence[str]]) -> None:
        """Sets the ids that exist, of texts and of classes."""
        by_name = {**vocabularies, **self._features.classes}
        names = (*self._features.texts, *self._features.classes)
        categories.check(self.name, names, by_name)
        self.vocabularies = {name: by_name[name] for name in names}
        self.table_sizes = categories.table_sizes(self.vocabularies)
        self._ids = categories.finders(
            {name: by_name[name] for name in self._features.texts}
        )
        self.reads = (*self.reads, *self.vocabularies.items())

    def _read_vocabularies(self) -> dict[str, tuple[str, ...]]:
        """Reads the columns of text of the training data."""
        split = "train" if "train" in self.splits else "test"
        batches = self.records(split).batch(_AT_ONCE)
        texts = batches.map(
            lambda _, records: [records[name] for name in self._features.texts]
        )
        # Reading a record reports its faults.
        readable = texts.ignore_errors().as_numpy_iterator()
        return categories.read_vocabularies(self._features.texts, readable)

    def files(self, split: str) -> list[str]:
        """Returns the paths of one split's shards, which may be read in part."""
        return [os.fspath(path) for path in self._info(split).filepaths]

    def records(
        self, split: str, shuffle_seed: tf.Tensor | None = None
    ) -> tf.data.Dataset:
        """Returns numbers, and dicts of encoded image and label, from TFDS's reader."""
        config = dataclasses.replace(
            self._read_config,
            shuffle_seed=shuffle_seed,
            shuffle_reshuffle_each_iteration=False,
            # Some sets are ordered on disk; training shuffles them all the same.
            enable_ordering_guard=False,
            # Caching would fix the first epoch's order; the pipeline prefetches at its
            # end.
            try_autocache=False,
            skip_prefetch=True,
            # Workers of a tf.data service read parts.
            assert_cardinality=False,
            # The id has the file, and the position in it.
            add_tfds_id=True,
        )
        with _without_warnings():
            records = self._builder.as_dataset(
                split=self._names()[split],
                shuffle_files=shuffle_seed is not None,
                decoders=self._features.decoders(),
                read_config=config,
            )

        def numbered(record):
            return _number(record.pop("tfds_id")), record

        return records.map(numbered)

    def reads_whole(self, split: str) -> str:
        """Returns why files are read whole, or ""; see ``Source.reads_whole``."""
        if not self._is_of_tfrecords:
            return "they are no TFRecord files"
        if not self._knows_order(split):
            return "TFDS alone knows their order"
        record_bytes = functools.partial(self.record_bytes, split)
        return self._index_of(split).reads_whole(record_bytes)

    def places(self, split: str) -> Places:
        """Returns the places of a split's records; see ``StreamSource.places``."""
        parts, index = self._info(split).file_instructions, self._index_of(split)

        def records(shuffle_seed):
            named = order.named_places(parts, index, self._read_config, shuffle_seed)
            return named.map(lambda name, place: (_number(name), place))

        return Places(records, functools.partial(index.read, parse=self._deserialized))

    def _numbered(self, split: str) -> tf.data.Dataset | None:
        """Returns the numbers of a split's records, from their names."""
        if not self._is_of_tfrecords or not self._knows_order(split):
            return None
        parts = self._info(split).file_instructions
        named = order.names(parts, self._read_config)
        return named.map(lambda name, _: (_number(name),))

    def _knows_order(self, split: str) -> bool:
        folders = {*map(os.path.dirname, self.files(split))}
        return not self._asked_config and len(folders) == 1

    def _index_of(self, split: str) -> RecordIndex:
        # One index for each split, as it keeps the places.
        parts = self._info(split).file_instructions
        paths = [os.fspath(part.filename) for part in parts]
        return self._index.setdefault(split, RecordIndex(paths))

    def record_bytes(self, split: str) -> float:
        """Returns the mean bytes of a record; see ``StreamSource.record_bytes``."""
        file = self._info(split).file_instructions[0]
        return tf.io.gfile.stat(file.filename).length / file.examples_in_shard

    def parse(self, records: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns examples and targets of records; see ``Source.parse``."""
        return self._features.parse(records, self._ids)

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """Yields the records of a file, including bad ones; see ``Source.walk``."""
        parts = None
        if split is not None:
            parts = [
                range(part.skip, part.skip + part.take)
                for part in self._info(split).file_instructions
                if os.fspath(part.filename) == path
            ]
        for record in framing.walk(path):
            index = record.number
            if parts is not None and not any(index in part for part in parts):
                continue
            name = f"{os.path.basename(path)}__{index}"
            record = dataclasses.replace(record, number=int(_number(name)))
            if not record.fault:
                try:
                    record = record.with_raw(self._deserialized(record.raw))
                except FAULTS as error:
                    record = record.with_fault(fault_of(error))
            yield record

    def _deserialized(self, record: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the features to read of a serialized record."""
        decoders = self._features.decoders()
        read = decoders.extract_features(self._builder.info.features)
        return read.deserialize_example(record, decoders=decoders.decoders)

    def is_whole(self, path: str) -> bool:
        """Tells whether a file is complete, by its end; see ``Source.is_whole``."""
        return not self._is_of_tfrecords or framing.is_whole(path)

    @property
    def _is_of_tfrecords(self) -> bool:
        return self._builder.info.file_format is tfds.core.FileFormat.TFRECORD

    def _names(self) -> dict[str, Any]:
        """Returns TFDS's names of our splits; empty until prepared."""
        infos = self._builder.info.splits
        if not infos:
            return {}
        usual = {
            "train": "train" if "train" in infos else None,
            "test": held_out(infos),
        }
        names = {split: self._asked[split] or usual[split] for split in usual}
        names = {split: name for split, name in names.items() if name}
        if self._shard is None:
            return names
        index, count = self._shard
        return {
            split: tfds.even_splits(name, count)[index] for split, name in names.items()
        }

    def _info(self, split: str) -> Any:
        return self._builder.info.splits[self._names()[split]]

    def _check_splits(self) -> None:
        """Makes TFDS read the names of the splits."""
        for split, name in self._names().items():
            try:
                count = self._info(split).num_examples
            # In TFDS, a slice that is too long is an AssertionError.
            except (AssertionError, ValueError) as error:
                raise ValueError(
                    f"{self.name} has no split {name}: {_reason(error)}"
                ) from error
            if not count:
                raise ValueError(
                    f"the split {name} of {self.name} is empty: expected an example"
                )


def _number(name: str | tf.Tensor) -> tf.Tensor:
    """Returns a record's number, from TFDS's name for it: file and position in it."""
    return tf.strings.to_hash_bucket_fast(name, 2**63 - 1)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """A context without TensorFlow's warning about TFDS's numbering of records."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)


def _reason(error: BaseException) -> str:
    """Returns the message on one line, at most a page of it."""
    return textwrap.shorten(str(error), 600) or "no reason given"
