"""Where records come from: one file for each kind of source.

``open_source`` is the registry: it reads a spec such as ``"tfds:mnist"`` and imports
only the file it needs.
"""

import importlib
import os
from typing import Any, Unpack

import tensorflow as tf

from towers.input_pipeline.sources.base import Source
from towers.input_pipeline.specs import SourceOptions, check, kinds_with, takes

__all__ = ["Source", "open_source"]

# What opens each kind of data set.
_OPENERS = {
    "digits": ("tfds.digits", "open_digits"),
    "tfds": ("tfds.tfds_source", "open_tfds"),
    "tfrecord": ("examples.tfrecord", "TFRecordSource"),
    "array_record": ("examples.array_record", "ArrayRecordSource"),
    "parquet": ("tables.parquet", "ParquetSource"),
    "csv": ("tables.csv_source", "CSVSource"),
    "folder": ("folder.image_folder", "ImageFolderSource"),
    "synthetic": ("synthetic", "open_synthetic"),
}


def open_source(
    spec: str,
    *,
    data_dir: str | os.PathLike | None = None,
    seed: int = 0,
    skip_bad: bool = False,
    **options: Unpack[SourceOptions],
) -> Source:
    """Opens the source that a spec names. It writes nothing; ``prepare()`` does.

    Paths may be on any file system that TensorFlow knows, such as ``gs://``.

    Args:
        spec: ``digits``, ``tfds:NAME``, ``tfrecord:GLOB``, ``array_record:GLOB``,
            ``parquet:GLOB``, ``csv:GLOB``, ``folder:DIR`` or
            ``synthetic:HxWxC:CLASSES[:COUNT]``.
        data_dir: folder where ``digits`` and ``tfds:`` store their files. None: TFDS's
            default folder.
        seed: seed of the images of ``synthetic:``.
        skip_bad: whether to look beyond bad records for what must be known of all
            records. This alone does not leave them out; see ``Source.without``.
        image_key: field of the encoded image in tf.Examples, by default
            ``image/encoded``; column of ``parquet:``, by default ``image``.
        label_key: field of the label in tf.Examples, by default ``image/class/label``;
            column of ``parquet:`` and ``csv:``, by default ``label``, ``class`` or
            ``target``, else the last one.
        label_column: another name of ``label_key``, for ``parquet:`` and ``csv:``.
        feature_columns: columns of numbers of ``parquet:`` and ``csv:``. None: all
            columns except the label.
        num_classes: number of classes, if labels are read from files. None: every label
            is read to find the largest.
        class_names: names of the classes 0, 1, ... if the labels of ``parquet:`` and
            ``csv:`` are names. None: all labels are read, and the names are sorted.
        eval_fraction: fraction of the records of ``parquet:``, ``csv:`` and ``folder:``
            to hold out, unless a file or folder is held out by its name. None: a tenth.
        **tfds_options: ``train_split``, ``test_split``, ``shard`` and ``read_config``
            of ``digits`` and ``tfds:``; see ``TFDSSource``.

    Returns:
        The source. Its ``notes`` say what was decided by default.

    Raises:
        ValueError: the spec or the data set cannot be read, or an argument does not
            apply to it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if not takes(spec, name):
            raise ValueError(
                f"received {name} for {spec!r}: expected only for {kinds_with(name)}, "
                "leave it out"
            )
    check(spec)
    if takes(spec, "label_column"):
        _name_label(given)
    # These are ignored where they mean nothing.
    for name, value in {
        "data_dir": data_dir,
        "seed": seed,
        "skip_bad": skip_bad,
    }.items():
        if takes(spec, name):
            given[name] = value
    kind, _, rest = spec.partition(":")
    module, opener = _OPENERS[kind]
    try:
        module = importlib.import_module(f"{__name__}.{module}")
        return getattr(module, opener)(rest, **given)
    # Of a file system: not installed, no permission, no network.
    except tf.errors.OpError as error:
        reason = error.message.splitlines()[0]
        raise ValueError(f"{spec!r} cannot be opened: {reason}") from error


def _name_label(given: dict[str, Any]) -> None:
    """Calls the label's column by one of its two names."""
    if "label_key" in given:
        if "label_column" in given:
            raise ValueError(
                f"received label_key={given['label_key']} and label_column="
                f"{given['label_column']}, two names of one thing: leave one out"
            )
        given["label_column"] = given.pop("label_key")
