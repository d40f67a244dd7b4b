"""A tower's step by itself: what it reads, computes, and applies at home."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from towers.builders.context import Context
from towers.builders.pieces.loss import StepOutputs
from towers.builders.pieces.reader import TowerInputs, Values
from towers.builders.steps.keras_steps import TrainStep
from towers.collectives import packing
from towers.devices import HOST, is_gpu
from towers.layers import overwritten, seeds


@dataclasses.dataclass
class TowerStep:
    """A tower's step by itself.

    Attributes:
        context: That of all towers.
        step: The train step of a tower by itself, where it is called.
    """

    context: Context
    step: TrainStep

    def graphs(self) -> tuple[Callable, Callable]:
        """Returns `compute` and `apply`, to be traced."""

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


def graph(function: Callable) -> Callable:
    """Makes a function to be traced for several kinds of local batches."""
    return tf.function(function, autograph=False, reduce_retracing=True)
