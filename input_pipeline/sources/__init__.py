"""Opens sources of records: one file for each kind of source.

``open_source`` is the registry: it reads a spec such as ``"tfds:mnist"`` and imports
only the file that it needs.
"""

import importlib
import os
import warnings
from typing import Unpack

import tensorflow as tf

from towers.input_pipeline.sources.base import Source
from towers.input_pipeline.specs import (
    SourceOptions,
    check,
    check_text,
    kinds_with,
    takes,
)
from towers.program import object_store, words

__all__ = ["Source", "SourceOptions", "open_source"]

# The module and function that open each kind of data set.
_OPENERS = {
    "digits": ("tfds.digits", "open_digits"),
    "tfds": ("tfds.tfds_source", "open_tfds"),
    "tfrecord": ("examples.tfrecord", "TFRecordSource"),
    "array_record": ("examples.array_record", "ArrayRecordSource"),
    "parquet": ("tables.parquet", "open_parquet"),
    "csv": ("tables.csv_source", "CSVSource"),
    "npz": ("array_files.array_file_source", "open_npz"),
    "npy": ("array_files.array_file_source", "open_npy"),
    "folder": ("folder", "open_folder"),
    "text": ("texts.text_files", "open_text"),
    "conll": ("texts.conll", "CoNLLSource"),
    "synthetic": ("synthetic", "open_synthetic"),
    "zipf": ("tables.zipf", "open_zipf"),
}
# The new name of each old option; flags have the same old names.
_UNTIL_0_4 = {"image_key": "image_column", "label_key": "label_column"}
# The openers for tables with a column of text.
_OF_TEXT = {
    "parquet": ("texts.labelled", "open_parquet"),
    "csv": ("texts.labelled", "open_csv"),
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

    Paths may be addresses that TensorFlow or fsspec reads, such as ``gs://``, ``s3://``
    or ``https://``.

    Args:
        spec: ``digits``, ``tfds:NAME``, ``tfrecord:GLOB``, ``array_record:GLOB``,
            ``parquet:GLOB``, ``csv:GLOB``, ``npz:FILE``, ``npy:X.npy,Y.npy``,
            ``folder:DIR``, ``text:GLOB``, ``text:python``, ``conll:GLOB``,
            ``synthetic:HxWxC:CLASSES[:COUNT]`` or ``zipf:NUMBERS:TABLESxROWS[:COUNT]``.
        data_dir: folder where ``digits`` and ``tfds:`` store their files. None: TFDS's
            default folder.
        seed: seed of the examples of ``synthetic:`` and ``zipf:``.
        skip_bad: whether to look beyond bad records for facts about all records. This
            alone does not leave them out; see ``Source.without``.
        **options: options of some kinds of data sets; see ``SourceOptions``.

    Returns:
        The source. Its ``notes`` describe the defaults that were chosen.

    Raises:
        ValueError: the spec or the data set cannot be read, or an argument does not
            apply to it.
    """
    for old, new in _UNTIL_0_4.items():
        if old in options and new not in options:
            warnings.warn(
                f"{old} is now {new}; the old name works until Towers 0.4.",
                FutureWarning,
                stacklevel=2,
            )
            options[new] = options.pop(old)
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in SourceOptions.__annotations__:
            raise TypeError(
                f"open_source() got an unexpected argument {name!r}: expected one of "
                + ", ".join(SourceOptions.__annotations__)
            )
        if not takes(spec, name):
            raise ValueError(
                f"received {name} for {spec!r}: expected only for {kinds_with(name)}, "
                "leave it out"
            )
    check(spec)
    check_text(spec, given)
    object_store.prepare(f"{spec},{os.fspath(data_dir or '')}")
    # Kinds of sources without these arguments ignore them.
    others = {"data_dir": data_dir, "seed": seed, "skip_bad": skip_bad}
    given |= {name: value for name, value in others.items() if takes(spec, name)}
    kind, _, rest = spec.partition(":")
    openers = _OPENERS | (_OF_TEXT if "text_column" in given else {})
    module, opener = openers[kind]
    try:
        module = importlib.import_module(f"{__name__}.{module}")
        return getattr(module, opener)(rest, **given)
    # Errors of a file system: not installed, no permission, no network.
    except tf.errors.OpError as error:
        reason = words.error_line(error)
        raise ValueError(f"{spec!r} cannot be opened: {reason}") from error
