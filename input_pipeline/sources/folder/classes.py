"""Finds the files of class folders, and those that are held out."""

import itertools
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources import label_notes
from towers.input_pipeline.sources.files import splits
from towers.input_pipeline.sources.folder import pictures
from towers.input_pipeline.specs import TEXTS, no_folder
from towers.program import words

# The paths of the files of each class, by the class's name.
_Classes = dict[str, list[str]]


class Found(NamedTuple):
    """The contents of class folders.

    Attributes:
        names: the names of the classes, sorted.
        paths: the paths of the files of each split, in a fixed order.
        labels: int64 [N], the labels of these.
        notes: sentences on what was decided.
    """

    names: tuple[str, ...]
    paths: dict[str, list[str]]
    labels: dict[str, np.ndarray]
    notes: tuple[str, ...]


def find(
    directory: str,
    eval_fraction: float | None,
    sorter: pictures.Sorted,
    is_bad: Callable[[str], bool] | None = None,
) -> Found:
    """Finds the files of class folders.

    Args:
        directory: see ``ImageFolderSource``.
        eval_fraction: see ``ImageFolderSource``.
        sorter: sorts the files, and notes the others.
        is_bad: see ``splits.every_nth``.

    Raises:
        ValueError: see ``ImageFolderSource``.
    """
    root = os.path.expanduser(directory)
    if not tf.io.gfile.isdir(root):
        raise no_folder(directory)
    train, test, fraction = _find_splits(root, eval_fraction, sorter, is_bad)
    names = tuple(sorted(train))
    label = {name: index for index, name in enumerate(names)}
    paths, labels = {}, {}
    for split, classes in (("train", train), ("test", test)):
        if any(classes.values()):
            paths[split] = [*itertools.chain.from_iterable(classes.values())]
            counts = [*map(len, classes.values())]
            labels[split] = np.repeat([*map(label.get, classes)], counts)
    notes = tuple(sorter.notes())
    if fraction and "test" in labels:
        note = splits.note(fraction, "files of each class", len(labels["test"]))
        notes = (*notes, note, *label_notes.missing(names, labels))
    return Found(names, paths, labels, notes)


def are_texts(directory: str) -> bool:
    """Tells whether class folders have texts, by the first one: most are .txt files.

    Raises:
        ValueError: it has pictures as well.
    """
    root = os.path.expanduser(directory)
    if not tf.io.gfile.isdir(root):
        raise no_folder(directory)
    folders = pictures.folders_in(root)
    if "train" in folders:
        folders = pictures.folders_in(folders["train"]) or folders
    if not folders:
        return False
    first = next(iter(folders.values()))
    names = [name.lower() for name, _ in pictures.entries(first)]
    texts = sum(name.endswith(TEXTS) for name in names)
    images = sum(name.endswith(pictures.SUFFIXES) for name in names)
    if texts > images > 0:
        raise mixed(first, texts, images)
    return 2 * texts > len(names)


def mixed(folder: str, texts: int, images: int) -> ValueError:
    """Makes an error for a folder with texts and pictures."""
    return ValueError(
        f"{folder} has {words.count(texts, 'text')} and "
        f"{words.count(images, 'picture')}: expected one of the two, so move the "
        "others away"
    )


def _find_splits(
    root: str,
    eval_fraction: float | None,
    sorter: pictures.Sorted,
    is_bad: Callable[[str], bool] | None,
) -> tuple[_Classes, _Classes, float]:
    """Returns the files for training, the held-out ones, and the fraction taken."""
    folders = pictures.folders_in(root)
    test_name = splits.held_out(folders)
    # If DIR/train has no folders, "train" is the name of a class.
    if test_name and "train" in folders and pictures.folders_in(folders["train"]):
        if eval_fraction:
            raise ValueError(
                f"eval_fraction is {eval_fraction}, but {folders[test_name]} is held "
                "out by its name: leave it out, or name the folder train alone"
            )
        train = _find_classes(folders["train"], sorter)
        test = _find_classes(folders[test_name], sorter)
        split = folders["train"], folders[test_name]
        sorter.folders += [path for path in folders.values() if path not in split]
        sorter.loose(root)
        if unknown := sorted(set(test) - set(train)):
            raise ValueError(
                f"{folders[test_name]} has the class {unknown[0]!r}, which is not in "
                f"{folders['train']}: both must have the same class folders"
            )
        if missing := sorted(set(train) - set(test)):
            sorter.more.append(
                f"{folders[test_name]} has no class {missing[0]!r}, but "
                f"{folders['train']} has: move it away if it is no class, such as "
                "texts without a label."
            )
        return train, test, 0
    taken = splits.check_fraction(eval_fraction)
    train, test = {}, {}
    for name, paths in _find_classes(root, sorter).items():
        test[name] = splits.every_nth(paths, taken, is_bad)
        held_out = {*test[name]}
        train[name] = [path for path in paths if path not in held_out]
    return train, test, taken


def _find_classes(folder: str, sorter: pictures.Sorted) -> _Classes:
    folders, classes = pictures.folders_in(folder), {}
    listed = pictures.names_in_each([*folders.values()], folder)
    for (name, path), names in zip(folders.items(), listed, strict=True):
        before, folders_before = sorter.left_out.copy(), len(sorter.folders)
        classes[name] = sorter.files(path, names)
        if not classes[name]:
            left_out = sorter.left_out - before
            kinds = [f"{n} {kind}" for kind, n in left_out.items()]
            if folders := len(sorter.folders) - folders_before:
                kinds.append(words.count(folders, "folder"))
            others = ", ".join(kinds)
            raise ValueError(
                f"the class folder {path} has no {sorter.what} file directly in it"
                f"{others and f', only {others}'}: add some or remove the folder"
            )
    if not classes:
        raise ValueError(
            f"{folder} has no class folders: expected a folder of {sorter.what} "
            "files for each class"
        )
    sorter.loose(folder)
    return classes
