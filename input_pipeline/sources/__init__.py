"""Where records come from: one file for each kind of source.

``open_source`` is the registry: it reads a spec such as ``"tfds:mnist"`` and imports
only the file it needs.
"""

import difflib
import os
from typing import Any

import tensorflow as tf

from towers.input_pipeline.sources.base import Source

__all__ = ["Source", "open_source"]

_FORMS = {
    "digits": "digits",
    "tfds": "tfds:NAME",
    "tfrecord": "tfrecord:GLOB",
    "array_record": "array_record:GLOB",
    "parquet": "parquet:GLOB",
    "csv": "csv:GLOB",
    "folder": "folder:DIR",
    "synthetic": "synthetic:HxWxC:CLASSES[:COUNT]",
}


def open_source(
    spec: str,
    *,
    data_dir: str | os.PathLike | None = None,
    seed: int = 0,
    image_key: str = "image/encoded",
    label_key: str = "image/class/label",
    num_classes: int | None = None,
    skip_bad: bool = False,
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
        image_key: field of the encoded image in tf.Examples; column of ``parquet:``.
        label_key: field of the label in tf.Examples; column of ``parquet:``, ``csv:``.
        num_classes: where labels are read from files; None reads every label to find
            the largest.
        skip_bad: whether to look beyond bad records for what must be known of all;
            they are not passed over by that (see ``Source.without``).
        **tfds_options: ``train_split``, ``test_split``, ``shard`` and ``read_config``
            of ``digits`` and ``tfds:``; see ``TFDSSource``.

    Returns:
        The source.

    Raises:
        ValueError: the spec, or what it names, is not a data set we can read.
    """
    kind, _, rest = spec.partition(":")
    # All but "digits" need something after the colon.
    if kind not in _FORMS or bool(rest) == (kind == "digits"):
        raise ValueError(
            f"unknown data set {spec!r}: {_hint(spec)}expected one of "
            f"{', '.join(_FORMS.values())}"
        )
    if tfds_options and kind not in ("digits", "tfds"):
        raise ValueError(
            f"received {', '.join(tfds_options)} for {spec!r}: expected only for "
            "digits and tfds:, leave it out"
        )
    try:
        if kind == "digits":
            from towers.input_pipeline.sources.digits import open_digits

            return open_digits(data_dir, **tfds_options)
        if kind == "tfds":
            from towers.input_pipeline.sources.tfds_source import open_tfds

            return open_tfds(rest, data_dir, **tfds_options)
        if kind == "tfrecord":
            from towers.input_pipeline.sources.tfrecord import TFRecordSource

            return TFRecordSource(rest, image_key, label_key, num_classes, skip_bad)
        if kind == "array_record":
            from towers.input_pipeline.sources.array_record import ArrayRecordSource

            return ArrayRecordSource(rest, image_key, label_key, num_classes, skip_bad)
        if kind == "parquet":
            from towers.input_pipeline.sources.parquet import ParquetSource

            return ParquetSource(rest, image_key, label_key, num_classes, skip_bad)
        if kind == "csv":
            from towers.input_pipeline.sources.csv_source import CSVSource

            return CSVSource(rest, label_key, num_classes, skip_bad)
        if kind == "folder":
            from towers.input_pipeline.sources.image_folder import ImageFolderSource

            return ImageFolderSource(rest)
        from towers.input_pipeline.sources.synthetic import open_synthetic

        return open_synthetic(rest, seed)
    # Of a file system: not installed, no permission, no network.
    except tf.errors.OpError as error:
        reason = error.message.splitlines()[0]
        raise ValueError(f"{spec!r} cannot be opened: {reason}") from error


def _hint(spec: str) -> str:
    """What may have been meant by an unknown spec: a form, or a name without tfds:."""
    near = difflib.get_close_matches(spec.partition(":")[0], _FORMS, n=1)
    if near:
        return f"did you mean {_FORMS[near[0]]}? "
    from towers.input_pipeline.sources.tfds_source import near_names

    near = near_names(spec)
    return f"did you mean tfds:{near[0]}? " if near else ""
