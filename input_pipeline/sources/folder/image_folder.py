"""``folder:DIR``: a folder of pictures for each class."""

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from towers.input_pipeline.local_store.store import LocalStore
from towers.input_pipeline.sources.base import IndexedSource
from towers.input_pipeline.sources.files.record import Record
from towers.input_pipeline.sources.folder import classes, pictures
from towers.input_pipeline.sources.folder.stored_folder import StoredFolder


class ImageFolderSource(StoredFolder, IndexedSource):
    """Class folders; the sorted names of the folders are the labels.

    DIR/train and one of DIR/validation, valid, val or test are the splits, if they
    exist. Otherwise every tenth file of each class, in sorted order, is held out.

    Args:
        directory: DIR.
        eval_fraction: fraction of each class's files to hold out, if no folder is; None
            for a tenth.
        local_store: the store that keeps far pictures, if any.

    Raises:
        ValueError: no such folder, no class folder, one without an image, a class that
            is only in the held-out split, or a fraction although a folder is held out.
    """

    def __init__(
        self,
        directory: str,
        eval_fraction: float | None = None,
        local_store: LocalStore | None = None,
    ):
        contents = classes.find(directory, eval_fraction, pictures.Sorted())
        self.name = f"folder:{directory}"
        self.image_shape = (None, None, 3)
        self.class_names = contents.names
        self.num_classes = len(self.class_names)
        # Paths in a fixed order, and the label of each.
        self._paths, self._labels = contents.paths, contents.labels
        self.splits = {split: len(paths) for split, paths in self._paths.items()}
        paths = [*itertools.chain(*self._paths.values())]
        self.notes = (*contents.notes, *pictures.notes_of_content(paths))
        self._store(local_store, paths)

    def files(self, split: str) -> list[str]:
        """Returns the paths of one split's images."""
        return [*self._paths[split]]

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns paths and labels; files are read one by one, in parallel."""
        paths, labels = self._tensors
        return tf.gather(paths, records), tf.gather(labels, records)

    def load(self, image: tf.Tensor) -> tf.Tensor:
        """Reads the file of a picture; see ``Source.load``."""
        return self._read_file(image)

    def _paths_of(self, numbers: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.gather(self._tensors[0], numbers),)

    @functools.cached_property
    def _tensors(self) -> tuple[tf.Tensor, tf.Tensor]:
        paths = [*itertools.chain(*self._paths.values())]
        labels = np.concatenate([*self._labels.values()])
        # On the CPU, where tf.data runs.
        with tf.init_scope(), tf.device("/CPU:0"):
            return pictures.as_tensor(paths), tf.constant(labels, tf.int64)

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """Yields one record: a file is an image here."""
        number = self._numbers[path]
        yield Record(path, "", number, tf.constant(number, tf.int64))

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        paths = itertools.chain(*self._paths.values())
        return {path: number for number, path in enumerate(paths)}
