"""A tower's step by itself: what it reads, computes, and applies at home."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builders.asynchronous.part import Part, graph
from towers.builders.common import Pieces
from towers.builders.pieces.loss import StepOutputs
from towers.builders.pieces.reader import TowerInputs, Values
from towers.builders.steps.keras_steps import TrainStep
from towers.collectives import batch, packing
from towers.devices import HOST, is_gpu
from towers.layers import overwritten, seeds


@dataclasses.dataclass
class TowerStep:
    """A tower's step by itself, as Keras has it.

    Attributes:
        pieces: Those of all towers.
        step: The train step of a tower by itself, where it is called.
    """

    pieces: Pieces
    step: TrainStep

    def __post_init__(self):
        self.context = self.pieces.context
        self.forget()

    def forget(self) -> None:
        """Forgets what was traced."""
        self._graphs = collections.defaultdict(self._new_graphs)

    def create_variables(self, data: Any) -> None:
        """Creates what Keras creates late; `data` is a batch, or its specs."""
        self.pieces.creator.create_variables(data)

    def parts(self) -> list[Part]:
        """Returns the parts as they are, to be called in turn."""
        return self._parts(self._reads(), self.compute, self.apply)

    def trace(self, spec: Any, rows: int | None) -> list[Part]:
        """Returns the parts, traced for local batches of a kind.

        Args:
            spec: What these are like.
            rows: Their number of rows, `None` for any.
        """
        compute, apply = self._graphs[rows]
        found = self.context.found
        tables = found.reads_tables
        read = [graph(each).get_concrete_function() for each in self._reads()]
        inputs = batch.specs(read[0].structured_outputs)
        compute = compute.get_concrete_function(spec, inputs)
        if found.reads_tables != tables:
            # A table cannot stay at home, as it turns out.
            return self.trace(spec, rows)
        outputs = batch.specs(compute.structured_outputs)
        apply = apply.get_concrete_function(spec, inputs, outputs)
        # Each tower calls it.
        found.graph = compute.graph
        return self._parts(read, compute, apply)

    def computed_with(self, made: Sequence[Any]) -> Values | None:
        """Returns what a tower has computed with, of what its parts have made."""
        return made[0].values[0] if made else None

    def _reads(self):
        towers = self.context.plan.towers
        return [functools.partial(self.read, tower.index) for tower in towers]

    def _parts(self, reads, compute, apply):
        towers = len(reads)
        return [
            Part([_without_batch(read) for read in reads], reads=True, goes_on=True),
            Part([compute] * towers, at_home=False),
            Part([apply] * towers, updates=True),
        ]

    def _new_graphs(self):
        def compute(local, inputs):
            # It runs where it is called: in a tower's thread, on the tower's device.
            with tf.device(None):
                return self.compute(local, inputs)

        return graph(compute), graph(self.apply)

    def read(self, index: int) -> TowerInputs:
        """Reads what the tower of an index computes with, whose seeds are its own."""
        (values,), scale = self.step.read()
        with tf.device(HOST):
            seeded = seeds.of_tower(self.context.model, values.state, index)
        return TowerInputs([values._replace(state=seeded)], scale)

    def compute(self, local: Any, inputs: TowerInputs) -> StepOutputs:
        """Computes loss and gradients where it is called, and sends them home."""
        plan = self.context.plan
        packed = any(map(plan.packs, plan.devices))
        if packed:
            ((params, state),) = inputs.values
            sent = packing.send([*params, *state], plan.home, "")
            values = Values(sent[: len(params)], sent[len(params) :])
            inputs = inputs._replace(values=[values])
        outputs = self.step.pieces.loss.compute(local, inputs, [local])
        if packed:
            gradients, state = outputs.results[0].gradients, outputs.state
            sent = packing.send([*gradients, *state], "", plan.home)
            outputs = _with_gradients(outputs, sent[: len(gradients)])
            outputs = outputs._replace(state=sent[len(gradients) :])
        # The index of a tower would become a tensor on its way between two graphs.
        results = [result._replace(state=(), tower=None) for result in outputs.results]
        # On the way home others may update. Seeds have not left theirs, the host.
        seeded = (tf.int64,) if is_gpu(plan.home) else ()
        with tf.device(plan.home):
            outputs = packing.copy(outputs._replace(results=results), seeded)
        with tf.device(HOST):
            state = [
                tf.identity(value)
                if value is not None and value.dtype in seeded
                else value
                for value in outputs.state
            ]
        return outputs._replace(state=state)

    def apply(
        self, local: Any, inputs: TowerInputs, outputs: StepOutputs
    ) -> dict[str, tf.Tensor]:
        """Updates variables and metrics with what a tower has computed."""
        with tf.device(self.context.plan.home):
            state = [
                None if new is None else _add_change(variable, old, new)
                for variable, old, new in zip(
                    self.context.variables,
                    [*inputs.values[0].params, *inputs.values[0].state],
                    outputs.state,
                    strict=True,
                )
            ]
            # It is the only tower of its plan, the first.
            results = [result._replace(tower=0) for result in outputs.results]
            outputs = outputs._replace(results=results, state=state)
            outputs = scale_as_now(self.context.model, outputs, inputs.scale)
        return self.step.apply(local, outputs)


def scale_as_now(
    model: keras.Model, outputs: StepOutputs, scale: tf.Tensor
) -> StepOutputs:
    """Gives a tower's gradients the loss scale that the optimizer will take off now."""
    optimizer = model.optimizer
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return outputs
    factor = optimizer.scale_loss(tf.ones([])) / scale
    as_they_are = overwritten.places(model)

    def scaled(gradients):
        return [
            g
            if g is None or i in as_they_are
            else tf.math.scalar_mul(tf.cast(factor, g.dtype), g)
            for i, g in enumerate(gradients)
        ]

    (result,) = outputs.results
    return _with_gradients(outputs, scaled(result.gradients))._replace(
        direct=[scaled(gradients) for gradients in outputs.direct]
    )


def _add_change(variable, old, new):
    """What a variable is to become that a tower has changed from `old` to `new`."""
    if old is None or not (new.dtype.is_floating or new.dtype.is_integer):
        return new
    with tf.device(variable.value.device):
        now = variable.value
        # Unless others have changed it too, without any rounding.
        return tf.where(now == old, new, now + (new - old))


def _with_gradients(outputs, gradients):
    (result,) = outputs.results
    return outputs._replace(results=[result._replace(gradients=gradients)])


def _without_batch(read):
    return lambda local: read()
