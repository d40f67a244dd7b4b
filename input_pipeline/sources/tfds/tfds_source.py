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
# Records whose texts are looked at together.
_AT_ONCE = 4096


def open_tfds(
    name: str, data_dir: str | os.PathLike | None, **options: Any
) -> "TFDSSource":
    """Opens a set by its TFDS name; downloads nothing.

    Args:
        name: such as ``mnist`` or ``imagenet2012:5.1.0``.
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
    # A wrong version is an AssertionError there, a wrong config a ValueError.
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        raise ValueError(f"TFDS cannot open {name!r}: {_reason(error)}") from error
    return TFDSSource(builder, f"tfds:{name}", **options)


def near_names(name: str) -> list[str]:
    """The names of TFDS that are spelt most alike, best first."""
    # Community sets would have to be listed over the network.
    known = tfds.list_builders(with_community_datasets=False)
    return difflib.get_close_matches(name, known, n=3)


class TFDSSource(StreamSource):
    """A TFDS builder as a source.

    Args:
        builder: with the features ``image`` and ``label``, or supervised keys.
        name: of the source.
        num_shards: files to write for each split; None lets TFDS choose.
        train_split: in TFDS's words, such as ``train[:90%]``; None for ``train``.
        eval_split: such as ``train[90%:]``; None for the set's own.
        shard: (index, count): this source has one of ``count`` even parts of each
            split, in which numbers of examples differ by one at most; None for all.
        read_config: how TFDS interleaves files; it has no say in orders and caching.
        target: what is to be learnt: "class", "numbers" or "mask"; None for what is
            clear from the features.
        num_classes: of a mask's pixels, where the set does not say.
        label_column: name of the target, for a set of columns; see ``columns.choose``.
        feature_columns: names of the others.
        vocabularies: see ``Source``; None for what the training data have, once
            prepared.

    Raises:
        ValueError: the features are not such as can be read, or, once prepared, there
            is no such split.
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
        found = None
        if label_column is None and feature_columns is None:
            found = features.choose(builder, name, target, num_classes)
        if found is None:
            asked = target, label_column, feature_columns
            found = columns.choose(builder, name, *asked)
        if found is None:
            raise features.no_such(builder, name, target)
        self._features = found
        self._take_target(found.target)
        self.image_shape, self.encoded = found.image_shape, found.encoded
        self.label_field, self.image_fields = found.y, found.fields
        self.notes = found.notes
        self._take_vocabularies(vocabularies or dict.fromkeys(found.texts, ()))
        self._known = vocabularies is not None or not found.texts
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
        """See ``Source.without``; what TFDS cannot read, it has to write again."""
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
            ValueError: no network, no permission, or whatever the builder met.
        """
        config = tfds.download.DownloadConfig(
            num_shards=self._num_shards, try_download_gcs=False
        )
        if os.environ.get("TQDM_DISABLE") == "1":
            # tqdm has read it when it was imported, which may have been before.
            tfds.disable_progress_bar()
        try:
            with network.no_waiting():
                self._builder.download_and_prepare(download_config=config)
        # A builder is somebody else's program and may raise anything.
        except Exception as error:
            # Another process may have been faster: all write to a folder of their
            # own and rename it, which only the first can.
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
        # A copy reads anew what is on disk, whoever wrote it.
        self._builder = copy.copy(self._builder)
        self._check_splits()
        if self._is_of_tfrecords:
            split = "train" if "train" in self.splits else "test"
            records = itertools.chain.from_iterable(map(self.walk, self.files(split)))
            found = self._notes_of_pictures(records)
            self.notes = (*self._features.notes, *found)
        if self._features.texts and not self._known:
            self._take_vocabularies(self._read_vocabularies())
            self._known = True

    def _take_vocabularies(self, vocabularies: Mapping[str, Sequence[str]]) -> None:
        """Says which ids there are, of texts and of classes."""
        found = {**vocabularies, **self._features.classes}
        names = (*self._features.texts, *self._features.classes)
        categories.check(self.name, names, found)
        self.vocabularies = {name: found[name] for name in names}
        self.table_sizes = categories.table_sizes(self.vocabularies)
        self._ids = categories.finders(
            {name: found[name] for name in self._features.texts}
        )
        self.reads = (*self.reads, *self.vocabularies.items())

    def _read_vocabularies(self) -> dict[str, tuple[str, ...]]:
        """Reads the columns of text of the training data."""
        split = "train" if "train" in self.splits else "test"
        batches = self.records(split).batch(_AT_ONCE)
        texts = batches.map(
            lambda _, records: [records[name] for name in self._features.texts]
        )
        # What is wrong with a record is said when it is read.
        found = texts.ignore_errors().as_numpy_iterator()
        return categories.read_vocabularies(self._features.texts, found)

    def files(self, split: str) -> list[str]:
        """Paths of one split's shards, of which a part of a split may read a part."""
        return [os.fspath(path) for path in self._info(split).filepaths]

    def records(
        self, split: str, shuffle_seed: tf.Tensor | None = None
    ) -> tf.data.Dataset:
        """Numbers, and dicts of encoded image and label, from TFDS's own reader."""
        config = dataclasses.replace(
            self._read_config,
            shuffle_seed=shuffle_seed,
            shuffle_reshuffle_each_iteration=False,
            # Some sets are ordered on disk; training shuffles them all the same.
            enable_ordering_guard=False,
            # Caching would pin the first epoch's order; we prefetch at the end.
            try_autocache=False,
            skip_prefetch=True,
            # Workers of a tf.data service read parts.
            assert_cardinality=False,
            # File and position in it.
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
        """See ``Source.reads_whole``."""
        if not self._is_of_tfrecords:
            return "they are no TFRecord files"
        if not self._knows_order(split):
            return "TFDS alone knows their order"
        record_bytes = functools.partial(self.record_bytes, split)
        return self._index_of(split).reads_whole(record_bytes)

    def places(self, split: str) -> Places:
        """See ``StreamSource.places``."""
        parts, index = self._info(split).file_instructions, self._index_of(split)

        def records(shuffle_seed):
            found = order.named_places(parts, index, self._read_config, shuffle_seed)
            return found.map(lambda name, place: (_number(name), place))

        return Places(records, functools.partial(index.read, parse=self._deserialized))

    def _numbered(self, split: str) -> tf.data.Dataset | None:
        """See ``StreamSource``: their names tell."""
        if not self._is_of_tfrecords or not self._knows_order(split):
            return None
        parts = self._info(split).file_instructions
        named = order.names(parts, self._read_config)
        return named.map(lambda name, _: (_number(name),))

    def _knows_order(self, split: str) -> bool:
        folders = {*map(os.path.dirname, self.files(split))}
        return not self._asked_config and len(folders) == 1

    def _index_of(self, split: str) -> RecordIndex:
        # One for each split, as it knows what it has found.
        parts = self._info(split).file_instructions
        paths = [os.fspath(part.filename) for part in parts]
        return self._index.setdefault(split, RecordIndex(paths))

    def record_bytes(self, split: str) -> float:
        """See ``StreamSource.record_bytes``."""
        file = self._info(split).file_instructions[0]
        return tf.io.gfile.stat(file.filename).length / file.examples_in_shard

    def parse(self, records: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """See ``Source.parse``."""
        return self._features.parse(records, self._ids)

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """See ``Source.walk``."""
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
        """The features that are read, of a serialized record."""
        decoders = self._features.decoders()
        read = decoders.extract_features(self._builder.info.features)
        return read.deserialize_example(record, decoders=decoders.decoders)

    def is_whole(self, path: str) -> bool:
        """See ``Source.is_whole``."""
        return not self._is_of_tfrecords or framing.is_whole(path)

    @property
    def _is_of_tfrecords(self) -> bool:
        return self._builder.info.file_format is tfds.core.FileFormat.TFRECORD

    def _names(self) -> dict[str, Any]:
        """What TFDS calls each of our splits; none until prepared."""
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
        """Has TFDS read the names of the splits."""
        for split, name in self._names().items():
            try:
                count = self._info(split).num_examples
            # A slice that is too long is an AssertionError there.
            except (AssertionError, ValueError) as error:
                raise ValueError(
                    f"{self.name} has no split {name}: {_reason(error)}"
                ) from error
            if not count:
                raise ValueError(
                    f"the split {name} of {self.name} is empty: expected an example"
                )


def _number(name: str | tf.Tensor) -> tf.Tensor:
    """A record's number, by the name that TFDS gives it: file and position in it."""
    return tf.strings.to_hash_bucket_fast(name, 2**63 - 1)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """TFDS numbers records by a function that TensorFlow calls outdated."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)


def _reason(error: BaseException) -> str:
    """The message on one line, and not a page of it."""
    return textwrap.shorten(str(error), 600) or "no reason given"
