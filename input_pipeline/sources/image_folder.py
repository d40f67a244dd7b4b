"""``folder:DIR``: a folder of JPEG or PNG files for each class."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from input_pipeline.sources.base import Source, decode_image, held_out, shuffle_all

_SUFFIXES = {".jpg", ".jpeg", ".png"}
_HOLD_OUT_EVERY = 10

# Paths of the images of each class, by the class's name.
_Classes = dict[str, list[str]]


class ImageFolderSource(Source):
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
        root = Path(directory).expanduser()
        if not root.is_dir():
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

    def records(
        self, split: str, shuffle_seed: int | tf.Tensor | None = None
    ) -> tf.data.Dataset:
        """Dicts of path and label: files are read by the parallel ``decode``."""
        paths, labels = zip(*self._labels[split].items(), strict=True)
        dataset = tf.data.Dataset.from_tensor_slices(
            {"path": list(paths), "label": np.array(labels, np.int64)}
        )
        return shuffle_all(dataset, len(paths), shuffle_seed)

    def decode(self, record: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """(uint8 image [H, W, 3], int64 label [])."""
        encoded = tf.io.read_file(record["path"])
        return decode_image(encoded, self.image_shape), record["label"]

    def walk(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """One record: a file is an image here."""
        label = next(paths[path] for paths in self._labels.values() if path in paths)
        yield path, {"path": path, "label": label}


def _find_splits(root: Path) -> tuple[_Classes, _Classes]:
    """The images for training and those held out."""
    folders = {folder.name: folder for folder in _folders(root)}
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


def _find_classes(folder: Path) -> _Classes:
    classes = {entry.name: _images(entry) for entry in _folders(folder)}
    if not classes:
        raise ValueError(
            f"{folder} has no class folders: expected a folder of JPEG or PNG files "
            "for each class"
        )
    for name, images in classes.items():
        if not images:
            raise ValueError(
                f"the class folder {folder / name} has no JPEG or PNG file directly in "
                "it: add images or remove the folder"
            )
    return classes


def _folders(parent: Path) -> list[Path]:
    """Folders in sorted order, without hidden ones."""
    return sorted(
        entry
        for entry in parent.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    )


def _images(folder: Path) -> list[str]:
    """Image files in sorted order, without hidden ones."""
    return sorted(
        str(entry)
        for entry in folder.iterdir()
        if entry.suffix.lower() in _SUFFIXES and not entry.name.startswith(".")
    )
