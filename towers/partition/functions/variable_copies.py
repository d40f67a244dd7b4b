"""Copies of variables on each device, for custom training loops.

TensorFlow does not report assignments, so each step first compares digests of all
copies. No value of an old copy is used, at the cost of one more read of each variable.
"""

from collections.abc import Iterable, Sequence

import tensorflow as tf

from towers.collectives import packing
from towers.devices.names import HOST
from towers.keras_adapter.variables import variable_like
from towers.layers.variables import digest


class VariableCopies:
    """Copies of variables on all devices but the first, which has the variables.

    A training loop may assign the variables at any time; `refresh` detects this.

    Attributes:
        renewals: How often all copies were given the variables' values, as a variable.
    """

    def __init__(self, originals: Iterable[tf.Variable], devices: Sequence[str]):
        """Creates the copies, with the current values of the variables."""
        self._devices = devices
        self._originals: list[tf.Variable] = []
        self._copies: list[list[tf.Variable]] = [[] for _ in devices[1:]]
        self.add(originals)
        with tf.init_scope(), tf.device(HOST):
            self.renewals = tf.Variable(0, trainable=False, dtype=tf.int64)

    def add(self, originals: Iterable[tf.Variable]) -> None:
        """Creates copies of variables that have none yet."""
        known = {*map(id, self._originals)}
        for original in {id(v): v for v in originals if id(v) not in known}.values():
            self._originals.append(original)
            for device, copies in zip(self._devices[1:], self._copies, strict=True):
                copies.append(variable_like(original, device, original))

    def handles(self) -> list[dict[int, tf.Tensor]]:
        """Returns, for each device, the handles of its copies; see `Copied`."""
        own = [variable.handle for variable in self._originals]
        others = [[variable.handle for variable in copies] for copies in self._copies]
        return [
            dict(zip(map(id, own), handles, strict=True)) for handles in [own, *others]
        ]

    def refresh(self) -> None:
        """Gives the copies the variables' values, if other code has assigned these.

        Digests are compared first, so that values are sent only if they differ.
        """
        with tf.name_scope("refresh"):
            tf.cond(self._differ([*range(len(self._originals))]), self._renew, _nothing)

    def follow(self, renewed: tf.Tensor) -> None:
        """Gives the copies values that have changed, comparing scalars alone.

        An example of such a scalar is a learning rate.

        Args:
            renewed: Whether to give the copies all values in any case.
        """
        scalars = [i for i, v in enumerate(self._originals) if v.shape.rank == 0]

        def of_scalars():
            tf.cond(self._differ(scalars), lambda: self._broadcast(scalars), _nothing)

        with tf.name_scope("follow"):
            tf.cond(renewed, self._renew, of_scalars)

    def _differ(self, places):
        """Checks whether copies of the variables at some indices differ in value."""
        digests = []
        copies_of_devices = [self._originals, *self._copies]
        for device, copies in zip(self._devices, copies_of_devices, strict=True):
            with tf.device(device):
                values = [tf.convert_to_tensor(copies[i]) for i in places]
                digests.append(_digest(values))
        with tf.device(self._devices[0]):
            return tf.reduce_any(tf.stack(digests) != digests[0])

    def _renew(self):
        self._broadcast(range(len(self._originals)))
        self.renewals.assign_add(1)

    def _broadcast(self, places):
        home, *others = self._devices
        originals = [self._originals[i] for i in places]
        copies = [[on_device[i] for i in places] for on_device in self._copies]
        packing.broadcast(home, originals, others, copies)


# XLA reads each number once, and materializes no intermediate tensors.
_digest = tf.function(digest, autograph=False, jit_compile=True)


def _nothing():
    pass
