"""Updates variables, and their copies on other devices, by an optimizer."""

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
    """Updates variables by an optimizer, whose state has copies if they have some.

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
        """Takes an optimizer that was built, and the copies of the variables."""
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
            gradients: One for each variable.
            others: The same on the devices of copies. What is `None` there, or of all,
                is sent.
            settings: What `settings` returns, for which a graph is traced.
        """
        home = self._plan.home
        if self._copies is None:
            with tf.device(home), substitutes.updates():
                self._optimizer.apply(gradients, self._variables)
            return
        devices = self._plan.devices[1:]
        others = [[None] * len(gradients)] * len(devices) if others is None else others
        arrived = [*map(functools.partial(_arrived, gradients), others, devices)]
        # What changes no copied variable, such as a counter, runs once, at home.
        verdict = judge(
            lambda batch: self._optimizer.apply(gradients, self._variables),
            (),
            functools.partial(self._copied, arrived),
        )
        update = Partitioned(verdict)
        # If those of the variables were renewed, so is what belongs to them.
        renewals = self._copies.renewals.read_value()
        self._state.follow(renewals != self._renewals)
        self._renewals.assign(renewals)
        update(self._plan, [()] * len(self._plan.devices), 1)

    def settings(self) -> str:
        """Returns what Python reads as an optimizer is traced, such as its momentum."""
        optimizers = [self._optimizer, *updating(self._optimizer)]
        found = [
            (name, value if isinstance(value, _SETTINGS) else id(value))
            for each in optimizers
            for name, value in vars(each).items()
            if isinstance(value, (*_SETTINGS, LearningRateSchedule))
        ]
        constraints = [getattr(each, "constraint", None) for each in self._variables]
        return repr([*found, *map(id, constraints)])

    def _copied(self, arrived: Sequence[Mapping[int, tf.Tensor]], trace: Trace):
        """Finds what each device has of the update: variables, state, and gradients."""
        variables = {id(each.handle): each for each in trace.concrete.variables}
        mine = self._copies.handles()[0].keys() | self._state.handles()[0].keys()
        needed = together(trace.graph, mine, variables.keys()) - mine
        self._state.add(variables[each] for each in needed)
        pairs = zip(self._copies.handles(), self._state.handles(), strict=True)
        every = [a | b for a, b in pairs]
        return Copied([every[0], *map(dict.__or__, every[1:], arrived)], "cpu")


def _arrived(gradients, on_device, device):
    """Returns a device's copies of gradients, by the `id` of the tensors at home."""
    copies = {}
    with tf.device(device):
        for gradient, there in zip(gradients, on_device, strict=True):
            there = packing.copy(gradient) if there is None else there
            copies |= zip(map(id, flat(gradient)), flat(there), strict=True)
    return copies
