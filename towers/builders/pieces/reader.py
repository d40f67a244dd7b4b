"""Reads what towers compute with: the variables' values, for each tower."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from towers.builders.context import Context
from towers.builders.pieces.copies import Copies
from towers.collectives import packing, placing
from towers.devices import HOST
from towers.layers import embeddings, seeds


class Values(NamedTuple):
    """The values of a model's variables, for one tower.

    Attributes:
        params: Of the trainable variables; `None` for tables that stay at home (see
            `embeddings.py`).
        state: Of the non-trainable variables.
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
        self, look_up: bool = True, send_params: bool = True
    ) -> list[Values]:
        """Reads the variables at home, and hands each tower their values.

        Args:
            look_up: Whether towers may look up rows of tables that stay at home.
            send_params: Whether towers need the parameters, and not the state alone.

        Returns:
            The values for each tower. The random seeds among them are its own.
        """
        model, plan = self.context.model, self.context.plan
        tables = ()
        if look_up and self.context.looks_up:
            tables = embeddings.tables(model)
        with tf.device(plan.home), tf.name_scope("read"):
            trainable = model.trainable_variables
            read = [v.value for v in trainable if id(v) not in tables]
            read = iter(placing.read(read, plan.home))
            params = [None if id(v) in tables else next(read) for v in trainable]
            others = [v.value for v in model.non_trainable_variables]
            state = placing.read(others, plan.home)
            sent = [*(params if send_params else ()), *state]
            buffers = packing.pack(sent) if any(map(plan.packs, plan.devices)) else []
        values = []
        for tower in plan.towers:
            mine = Values(params, state)
            if plan.packs(tower.device):
                with tf.device(tower.device), tf.name_scope("read"):
                    received = packing.unpack(buffers, sent)
                of_state = len(sent) - len(state)
                mine = Values(received[:of_state] or params, received[of_state:])
            with tf.device(HOST):
                seeded = seeds.of_tower(model, mine.state, tower.index)
            values.append(mine._replace(state=seeded))
        return values


@dataclasses.dataclass
class CopyReader:
    """Reads each tower's own copy of the parameters, and the state at home."""

    context: Context
    home: VariableReader
    copies: Copies

    def read_variables(self) -> list[Values]:
        """Returns the values that towers train on."""
        # Tables, too, are copied: those at home could be updated by home only.
        values = self.home.read_variables(look_up=False, send_params=False)
        for k, (device, copy) in enumerate(self.copies.by_device(), start=1):
            with tf.device(device), tf.name_scope("read"):
                params = placing.read(self.copies.trainable(copy), device)
            values[k] = values[k]._replace(params=params)
        return values
