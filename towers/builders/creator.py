"""Creates what Keras creates late: variables of model, metrics and optimizer.

A tower cannot create a variable, so all have to exist before one is traced.
"""

import contextlib
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from towers.builders.context import Context
from towers.builders.pieces.batches import LocalBatches
from towers.builders.pieces.copies import Copies
from towers.collectives import batch
from towers.devices import HOST, is_gpu
from towers.keras_adapter.layers import layers_of
from towers.layers import sharded, tables, variables
from towers.tower import build, eager
from towers.tower.errors import ModelError


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
        model, home = self.context.model, self.context.plan.home
        rows = batch.rows_given(data)
        with self._tables_placed(data):
            self._create(data, rows)
        plan = self.context.plan
        if is_gpu(home) or plan.pipeline.stages > 1:
            # Not all that was created there belongs there.
            with tf.init_scope():
                variables.move(model, plan.home_of)
        self.copies.create()
        self._say_where_tables_lie()

    def _create(self, data, rows):
        model, home = self.context.model, self.context.plan.home
        if not model.run_eagerly:
            with tf.init_scope(), tf.device(home):
                build.from_symbols(model, rows, self.context.preprocess)
        elif any(isinstance(t, tf.TypeSpec) for t in tf.nest.flatten(data)):
            # A run goes on in an epoch, of which metrics are to be restored.
            with eager.aside(model, builds=True), tf.init_scope(), tf.device(home):
                build.from_symbols(model, rows, self.context.preprocess)
        else:
            self._create_eagerly(data)

    def build_optimizer(self) -> None:
        """Creates the optimizer's variables, of a model that is built."""
        model = self.context.model
        with self._tables_placed(None), tf.device(self.context.plan.home):
            model.optimizer.build(model.trainable_variables)

    def create_for_prediction(self, x: Any) -> None:
        """Creates what prediction needs; `x` are the inputs of a batch."""
        with self._tables_placed((x, None, None)):
            if self.context.model.run_eagerly:
                self._create_eagerly((x, None, None))
            else:
                self._build(x, self.context.plan.home)

    def _build(self, x, device):
        """Creates the variables of the model's layers, unless they exist."""
        model, preprocess = self.context.model, self.context.preprocess
        if model.built:
            return
        x = batch.rows_given(x)
        if preprocess is not None:
            x, *_ = preprocess.spec((x, None, None), training=False)
        with tf.init_scope(), tf.device(device):
            model(build.symbols(x))

    @contextlib.contextmanager
    def _tables_placed(self, data):
        """Inside, tables lie where they are to, and slots are created beside them."""
        context = self.context
        model = context.model
        if context.shard_embeddings == "none":
            yield
            return
        if not (model.built or model.run_eagerly):
            # A table may be larger than the device that is home.
            self._build(keras.utils.unpack_x_y_sample_weight(data)[0], HOST)
        self._put_tables()
        with sharded.slots_like_variables():
            yield
        self._put_tables()  # of what was built by now
        with tf.init_scope():
            variables.move(model, context.plan.home_of)

    def _say_where_tables_lie(self):
        context = self.context
        if context.shard_embeddings != "none":
            copies = self.copies.variables()
            lines = tables.lines(context.model, context.plan.home_of, copies)
            context.say([*lines])

    def _put_tables(self):
        context = self.context
        model, way, plan = context.model, context.shard_embeddings, context.plan
        optimizer = model.optimizer if model.compiled else None
        why = optimizer and sharded.refuse_others(optimizer)
        if why and way != "auto":
            raise ModelError(
                f"Received shard_embeddings='{way}' with {why}; expected an optimizer "
                "that updates each number by itself, such as Adagrad or Adam, or "
                "shard_embeddings='none'."
            )
        if why:
            line = (
                f"The embedding tables are where all variables are, because of {why}."
            )
            context.say([line])
        with tf.init_scope():
            if why:
                tables.bring_home(model, plan.home_of)
            else:
                placed = tables.layout(model, plan.all_devices, way, plan.home_of)
                tables.put(placed, optimizer)

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
