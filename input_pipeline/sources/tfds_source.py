"""``tfds:NAME``: any image classification set of TensorFlow Datasets."""

import copy
import difflib
import os
import textwrap
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from input_pipeline.sources.base import Source, decode_image, held_out, walk_tfrecord

_CYCLE_LENGTH = 16


def open_tfds(name: str, data_dir: str | os.PathLike | None) -> "TFDSSource":
    """Opens a set by its TFDS name; downloads nothing.

    Args:
        name: such as ``mnist`` or ``imagenet2012:5.1.0``.
        data_dir: TFDS's folder, or None for its default one.

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
    return TFDSSource(builder, f"tfds:{name}")


def near_names(name: str) -> list[str]:
    """The names of TFDS that are spelt most alike, best first."""
    # Community sets would have to be listed over the network.
    known = tfds.list_builders(with_community_datasets=False)
    return difflib.get_close_matches(name, known, n=3)


class TFDSSource(Source):
    """A TFDS builder as a source.

    Args:
        builder: with at least the features ``image`` and ``label``.
        name: of the source.
        num_shards: files to write for each split; None lets TFDS choose.

    Raises:
        ValueError: the features are not those of labelled images.
    """

    def __init__(
        self,
        builder: tfds.core.DatasetBuilder,
        name: str,
        num_shards: int | None = None,
    ):
        image, label = _image_and_label(builder, name)
        self.name = name
        self.num_classes = label.num_classes
        self.class_names = tuple(label.names)
        height, width, channels = image.shape
        self.image_shape = (height, width, channels or 3)
        self._builder = builder
        self._num_shards = num_shards

    @property
    def splits(self) -> dict[str, int | None]:
        """Number of examples for each split; empty until prepared."""
        infos = self._builder.info.splits
        return {
            split: infos[name].num_examples for split, name in self._names().items()
        }

    def prepare(self) -> None:
        """Downloads the set and writes its shards, unless that was done before.

        Raises:
            ValueError: no network, no permission, or whatever the builder met.
        """
        config = tfds.download.DownloadConfig(
            num_shards=self._num_shards, try_download_gcs=False
        )
        try:
            self._builder.download_and_prepare(download_config=config)
        # A builder is somebody else's program and may raise anything.
        except Exception as error:
            # Another process may have been faster: all write to a folder of their
            # own and rename it, which only the first can.
            if not tf.io.gfile.exists(self._builder.data_dir):
                raise ValueError(
                    f"{self.name} cannot be prepared in {self._builder.data_dir}: "
                    f"{type(error).__name__}: {_reason(error)}"
                ) from error
        # A copy reads anew what is on disk, whoever wrote it.
        self._builder = copy.copy(self._builder)

    def files(self, split: str) -> list[str]:
        """Paths of one split's shards."""
        info = self._builder.info.splits[self._names()[split]]
        return [os.fspath(path) for path in info.filepaths]

    def records(
        self, split: str, shuffle_seed: int | tf.Tensor | None = None
    ) -> tf.data.Dataset:
        """Dicts of encoded image and label, from TFDS's own reader."""
        config = tfds.ReadConfig(
            shuffle_seed=shuffle_seed,
            shuffle_reshuffle_each_iteration=False,
            interleave_cycle_length=_CYCLE_LENGTH,
            num_parallel_calls_for_interleave_files=tf.data.AUTOTUNE,
            num_parallel_calls_for_decode=tf.data.AUTOTUNE,
            # Some sets are ordered on disk; training shuffles them all the same.
            enable_ordering_guard=False,
            # Caching would pin the first epoch's order; we prefetch at the end.
            try_autocache=False,
            skip_prefetch=True,
        )
        return self._builder.as_dataset(
            split=self._names()[split],
            shuffle_files=shuffle_seed is not None,
            decoders=_still_encoded(),
            read_config=config,
        )

    def decode(self, record: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """(uint8 image [H, W, C], int64 label [])."""
        image = decode_image(record["image"], self.image_shape)
        return image, tf.cast(record["label"], tf.int64)

    def walk(self, path: str) -> Iterator[tuple[str, dict[str, tf.Tensor]]]:
        """See ``Source.walk``."""
        decoders = _still_encoded()
        features = decoders.extract_features(self._builder.info.features)

        def parse(serialized: tf.Tensor) -> dict[str, tf.Tensor]:
            return features.deserialize_example(serialized, decoders=decoders.decoders)

        return walk_tfrecord(path, parse)

    def _names(self) -> dict[str, str]:
        """TFDS's name for each of our splits."""
        infos = self._builder.info.splits
        names = {"train": "train"} if "train" in infos else {}
        test = held_out(infos)
        return names | ({"test": test} if test else {})


def _still_encoded() -> tfds.decode.PartialDecoding:
    """Only image and label, the image as bytes: it is decoded in our own map."""
    return tfds.decode.PartialDecoding(
        ["image", "label"], decoders={"image": tfds.decode.SkipDecoding()}
    )


def _image_and_label(
    builder: tfds.core.DatasetBuilder, name: str
) -> tuple[tfds.features.Image, tfds.features.ClassLabel]:
    """The two features that are read, checked for their kind."""
    features = builder.info.features
    found = dict(features) if isinstance(features, tfds.features.FeaturesDict) else {}
    image, label = found.get("image"), found.get("label")
    if (
        isinstance(image, tfds.features.Image)
        and image.np_dtype == np.uint8
        and isinstance(label, tfds.features.ClassLabel)
        and label.num_classes
    ):
        return image, label
    kinds = ", ".join(f"{key} ({type(found[key]).__name__})" for key in found)
    raise ValueError(
        f"{name} is not a set of labelled images: expected the features image (Image "
        f"of uint8) and label (ClassLabel), found {kinds or 'none'}; choose another "
        "set"
    )


def _reason(error: BaseException) -> str:
    """The message on one line, and not a page of it."""
    return textwrap.shorten(str(error), 600) or "no reason given"
