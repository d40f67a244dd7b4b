"""Creates what Keras creates late: variables of model, metrics and optimizer.

A tower cannot create a variable, so all have to exist before one is traced.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builders.context import Context
from towers.builders.pieces.copies import Copies
from towers.collectives import batch
from towers.devices.names import HOST, is_gpu
from towers.hosts import group
from towers.keras_adapter import optimizers
from towers.keras_adapter.layers import call_model
from towers.keras_adapter.runtime import is_deterministic
from towers.layers import parameters, sharded, tables, variables
from towers.layers.pipeline import LayerPlacement, Pipeline, weighted
from towers.program import words
from towers.program.features import feature
from towers.tower import build, eager
from towers.tower.errors import ModelError

# Of a batch, and of other dimensions, whose size is not known.
_FEW_ROWS = 8


@dataclasses.dataclass
class VariableCreator:
    """Creates variables at home, places tables and layers, and creates copies."""

    context: Context
    copies: Copies
    _looked_up: dict[int, int] | None = None

    def build_all(self, data: Any) -> None:
        """Creates the variables of layers, losses, metrics and the optimizer.

        Args:
            data: A batch, or its `tf.TypeSpec`s.
        """
        # What is not known when the graph is built, it checks where the batch is cut.
        batch.check_rows(batch.specs(data))
        rows = batch.rows_given(data)
        with self._tables_placed(data), self.copies.creating():
            self._create(rows)

    def build_apart(self, data: Any, trains: bool = True) -> None:
        """Creates the variables of layers and the optimizer, and cuts what is cut.

        Args:
            data: A batch, or its `tf.TypeSpec`s.
            trains: Whether the optimizer is needed.
        """
        model = self.context.model
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        self.build_layers(x)
        with self._tables_placed(data):
            if trains and model.compiled and model.optimizer is not None:
                self.build_optimizer()

    def place(self, data: Any, divided: bool) -> None:
        """Moves variables to where they belong, and creates their copies.

        Args:
            data: A batch, or its `tf.TypeSpec`s.
            divided: Whether layers have just been divided among stages.
        """
        plan = self.context.plan
        if divided and self.context.shard_embeddings != "none":
            self._put_tables(data)
        if is_gpu(plan.home) or plan.pipeline.stages > 1:
            # Not all that was created there belongs there.
            with tf.init_scope():
                variables.move(self.context.model, self.copies.home_of)
        self.copies.create()
        self._say_where_tables_lie()

    def divide_layers(self, tower: Callable[[Pipeline], Sequence[Any]]) -> bool:
        """Divides layers among stages by the time that each takes, once.

        Args:
            tower: Returns what a tower computes of a micro-batch of known size, for
                a pipeline in which each layer is a stage.

        Returns:
            Whether they may be on other stages now.
        """
        context, plan = self.context, self.context.plan
        placement, model = plan.pipeline.placement, context.model
        if not placement.balanced or model.run_eagerly:
            return False
        _ = placement.layers  # It says what does not fit.
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
            # Not in an `init_scope`, where no tape records.
            towers = tower(Pipeline(len(layers), placement=each_alone))
            with tf.init_scope():
                seconds = feature("stages.measure").seconds_of_parts(
                    towers, len(layers), plan.devices[0]
                )
        except Exception as error:
            # It is the user's model that is called.
            line = (
                f"The layers of model '{model.name}' are divided among stages by their "
                f"weights, as they cannot be measured: {words.error_line(error)}"
            )
            context.say([line])
        # All hosts divide them alike.
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

    def local_spec(self, data: Any) -> Any:
        """Returns the specs of (x, y, sample_weight), as the loss sees a micro-batch.

        All sizes are known.

        Args:
            data: A batch, or its `tf.TypeSpec`s.
        """
        data = batch.specs(keras.utils.unpack_x_y_sample_weight(data))
        if self.context.preprocess is not None:
            data = self.context.preprocess.spec(data, training=True)
        return sized(data, self.usual_rows(data))

    def usual_rows(self, data: Any) -> int:
        """Returns how many examples a micro-batch has, or may have.

        Args:
            data: A nest of batches, or of their `tf.TypeSpec`s.
        """
        plan, first = self.context.plan, tf.nest.flatten(batch.specs(data))[0]
        total = self.context.usual_rows or first.shape[0] or _FEW_ROWS * plan.count
        return max(1, plan.sizes(int(total))[0])

    def _create(self, rows):
        """Creates the variables that Keras creates for a batch of such rows."""
        model, home = self.context.model, self.context.plan.home
        if not model.run_eagerly:
            # It would stop the tapes of layers that take gradients.
            lifted = contextlib.nullcontext if tf.executing_eagerly() else tf.init_scope
            with lifted(), tf.device(home):
                build.from_symbols(model, rows, self.context.preprocess)
        else:
            # A run goes on in an epoch, of which metrics are to be restored.
            with eager.aside(model, builds=True), tf.init_scope(), tf.device(home):
                build.from_symbols(model, rows, self.context.preprocess)

    def build_optimizer(self) -> None:
        """Creates the optimizer's variables, of a model that is built."""
        model = self.context.model
        home = self.context.plan.home
        if group.member() is None:
            placed = self._tables_placed(None)
        else:
            # Hosts that have trained have built it before. All hosts divide it later.
            placed = sharded.slots_like_variables()
        with placed, self.copies.creating(), tf.device(home):
            model.optimizer.build(model.trainable_variables)

    def build_layers(self, x: Any) -> None:
        """Creates the variables of the model's layers, unless they exist.

        Args:
            x: The inputs of a batch, or their `tf.TypeSpec`s.
        """
        # A table may be larger than the device that is home.
        divided = self.context.shard_embeddings != "none"
        device = HOST if divided else self.context.plan.home
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
            x, *_ = keras.utils.unpack_x_y_sample_weight(data)
            if all(isinstance(each, tf.TensorSpec) for each in _specs(x)):
                self.build_layers(x)
        elastic = group.member() is not None
        if elastic and model.built and model.compiled and not model.optimizer.built:
            with tf.init_scope():
                self.build_optimizer()
        if model.built:
            self._put_tables(data)
        # Else it is built of ragged or sparse tensors, and then cut.
        with sharded.slots_like_variables():
            yield
        self._put_tables(data)  # of what was built by now
        with tf.init_scope():
            variables.move(model, self.copies.home_of)

    def _say_where_tables_lie(self):
        context = self.context
        if context.shard_embeddings != "none":
            # Slices are empty between steps.
            copies = self.copies.variables()
            copies = [copy for copy in copies if copy.shape.is_fully_defined()]
            lines = tables.lines(context.model, context.plan.home_of, copies)
            context.say([*lines])

    def _look_ups(self, data):
        """Counts the rows that a step looks up in each table, once, by its `id`."""
        context, model = self.context, self.context.model
        known = data is not None and not model.run_eagerly
        if self._looked_up is None and known and len(tables.of(model)) > 1:
            call = tf.function(call_model, autograph=False)
            try:
                x, *_ = self.local_spec(data)
                with keras.StatelessScope():
                    self._looked_up = tables.look_ups(
                        lambda: call.get_concrete_function(model, x, training=False)
                    )
            except Exception as error:
                # It is the user's model that is called.
                self._looked_up = {}
                line = (
                    f"The tables of model '{model.name}' are placed by their bytes "
                    "alone, as the rows that it looks up cannot be counted: "
                    f"{words.error_sentence(error)}"
                )
                context.say([line])
        return self._looked_up or {}

    def _put_tables(self, data):
        context = self.context
        model, way, plan = context.model, context.shard_embeddings, context.plan
        optimizer = model.optimizer if model.compiled else None
        why = optimizer and sharded.refuse_others(optimizer)
        if why and context.shard_from_bytes is not None:
            self._distribute_parameters(optimizer, why)
            return
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
                plan.pipeline.placement.keeps_tables()
                tables.bring_home(model, plan.home_of)
            else:
                places_of = plan.places_of(bool(self.copies.towers))
                looked_up = self._look_ups(data) if way == "auto" else {}
                self._say_what_each_host_has()
                divided = ()
                if plan.hosts.count > 1:
                    spread = feature("collectives.spread.tables")
                    divided = spread.divide(model, plan, way, optimizer)
                placed = tables.layout(
                    *(model, plan.all_devices, way, places_of, looked_up, divided)
                )
                tables.put(placed, optimizer)
                self._put_parameters(optimizer, placed)

    def _put_parameters(self, optimizer, tables_placed):
        """Divides parameters among the towers' devices, if they are to be sharded."""
        context = self.context
        if context.shard_from_bytes is not None:
            chosen = self._large_parameters({id(p.variable) for p in tables_placed})
            parameters.cut(chosen, context.plan.all_devices, optimizer)

    def _large_parameters(self, apart=frozenset()):
        """Returns the variables to be sharded, but for those with the `id`s `apart`."""
        context = self.context
        chosen = parameters.choose(context.model, context.shard_from_bytes)
        apart = apart | context.facts.kept_whole
        return [variable for variable in chosen if id(variable) not in apart]

    def _distribute_parameters(self, optimizer, why):
        """Puts whole parameters on the towers' devices, as nothing may be cut."""
        context = self.context
        of_whole = not optimizers.is_elementwise(optimizers.innermost(optimizer))
        refusal = feature("collectives.optimizer_shards").refusal(optimizer)
        if not of_whole or refusal is not None:
            raise ModelError(
                f"Received variable_update='sharded' with {why}; expected an optimizer "
                "that updates each number, or each variable, by itself, such as Adam "
                "or Muon, or variable_update='replicated'."
            )
        line = (
            "Each large variable is whole on one device, and not cut over all, because "
            f"of {why}."
        )
        context.say([line])
        with tf.init_scope():
            devices = context.plan.all_devices
            parameters.distribute(self._large_parameters(), devices, optimizer)

    def _say_what_each_host_has(self):
        plan, way = self.context.plan, self.context.shard_embeddings
        if plan.hosts.count == 1:
            return
        why = feature("collectives.spread.tables").refusal(plan, way)
        if why is not None:
            line = (
                f"Each of the {plan.hosts.count} hosts has whole tables, divided over "
                f"its own devices: {why}."
            )
            self.context.say([line])


def _specs(data):
    return tf.nest.flatten(batch.specs(data))


def sized(data: Any, rows: int | None) -> Any:
    """Returns the specs of a batch of so many rows, of which no other size is unknown.

    Args:
        data: A nest of batches, or of their `tf.TypeSpec`s.
        rows: The number of rows; `None` if that is unknown.
    """

    def local(spec):
        if spec is None:
            return None
        sizes = [_FEW_ROWS if n is None else n for n in spec.shape[1:]]
        return tf.TensorSpec([rows, *sizes], spec.dtype)

    return tf.nest.map_structure(local, batch.specs(data))
