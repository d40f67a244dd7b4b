"""The copies of the variables that every tower but the first has, if towers have some.

The model's own variables are the first tower's copy, so whoever reads them finds them
current. Each host has its own; those of the first host are what all others copy. Where
they may have been changed from outside, the other copies are made anew: at the start of
`fit` and of each epoch, and before each call of training if a callback runs in between
that may change them (`listeners.py`).

Copies are equal between two steps: a way to update variables whose copies differ, such
as local SGD, would need an average before anybody reads. They are variables of their
own, not one buffer, as the user's optimizer treats variables one by one.
"""

import contextlib
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from towers.builders.context import Context
from towers.collectives import packing, placing
from towers.collectives.first_host import follow_first_host
from towers.devices.names import HOST
from towers.keras_adapter.optimizers import (
    all_variables,
    learning_rate_variable,
    updating,
)
from towers.keras_adapter.variables import (
    put_behind,
    swapped_values,
    value_behind,
    variable_like,
)
from towers.layers import sharded, variables
from towers.plan import Tower
from towers.program.features import feature
from towers.tower.errors import ModelError


class HostsParts:
    """Variables that several hosts divide: none of them has the whole of one.

    Before hosts change, each gets the whole, and the next generation divides it anew. A
    host that dies leaves zeros, and the next generation reads the checkpoint: copies of
    a neighbour's part would cost as much traffic in each step as the parts do.
    """

    def __init__(self, context: Context):
        self._context = context
        self._may_be_kept = True

    def any(self) -> bool:
        """Tells whether there are such variables."""
        return any(True for _ in self._divided())

    def keep(self) -> None:
        """Has each host read by itself what hosts divide, until training goes on.

        All hosts call it together.
        """
        for _, each in self._divided():
            each.keep()
        self._may_be_kept = True

    def begin_step(self) -> None:
        """Is told that what hosts divide changes, which may be kept."""
        for _, each in self._divided() if self._may_be_kept else ():
            each.forget()
        self._may_be_kept = False

    def join(self) -> None:
        """Gives each host the whole of what hosts divide, in the host's memory.

        All hosts call it together. Then each may go on with others.
        """
        for variable, each in self._divided():
            put_behind(variable, variable_like(each.numpy(), HOST, each))

    def lose(self) -> bool:
        """Puts zeros in the place of what hosts divide, as a host has gone with a part.

        Returns:
            Whether there was anything.
        """
        found = [*self._divided()]
        for variable, each in found:
            with tf.device(HOST):  # A table may be larger than a GPU.
                zeros = tf.zeros(each.shape, each.dtype)
            put_behind(variable, variable_like(zeros, HOST, each))
        return bool(found)

    def take_home(self) -> bool:
        """Gives this host the whole of what hosts have divided, without the others.

        Returns:
            Whether that was lost, as they have trained since they kept it.
        """
        if not self._may_be_kept:
            return self.lose()
        self.join()
        return False

    def _divided(self):
        """Yields variables of which several hosts have parts, and what is behind."""
        if self._context.plan.hosts.count > 1:
            for variable in variables.of(self._context.model):
                if sharded.across_hosts(variable):
                    yield variable, sharded.of(variable)


class Copies:
    """The copies of the trainable variables, and of the optimizer's.

    Attributes:
        towers: The towers that have one.
        stale: Whether the model's own variables may have other values.
        shards: The shards of the optimizer's state, if each tower has a part of it
            instead of a copy.
        hosts_parts: What hosts divide.
    """

    def __init__(
        self,
        context: Context,
        towers: Sequence[Tower] = (),
        shard_optimizer_state: bool = False,
    ):
        """Creates none yet; there will be one for each of these towers."""
        self._context, self.towers = context, towers
        self.stale, self.shards = True, None
        self.hosts_parts = HostsParts(context)
        if shard_optimizer_state:
            plan = context.plan
            shards = feature("collectives.optimizer_shards").OptimizerShards
            self.shards = shards(
                context.model, self._by_stage, plan.hosts, plan.replicas_by_host
            )
        # The variables that towers have copies of, trainable ones first, and for each
        # tower but the first the copies.
        self._originals: Sequence[keras.Variable] = ()
        self._copies: Sequence[Sequence[tf.Variable]] = ()

    def creating(self) -> contextlib.AbstractContextManager[None]:
        """Inside, an optimizer that is built may create its slots in shards."""
        if self.shards is None:
            return contextlib.nullcontext()
        return self.shards.creating()

    def create(self) -> None:
        """Creates the copies, unless they exist."""
        optimizer, home_of = self._context.model.optimizer, self._context.plan.home_of
        if self.shards is None and optimizer is not None:
            # Another builder may have cut them.
            sharded.join_slots(optimizer, home_of)
        if self._originals or not (self.towers or self.shards):
            return
        originals = [*self._context.model.trainable_variables]
        if self.shards is not None:
            _refuse(self._context.model)
            self.shards.create()
        elif optimizer is not None:
            originals += all_variables(optimizer)
        # What is cut is on several devices as it is.
        self.add([each for each in originals if sharded.of(each) is None])

    def add(self, originals: Sequence[keras.Variable]) -> None:
        """Creates copies of those of some variables that have none yet."""
        known = {*map(id, self._originals)}
        added = {id(each): each for each in originals if id(each) not in known}
        added = [*added.values()]
        if not added:
            return
        with tf.init_scope():
            plan = self._context.plan
            copies = [_copy(plan, tower, added) for tower in self.towers]
        if not self._originals:
            # Other hosts may have no copies, and all follow the first one together.
            self.stale = self.stale and self._context.plan.hosts.count > 1
        self._originals = [*self._originals, *added]
        self._copies = [
            [*mine, *more]
            for mine, more in zip(
                self._copies or [[] for _ in copies], copies, strict=True
            )
        ]

    def handles(self) -> list[dict[int, tf.Tensor]]:
        """Returns, for each tower, the handles of its copies.

        They are by the `id` of the handle of the model's own variable.
        """
        own = [value_behind(each).handle for each in self._originals]
        every = [own, *([copy.handle for copy in copies] for copies in self._copies)]
        return [dict(zip(map(id, own), mine, strict=True)) for mine in every]

    def variables(self) -> list[tf.Variable]:
        """Returns the copies of all towers, and what belongs to shards."""
        copies = [copy for copies in self._copies for copy in copies]
        return copies + (self.shards.variables() if self.shards else [])

    @property
    def home_of(self) -> Callable[[keras.Variable], str | None]:
        """What tells where a variable lives: `None` for what an owner of shards has."""
        home_of = self._context.plan.home_of
        if self.shards is None:
            return home_of
        owned = self.shards.slot_ids()
        return lambda each: None if id(each) in owned else home_of(each)

    def _by_stage(self, variables):
        """Yields the places of each stage's variables, and the devices of copies."""
        for places, plan in self._context.plan.by_stage(variables):
            others = [tower.device for tower in plan.replicas[1:]]
            yield places, [plan.home, *others]

    def of_tower(self, k: int) -> Sequence[tf.Variable]:
        """Returns the trainable variables of a tower of this host, by its place."""
        if k == 0:
            return [*map(value_behind, self._context.model.trainable_variables)]
        return self.trainable(self._copies[k - 1])

    def of_towers(self) -> Sequence[Sequence[tf.Variable]]:
        """Returns the copies of each tower; none before any training."""
        return self._copies

    def trainable(self, copy: Sequence[tf.Variable]) -> list[tf.Variable | None]:
        """Returns a copy of each trainable variable, `None` of those that are cut."""
        copies = iter(copy)
        return [
            next(copies) if sharded.of(variable) is None else None
            for variable in self._context.model.trainable_variables
        ]

    def broadcast(self) -> None:
        """Gives all copies the values of the model's own variables."""
        for places, plan in self._context.plan.by_stage(self._originals):
            originals = [self._originals[i].value for i in places]
            copies = [[mine[i] for i in places] for mine in self._copies]
            devices = [tower.device for tower in plan.replicas[1:]]
            packing.broadcast(plan.home, originals, devices, copies)

    def follow_first_host(self) -> None:
        """Gives the model, its optimizer and metrics the values of the first host's."""
        model = self._context.model
        every = [*variables.of(model), *variables.plain(model).values()]
        # No host has all of what is divided among them.
        whole = [v for v in every if not sharded.across_hosts(v)]
        follow_first_host(self._context.plan.hosts, whole)

    def differ(self) -> bool:
        """Tells whether the copies may have other values than the model's variables."""
        written = self.stale or self._context.callbacks_may_write
        return bool(self._originals) and written

    def update(self, updates: Sequence[Callable[[], None]]) -> None:
        """Has the optimizer update each tower's copy.

        Each of `updates` applies it, with the gradients of one of these towers.
        """
        self.follow_learning_rates()
        for k, (tower, copy) in enumerate(
            zip(self.towers, self._copies, strict=False), start=1
        ):
            stages = self._context.plan.pipeline.stages
            where = placing.updates(tower.device, stages)
            with where, tf.name_scope(f"apply_{k}"):
                with swapped_values(self._originals, copy):
                    updates[k - 1]()

    def follow_learning_rates(self) -> None:
        """Gives copies of learning rates their values, which callbacks change."""
        for i in _learning_rates(self._context.model, self._originals):
            for copy in self._copies:
                with tf.device(copy[i].device), tf.name_scope("learning_rate"):
                    copy[i].assign(self._originals[i].value)


def _learning_rates(model, originals):
    """The places of learning rates: they are changed all the time, and small."""
    every = variables.optimizers(model).values()
    leaves = [leaf for each in every for leaf in (each, *updating(each))]
    rates = {id(learning_rate_variable(leaf)) for leaf in leaves}
    return [i for i, each in enumerate(originals) if id(each) in rates]


def _copy(plan, tower, originals):
    copies, stage_of = [], plan.pipeline.stage_of
    for variable in originals:
        device, original = tower.devices[stage_of(variable)], variable.value
        copies.append(variable_like(original, device, original))
    return copies


def _refuse(model):
    reason = feature("collectives.optimizer_shards").refusal(model.optimizer)
    if reason is not None:
        raise ModelError(
            f"Received shard_optimizer_state=True for model '{model.name}', whose "
            f"{reason}; expected one of Keras's optimizers, or a class with an "
            "`update_step` alone, which keeps slots in lists, one for each variable."
        )
