"""Flags that say what is in the files of a data set: those of several programs."""

from collections.abc import Mapping
from typing import Any

from absl import flags

NAMES = (
    *("num_classes", "eval_fraction", "feature_columns", "label_column"),
    *("image_key", "label_key"),
)


def define(group: Mapping[str, str], values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags, which are named as the arguments of ``open_source``.

    Args:
        group: ``module_name``, under which they are shown.
        values: where they go.
    """
    own = {"flag_values": values, **group}
    flags.DEFINE_integer(
        "num_classes",
        None,
        "Number of classes, if labels are read from files. Default: counted from "
        "the labels.",
        **own,
    )
    flags.DEFINE_float(
        "eval_fraction",
        None,
        "Fraction of the records of csv:, parquet: and folder: to hold out for "
        "validation, unless a file or folder is held out by its name, such as test. "
        "Default: 0.1.",
        **own,
    )
    flags.DEFINE_list(
        "feature_columns",
        None,
        "Columns of csv: and parquet: to train on, such as age,fare. Default: all "
        "columns except the label.",
        **own,
    )
    flags.DEFINE_string(
        "label_column",
        None,
        "Column of csv: and parquet: that contains the label. Default: label, class "
        "or target, else the last column.",
        **own,
    )
    flags.DEFINE_string(
        "image_key",
        None,
        "Field of the image in tfrecord: and array_record:, or its column in "
        "parquet:. Default: image/encoded; in parquet:, image.",
        **own,
    )
    flags.DEFINE_string(
        "label_key",
        None,
        "Field of the label in tfrecord: and array_record:. Default: "
        "image/class/label.",
        **own,
    )


def given(values: flags.FlagValues = flags.FLAGS) -> dict[str, Any]:
    """Returns what was given of them, as arguments of ``open_source``."""
    found = {name: values[name].value for name in NAMES}
    return {name: value for name, value in found.items() if value is not None}
