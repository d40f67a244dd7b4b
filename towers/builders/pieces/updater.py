"""Applies the optimizer: once at home, or to each copy of the variables."""

import dataclasses
import functools
from collections.abc import Sequence

import tensorflow as tf

from towers.builders.context import Context
from towers.builders.pieces.copies import Copies
from towers.collectives import placing, reduce
from towers.layers import fused, sharded
from towers.tower.errors import ModelError


@dataclasses.dataclass
class Updater:
    """Applies the optimizer to the model's variables, and to their copies, if any."""

    context: Context
    copies: Copies

    def update_weights(self, sums: Sequence[Sequence[reduce.Gradient]]) -> None:
        """Applies the optimizer, with the summed gradients for each copy."""
        plan = self.context.plan
        with placing.updates(plan.home, plan.pipeline.stages), tf.name_scope("apply"):
            self._apply_optimizer(sums[0])
        self.copies.update(
            [functools.partial(self._apply_optimizer, each) for each in sums[1:]]
        )

    def _apply_optimizer(self, gradients: Sequence[reduce.Gradient]) -> None:
        """Applies the model's optimizer where it is called."""
        context, model = self.context, self.context.model

        def update(gradients):
            with fused.updates():
                sharded.apply(model.optimizer, gradients, model.trainable_variables)

        if gradients and all(each is None for each in gradients):
            raise ModelError(
                f"No variable of model '{model.name}' has a gradient; expected a loss "
                "that depends on one, so look for integers, argmax or stop_gradient "
                "between the variables and the outputs."
            )
        # XLA compiles for one device.
        cut = sharded.devices(model.trainable_variables)
        wanted = context.xla or context.compiles_update
        if wanted and not cut and (context.xla or self._may_compile(gradients)):
            update = tf.function(update, autograph=False, jit_compile=True)
        update(gradients)

    def _may_compile(self, gradients):
        """Whether XLA may compile an update that nobody asked it for."""
        sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
        if sparse:
            line = (
                f"XLA does not compile the update of model "
                f"'{self.context.model.name}', as it would do so anew for each size "
                "of its sparse gradients."
            )
            self.context.say([line])
        return not sparse
