"""Reads what towers compute with: the variables' values, for each tower."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.builders.context import Context
from towers.builders.pieces.batches import LocalBatches
from towers.builders.pieces.copies import Copies
from towers.collectives import batch, packing, placing
from towers.collectives.spread import tables as spread_tables
from towers.devices import HOST
from towers.layers import embeddings, seeds, sharded
from towers.tower import passes
from towers.tower.run import TowerCall, run
from towers.tower.scope import stateless
from towers.tower.traced import Traced


class Values(NamedTuple):
    """The values of a model's variables, for one tower.

    Attributes:
        params: Of the trainable variables; `None` for tables that stay at home (see
            `embeddings.py`), or numbers and values of rows that were fetched.
        state: Of the others; see `variables.not_trained`.
    """

    params: Sequence[tf.Tensor | None]
    state: Sequence[tf.Tensor]


class TowerInputs(NamedTuple):
    """What the towers compute with.

    Attributes:
        values: The variables' values for each tower.
        scale: The optimizer's loss scale, 1 without one: a float32 scalar.
    """

    values: Sequence[Values]
    scale: tf.Tensor


@dataclasses.dataclass
class VariableReader:
    """Reads the variables at home, and hands each tower their values."""

    context: Context

    def read_variables(
        self,
        tables: Callable[[keras.Model], Collection[int]] = embeddings.tables,
        send_params: bool = True,
    ) -> list[Values]:
        """Reads the variables at home, and hands each tower their values.

        Args:
            tables: Returns the ids of tables that may stay where they are, for towers
                to look up rows.
            send_params: Whether towers need the parameters, and not the state alone.

        Returns:
            The values for each tower. The random seeds among them are its own.
        """
        model, plan = self.context.model, self.context.plan
        tables = tables(model) if self.context.looks_up else ()
        if any(id(v) not in tables and sharded.of(v) for v in model.variables):
            line = (
                f"Each tower of model '{model.name}' reads all shards of its tables in "
                "each step, as the model uses a table otherwise than to look up rows, "
                "runs eagerly or by XLA, or has synchronized layers."
            )
            self.context.say([line])
        trainable = model.trainable_variables
        variables = self.context.variables
        wanted = [v for v in variables if id(v) not in tables]
        # What copies stand in for need not travel.
        kept = () if send_params else {id(v) for v in trainable if not sharded.of(v)}
        read = [{} for _ in plan.replicas]
        for places, of_stage in plan.by_stage(wanted):
            of_stage_read = self._read([wanted[i] for i in places], of_stage, kept)
            for values, more in zip(read, of_stage_read, strict=True):
                values.update(more)
        values = []
        for k, tower in enumerate(plan.towers):
            mine = read[k // plan.pipeline.micro_batches]
            found = [mine.get(id(variable)) for variable in variables]
            params, state = found[: len(trainable)], found[len(trainable) :]
            with tf.device(HOST):
                state = seeds.of_tower(model, state, tower.index)
            values.append(Values(params, state))
        return values

    def _read(self, variables, plan, kept):
        """Reads the variables of a stage; yields their values by id, for each tower."""
        ids = [id(variable) for variable in variables]
        with tf.device(plan.home), tf.name_scope("read"):
            at_home = placing.read([v.value for v in variables], plan.home)
            sent = [None if i in kept else v for i, v in zip(ids, at_home, strict=True)]
            devices = [tower.device for tower in plan.replicas]
            buffers = packing.pack(sent) if any(map(plan.packs, devices)) else []
        for device in devices:
            values = at_home
            if plan.packs(device):
                with tf.device(device), tf.name_scope("read"):
                    received = packing.unpack(buffers, sent)
                pairs = zip(received, at_home, strict=True)
                values = [mine if mine is not None else home for mine, home in pairs]
            yield dict(zip(ids, values, strict=True))


@dataclasses.dataclass
class RowReader:
    """Fetches rows of tables of which several hosts have parts, for each tower."""

    context: Context
    reader: VariableReader
    batches: LocalBatches

    def fetch(
        self,
        values: Sequence[Values],
        x: Any,
        local_x: Sequence[Any] | None,
        training: bool = False,
    ) -> Sequence[Values]:
        """Fetches the rows that towers look up for a batch.

        Args:
            values: The variables' values for each tower.
            x: The inputs of the whole batch.
            local_x: What each tower has of them, if it is there.
            training: Whether this is a part of training.

        Returns:
            The values, which have these rows; or whole tables, if the numbers of the
            rows depend on rows.
        """
        context, plan = self.context, self.context.plan
        variables = context.model.trainable_variables
        params = values[0].params
        every = spread_tables.of(variables)
        spread = {i: table for i, table in every.items() if params[i] is None}
        if not spread:
            return values
        if local_x is None:
            local_x = [local for (local,) in self.batches.place((x,))]
        wanted = [variables[i] for i in spread]
        function = functools.partial(_wanted, context.model, training, wanted)
        specs = [*batch.specs(values[0]), batch.local_spec(local_x[0], None)]
        traced = Traced(function, specs, xla=False, noinline=False, on_gpu=plan.on_gpus)
        if traced.depends_on_rows:
            context.found.reads_tables = True
            return self.reader.read_variables()
        sizes = plan.sizes(batch.batch_size(x))
        calls = [
            TowerCall(tower.index, tower.device, size, tf.ones([]), [*each, rows])
            for tower, size, each, rows in zip(
                plan.towers, sizes, values, local_x, strict=True
            )
        ]
        results = run([traced] * len(calls), calls)
        ids = [*zip(*(result.outputs for result in results), strict=True)]
        fetched = spread_tables.fetch(plan.hosts, [*spread.values()], ids)
        found = dict(zip(spread, fetched, strict=True))
        return [
            each._replace(params=[found.get(i, p) for i, p in enumerate(each.params)])
            for each in values
        ]


def _wanted(model, training, tables, params, state, x):
    """A tower that tells, as outputs, which rows of tables it looks up.

    It is pure, so that it looks up the same again.
    """
    with stateless(model, params, state) as scope:
        passes.call(model, x, training)
        return passes.TowerResult(tuple(map(scope.looked_up, tables)))


@dataclasses.dataclass
class CopyReader:
    """Reads each tower's own copy of the parameters, and the state at home."""

    context: Context
    home: VariableReader
    copies: Copies

    def read_variables(self) -> list[Values]:
        """Returns the values that towers train on."""
        # Tables at home, too, are copied, as home alone could update them.
        cut = embeddings.cut_tables
        values = self.home.read_variables(cut, send_params=False)
        count = self.context.plan.pipeline.micro_batches
        for k, copy in enumerate(self.copies.of_towers(), start=1):
            params = list(values[k * count].params)
            for i, variable in enumerate(self.copies.trainable(copy)):
                if variable is not None:
                    with tf.device(variable.device), tf.name_scope("read"):
                        (params[i],) = placing.read([variable], variable.device)
            for j in range(k * count, (k + 1) * count):
                values[j] = values[j]._replace(params=params)
        return values
