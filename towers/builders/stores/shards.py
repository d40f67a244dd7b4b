"""A store of shards: each tower has a shard of every large variable, and updates it.

Towers gather a parameter for each use (`variable_update="sharded"`), or once a step
(`shard_optimizer_state=True`); see `layers/parameters.py`. Each of several hosts has
all shards of the parameters, so that towers gather them without communication between
hosts. Where parameters are gathered once a step, the hosts also divide the optimizer's
slots.

Small variables stay whole at home, and so do variables that a constraint, a gradient or
the step itself assigns. If the optimizer needs whole variables, no variable is cut:
each is on one device.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towers.builders.context import Context
from towers.builders.stores.store import Store
from towers.collectives.reduce import Gradient
from towers.keras_adapter import optimizers
from towers.layers import parameters, sharded
from towers.program.features import feature
from towers.tower.errors import ModelError


class Shards(Store):
    """A shard of each large variable on each tower, which updates it."""

    divides = updates_apart = True

    def __init__(
        self,
        context: Context,
        min_bytes: int | None = None,
        gathered_by_use: bool = True,
        divides_tables: bool = False,
    ):
        """Shards nothing yet.

        Args:
            context: See `Store`.
            min_bytes: Minimum size of a variable that is sharded; by default
                `parameters.MIN_BYTES`.
            gathered_by_use: Whether towers gather a parameter for each use, not once a
                step.
            divides_tables: Whether the strategy itself divides the rows of tables,
                without a request by the user.
        """
        super().__init__(context)
        self._divides_tables = divides_tables
        self._min_bytes, self._gathered_by_use = min_bytes, gathered_by_use

    def _cut(self, data: Any) -> None:
        """Shards variables and their slots; see `Store`.

        Raises:
            ModelError: The optimizer may need all variables at once.
        """
        context, optimizer = self._context, self._optimizer
        why = optimizer and sharded.why_not_cut(optimizer)
        if optimizer is not None:
            self._check(optimizer)
        apart = set(context.facts.kept_whole)
        # An optimizer that needs whole variables treats tables like other parameters.
        implied = self._divides_tables and context.shard_embeddings == "rows"
        if context.shard_embeddings != "none" and not (why and implied):
            apart |= self._cut_tables(data)
        if why:
            line = (
                "Each large variable is whole on one device, and not cut over all, "
                f"because of {why}."
            )
            context.say([line])
        trained = context.model.trainable_variables
        least = self._min_bytes or parameters.MIN_BYTES
        chosen = parameters.choose(trained, least)
        chosen = [variable for variable in chosen if id(variable) not in apart]
        with tf.init_scope():
            for indices, plan in context.plan.by_stage(chosen):
                self._divide([chosen[i] for i in indices], plan, optimizer)
        for parameter in parameters.of(trained):
            parameter.gathered_by_use = self._gathered_by_use

    def apply(self, sums: Sequence[Sequence[Gradient]]) -> None:
        """Applies the optimizer, and sends updated parts to all hosts; see `Store`."""
        super().apply(sums)
        targets = sharded.targets(self._context.model.trainable_variables)
        pairs = zip(targets, sums[0], strict=True)
        changed = {id(target): target for target, g in pairs if g is not None}
        spread = [p for p in parameters.of([*changed.values()]) if p.elsewhere]
        if spread:
            share = feature("collectives.spread.parameters").share
            share(self._context.plan.hosts, spread)

    def _divide(self, variables, plan, optimizer):
        """Divides the variables of a stage among the devices of that stage."""
        uncut, cut = [], []
        for variable in variables:
            leaf = optimizer and optimizers.updating_one(optimizer, variable)
            why = leaf and sharded.why_not_cut(leaf)
            (uncut if why else cut).append(variable)
        devices, placement = [tower.device for tower in plan.replicas], parameters
        arguments: tuple[Any, ...] = (optimizer,)
        # No host knows the norm of gradients that other hosts have accumulated.
        local = optimizer is not None and sharded.clips_accumulated(optimizer)
        if plan.hosts.count > 1 and not self._gathered_by_use and not local:
            placement = feature("collectives.spread.parameters")
            arguments = plan.replicas_by_host, plan.hosts, optimizer
        placement.cut(cut, devices, *arguments)
        placement.distribute(uncut, devices, *arguments)

    def _check(self, optimizer):
        """Refuses an optimizer whose state cannot be divided."""
        refusal = sharded.why_not_distributed(optimizer)
        if refusal is None:
            return
        received, instead = "variable_update='sharded'", "variable_update='replicated'"
        if not self._gathered_by_use:
            received, instead = (
                "shard_optimizer_state=True",
                "shard_optimizer_state=False",
            )
        raise ModelError(
            f"Received {received} for model '{self._context.model.name}', whose "
            f"{refusal}; expected one of Keras's optimizers, or a class with an "
            "`update_step` alone, which keeps slots in lists, one for each variable, "
            f"or {instead}."
        )
