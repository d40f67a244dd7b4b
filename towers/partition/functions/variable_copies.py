"""Copies of variables on each device, for loops of one's own."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from towers.collectives import packing
from towers.devices import HOST
from towers.keras_adapter.variables import (
    swapped_values,
    value_behind,
    variable_like,
)
from towers.layers import variables


class VariableCopies:
    """Copies of variables on all devices but the first, which has the variables.

    A loop may assign the variables at any time. `refresh` finds that out.

    Attributes:
        renewals: How often the copies were given the variables' values, as a variable.
    """

    def __init__(
        self,
        originals: Sequence[keras.Variable | tf.Variable],
        devices: Sequence[str],
        compared: Callable[[tf.Variable], bool] = lambda variable: True,
    ):
        """Creates the copies, with the values that the variables have.

        Args:
            originals: The variables.
            devices: All devices.
            compared: Tells of which variables `refresh` compares the values.
        """
        self._originals, self._devices = [*originals], devices
        self._values = [
            each if isinstance(each, tf.Variable) else value_behind(each)
            for each in originals
        ]
        self._copies = [
            [variable_like(value, device, value) for value in self._values]
            for device in devices[1:]
        ]
        self._compared = [i for i, each in enumerate(self._values) if compared(each)]
        with tf.init_scope(), tf.device(HOST):
            self.renewals = tf.Variable(0, trainable=False, dtype=tf.int64)

    def handles(self) -> list[dict[int, tf.Tensor]]:
        """Returns, for each device, the handles of its copies; see `Copied`."""
        every = [
            [each.handle for each in copies] for copies in [self._values, *self._copies]
        ]
        return [dict(zip(map(id, every[0]), mine, strict=True)) for mine in every]

    def refresh(self, renews: tf.Tensor | bool = False) -> None:
        """Gives the copies the variables' values, if something else assigned those.

        Digests tell, so that values travel only then.

        Args:
            renews: Whether to do so in any case.
        """
        if not self._copies:
            return
        digests = []
        for device, copies in zip(
            self._devices, [self._values, *self._copies], strict=True
        ):
            with tf.device(device), tf.name_scope("digest"):
                digests.append(variables.digest(copies[i] for i in self._compared))
        home, *others = self._devices

        def renew():
            packing.broadcast(home, self._values, others, self._copies)
            self.renewals.assign_add(1)

        with tf.device(home), tf.name_scope("broadcast"):
            same = tf.reduce_all(tf.stack(digests) == digests[0])
            tf.cond(same & ~tf.convert_to_tensor(renews), lambda: None, renew)

    @contextlib.contextmanager
    def of(self, k: int) -> Iterator[list[keras.Variable | tf.Variable]]:
        """Inside, Keras variables use the copies on a device.

        Args:
            k: The number of the device, from 1.

        Yields:
            What an optimizer takes: these Keras variables, and the copies of others.
        """
        copies = self._copies[k - 1]
        pairs = [*zip(self._originals, copies, strict=True)]
        of_keras = [(v, copy) for v, copy in pairs if isinstance(v, keras.Variable)]
        with swapped_values([v for v, _ in of_keras], [copy for _, copy in of_keras]):
            yield [v if isinstance(v, keras.Variable) else copy for v, copy in pairs]
