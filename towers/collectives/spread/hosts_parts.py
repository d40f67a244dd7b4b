"""Variables that several hosts divide: none of them has the whole of one.

Before hosts change, each gets the whole, and the next generation divides it anew. A
host that dies leaves zeros, and the next generation reads the checkpoint: copies of a
neighbour's part would cost as much traffic in each step as the parts do.
"""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from towers.devices.names import HOST
from towers.keras_adapter.variables import put_behind, variable_like
from towers.layers import sharded, variables


class HostsParts:
    """The variables of a model, and of its optimizers, that several hosts divide."""

    def __init__(self, model: keras.Model):
        """Takes the model, which all hosts train together."""
        self._model = model
        self._may_be_kept = True

    def any(self) -> bool:
        """Tells whether there are such variables."""
        return any(True for _ in self._divided())

    def keep(self) -> None:
        """Has each host read by itself what hosts divide, until training goes on.

        All hosts call it together.
        """
        for _, parts in self._divided():
            parts.keep()
        self._may_be_kept = True

    def begin_step(self) -> None:
        """Drops what `keep` has kept: a step is about to change it."""
        for _, parts in self._divided() if self._may_be_kept else ():
            parts.forget()
        self._may_be_kept = False

    def join(self) -> None:
        """Gives each host the whole of what hosts divide, in the host's memory.

        All hosts call it together. Then each may go on with others.
        """
        for variable, parts in self._divided():
            put_behind(variable, variable_like(parts.numpy(), HOST, parts))

    def lose(self) -> bool:
        """Puts zeros in the place of what hosts divide, as a host has gone with a part.

        Returns:
            Whether there was anything.
        """
        divided = [*self._divided()]
        for variable, parts in divided:
            with tf.device(HOST):  # A table may be larger than a GPU.
                zeros = tf.zeros(parts.shape, parts.dtype)
            put_behind(variable, variable_like(zeros, HOST, parts))
        return bool(divided)

    def take_home(self) -> bool:
        """Gives this host the whole of what hosts have divided, without the others.

        Returns:
            Whether that was lost, as they have trained since they kept it.
        """
        if not self._may_be_kept:
            return self.lose()
        self.join()
        return False

    def _divided(self) -> Iterator[tuple[keras.Variable, Any]]:
        """Yields variables of which several hosts have parts, and what is behind."""
        for variable in variables.of(self._model):
            if sharded.across_hosts(variable):
                yield variable, sharded.of(variable)
