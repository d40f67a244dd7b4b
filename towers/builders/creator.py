"""Creates what Keras creates late: variables of model, metrics and optimizer.

A tower cannot create a variable, so all have to exist before one is traced.
"""

import dataclasses
from typing import Any

import tensorflow as tf

from towers.builders.context import Context
from towers.builders.pieces.batches import LocalBatches
from towers.builders.pieces.copies import Copies
from towers.collectives import batch
from towers.devices import is_gpu
from towers.keras_adapter.layers import layers_of
from towers.layers import variables
from towers.tower import build, eager


@dataclasses.dataclass
class VariableCreator:
    """Creates the variables at home, and their copies, if there are to be any."""

    context: Context
    batches: LocalBatches
    copies: Copies
    _built_eagerly: bool = False

    def create_variables(self, data: Any) -> None:
        """Creates what training needs; `data` is a batch or its `tf.TypeSpec`s."""
        # What is not known when the graph is built, it checks where the batch is cut.
        batch.check_rows(batch.specs(data))
        with self.copies.creating():
            self._create(data)
        plan = self.context.plan
        if is_gpu(plan.home) or plan.pipeline.stages > 1:
            # Not all that was created there belongs there.
            with tf.init_scope():
                variables.move(self.context.model, self.copies.home_of)
        self.copies.create()

    def _create(self, data):
        model, home = self.context.model, self.context.plan.home
        rows = batch.rows_given(data)
        if not model.run_eagerly:
            with tf.init_scope(), tf.device(home):
                build.from_symbols(model, rows, self.context.preprocess)
        elif any(isinstance(t, tf.TypeSpec) for t in tf.nest.flatten(data)):
            # A run goes on in an epoch, of which metrics are to be restored.
            with eager.aside(model, builds=True), tf.init_scope(), tf.device(home):
                build.from_symbols(model, rows, self.context.preprocess)
        else:
            self._create_eagerly(data)

    def create_for_prediction(self, x: Any) -> None:
        """Creates what prediction needs; `x` are the inputs of a batch."""
        model, preprocess = self.context.model, self.context.preprocess
        if model.run_eagerly:
            self._create_eagerly((x, None, None))
        elif not model.built:
            x = batch.rows_given(x)
            if preprocess is not None:
                x, *_ = preprocess.spec((x, None, None), training=False)
            with tf.init_scope(), tf.device(self.context.plan.home):
                model(build.symbols(x))

    def _create_eagerly(self, data):
        """Creates the model's variables; losses and metrics create theirs themselves.

        Keras builds symbolically, which is not Python as the user sees it.
        """
        model = self.context.model
        with tf.init_scope(), tf.device(self.context.plan.home):
            unbuilt = not all(layer.built for layer in layers_of(model))
            if unbuilt and not self._built_eagerly:
                local, *_ = self.batches.cut(data)
                build.by_a_call(model, local, self.context.preprocess)
            self._built_eagerly = True
            # A model that only predicts need not be compiled.
            optimizer = model.optimizer if model.compiled else None
            if optimizer is not None and not optimizer.built:
                optimizer.build(model.trainable_variables)
