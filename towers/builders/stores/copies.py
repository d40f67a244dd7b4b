"""A store of copies: every tower has a copy of the variables.

The model's own variables are the first tower's copy, so they are always current. Each
host has its own copies, which follow those of the first host. Where the model's
variables may have been changed from outside, all other copies are renewed: at the start
of `fit` and of each epoch, and before each call of training if a callback runs in
between that may change them (`model/fit_call.py`).

Copies are equal between two steps: a way to update variables whose copies differ, such
as local SGD, would need an average before any read. Copies are separate variables,
not one buffer, as the user's optimizer updates variables one by one.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.builders.context import Context
from towers.builders.stores.store import Store, updating_in_place
from towers.collectives import packing, reduce
from towers.collectives.reduce import Gradient
from towers.devices.names import HOST
from towers.keras_adapter.optimizers import (
    all_variables,
    known_variables,
    learning_rate_variable,
    updating,
)
from towers.keras_adapter.variables import swapped_values, value_behind, variable_like
from towers.layers import sharded, variables
from towers.partition.call import Copied
from towers.partition.placement import together
from towers.partition.trace import Trace
from towers.plan import Plan, Tower


class Copies(Store):
    """A copy of the variables on each tower, updated by the sum of gradients.

    The model's own variables are the first tower's copy.

    Attributes:
        algorithm: How gradients are added: a key of `reduce.ALGORITHMS`.
    """

    def __init__(self, context: Context, all_reduce: str = "auto"):
        """Creates no copies yet.

        Args:
            context: See `Store`.
            all_reduce: How gradients are added; see `Plan.algorithm_for`.
        """
        super().__init__(context)
        hosts = context.plan.hosts
        self.algorithm = context.plan.algorithm_for(all_reduce)
        in_place = hosts.connects_devices and not self.updates_apart
        if all_reduce == "nccl" and hosts.count > 1 and not in_place:
            line = (
                f"The gradients of {hosts.count} hosts go through their memory, not by "
                "NCCL; expected hosts that TensorFlow connects, and neither "
                "gradient_compression nor stages, for NCCL to add them."
            )
            context.say([line])
        # The variables that have copies, trainable variables first; then, for each
        # tower but the first, the copies.
        self._originals: Sequence[keras.Variable] = ()
        self._copies: Sequence[Sequence[tf.Variable]] = ()

    @property
    def copied_to(self) -> Sequence[Tower]:
        """The towers that have copies, all but the first; see `Store`."""
        return self._context.plan.replicas[1:]

    @property
    def updates_apart(self) -> bool:
        """Whether a step leaves its update to `add` and `apply`; see `Store`."""
        return self.divides or self._context.plan.pipeline.stages > 1

    def create_copies(self) -> None:
        """Creates copies of variables and optimizer state; see `Store`."""
        if self._originals or not self.copied_to:
            return
        originals = [*self._context.model.trainable_variables]
        if self._context.model.optimizer is not None:
            originals += all_variables(self._context.model.optimizer)
        # Variables in parts are on several devices already.
        self.add_copies([v for v in originals if sharded.of(v) is None])

    def copied(self, trace: Trace) -> Copied:
        """Returns the copies that a training step reads; see `Store`.

        Variables that optimizers update, and the optimizers' state, have copies.
        """
        model = self._context.model
        if self.updates_apart:
            return Copied(self.handles(), self.algorithm)
        # Also for a single tower: other hosts may have more, and need the same phases.
        wanted = [*model.trainable_variables]
        for optimizer in variables.optimizers(model).values():
            wanted += all_variables(optimizer)
            for leaf in updating(optimizer):
                wanted += known_variables(leaf)
        known = {id(value_behind(v).handle): v for v in variables.of(model)}
        handles = {id(value_behind(v).handle) for v in wanted}
        handles = together(trace.graph, handles, known.keys())
        wanted += [known[handle] for handle in handles & known.keys()]
        self.add_copies(wanted)
        return Copied(self.handles(), self.algorithm)

    def add_copies(self, originals: Sequence[keras.Variable]) -> None:
        """Creates copies of variables that have none yet."""
        known = {*map(id, self._originals)}
        added = {
            id(variable): variable
            for variable in originals
            if id(variable) not in known
        }
        added = [*added.values()]
        if not added:
            return
        with tf.init_scope():
            plan = self._context.plan
            copies = [_copy(plan, tower, added) for tower in self.copied_to]
        if not self._originals:
            # Other hosts may have no copies, and all hosts follow the first together.
            self.stale = self.stale and self._context.plan.hosts.count > 1
        self._originals = [*self._originals, *added]
        self._copies = [
            [*known_copies, *added_copies]
            for known_copies, added_copies in zip(
                self._copies or [[] for _ in copies], copies, strict=True
            )
        ]

    def handles(self) -> list[dict[int, tf.Tensor]]:
        """Returns, for each tower, the handles of its copies.

        Keys are the `id`s of the handles of the model's own variables.
        """
        own = [value_behind(variable).handle for variable in self._originals]
        handles = [own, *([copy.handle for copy in copies] for copies in self._copies)]
        return [
            dict(zip(map(id, own), copies_of_tower, strict=True))
            for copies_of_tower in handles
        ]

    def copies(self) -> list[tf.Variable]:
        """Returns the copies of all towers but the first; see `Store`."""
        return [copy for copies in self._copies for copy in copies]

    def of_tower(self, k: int) -> Sequence[tf.Variable]:
        """Returns the trainable variables of this host's tower with index `k`."""
        if k == 0:
            return [*map(value_behind, self._context.model.trainable_variables)]
        return self._copies[k - 1][: len(self._context.model.trainable_variables)]

    def broadcast(self) -> None:
        """Assigns the values of the model's own variables to all copies."""
        for indices, plan in self._context.plan.by_stage(self._originals):
            originals = [self._originals[i].value for i in indices]
            copies = [
                [copies_of_tower[i] for i in indices]
                for copies_of_tower in self._copies
            ]
            devices = [tower.device for tower in plan.replicas[1:]]
            packing.broadcast(plan.home, originals, devices, copies)

    def differ(self) -> bool:
        """Returns whether copies may differ from the model's variables."""
        written = self.stale or self._context.callbacks_may_write
        return bool(self._originals) and written

    def apply(self, sums: Sequence[Sequence[Gradient]]) -> None:
        """Updates each copy on its tower; see `Store`."""
        super().apply(sums)
        self.follow_learning_rates()
        stages = self._context.plan.pipeline.stages
        copies = zip(self.copied_to, self._copies, sums[1:], strict=False)
        for k, (tower, copy, gradients) in enumerate(copies, start=1):
            with updating_in_place(tower.device, stages), tf.name_scope(f"apply_{k}"):
                with swapped_values(self._originals, copy):
                    self._apply_here(gradients)

    def _add_on_devices(
        self, plan: Plan, gradients: Sequence[Sequence[Gradient]]
    ) -> Sequence[Sequence[Gradient]]:
        """All-reduces the gradients of one stage; see `Store`."""
        devices = [tower.device for tower in plan.replicas]
        return reduce.all_reduce(gradients, devices, devices, self.algorithm)[0]

    def _hand_out(
        self, plan: Plan, sums: Sequence[Gradient]
    ) -> Sequence[Sequence[Gradient]]:
        """Copies the sums of one stage from home to each tower; see `Store`."""
        devices = [tower.device for tower in plan.replicas]
        return reduce.all_reduce([sums], [HOST], devices, "cpu")[0]

    def follow_learning_rates(self) -> None:
        """Copies learning rates, which callbacks change, to all towers."""
        for i in _learning_rates(self._context.model, self._originals):
            for copy in self._copies:
                with tf.device(copy[i].device), tf.name_scope("learning_rate"):
                    copy[i].assign(self._originals[i].value)


def _learning_rates(model, originals):
    """Returns the indices of learning rates, which are small and change often."""
    optimizers_of_model = variables.optimizers(model).values()
    leaves = [
        leaf
        for optimizer in optimizers_of_model
        for leaf in (optimizer, *updating(optimizer))
    ]
    rates = {id(learning_rate_variable(leaf)) for leaf in leaves}
    return [i for i, variable in enumerate(originals) if id(variable) in rates]


def _copy(plan, tower, originals):
    copies, stage_of = [], plan.pipeline.stage_of
    for variable in originals:
        device, original = tower.devices[stage_of(variable)], variable.value
        copies.append(variable_like(original, device, original))
    return copies
