"""Flags of several programs that describe the files of a data set."""

import functools
from collections.abc import Mapping
from typing import Any

from absl import flags

from towers.input_pipeline.choices import MISSING

HELPS = {
    "num_classes": (
        "Number of classes, if labels are read from files. Default: counted from the "
        "labels."
    ),
    "eval_fraction": (
        "Fraction of csv:, parquet:, npz:, npy:, folder: and text: to hold out for "
        "validation, unless a file, folder or array is named test or the like. "
        "Default: 0.1."
    ),
    "feature_columns": (
        "Columns of csv:, parquet: and tfds: to train on, such as age,fare. Default: "
        "all except the label; of texts, those that repeat."
    ),
    "missing": (
        "Value of a missing number in csv:, parquet:, npz: and npy:, in training and "
        "prediction: mean or median of its column, and a further column says so; fail: "
        "its row is bad. Default: mean."
    ),
    "label_column": (
        "Column of csv:, parquet: and tfds: with the label. Default: label, class or "
        "target, else the last column. In conll:, the number of the tags' column."
    ),
    "text_column": (
        "Column of csv: and parquet: with text to train on. In conll:, the number of "
        "the words' column. Default: train on the columns of numbers; in conll:, the "
        "first column, or the second of CoNLL-U."
    ),
    "tokenizer": (
        "Tokenizer of text: bytes, sentencepiece:FILE, wordpiece:FILE or words:FILE. "
        "Default: bytes; in conll:, the words of the training data."
    ),
    "sequence_length": "Number of tokens in a row of text. Default: 128.",
    "packing": (
        "Join the documents of text: into rows without padding. --nopacking: a row has "
        "one document, or a part of it. Default: packing."
    ),
    "image_key": (
        "Field of the image in tfrecord: and array_record:, or its column in parquet:. "
        "Default: image/encoded; in parquet:, image."
    ),
    "label_key": (
        "Field of the label in tfrecord: and array_record:. Default: image/class/label."
    ),
}
NAMES = tuple(HELPS)


def define(group: Mapping[str, str], values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags, which are named as the arguments of ``open_source``.

    The flags appear below the heading that `group` has as ``module_name``.
    """
    definitions = {
        "num_classes": flags.DEFINE_integer,
        "sequence_length": flags.DEFINE_integer,
        "packing": flags.DEFINE_bool,
        "eval_fraction": flags.DEFINE_float,
        "feature_columns": flags.DEFINE_list,
        "missing": functools.partial(flags.DEFINE_enum, enum_values=MISSING),
    }
    for name, text in HELPS.items():
        definition = definitions.get(name, flags.DEFINE_string)
        definition(name, default=None, help=text, flag_values=values, **group)


def given(values: flags.FlagValues = flags.FLAGS) -> dict[str, Any]:
    """Returns the flags that were given, as arguments of ``open_source``."""
    values_by_name = {name: values[name].value for name in NAMES}
    return {name: value for name, value in values_by_name.items() if value is not None}
