"""Notes oddities of a data set's labels, before a model learns them."""

from collections.abc import Mapping, Sequence

import numpy as np

from towers.input_pipeline.sources.targets import Target


def notes(target: Target, labels: Mapping[str, np.ndarray]) -> list[str]:
    """Describes oddities of labels, in sentences.

    Args:
        target: the target: classes, numbers or labels.
        labels: the labels of each split: int64 [N] of classes, or float32 [N, size].
    """
    every = np.concatenate([*labels.values()])
    if not len(every):
        return []
    if target.row_shape:
        return _constant(target, every)
    odd = missing(target.names, labels)
    used = np.unique(every).astype(np.int64)
    # If the number of classes is given, the last ones may be missing here.
    if target.names is None and len(used) <= used[-1] == target.size - 1:
        odd.insert(0, _unused(used))
    return odd


def missing(names: Sequence[str] | None, labels: Mapping[str, np.ndarray]) -> list[str]:
    """Names the classes that only one of the splits has, in sentences.

    Args:
        names: the names of the classes, by their labels; None without names.
        labels: the labels of the examples of each split.
    """
    train, test = (np.unique(labels.get(split, ())) for split in ("train", "test"))
    if not len(train) or not len(test):
        return []
    return [
        *_without(
            names,
            np.setdiff1d(test, train),
            "to train on, but some in the validation data: the model cannot learn",
        ),
        *_without(
            names,
            np.setdiff1d(train, test),
            "in the validation data, which so tells nothing about",
        ),
    ]


def _without(names: Sequence[str] | None, labels: np.ndarray, where: str) -> list[str]:
    if not len(labels):
        return []
    first = int(labels[0]) if names is None else repr(names[int(labels[0])])
    if len(labels) == 1:
        return [f"The class {first} has no example {where} it."]
    return [f"{len(labels):,} classes, such as {first}, have no example {where} them."]


def _constant(target: Target, every: np.ndarray) -> list[str]:
    names = target.names or [*map(str, range(target.size))]
    columns = zip(names, every.T, strict=True)
    return [
        f"All values to predict of {name!r} are {column[0]:g}: there is nothing to "
        "learn about it."
        for name, column in columns
        if (column == column[0]).all()
    ]


def _unused(used: np.ndarray) -> str:
    """Notes the labels that never appear.

    Args:
        used: the labels that do, sorted.
    """
    count = int(used[-1]) + 1
    missing = np.setdiff1d(np.arange(min(count, 2**20)), used)
    if len(missing) <= 3:
        never = f"{' and '.join(map(str, missing))} never appear"
    else:
        never = f"{count - len(used):,} of them never appear, such as {missing[0]}"
    if len(missing) == 1:
        never += "s"
    return (
        f"The labels are {used[0]} to {used[-1]}: {count:,} classes, and {never}; "
        "number the classes from 0 without gaps, or the model gets outputs that are "
        "never right."
    )
