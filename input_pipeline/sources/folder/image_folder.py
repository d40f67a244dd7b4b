"""``folder:DIR``: a folder of pictures for each class."""

import functools
import itertools
import os
from collections.abc import Iterator

import tensorflow as tf

from towers.input_pipeline.sources.base import IndexedSource
from towers.input_pipeline.sources.files import splits
from towers.input_pipeline.sources.files.record import Record
from towers.input_pipeline.sources.folder import pictures
from towers.input_pipeline.specs import PICTURES, no_folder

# Paths of the images of each class, by the class's name.
_Classes = dict[str, list[str]]


class ImageFolderSource(IndexedSource):
    """Class folders; the sorted names of the folders are the labels.

    With DIR/train and one of DIR/validation, valid, val or test, those are the
    splits. Otherwise every tenth file of each class, in sorted order, is held out.

    Args:
        directory: DIR.
        eval_fraction: of the files of each class to hold out, if no folder is; None for
            a tenth.

    Raises:
        ValueError: no such folder, no class folder, one without an image, a class that
            is only in the held-out split, or a fraction although a folder is held out.
    """

    def __init__(self, directory: str, eval_fraction: float | None = None):
        root = os.path.expanduser(directory)
        if not tf.io.gfile.isdir(root):
            raise no_folder(directory)
        found = pictures.Sorted()
        train, test, fraction_used = _find_splits(root, eval_fraction, found)
        self.name = f"folder:{directory}"
        self.image_shape = (None, None, 3)
        self.class_names = tuple(sorted(train))
        self.num_classes = len(train)
        label = {name: index for index, name in enumerate(self.class_names)}
        # Paths in a fixed order, and the label of each.
        self._labels = {
            split: {path: label[name] for name in classes for path in classes[name]}
            for split, classes in (("train", train), ("test", test))
            if any(classes.values())
        }
        self.splits = {split: len(paths) for split, paths in self._labels.items()}
        self.notes = (*found.notes(),)
        if fraction_used and "test" in self.splits:
            count = self.splits["test"]
            note = splits.note(fraction_used, "files of each class", count)
            self.notes = (*self.notes, note)

    def files(self, split: str) -> list[str]:
        """Paths of one split's images."""
        return list(self._labels[split])

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Paths and labels; files are read one by one, in parallel."""
        paths, labels = self._tensors
        return tf.gather(paths, records), tf.gather(labels, records)

    def load(self, image: tf.Tensor) -> tf.Tensor:
        """See ``Source.load``."""
        return tf.io.read_file(image)

    @functools.cached_property
    def _tensors(self) -> tuple[tf.Tensor, tf.Tensor]:
        pairs = {
            path: label
            for split in self._labels.values()
            for path, label in split.items()
        }
        # On the CPU, which is where tf.data runs.
        with tf.init_scope(), tf.device("/CPU:0"):
            return tf.constant([*pairs]), tf.constant([*pairs.values()], tf.int64)

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """One record: a file is an image here."""
        number = self._numbers[path]
        yield Record(path, "", number, tf.constant(number, tf.int64))

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        paths = itertools.chain.from_iterable(self._labels.values())
        return {path: number for number, path in enumerate(paths)}


def _find_splits(
    root: str, eval_fraction: float | None, found: pictures.Sorted
) -> tuple[_Classes, _Classes, float]:
    """The images for training, those held out, and the fraction that was taken."""
    folders = _folders(root)
    test_name = splits.held_out(folders)
    # Where DIR/train has no folders, "train" is the name of a class.
    if test_name and "train" in folders and _folders(folders["train"]):
        if eval_fraction:
            raise ValueError(
                f"eval_fraction is {eval_fraction}, but {folders[test_name]} is held "
                "out by its name: leave it out, or name the folder train alone"
            )
        train = _find_classes(folders["train"], found)
        test = _find_classes(folders[test_name], found)
        split = folders["train"], folders[test_name]
        found.folders += [path for path in folders.values() if path not in split]
        found.loose(root)
        if unknown := sorted(set(test) - set(train)):
            raise ValueError(
                f"{folders[test_name]} has the class {unknown[0]!r}, which is not in "
                f"{folders['train']}: both must have the same class folders"
            )
        return train, test, 0
    taken = splits.check_fraction(eval_fraction)
    train, test = {}, {}
    for name, paths in _find_classes(root, found).items():
        train[name], test[name] = [], []
        for place, path in enumerate(paths):
            held = splits.is_nth(place, taken)
            (test if held else train)[name].append(path)
    return train, test, taken


def _find_classes(folder: str, found: pictures.Sorted) -> _Classes:
    classes = {}
    for name, path in _folders(folder).items():
        before = found.left_out.copy()
        classes[name] = found.pictures(path)
        if not classes[name]:
            others = ", ".join(
                f"{n} {kind}" for kind, n in (found.left_out - before).items()
            )
            raise ValueError(
                f"the class folder {path} has no {PICTURES} file directly in it"
                f"{others and f', only {others}'}: add images or remove the folder"
            )
    if not classes:
        raise ValueError(
            f"{folder} has no class folders: expected a folder of {PICTURES} "
            "files for each class"
        )
    found.loose(folder)
    return classes


def _folders(parent: str) -> dict[str, str]:
    """Paths of the folders by their names, sorted."""
    entries = pictures.entries(parent)
    return {name: path for name, path in entries if tf.io.gfile.isdir(path)}
