"""A store of shards: each tower has a part of every large variable, and updates it.

Towers gather a parameter for each use (`variable_update="sharded"`), or once in a step
(`shard_optimizer_state=True`); see `layers/parameters.py`. Of several hosts, each has
all parts of the parameters, so that towers gather them without a message. Where
parameters are gathered once, the hosts divide the optimizer's slots as well.

Small variables are at home, whole, and so are those that a constraint, a gradient or
the step itself assigns. Where an optimizer looks at whole variables, no variable is
cut: each is on one device.
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
    """A part of each large variable on each tower, which updates it."""

    divides = updates_apart = True

    def __init__(
        self,
        context: Context,
        min_bytes: int | None = None,
        gathered_by_use: bool = True,
        divides_tables: bool = False,
    ):
        """Divides nothing yet.

        Args:
            context: See `Store`.
            min_bytes: How large variables are that are divided; by default, as
                `parameters.MIN_BYTES` says.
            gathered_by_use: Whether towers gather a parameter for each use, not once in
                a step.
            divides_tables: Whether rows of tables are divided without being asked for.
        """
        super().__init__(context)
        self._divides_tables = divides_tables
        self._min_bytes, self._gathered_by_use = min_bytes, gathered_by_use

    def _cut(self, data: Any) -> None:
        """See `Store`.

        Raises:
            ModelError: The optimizer may look at all variables at once.
        """
        context, optimizer = self._context, self._optimizer
        why = optimizer and sharded.why_not_cut(optimizer)
        if optimizer is not None:
            self._check(optimizer)
        apart = set(context.facts.kept_whole)
        # A table of which no row may be alone is a parameter as all others.
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
            for places, plan in context.plan.by_stage(chosen):
                self._divide([chosen[i] for i in places], plan, optimizer)
        for parameter in parameters.of(trained):
            parameter.gathered_by_use = self._gathered_by_use

    def apply(self, sums: Sequence[Sequence[Gradient]]) -> None:
        """See `Store`."""
        super().apply(sums)
        targets = sharded.targets(self._context.model.trainable_variables)
        given = zip(targets, sums[0], strict=True)
        changed = {id(target): target for target, g in given if g is not None}
        spread = [p for p in parameters.of([*changed.values()]) if p.elsewhere]
        if spread:
            share = feature("collectives.spread.parameters").share
            share(self._context.plan.hosts, spread)

    def _divide(self, variables, plan, optimizer):
        """Divides the variables of a stage among the devices that have it."""
        whole, cut = [], []
        for variable in variables:
            leaf = optimizer and optimizers.updating_one(optimizer, variable)
            why = leaf and sharded.why_not_cut(leaf)
            (whole if why else cut).append(variable)
        devices, way = [tower.device for tower in plan.replicas], parameters
        arguments: tuple[Any, ...] = (optimizer,)
        # The norm of what other hosts have accumulated is not known.
        local = optimizer is not None and sharded.clips_accumulated(optimizer)
        if plan.hosts.count > 1 and not self._gathered_by_use and not local:
            way = feature("collectives.spread.parameters")
            arguments = plan.replicas_by_host, plan.hosts, optimizer
        way.cut(cut, devices, *arguments)
        way.distribute(whole, devices, *arguments)

    def _check(self, optimizer):
        refusal = sharded.why_not_distributed(optimizer)
        if refusal is None:
            return
        asked, instead = "variable_update='sharded'", "variable_update='replicated'"
        if not self._gathered_by_use:
            asked, instead = "shard_optimizer_state=True", "shard_optimizer_state=False"
        raise ModelError(
            f"Received {asked} for model '{self._context.model.name}', whose "
            f"{refusal}; expected one of Keras's optimizers, or a class with an "
            "`update_step` alone, which keeps slots in lists, one for each variable, "
            f"or {instead}."
        )
