"""Folders whose records are files, one or two each, read through a local store."""

import abc
from collections.abc import Sequence

import tensorflow as tf

from towers.input_pipeline.local_store.store import LocalStore
from towers.input_pipeline.sources.files import stored


class StoredFolder(abc.ABC):
    """Reads files through a store, if there is one; a base before ``IndexedSource``."""

    _stored = None

    @abc.abstractmethod
    def _paths_of(self, numbers: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Returns the paths [B] of the files of records, for each kind of file."""

    def _store(self, local_store: LocalStore | None, paths: Sequence[str]) -> None:
        if local_store is not None:
            self._stored = local_store.open(self.name, paths)
            self.in_graph, self.is_far = False, True
            self._note(self._stored.note)

    def _read_file(self, path: tf.Tensor) -> tf.Tensor:
        if self._stored is None:
            return tf.io.read_file(path)
        return stored.read_file(self._stored, path)

    def announced(
        self,
        batches: tf.data.Dataset,
        split: str,
        seeds: tf.Tensor | None,
        batch_size: int,
    ) -> tf.data.Dataset:
        """Starts reading the files of records; see ``IndexedSource.announced``."""
        if self._stored is None:
            return batches
        return stored.announced(
            self._stored, batches, self._paths_of, split, seeds, batch_size
        )
