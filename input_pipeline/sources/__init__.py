"""Where records come from: one file for each kind of source.

``open_source`` is the registry: it reads a spec such as ``"tfds:mnist"`` and imports
only the file it needs.
"""

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towers.input_pipeline.sources.base import Source
from towers.input_pipeline.specs import check, kinds_with, takes

__all__ = ["Source", "open_source"]


def open_source(
    spec: str,
    *,
    data_dir: str | os.PathLike | None = None,
    seed: int = 0,
    skip_bad: bool = False,
    image_key: str | None = None,
    label_key: str | None = None,
    label_column: str | None = None,
    feature_columns: Sequence[str] | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    eval_fraction: float | None = None,
    **tfds_options: Any,
) -> Source:
    """Opens the source that a spec names; writes nothing (``prepare()`` does).

    Paths may be of any file system that TensorFlow knows, such as ``gs://``.

    Args:
        spec: ``digits``, ``tfds:NAME``, ``tfrecord:GLOB``, ``array_record:GLOB``,
            ``parquet:GLOB``, ``csv:GLOB``, ``folder:DIR`` or
            ``synthetic:HxWxC:CLASSES[:COUNT]``.
        data_dir: where ``digits`` and ``tfds:`` keep their files; None for TFDS's
            default folder.
        seed: of the images of ``synthetic:``.
        skip_bad: whether to look beyond bad records for what must be known of all;
            they are not passed over by that (see ``Source.without``).
        image_key: field of the encoded image in tf.Examples, by default
            ``image/encoded``; column of ``parquet:``, by default ``image``.
        label_key: field of the label in tf.Examples, by default
            ``image/class/label``; column of ``parquet:`` and ``csv:``, by default
            ``label``, ``class`` or ``target``, else the last one.
        label_column: another name of ``label_key``, for ``parquet:`` and ``csv:``.
        feature_columns: columns of numbers of ``parquet:`` and ``csv:``; None takes all
            but the label's.
        num_classes: where labels are read from files; None reads every label to find
            the largest.
        class_names: where the labels of ``parquet:`` and ``csv:`` are names of classes,
            those of labels 0, 1, ...; None reads all, and sorts them.
        eval_fraction: of the records of ``parquet:``, ``csv:`` and ``folder:`` to hold
            out, where no file or folder is held out by its name; None for a tenth.
        **tfds_options: ``train_split``, ``test_split``, ``shard`` and ``read_config``
            of ``digits`` and ``tfds:``; see ``TFDSSource``.

    Returns:
        The source. What was decided without being asked for is in its ``notes``.

    Raises:
        ValueError: the spec, or what it names, is not a data set we can read, or an
            argument does not apply to it.
    """
    kind, _, rest = spec.partition(":")
    options = {
        "image_key": image_key,
        "label_key": label_key,
        "label_column": label_column,
        "feature_columns": feature_columns,
        "num_classes": num_classes,
        "class_names": class_names,
        "eval_fraction": eval_fraction,
        **tfds_options,
    }
    options = {name: value for name, value in options.items() if value is not None}
    for name in options:
        if not takes(spec, name):
            raise ValueError(
                f"received {name} for {spec!r}: expected only for {kinds_with(name)}, "
                "leave it out"
            )
    check(spec)
    if takes(spec, "label_column") and "label_key" in options:
        if label_column is not None:
            raise ValueError(
                f"received label_key={label_key} and label_column={label_column}, two "
                "names of one thing: leave one out"
            )
        options["label_column"] = options.pop("label_key")
    try:
        if kind == "digits":
            from towers.input_pipeline.sources.digits import open_digits

            return open_digits(data_dir, **options)
        if kind == "tfds":
            from towers.input_pipeline.sources.tfds_source import open_tfds

            return open_tfds(rest, data_dir, **options)
        if kind == "tfrecord":
            from towers.input_pipeline.sources.tfrecord import TFRecordSource

            return TFRecordSource(rest, **options, skip_bad=skip_bad)
        if kind == "array_record":
            from towers.input_pipeline.sources.array_record import ArrayRecordSource

            return ArrayRecordSource(rest, **options, skip_bad=skip_bad)
        if kind == "parquet":
            from towers.input_pipeline.sources.parquet import ParquetSource

            return ParquetSource(rest, **options, skip_bad=skip_bad)
        if kind == "csv":
            from towers.input_pipeline.sources.csv_source import CSVSource

            return CSVSource(rest, **options, skip_bad=skip_bad)
        if kind == "folder":
            from towers.input_pipeline.sources.image_folder import ImageFolderSource

            return ImageFolderSource(rest, **options)
        from towers.input_pipeline.sources.synthetic import open_synthetic

        return open_synthetic(rest, seed)
    # Of a file system: not installed, no permission, no network.
    except tf.errors.OpError as error:
        reason = error.message.splitlines()[0]
        raise ValueError(f"{spec!r} cannot be opened: {reason}") from error
