"""Makes one of what towers return: of their gradients, and of their state."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers.analysis.rules import Rules
from towers.builders.context import Context
from towers.builders.pieces.copies import Copies
from towers.collectives import reduce
from towers.devices import is_gpu
from towers.layers import overwritten
from towers.tower.passes import TowerResult

Seen = Callable[[reduce.Packed], Any]


@dataclasses.dataclass
class Reducer(abc.ABC):
    """Adds the towers' gradients."""

    context: Context

    def sum_gradients(
        self,
        gradients: Sequence[Sequence[reduce.Gradient]],
        sources: Sequence[str],
        seen: Seen | None = None,
    ) -> list[list[reduce.Gradient]]:
        """Adds the towers' gradients.

        Args:
            gradients: Lists of gradients; see `TowerResult.gradients`.
            sources: The devices that they are on.
            seen: Is told of what has travelled packed; see `reduce.all_reduce`.

        Returns:
            The sums, once for each copy of the variables.
        """
        plan, largest = self.context.plan, overwritten.places(self.context.model)
        return plan.hosts.sum(self._sum(plan, gradients, sources, largest, seen))

    @abc.abstractmethod
    def _sum(self, plan, gradients, sources, largest, seen):
        """Adds those of this host; `largest` is as in `reduce.sum_gradients`."""


class SumAtHome(Reducer):
    """Adds the towers' gradients on one device, for the variables at home."""

    def _sum(self, plan, gradients, sources, largest, seen):
        if any(map(plan.packs, sources)):
            ends = plan.merge, plan.home
            return [reduce.sum_packed(gradients, sources, *ends, largest, seen)]
        with tf.device(plan.merge):
            return [reduce.sum_gradients(gradients, largest)]


@dataclasses.dataclass
class AllReduce(Reducer):
    """Adds the towers' gradients, and gives every tower the sums.

    Attributes:
        algorithm: A key of `reduce.ALGORITHMS`; "auto" takes the first GPU, or else the
            CPU.
    """

    algorithm: str = "auto"

    def __post_init__(self):
        if self.algorithm == "auto":
            self.algorithm = "device" if is_gpu(self.context.plan.home) else "cpu"

    def _sum(self, plan, gradients, sources, largest, seen):
        return reduce.all_reduce(
            gradients, sources, plan.devices, self.algorithm, largest, seen
        )


@dataclasses.dataclass
class StateCombiner:
    """Combines what the towers made of the model's variables, by rules."""

    context: Context
    copies: Copies

    def combine_state(
        self, results: Sequence[TowerResult], rules: Rules
    ) -> list[tf.Tensor | None]:
        """Combines, at home, what the towers made of the model's variables, by rules.

        Returns:
            A value for each trainable and then each non-trainable variable, `None` for
            those that no tower changed.
        """
        plan = self.context.plan
        count = len(self.context.variables)
        sources = [plan.devices[result.tower] for result in results]
        with tf.device(plan.home), tf.name_scope("state"):
            return reduce.combine_states(
                [result.state for result in results],
                [result.fraction for result in results],
                [rules[f"state {i}"] for i in range(count)],
                sources if any(map(plan.packs, sources)) else (),
                plan.hosts,
            )

    def assign_state(self, state: Sequence[tf.Tensor | None]) -> None:
        """Assigns to the model's variables what `combine_state` returned."""
        with tf.name_scope("state"):
            for variable, value in zip(self.context.variables, state, strict=True):
                if value is not None:
                    with tf.device(self.context.plan.home_of(variable)):
                        variable.assign(value)
        self.copies.assign_state(state)
