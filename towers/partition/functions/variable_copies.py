"""Copies of variables on each device, for loops of one's own.

TensorFlow does not tell that a variable was assigned, so each step compares digests of
all copies first. A number is never that of an old copy, but each variable is read once
more.
"""

from collections.abc import Iterable, Sequence

import tensorflow as tf

from towers.collectives import packing
from towers.devices.names import HOST
from towers.keras_adapter.variables import variable_like
from towers.layers.variables import digest


class VariableCopies:
    """Copies of variables on all devices but the first, which has the variables.

    A loop may assign the variables at any time. `refresh` finds that out.

    Attributes:
        renewals: How often all copies were given the variables' values, as a variable.
    """

    def __init__(self, originals: Iterable[tf.Variable], devices: Sequence[str]):
        """Creates the copies, with the values that the variables have."""
        self._devices = devices
        self._originals: list[tf.Variable] = []
        self._copies: list[list[tf.Variable]] = [[] for _ in devices[1:]]
        self.add(originals)
        with tf.init_scope(), tf.device(HOST):
            self.renewals = tf.Variable(0, trainable=False, dtype=tf.int64)

    def add(self, originals: Iterable[tf.Variable]) -> None:
        """Creates copies of those variables that have none yet."""
        known = {*map(id, self._originals)}
        for each in {id(v): v for v in originals if id(v) not in known}.values():
            self._originals.append(each)
            for device, copies in zip(self._devices[1:], self._copies, strict=True):
                copies.append(variable_like(each, device, each))

    def handles(self) -> list[dict[int, tf.Tensor]]:
        """Returns, for each device, the handles of its copies; see `Copied`."""
        own = [each.handle for each in self._originals]
        others = [[each.handle for each in copies] for copies in self._copies]
        return [dict(zip(map(id, own), mine, strict=True)) for mine in [own, *others]]

    def refresh(self) -> None:
        """Gives the copies the variables' values, if something else assigned those.

        Digests tell, so that values travel only then.
        """
        with tf.name_scope("refresh"):
            tf.cond(self._differ([*range(len(self._originals))]), self._renew, _nothing)

    def follow(self, renewed: tf.Tensor) -> None:
        """Does the same, but compares scalars alone, such as a learning rate.

        Args:
            renewed: Whether to give the copies all values in any case.
        """
        scalars = [i for i, v in enumerate(self._originals) if v.shape.rank == 0]

        def of_scalars():
            tf.cond(self._differ(scalars), lambda: self._broadcast(scalars), _nothing)

        with tf.name_scope("follow"):
            tf.cond(renewed, self._renew, of_scalars)

    def _differ(self, places):
        """Whether copies of the variables at some places have other values."""
        digests = []
        every = [self._originals, *self._copies]
        for device, copies in zip(self._devices, every, strict=True):
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
        copies = [[mine[i] for i in places] for mine in self._copies]
        packing.broadcast(home, originals, others, copies)


# XLA reads each number once, and keeps nothing of what is between.
_digest = tf.function(digest, autograph=False, jit_compile=True)


def _nothing():
    pass
