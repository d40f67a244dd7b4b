"""The pieces of a builder: creation of variables, and placement of batches.

A tower cannot create a variable while it is traced. So the variables of model, metrics
and optimizer, which Keras creates late, are created before.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builders.context import Context
from towers.builders.stores.store import Store
from towers.collectives import batch, packing
from towers.devices.names import HOST, is_gpu
from towers.keras_adapter.runtime import is_deterministic
from towers.layers import sharded, substitutes, variables
from towers.layers.pipeline import LayerPlacement, Pipeline, weighted
from towers.program import words
from towers.program.features import feature
from towers.tower import eager

_INDICES = tf.int32, tf.int64


@dataclasses.dataclass
class VariableCreator:
    """Creates variables where the store puts them, and divides layers among stages."""

    context: Context
    store: Store

    def build_all(self, data: Any) -> None:
        """Creates the variables of layers, losses, metrics and the optimizer.

        Args:
            data: A batch, or its `tf.TypeSpec`s.
        """
        # Sizes unknown at tracing are checked where the batch is cut.
        batch.check_rows(batch.specs(data))
        rows = batch.rows_given(data)
        with self._parts_placed(data):
            self._create(rows)

    def build_apart(self, data: Any, trains: bool = True) -> None:
        """Creates the variables of layers and the optimizer, and cuts them into parts.

        Args:
            data: A batch, or its `tf.TypeSpec`s.
            trains: Whether the optimizer is needed.
        """
        model = self.context.model
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        self.build_layers(x)
        with self._parts_placed(data):
            if trains and model.compiled and model.optimizer is not None:
                self.build_optimizer()

    def divide_layers(self, tower: Callable[[Pipeline], Sequence[Any]]) -> bool:
        """Divides layers among stages by the measured time of each layer, once.

        Args:
            tower: Returns what a tower computes of a micro-batch of known size, for
                a pipeline in which each layer is a stage.

        Returns:
            Whether layers may have moved to other stages.
        """
        context, plan = self.context, self.context.plan
        placement, model = plan.pipeline.placement, context.model
        if not placement.balanced or model.run_eagerly:
            return False
        _ = placement.layers  # Raises if the options do not fit the model.
        placement.balanced = False
        if is_deterministic():
            line = (
                f"The layers of model '{model.name}' are divided among stages by their "
                "weights, as a deterministic run measures nothing."
            )
            context.say([line])
            return False
        layers = {id(layer): k for k, layer in enumerate(weighted(model))}
        each_alone = LayerPlacement(model, layers=layers)
        begun_s, seconds = time.perf_counter(), None
        try:
            # Gradient tapes record nothing within an `init_scope`.
            towers = tower(Pipeline(len(layers), placement=each_alone))
            with tf.init_scope():
                seconds = feature("stages.measure").seconds_of_parts(
                    towers, len(layers), plan.devices[0]
                )
        except Exception as error:
            # The user's model may raise any exception.
            line = (
                f"The layers of model '{model.name}' are divided among stages by their "
                f"weights, as they cannot be measured: {words.error_line(error)}"
            )
            context.say([line])
        # All hosts have to divide the layers alike.
        if not all(plan.hosts.exchange(seconds is not None)):
            return False
        placement.balance(plan.hosts.broadcast_value(seconds))
        taken_s = time.perf_counter() - begun_s
        line = (
            f"Measured the layers of model '{model.name}' for {taken_s:.1f} s, to "
            "divide them among stages."
        )
        context.say([line])
        return True

    def _create(self, rows):
        """Creates the variables that Keras creates for a batch like `rows`."""
        model, home = self.context.model, self.context.plan.home
        if not model.run_eagerly:
            # An `init_scope` would stop the tapes of layers that compute gradients.
            lifted = contextlib.nullcontext if tf.executing_eagerly() else tf.init_scope
            with lifted(), tf.device(home):
                eager.from_symbols(model, rows, self.context.preprocess)
        else:
            # A resumed run continues within an epoch, whose metrics are restored.
            with eager.aside(model, builds=True), tf.init_scope(), tf.device(home):
                eager.from_symbols(model, rows, self.context.preprocess)

    def build_optimizer(self) -> None:
        """Creates the optimizer's variables; the model is built."""
        model = self.context.model
        home = self.context.plan.home
        with self._parts_placed(None), tf.device(home):
            model.optimizer.build(model.trainable_variables)

    def build_layers(self, x: Any) -> None:
        """Creates the variables of the model's layers, unless they exist.

        Args:
            x: The inputs of a batch, or their `tf.TypeSpec`s.
        """
        # An embedding table may be larger than the memory of home.
        device = HOST if self.store.divides else self.context.plan.home
        model, preprocess = self.context.model, self.context.preprocess
        if model.built:
            return
        x = batch.rows_given(x)
        if preprocess is not None:
            x, *_ = preprocess.spec((x, None, None), training=False)
        with tf.init_scope(), tf.device(device):
            model(eager.symbols(x))

    @contextlib.contextmanager
    def _parts_placed(self, data):
        """Inside, parts are on their devices, and slots are created beside them."""
        model, store = self.context.model, self.store
        if not store.divides:
            yield
            return
        if not (model.built or model.run_eagerly):
            x, *_ = keras.utils.unpack_x_y_sample_weight(data)
            if all(isinstance(spec, tf.TensorSpec) for spec in _specs(x)):
                self.build_layers(x)
        if model.built:
            store.cut(data)
        # Otherwise ragged or sparse inputs build the model, which is cut afterwards.
        with sharded.slots_like_variables():
            yield
        store.cut(data)  # variables that were built inside
        with tf.init_scope():
            variables.move(model, self.context.plan.home_of)


def _specs(data):
    return tf.nest.flatten(batch.specs(data))


# Batches: cut into local batches, and copied to the towers.


@dataclasses.dataclass
class LocalBatches:
    """Cuts a global batch into one local batch for each tower."""

    context: Context

    def cut(self, data: Any) -> list[Any]:
        """Cuts a batch on its device; returns one nest of tensors for each tower."""
        batch.check_rows(data)
        data = tf.nest.map_structure(batch.as_tensor, data)
        bounds = self.context.plan.bounds(batch.batch_size(data))
        if batch.part_of(data) is not None:
            first, end = bounds[0][0], bounds[-1][1]
            data = batch.rows_given(data)
            tf.debugging.assert_equal(batch.batch_size(data), end - first)
            bounds = [(start - first, end - first) for start, end in bounds]
        return [batch.take(data, start, end) for start, end in bounds]

    def whole(self, data: Any) -> Any:
        """Returns the global batch, also if this host reads only its rows.

        Args:
            data: The batch, as this host reads it.

        Returns:
            (x, y, sample_weight).
        """
        data = keras.utils.unpack_x_y_sample_weight(data)
        part = batch.part_of(data)
        if part is None:
            return data
        rows = (part.x, *data[1:])
        return self.context.plan.gather(rows, batch.batch_size(data), "batch")

    def place(self, data: Any) -> list[Any]:
        """Cuts a batch, and copies each local batch to its tower."""
        return self.copy_each(self.cut(data))

    def copy_each(self, local_batches: Sequence[Any]) -> list[Any]:
        """Copies each local batch to the device of its tower."""
        return [*map(self.copy, self.context.plan.devices, local_batches)]

    def copy(self, device: str, local: Any) -> Any:
        """Copies a local batch to the device of a tower."""
        kept = () if self._sends_indices or not is_gpu(device) else _INDICES
        as_taken = self.context.local_spec(local) if kept else local
        with tf.device(device), tf.name_scope("place"):
            return packing.copy(local, kept, as_taken)

    @functools.cached_property
    def _sends_indices(self):
        """Whether to send indices to GPUs: tables at home need them at home.

        Cached, as it searches all layers, and batches are placed in each step.
        """
        context = self.context
        if is_gpu(context.plan.home) or context.model.run_eagerly:
            return True
        return not substitutes.tables(context.model)

    def preprocess(self, data: Any, training: bool) -> Any:
        """Returns a global batch as the loss sees it, computed at home.

        Args:
            data: (x, y, sample_weight) of the batch.
            training: Whether the batch is used for training.
        """
        data, preprocess = self.whole(data), self.context.preprocess
        if preprocess is None:
            return data
        with tf.device(self.context.plan.home):
            return preprocess(tf.nest.map_structure(batch.as_tensor, data), training)


# All pieces together.


class Pieces:
    """The pieces that all ways to update variables share.

    Attributes:
        context: The state that the pieces share.
        store: Says where variables live, and updates them.
        batches: Cuts and places batches.
        creator: Creates variables.
    """

    def __init__(self, context: Context, store: Store):
        """Composes the pieces; none knows the model's variables yet."""
        self.context, self.store = context, store
        self.batches = LocalBatches(context)
        self.creator = VariableCreator(context, store)
