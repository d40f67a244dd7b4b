"""``folder:DIR``: a folder of JPEG or PNG files for each class."""

import functools
import itertools
import os
from collections.abc import Iterator

import tensorflow as tf

from towers.input_pipeline.sources.base import IndexedSource, Record, held_out

_SUFFIXES = (".jpg", ".jpeg", ".png")
_HOLD_OUT_EVERY = 10

# Paths of the images of each class, by the class's name.
_Classes = dict[str, list[str]]


class ImageFolderSource(IndexedSource):
    """Class folders; the sorted names of the folders are the labels.

    With DIR/train and one of DIR/validation, valid, val or test, those are the
    splits. Otherwise every tenth file of each class, in sorted order, is held out.

    Args:
        directory: DIR.

    Raises:
        ValueError: no such folder, no class folder, one without an image, or a class
            that is only in the held-out split.
    """

    def __init__(self, directory: str):
        root = os.path.expanduser(directory)
        if not tf.io.gfile.isdir(root):
            raise ValueError(
                f"{directory!r} is not a folder: expected one that holds a folder of "
                "JPEG or PNG files for each class"
            )
        train, test = _find_splits(root)
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


def _find_splits(root: str) -> tuple[_Classes, _Classes]:
    """The images for training and those held out."""
    folders = _folders(root)
    test_name = held_out(folders)
    # Where DIR/train has no folders, "train" is the name of a class.
    if test_name and "train" in folders and _folders(folders["train"]):
        train = _find_classes(folders["train"])
        test = _find_classes(folders[test_name])
        if unknown := sorted(set(test) - set(train)):
            raise ValueError(
                f"{folders[test_name]} has the class {unknown[0]!r}, which is not in "
                f"{folders['train']}: both must have the same class folders"
            )
        return train, test
    train, test = {}, {}
    for name, paths in _find_classes(root).items():
        test[name] = paths[_HOLD_OUT_EVERY - 1 :: _HOLD_OUT_EVERY]
        train[name] = sorted(set(paths) - set(test[name]))
    return train, test


def _find_classes(folder: str) -> _Classes:
    classes = {name: _images(path) for name, path in _folders(folder).items()}
    if not classes:
        raise ValueError(
            f"{folder} has no class folders: expected a folder of JPEG or PNG files "
            "for each class"
        )
    for name, images in classes.items():
        if not images:
            raise ValueError(
                f"the class folder {os.path.join(folder, name)} has no JPEG or PNG "
                "file directly in it: add images or remove the folder"
            )
    return classes


def _folders(parent: str) -> dict[str, str]:
    """Paths of the folders by their names, sorted."""
    entries = _entries(parent)
    return {name: path for name, path in entries if tf.io.gfile.isdir(path)}


def _images(folder: str) -> list[str]:
    """Image files in sorted order."""
    entries = _entries(folder)
    return [path for name, path in entries if name.lower().endswith(_SUFFIXES)]


def _entries(folder: str) -> list[tuple[str, str]]:
    """Names and paths of what is in a folder, sorted, without what is hidden."""
    # Some file systems end the names of folders with a slash.
    names = sorted(name.rstrip("/") for name in tf.io.gfile.listdir(folder))
    return [(name, os.path.join(folder, name)) for name in names if name[0] != "."]
