"""Updates variables that lie in parts, or on stages, on the devices that have them.

Where each device has a part of the variables or of the optimizer's state, an optimizer
cannot simply be applied to each copy. So a step of training leaves its update out (see
`updates_apart` of `Trace`): gradients are added for those that own the variables, and
each owner applies the optimizer to what it has.
"""

import itertools
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from towers.builders.common import Pieces
from towers.builders.pieces.reducer import Reducer
from towers.collectives.reduce import Gradient
from towers.layers import sharded
from towers.partition.combined import REDUCE_SCOPE
from towers.partition.trace import OptimizerCall
from towers.tower.errors import ModelError


class ApartUpdate:
    """Adds gradients for the owners of variables, and has these apply the optimizer."""

    def __init__(self, pieces: Pieces, reducer: Reducer):
        """Takes what adds gradients, and the updater of the pieces."""
        self._context, self._copies = pieces.context, pieces.copies
        self._reducer, self._updater = reducer, pieces.updater

    def add(
        self,
        update: OptimizerCall,
        parts: Sequence[Sequence[Gradient]],
        whole: Mapping[int, Gradient],
    ) -> list[list[Gradient]]:
        """Adds the gradients that an optimizer is to apply.

        Args:
            update: The optimizer's call.
            parts: For each device, its part of each gradient of the call; `None` for
                those that home has.
            whole: The gradients that home has, by their places in the call.

        Returns:
            For each copy of the variables, a gradient for each target of a trainable
            variable; see `Reducer.sum_gradients`.

        Raises:
            ModelError: The call is not that of the model's optimizer for its trainable
                variables.
        """
        model, plan = self._context.model, self._context.plan
        places = {id(variable): i for i, variable in enumerate(update.variables)}
        if update.optimizer is not model.optimizer or (
            places.keys() - {*map(id, model.trainable_variables)}
        ):
            raise ModelError(
                f"Model '{model.name}' applies an optimizer of its own, with variables "
                "or a state in parts on several devices; expected `self.optimizer` for "
                "the model's trainable variables, or each variable whole: "
                "variable_update='replicated' without shard_optimizer_state, "
                "shard_embeddings='none', stages=1."
            )
        trained = model.trainable_variables
        chosen = [places.get(id(variable)) for variable in trained]
        of_devices = []
        for tower, part in zip(plan.replicas, parts, strict=True):
            # Each tower cuts its gradients, and sends others their parts.
            with tf.device(tower.device):
                given = [None if i is None else part[i] for i in chosen]
                of_devices.append(sharded.expand(trained, given))
        towers = range(0, len(plan.towers), plan.pipeline.micro_batches)
        over_hosts = self._add_over_hosts if plan.hosts.count > 1 else None
        with tf.name_scope(REDUCE_SCOPE):
            sums = self._reducer.sum_gradients(
                of_devices, towers, over_hosts=over_hosts
            )
        at_home = []
        for variable, i in zip(trained, chosen, strict=True):
            at_home += _of_targets(variable, whole.get(i))
        copies = zip(sums, self._given_to_copies(at_home), strict=True)
        return [
            [b if a is None else a for a, b in zip(added, given, strict=True)]
            for added, given in copies
        ]

    def together(self, sums: Sequence[Sequence[Gradient]]) -> list[Gradient]:
        """Returns those of the sums that are all there are, once: see `Reducer`."""
        every = itertools.chain(*self._reducer.together(sums))
        return [gradient for gradient in every if gradient is not None]

    def apply(self, sums: Sequence[Sequence[Gradient]]) -> None:
        """Has each owner apply the optimizer to the sums of `add`."""
        self._updater.update_weights(sums)

    def _add_over_hosts(self, sums, scatter=tuple):
        """Adds this host's sums to those of others; see `Reducer.sum_gradients`."""
        hosts, timers = self._context.plan.hosts, self._context.timers
        dense = [gradient for gradient in sums if isinstance(gradient, tf.Tensor)]
        begun = timers.begin_sum(sums)
        totals = hosts.all_reduce(sums, "gradients", dense)
        scattered = scatter()
        timers.end_sum(begun, totals)
        return totals, scattered

    def _given_to_copies(self, gradients):
        """Gives each copy the gradients of targets that home has."""
        given = self._reducer.hand_out(gradients)
        cut = sharded.devices(self._context.model.trainable_variables)
        for i in cut:
            # As in `sum_gradients`, the first copy updates the shards of a table.
            for k, of_copy in enumerate(given):
                of_copy[i] = sharded.norm(gradients[i]) if k else gradients[i]
        if (shards := self._copies.shards) is not None:
            # All hosts have these; what is cut stays where it is.
            there = {i for i, gradient in enumerate(gradients) if gradient is not None}
            shards.with_gradients |= there - cut.keys()
        return given


def _of_targets(variable: keras.Variable, gradient: Gradient) -> list[Gradient]:
    """Returns a variable's gradient for each of its targets."""
    if gradient is not None and sharded.tables_across_hosts([variable]):
        return sharded.of(variable).parts_of(gradient)
    return sharded.expand([variable], [gradient])
