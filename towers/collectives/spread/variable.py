"""A variable whose parts several hosts divide, such as an optimizer's slot.

Reading it is a collective: between batches all hosts run the same callbacks, and no
host may read it alone. As `fit` ends, each host maps a file with the whole value,
because a script may save the model on one host alone.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.collectives.world import World
from towers.devices.names import HOST
from towers.hosts import group
from towers.keras_adapter.variables import take_identity
from towers.layers.sharded import ShardedVariable

# Smaller values are kept in memory, not in a file.
_SMALL_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a variable that belongs to one tower of some host.

    Attributes:
        owner: Index of the tower, among the towers of all hosts.
        start: Index of the first element, in the flattened variable.
        stop: Index after the last element.
        shape: Shape of the part: rows of the variable, or flat.
    """

    owner: int
    start: int
    stop: int
    shape: tuple[int, ...]


class SpreadVariable(ShardedVariable):
    """The value of a `keras.Variable` of which each host has some parts.

    All hosts have to read it together, and get the whole value; each host assigns its
    own parts. After `keep`, each host may read it by itself.

    Attributes:
        shards: A `tf.Variable` for each part of this host.
        shape: Shape of the whole value.
        parts: The parts of each host, in order.
        hosts: The hosts.
    """

    # The parts have no common axis along which rows could be looked up.
    axis = None
    across_hosts = True

    def __init__(
        self,
        shards: Sequence[tf.Variable],
        shape: Sequence[int],
        parts: Sequence[Sequence[Part]],
        hosts: World,
        like: Any,
    ):
        """Takes the identity of `like`, which it replaces."""
        self.shards, self.shape = tuple(shards), tf.TensorShape(shape)
        self.parts = parts
        self.dtype, self.name, self.trainable = like.dtype, like.name, like.trainable
        self.hosts, self._kept = hosts, None
        take_identity(self, like)

    @property
    def device(self) -> str:
        """The device on which the whole value is gathered."""
        return HOST

    def split(self, value: Any) -> list[Any]:
        """Cuts a whole value into the parts of this host."""
        flat, own_parts = tf.reshape(value, [-1]), self.parts[self.hosts.index]
        return [
            tf.reshape(flat[part.start : part.stop], part.shape) for part in own_parts
        ]

    def assign(self, value: Any, **_: Any) -> None:
        """Assigns to each part of this host its part of a whole value."""
        super().assign(value)
        if tf.inside_function():
            self._kept = None
        elif self._kept is not None:
            self._kept[...] = np.asarray(value)

    def alike(self, shards: Sequence[tf.Variable], like: Any) -> "SpreadVariable":
        """Makes a variable of the same parts; see `ShardedVariable`."""
        return SpreadVariable(shards, self.shape, self.parts, self.hosts, like)

    def own(self) -> np.ndarray:
        """Returns the elements that this host has, flat."""
        flat = [shard.numpy().reshape(-1) for shard in self.shards]
        return np.concatenate(flat) if flat else np.zeros(0)

    def keep(self) -> None:
        """Lets each host read the whole value by itself, until it changes.

        Large values are mapped to an unnamed file, so that they do not take up memory.
        All hosts call it together.
        """
        if self._kept is not None:
            return
        value = self.numpy()
        if value.nbytes >= _SMALL_BYTES:
            with tempfile.TemporaryFile() as file:
                mapped = np.memmap(file, np.uint8, "w+", shape=(value.nbytes,))
            mapped = np.asarray(mapped).view(value.dtype).reshape(value.shape)
            mapped[...] = value
            value = mapped
        self._kept = value

    def forget(self) -> None:
        """Drops the kept value, as the variable is about to change."""
        self._kept = None

    def numpy(self) -> np.ndarray:
        """Returns the whole value."""
        if self._kept is not None:
            return np.array(self._kept)
        with group.explained():
            return self._gathered().numpy()

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        with tf.device(HOST):
            if tf.inside_function():
                # A graph traced during training may be called after it, once kept.
                is_kept = tf.numpy_function(lambda: self._kept is not None, [], tf.bool)
                value = tf.cond(is_kept, self._read_kept, self._gathered)
            else:
                value = tf.constant(self.numpy())
            return tf.cast(value, dtype or self.dtype)

    def _read_kept(self):
        kept = tf.numpy_function(lambda: self._kept, [], self.dtype)
        return tf.ensure_shape(kept, self.shape)

    def _gathered(self):
        like = [
            [tf.TensorSpec(part_spec.shape, self.dtype) for part_spec in of_host]
            for of_host in self.parts
        ]
        with tf.device(HOST):
            own = [tf.convert_to_tensor(shard) for shard in self.shards]
            purpose = f"values of {self._shared_name}"
            gathered = self.hosts.gather_parts(own, like, purpose)
            flat = [tf.reshape(part, [-1]) for of_host in gathered for part in of_host]
            return tf.reshape(tf.concat(flat, 0), self.shape)
