"""Examples that stay on the towers' devices: a batch is then the numbers of its rows.

Every device has all examples, as each epoch may give a tower any of them. A tower looks
up the rows of its part of a batch when a step begins. So only numbers travel.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.devices.names import HOST


class KeptExamples:
    """Arrays of examples, with a copy on each device that asks for rows.

    In place of x, y and sample_weight, a batch has the numbers of their rows: an
    integer tensor [B], and neither y nor sample_weight.
    """

    def __init__(self, examples: tuple[Any, ...] | None = None):
        """Keeps arrays, or none yet; see `fill`."""
        self._examples, self._first = None, 0
        self._on: dict[str, list[tf.Variable]] = {}
        if examples is not None:
            self.fill(examples)

    def fill(self, examples: tuple[Any, ...], first: int = 0) -> None:
        """Keeps other arrays.

        Args:
            examples: (x, y, sample_weight) of all examples: nests of arrays with one
                row an example; the last two may be `None`. If x is one array, it has
                at least two dimensions, as row numbers have one.
            first: The number of the first row.
        """
        self._examples = tf.nest.map_structure(_as_array, examples)
        self._first = first
        self._on.clear()

    @property
    def bytes(self) -> int:
        """The memory that the examples take on each device."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def _arrays(self):
        return [a for a in tf.nest.flatten(self._examples) if a is not None]

    def are_numbers(self, data: Any) -> bool:
        """Tells whether a batch, or its `tf.TypeSpec`s, has numbers of rows."""
        x, *others = data if isinstance(data, tuple) else (data,)
        if self._examples is None:
            return False
        if tf.nest.is_nested(x) or any(part is not None for part in others):
            return False
        return x.shape.rank == 1 and x.dtype.is_integer

    def specs(self) -> tuple[Any, ...]:
        """Returns the specs of the examples in a batch of any size."""
        return tf.nest.map_structure(
            lambda a: (
                None if a is None else tf.TensorSpec((None, *a.shape[1:]), a.dtype)
            ),
            self._examples,
        )

    def rows(self, data: Any, device: str = HOST) -> tuple[Any, ...]:
        """Looks up the examples of a batch on a device.

        Args:
            data: The numbers of their rows, as a batch.
            device: The device, which gets a copy of all examples unless it has one.

        Returns:
            (x, y, sample_weight), on the device.
        """
        numbers = data[0] if isinstance(data, tuple) else data
        with tf.device(device):
            numbers -= tf.constant(self._first, numbers.dtype)
            rows = [tf.gather(array, numbers) for array in self._copy_on(device)]
        return tf.nest.pack_sequence_as(self._examples, self._with_none(rows))

    def place(self, devices: Sequence[str]) -> None:
        """Copies the examples to devices now, and not when they ask for rows."""
        for device in devices:
            self._copy_on(device)

    def _copy_on(self, device):
        if device not in self._on:
            with tf.init_scope(), tf.device(device):
                # GPUs look up small integers in variables only.
                self._on[device] = [
                    tf.Variable(array, trainable=False) for array in self._arrays
                ]
        return self._on[device]

    def _with_none(self, values):
        values = iter(values)
        flat = tf.nest.flatten(self._examples)
        return [None if array is None else next(values) for array in flat]


def _as_array(value):
    return None if value is None else np.asarray(value)
