"""Variables that several hosts divide, so that no host has a whole one.

If a host dies, its parts are lost, and all start again from the checkpoint: a copy of a
neighbour's part would cost as much traffic in each step as the parts do.
"""

from collections.abc import Iterator
from typing import Any

import keras

from towers.devices.names import HOST
from towers.keras_adapter.variables import put_behind, variable_like
from towers.layers import sharded, variables


class HostsParts:
    """The variables of a model and its optimizers that several hosts divide."""

    def __init__(self, model: keras.Model):
        """Takes the model, which all hosts train together."""
        self._model = model
        self._may_be_kept = True

    def any(self) -> bool:
        """Returns whether there are divided variables."""
        return any(True for _ in self._divided())

    def keep(self) -> None:
        """Lets each host read divided variables by itself, until the next step.

        All hosts call it together.
        """
        for _, parts in self._divided():
            parts.keep()
        self._may_be_kept = True

    def begin_step(self) -> None:
        """Drops the values that `keep` stored, before a step changes the variables."""
        for _, parts in self._divided() if self._may_be_kept else ():
            parts.forget()
        self._may_be_kept = False

    def join(self) -> None:
        """Gathers the whole divided variables into the memory of each host.

        All hosts call it together.
        """
        for variable, parts in self._divided():
            put_behind(variable, variable_like(parts.numpy(), HOST, parts))

    def _divided(self) -> Iterator[tuple[keras.Variable, Any]]:
        """Yields divided variables, each with the `SpreadVariable` behind it."""
        for variable in variables.of(self._model):
            if sharded.across_hosts(variable):
                yield variable, sharded.of(variable)
