"""Updates variables, and their copies on other devices, by an optimizer."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.collectives import packing
from towers.collectives.reduce import Gradient
from towers.devices import HOST
from towers.keras_adapter.optimizers import all_variables
from towers.layers import fused
from towers.partition.functions.variable_copies import VariableCopies
from towers.plan import Plan


class Update:
    """Updates variables by an optimizer; copies, too, each on its device.

    Attributes:
        in_graph: The same, as a graph.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable | tf.Variable],
        plan: Plan,
        copies: VariableCopies | None,
    ):
        """Creates copies of the optimizer's state, if the variables have some."""
        self._optimizer, self._variables, self._plan = optimizer, variables, plan
        self._copies, self._state = copies, None
        if copies is not None:
            # Slots are as large as variables. Who assigns them assigns these, too.
            self._state = VariableCopies(
                all_variables(optimizer), plan.devices, lambda each: not each.shape.rank
            )
            with tf.device(HOST):
                self._renewals = tf.Variable(copies.renewals, trainable=False)
        self.in_graph = tf.function(self, autograph=False, reduce_retracing=True)

    def __call__(
        self, gradients: Sequence[Gradient], others: Sequence[Sequence[Gradient]]
    ) -> None:
        """Takes gradients, and for each other device what it has of them.

        Those that a device does not have, which are `None` there, are sent.
        """
        if self._copies is not None:
            self._refresh()
        with tf.device(self._plan.home):
            self._apply(gradients, self._variables)
        if self._copies is None:
            return
        devices = self._plan.devices[1:]
        others = others or [[None] * len(gradients) for _ in devices]
        for k, (device, mine) in enumerate(zip(devices, others, strict=True), start=1):
            with tf.device(device), tf.name_scope(f"copy_{k}"):
                pairs = zip(mine, gradients, strict=True)
                mine = [packing.copy(g) if m is None else m for m, g in pairs]
                with self._state.of(k), self._copies.of(k) as variables:
                    self._apply(mine, variables)

    def _refresh(self):
        """Renews copies of the state, too, if those of the variables were renewed."""
        now = self._copies.renewals.read_value()
        self._state.refresh(now != self._renewals)
        self._renewals.assign(now)

    def _apply(self, gradients, variables):
        with fused.updates():
            self._optimizer.apply(gradients, variables)
