"""A variable of which each of several hosts has a part, such as an optimizer's slot.

To read it is a collective, since all hosts run the same callbacks: between batches, no
host may read it alone. As `fit` ends, each host maps a file with the whole state,
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

# Less than that is not worth a file.
_SMALL_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a variable that a tower of some host has.

    Attributes:
        owner: Which of the towers of all hosts has it.
        start: The first of its numbers, as if the variable was flat.
        stop: The one behind the last.
        shape: The shape of the part: rows of the variable, or flat.
    """

    owner: int
    start: int
    stop: int
    shape: tuple[int, ...]


class SpreadVariable(ShardedVariable):
    """What stands behind a `keras.Variable` of which each host has some parts.

    All hosts have to read it together, and get the whole value; each assigns its own
    parts. Where it is kept, each host may read it by itself.

    Attributes:
        shards: A `tf.Variable` for each part of this host.
        shape: That of the whole value.
        parts: The parts of each host, in order.
        hosts: The hosts.
    """

    # What it is made of lies in no order by which rows could be looked up.
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
        """Takes the identity of `like`, in whose place it stands."""
        self.shards, self.shape = tuple(shards), tf.TensorShape(shape)
        self.parts = parts
        self.dtype, self.name, self.trainable = like.dtype, like.name, like.trainable
        self.hosts, self._kept = hosts, None
        take_identity(self, like)

    @property
    def device(self) -> str:
        """The device of the whole value, if somebody reads it."""
        return HOST

    def split(self, value: Any) -> list[Any]:
        """Cuts a whole value into the parts of this host."""
        flat, mine = tf.reshape(value, [-1]), self.parts[self.hosts.index]
        return [tf.reshape(flat[each.start : each.stop], each.shape) for each in mine]

    def assign(self, value: Any, **_: Any) -> None:
        """Gives each part of this host its part of a whole value."""
        super().assign(value)
        if tf.inside_function():
            self._kept = None
        elif self._kept is not None:
            self._kept[...] = np.asarray(value)

    def alike(self, shards: Sequence[tf.Variable], like: Any) -> "SpreadVariable":
        """See `ShardedVariable`."""
        return SpreadVariable(shards, self.shape, self.parts, self.hosts, like)

    def own(self) -> np.ndarray:
        """Returns the numbers that this host has."""
        flat = [each.numpy().reshape(-1) for each in self.shards]
        return np.concatenate(flat) if flat else np.zeros(0)

    def keep(self) -> None:
        """Has each host read the whole value by itself, until it changes.

        It lies in a file that has no name and is mapped: not in memory that others may
        need. All hosts call it together.
        """
        if self._kept is not None:
            return
        whole = self.numpy()
        if whole.nbytes >= _SMALL_BYTES:
            with tempfile.TemporaryFile() as file:
                mapped = np.memmap(file, np.uint8, "w+", shape=(whole.nbytes,))
            mapped = np.asarray(mapped).view(whole.dtype).reshape(whole.shape)
            mapped[...] = whole
            whole = mapped
        self._kept = whole

    def forget(self) -> None:
        """Is told that the value changes, which was kept."""
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
                # What is traced while training goes on may be called behind it.
                is_kept = tf.numpy_function(lambda: self._kept is not None, [], tf.bool)
                whole = tf.cond(is_kept, self._read_kept, self._gathered)
            else:
                whole = tf.constant(self.numpy())
            return tf.cast(whole, dtype or self.dtype)

    def _read_kept(self):
        kept = tf.numpy_function(lambda: self._kept, [], self.dtype)
        return tf.ensure_shape(kept, self.shape)

    def _gathered(self):
        like = [
            [tf.TensorSpec(each.shape, self.dtype) for each in of_host]
            for of_host in self.parts
        ]
        with tf.device(HOST):
            mine = [tf.convert_to_tensor(shard) for shard in self.shards]
            purpose = f"values of {self._shared_name}"
            every = self.hosts.gather_parts(mine, like, purpose)
            flat = [tf.reshape(part, [-1]) for of_host in every for part in of_host]
            return tf.reshape(tf.concat(flat, 0), self.shape)
