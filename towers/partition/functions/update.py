"""Updates variables and their copies on other devices by an optimizer."""

import functools
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from towers.collectives import packing
from towers.collectives.reduce import Gradient
from towers.devices.names import HOST
from towers.keras_adapter.optimizers import all_variables, updating
from towers.keras_adapter.variables import value_behind
from towers.layers import substitutes
from towers.loop.loop import flat
from towers.partition.call import Copied
from towers.partition.functions.variable_copies import VariableCopies
from towers.partition.partitioned import Partitioned, judge
from towers.partition.placement import together
from towers.partition.trace import Trace
from towers.plan import Plan

LearningRateSchedule = keras.optimizers.schedules.LearningRateSchedule
_SETTINGS = bool, int, float, str, type(None)


class Update:
    """Updates variables and their copies; the optimizer's state is copied alike.

    Attributes:
        in_graph: The update as a `tf.function`.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable | tf.Variable],
        plan: Plan,
        copies: VariableCopies | None,
    ):
        """Takes a built optimizer, and the copies of the variables, if any."""
        self._optimizer, self._variables, self._plan = optimizer, variables, plan
        self._copies = copies if plan.devices[1:] else None
        if self._copies is not None:
            state = map(value_behind, all_variables(optimizer))
            self._state = VariableCopies(state, plan.devices)
            with tf.device(HOST):
                self._renewals = tf.Variable(copies.renewals, trainable=False)
        self.in_graph = tf.function(self, autograph=False, reduce_retracing=True)

    def __call__(
        self,
        gradients: Sequence[Gradient],
        others: Sequence[Sequence[Gradient]] | None = None,
        settings: str = "",
    ) -> None:
        """Applies gradients.

        Args:
            gradients: One gradient for each variable.
            others: The gradients on the devices of the copies. Gradients that are
                `None` here, or all if `others` is, are sent from home.
            settings: The result of `settings`; each value gets a graph of its own.
        """
        home = self._plan.home
        if self._copies is None:
            with tf.device(home), substitutes.updates():
                self._optimizer.apply(gradients, self._variables)
            return
        devices = self._plan.devices[1:]
        others = [[None] * len(gradients)] * len(devices) if others is None else others
        arrived = [*map(functools.partial(_arrived, gradients), others, devices)]
        # Operations that change no copied variable, such as a counter, run once, at
        # home.
        verdict = judge(
            lambda batch: self._optimizer.apply(gradients, self._variables),
            (),
            functools.partial(self._copied, arrived),
        )
        update = Partitioned(verdict)
        # If the copies of the variables were renewed, renew those of the state, too.
        renewals = self._copies.renewals.read_value()
        self._state.follow(renewals != self._renewals)
        self._renewals.assign(renewals)
        update(self._plan, [()] * len(self._plan.devices), 1)

    def settings(self) -> str:
        """Returns the Python settings that a trace depends on, such as momentum."""
        optimizers = [self._optimizer, *updating(self._optimizer)]
        settings = [
            (name, value if isinstance(value, _SETTINGS) else id(value))
            for owner in optimizers
            for name, value in vars(owner).items()
            if isinstance(value, (*_SETTINGS, LearningRateSchedule))
        ]
        constraints = [getattr(v, "constraint", None) for v in self._variables]
        return repr([*settings, *map(id, constraints)])

    def _copied(self, arrived: Sequence[Mapping[int, tf.Tensor]], trace: Trace):
        """Returns copies of the update's inputs: variables, state, and gradients."""
        variables = {id(v.handle): v for v in trace.concrete.variables}
        handles = self._copies.handles()[0].keys() | self._state.handles()[0].keys()
        needed = together(trace.graph, handles, variables.keys()) - handles
        self._state.add(variables[handle] for handle in needed)
        pairs = zip(self._copies.handles(), self._state.handles(), strict=True)
        copies = [a | b for a, b in pairs]
        return Copied([copies[0], *map(dict.__or__, copies[1:], arrived)], "cpu")


def _arrived(gradients, on_device, device):
    """Returns a device's copies of gradients, by the `id` of the tensors at home."""
    copies = {}
    with tf.device(device):
        for gradient, copy in zip(gradients, on_device, strict=True):
            copy = packing.copy(gradient) if copy is None else copy
            copies |= zip(map(id, flat(gradient)), flat(copy), strict=True)
    return copies
