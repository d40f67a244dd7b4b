"""Adds the gradients that towers have computed."""

import abc
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers.builders.context import Context
from towers.builders.guard import finite
from towers.collectives import reduce
from towers.collectives.parts import part_of
from towers.devices.names import HOST
from towers.layers import sharded
from towers.program.features import feature


@dataclasses.dataclass
class Reducer(abc.ABC):
    """Adds the towers' gradients."""

    context: Context

    def sum_gradients(
        self,
        gradients: Sequence[Sequence[reduce.Gradient]],
        towers: Sequence[int],
        over_hosts: Callable[..., Any] | None = None,
    ) -> list[list[reduce.Gradient]]:
        """Adds the towers' gradients.

        Those of shards are added where the shards lie. Where each host has whole
        tables, cut over its own devices, hosts add gradients of whole tables. Where
        hosts divide tables, rows go to those that have them.

        Args:
            gradients: A list for each tower: a gradient for each target of a trainable
                variable (see `sharded.targets`), `None` where it has none.
            towers: Which towers of this host have them.
            over_hosts: Adds this host's sums to those of others, if there are others;
                returns the sums, and what a second argument returns, which may add what
                is `None` in the first.

        Returns:
            The sums, once for each copy of the variables. Only the first has those of
            shards; in the others, the sum's norm stands in for it.
        """
        model, mine = self.context.model, {}
        for i, device in sharded.devices(model.trainable_variables).items():
            with tf.device(device):
                mine[i] = reduce.add([each[i] for each in gradients])
        if not mine:
            return self._sum_whole(gradients, towers, over_hosts)
        others = [
            [None if i in mine else g for i, g in enumerate(each)] for each in gradients
        ]

        def with_shards(sums, scatter=tuple):
            variables = model.trainable_variables
            sums = [mine.get(i, total) for i, total in enumerate(sums)]
            with tf.device(HOST):
                whole = sharded.whole(variables, sums)
                sums, parts = self._over_hosts_that_divide(whole, scatter, over_hosts)
            mine.update({i: sums[i] for i in mine})
            sums = [None if i in mine else total for i, total in enumerate(sums)]
            return sums, parts

        adds = over_hosts and with_shards
        sums = self._sum_whole(others, towers, adds)
        norms = {i: sharded.norm(gradient) for i, gradient in mine.items()}
        return [
            [(norms if k else mine).get(i, total) for i, total in enumerate(each)]
            for k, each in enumerate(sums)
        ]

    def _over_hosts_that_divide(self, whole, scatter, over_hosts):
        """Adds gradients over hosts; returns those of targets, and what is scattered.

        Those of tables that hosts divide are given to the hosts that have the rows.
        """
        variables = self.context.model.trainable_variables
        spread = {
            i: table
            for i, table in sharded.tables_across_hosts(variables).items()
            if whole[i] is not None
        }
        of_spread = [whole[i] for i in spread]
        others = [None if i in spread else each for i, each in enumerate(whole)]

        def scatter_all():
            hosts = self.context.plan.hosts
            give = feature("collectives.spread.tables").give
            return scatter(), give(hosts, [*spread.values()], of_spread)

        others, (parts, given) = over_hosts(others, scatter_all)
        given, sums = dict(zip(spread, given, strict=True)), []
        for i, (variable, total) in enumerate(zip(variables, others, strict=True)):
            sums += given.get(i) or sharded.expand([variable], [total])
        return sums, parts

    def _sum_whole(self, gradients, towers, over_hosts):
        """Adds those of variables that are not cut."""
        model = self.context.model
        variables = sharded.targets(model.trainable_variables)
        if over_hosts is None:

            def add(plan, places):
                part = [[each[i] for i in places] for each in gradients]
                sources = [plan.devices[k] for k in towers]
                return self._sum(plan, places, part, sources)

            return self._by_stage(variables, add)

        def mine(plan, places):
            part = [[of_tower[i] for i in places] for of_tower in gradients]
            sources = [plan.devices[k] for k in towers]
            if any(map(plan.packs, sources)):
                ends = plan.merge, plan.merge
                return [reduce.sum_packed(part, sources, *ends)]
            with tf.device(plan.merge):
                return [reduce.sum_gradients(part)]

        (sums,) = self._by_stage(variables, mine)
        return self._over_hosts(variables, sums, over_hosts)

    def _over_hosts(self, variables, sums, over_hosts):
        """Adds sums of this host to those of others; returns them for each copy."""
        sums, _ = over_hosts(sums)
        return self.hand_out(sums)

    def _by_stage(self, variables, function):
        """Puts together what a function returns for each stage: lists of gradients."""
        found = []
        for places, plan in self.context.plan.by_stage(variables):
            for k, each in enumerate(function(plan, places)):
                if k == len(found):
                    found.append([None] * len(variables))
                for i, gradient in zip(places, each, strict=True):
                    found[k][i] = gradient
        return found

    def hand_out(self, sums: Sequence[reduce.Gradient]) -> list[list[reduce.Gradient]]:
        """Returns sums that are there for each copy of the variables."""
        variables = sharded.targets(self.context.model.trainable_variables)
        return self._by_stage(
            variables,
            lambda plan, places: self._copies(plan, places, [sums[i] for i in places]),
        )

    def together(
        self, sums: Sequence[Sequence[reduce.Gradient]]
    ) -> Sequence[Sequence[reduce.Gradient]]:
        """Returns which of the lists of sums are all there are, once."""
        return sums[:1]

    @abc.abstractmethod
    def _sum(self, plan, places, gradients, sources):
        """Adds those of this host, which are of the variables at some places."""

    @abc.abstractmethod
    def _copies(self, plan, places, sums):
        """Returns sums once for each copy of the variables."""


class SumAtHome(Reducer):
    """Adds the towers' gradients on one device, for the variables at home."""

    def _sum(self, plan, places, gradients, sources):
        if any(map(plan.packs, sources)):
            return [reduce.sum_packed(gradients, sources, plan.merge, plan.home)]
        with tf.device(plan.merge):
            return [reduce.sum_gradients(gradients)]

    def _copies(self, plan, places, sums):
        return [sums]


@dataclasses.dataclass
class AllReduce(Reducer):
    """Adds the towers' gradients, and gives every tower the sums.

    Attributes:
        algorithm: See `reduce.algorithm_for`.
    """

    algorithm: str = "auto"

    def __post_init__(self):
        home = self.context.plan.home
        self.algorithm = reduce.algorithm_for(self.algorithm, home)

    def _sum(self, plan, places, gradients, sources):
        targets = [tower.device for tower in plan.replicas]
        return reduce.all_reduce(gradients, sources, targets, self.algorithm)

    def _copies(self, plan, places, sums):
        targets = [tower.device for tower in plan.replicas]
        return reduce.all_reduce([sums], [HOST], targets, "cpu")


@dataclasses.dataclass
class ReduceScatter(Reducer):
    """Adds the towers' gradients part by part, each where its owner is.

    What it returns for a tower has `None` for what is not its own.

    Attributes:
        shards: Says who owns which part: `OptimizerShards`.
    """

    shards: Any

    def together(self, sums):
        """See `Reducer`: each tower has others."""
        if not self.shards.across_hosts:
            return sums
        # Each host has others, and all have to find the same.
        mine = [
            gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            for gradient in itertools.chain(*sums)
            if gradient is not None
        ]
        good = finite(mine) if mine else tf.constant(True)
        with tf.device(HOST):
            told = tf.where(good, 0.0, float("inf"))
            told = self.context.plan.hosts.all_reduce(
                told, "whether gradients are finite"
            )
        return [[told]]

    def _sum(self, plan, places, gradients, sources):
        sums = []
        for k, tower in enumerate(plan.replicas):
            parts = []
            for each, source in zip(gradients, sources, strict=True):
                with tf.device(source):
                    parts.append(self._parts(k, places, each))
            if any(map(plan.packs, sources)):
                ends = tower.device, tower.device
                sums.append(reduce.sum_packed(parts, sources, *ends))
            else:
                with tf.device(tower.device):
                    sums.append(reduce.sum_gradients(parts))
        return sums

    def _over_hosts(self, variables, sums, over_hosts):
        # Rows are sent to all hosts, as each has others.
        every = [*enumerate(self.shards.parts_of_hosts)]
        dense = {i for i, total in enumerate(sums) if isinstance(total, tf.Tensor)}
        hosts, mine = self.context.plan.hosts, sums

        def scatter():
            with tf.device(HOST):
                parts = [
                    [
                        tf.reshape(part_of(mine[i], part), part.shape)
                        for i, of_hosts in every
                        for part in (of_hosts[k] if i in dense else ())
                    ]
                    for k in range(hosts.count)
                ]
            return hosts.reduce_scatter(parts, "parts of gradients")

        sparse = [None if i in dense else total for i, total in enumerate(sums)]
        sums, found = over_hosts(sparse, scatter)
        found = iter(found)
        parts_found = {
            (i, copy): next(found)
            for i in sorted(dense)
            for copy in self.shards.parts[i]
        }
        given = {i for i, total in enumerate(sums) if total is not None}
        self.shards.with_gradients = frozenset(dense | given)
        copies = self._by_stage(
            variables,
            lambda plan, places: self._copies(plan, places, [sums[i] for i in places]),
        )
        for (i, copy), part in parts_found.items():
            copies[copy][i] = part
        return copies

    def _copies(self, plan, places, sums):
        return [self._parts(k, places, sums) for k in range(len(plan.replicas))]

    def _parts(self, k, places, gradients):
        """What the k-th tower owns of gradients; `None` for what is not its own."""
        found = []
        for i, gradient in zip(places, gradients, strict=True):
            part = self.shards.parts[i].get(k)
            if part is None or gradient is None:
                found.append(None)
            else:
                found.append(part_of(gradient, part))
        return found
