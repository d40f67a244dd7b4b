"""Infers from the names of arrays which are examples, and which their labels."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from towers.input_pipeline.sources.array_files import numpy_files
from towers.input_pipeline.sources.files.splits import HELD_OUT, held_out

_X = {"x", "image", "images", "data", "feature", "features", "input", "inputs"}
_Y = {"y", "label", "labels", "target", "targets", "class", "classes"}
_NAMES = "x_train, y_train and perhaps x_test, y_test; or x, y"


class Pair(NamedTuple):
    """Examples and their labels.

    Attributes:
        x_name: name of the examples.
        x: the examples.
        y_name: name of the labels.
        y: the labels.
    """

    x_name: str
    x: np.ndarray
    y_name: str
    y: np.ndarray


def pairs(
    where: str, arrays: Mapping[str, np.ndarray]
) -> tuple[dict[str, Pair], list[str]]:
    """Finds the arrays to train on, "train", and to evaluate on, "test".

    Args:
        where: the file, for messages.
        arrays: the arrays by their names, in the order of the file.

    Returns:
        The existing splits, and sentences on what was guessed or left out.

    Raises:
        ValueError: names do not tell, or there are not as many labels as examples.
    """
    names_of: dict[str, dict[str, str]] = {}
    for name in arrays:
        if (role := _role(name)) is not None:
            split, letter = role
            names_of.setdefault(split, {}).setdefault(letter, name)
    whole = {split: two for split, two in names_of.items() if len(two) == 2}
    notes = []
    if not whole and len(arrays) == 2 and not names_of:
        x, y = arrays
        whole = {"train": {"x": x, "y": y}}
        notes.append(
            f"Of {where}, {x!r} is taken for the examples and {y!r} for their labels; "
            "expected the names x and y."
        )
    if not whole:
        raise ValueError(f"{where} has {_listed(arrays)}: expected {_NAMES}")
    test = held_out(whole)
    chosen = {"train": "train", "test": test}
    chosen = {split: whole[name] for split, name in chosen.items() if name in whole}
    left = [name for name in arrays if name not in _names(chosen)]
    if left:
        notes.append(f"Left out of {where}: {', '.join(map(repr, left))}.")
    splits = {
        split: Pair(two["x"], arrays[two["x"]], two["y"], arrays[two["y"]])
        for split, two in chosen.items()
    }
    for pair in splits.values():
        if not pair.x.ndim or pair.y.shape[:1] != pair.x.shape[:1]:
            two = {pair.x_name: pair.x, pair.y_name: pair.y}
            raise ValueError(
                f"{where} has {_listed(two)}: expected as many labels as examples"
            )
        if not pair.x.size:
            raise ValueError(
                f"{where} has {_listed({pair.x_name: pair.x})}: expected at least one "
                "example"
            )
    return splits, notes


def examples(where: str, arrays: Mapping[str, np.ndarray]) -> tuple[str, np.ndarray]:
    """Finds the examples to predict for: the held-out ones, if there are several.

    Args:
        where: the file, for messages.
        arrays: the arrays by their names.

    Raises:
        ValueError: names do not tell.
    """
    if len(arrays) == 1:
        return next(iter(arrays.items()))
    roles = {_role(name): name for name in reversed([*arrays])}
    for split in (*reversed(HELD_OUT), "train"):
        if (split, "x") in roles:
            name = roles[split, "x"]
            return name, arrays[name]
    raise ValueError(
        f"{where} has {_listed(arrays)}: expected one array of examples, or x, x_test "
        "or x_train"
    )


def named_by_files(paths: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Reads the files of ``npy:``: x and y, and perhaps x_test and y_test.

    Args:
        paths: the paths, with commas between.

    Returns:
        The arrays by these names, and notes, as from ``numpy_files.load``.
    """
    arrays, notes = {}, []
    for name, path in zip(
        ("x", "y", "x_test", "y_test"), paths.split(","), strict=False
    ):
        some, more = numpy_files.load(path)
        if len(some) > 1 or "" not in some:
            raise ValueError(
                f"{path} has several arrays: expected one, so give npz:{path}"
            )
        arrays[name], notes = some[""], notes + more
    return arrays, notes


def _role(name: str) -> tuple[str, str] | None:
    """Returns the split of an array, and "x" or "y"; None if its name does not tell."""
    parts = re.split(r"[_\W]+", os.path.basename(name).lower())
    splits = [part for part in parts if part in ("train", "training", *HELD_OUT)]
    others = [part for part in parts if part not in splits]
    if len(others) != 1 or len(splits) > 1 or others[0] not in _X | _Y:
        return None
    split = splits[0] if splits and splits[0] != "training" else "train"
    return split, "x" if others[0] in _X else "y"


def _names(chosen):
    return {name for two in chosen.values() for name in two.values()}


def _listed(arrays):
    return (
        ", ".join(
            f"{name} {array.dtype} {[*array.shape]}" for name, array in arrays.items()
        )
        or "no array"
    )
