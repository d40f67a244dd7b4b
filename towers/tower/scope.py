"""What it means in a tower to read a variable, and to assign one."""

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.analysis import effects
from towers.analysis.kinds import Dependence
from towers.analysis.rules import GraphWanted, NoRuleError, Rules
from towers.collectives import reduce
from towers.keras_adapter.layers import layer_of, layers_of
from towers.keras_adapter.models import compiled_loss
from towers.keras_adapter.randomness import shared_generator
from towers.keras_adapter.variables import value_behind
from towers.layers import embeddings, fused, overwritten, seeds, sharded
from towers.layers.variables import metrics_of_layers, not_trained, seed_ids
from towers.tower.errors import ModelError

# The name of what stands in for a table that stays at home.
TABLE = "table_at_home"
# And that of what stands in for rows of other hosts while their numbers are found out.
ROWS = "rows_elsewhere"


class TowerScope(keras.StatelessScope):
    """A stateless scope in which assigning means what it does to a variable."""

    def __init__(self, model, params, state, tape):
        variables = model.trainable_variables
        self._model = model
        self._tape = tape
        self._graph = tf.compat.v1.get_default_graph()
        self._tables = {
            id(v): p
            for v, p in zip(variables, params, strict=True)
            if p is None or isinstance(p, tuple)
        }
        # The values of the trainable variables, or what stands in for them.
        self._params = [
            tf.broadcast_to(tf.zeros([], v.dtype), v.shape, TABLE)
            if id(v) in self._tables
            else p
            for v, p in zip(variables, params, strict=True)
        ]
        if tape is not None:
            tape.watch(self._params)
        mapping = [
            *zip(variables, self._params, strict=True),
            *zip(not_trained(model), state, strict=True),
            # Keras tracks each output's loss: home does so, of the whole batch.
            *((v, tf.zeros(v.shape, v.dtype)) for v in self._loss_variables()),
        ]
        super().__init__(mapping, collect_losses=True)
        # By id of the variable: its path, the values that it was assigned, in order,
        # and the rows that were looked up, with their indices, for each shard if this
        # host has all.
        self._paths = {}
        self._assigned = collections.defaultdict(list)
        self._looked_up = collections.defaultdict(list)
        # Tables of which all towers look up the same rows, each once.
        self._alike: set[int] = set()
        # For each table, whether a look-up is of rows that differ.
        self._once = collections.defaultdict(list)
        # What each use of a variable got that is to be overwritten with its gradient.
        self._used = collections.defaultdict(list)

    def rows_of(self, variable, ids):
        """Looks up rows of a table in the variable itself; see `embeddings.py`.

        Returns `None` where the tower has the table as a value, or gradients would be
        lost: in a graph within the tower's, such as a branch of `tf.cond`.
        """
        inner = tf.compat.v1.get_default_graph() is not self._graph
        if inner or id(variable) not in self._tables:
            return None
        table = value_behind(variable)
        if (cut := sharded.of(variable)) is not None:
            flat = tf.reshape(embeddings.not_negative(ids, table), [-1])
            found = (
                [_fetched(self._tables[id(variable)], flat, variable)]
                if cut.elsewhere
                else cut.look_up(flat)
            )
        else:
            with tf.device(table.device):
                found_ids = embeddings.not_negative(ids, table)
                found = [(tf.gather(table, found_ids), found_ids)]
        if self._tape is not None:
            self._tape.watch([rows for rows, _ in found])
        self._looked_up[id(variable)].append(found)
        self._once[id(variable)].append(_differ(ids, variable.shape[0]))
        if cut is None:
            return found[0][0]
        rows = [rows for rows, _ in found]
        rows = rows[0] if cut.elsewhere else cut.join(flat, rows)
        return tf.reshape(rows, [*_sizes(ids), variable.shape[1]])

    def get_current_value(self, variable):
        """Reads a variable, and keeps apart the uses of one; see `overwritten.py`."""
        value = super().get_current_value(variable)
        inner = tf.compat.v1.get_default_graph() is not self._graph
        if self._tape is None or inner or not variable.overwrite_with_gradient:
            return value
        value = tf.stop_gradient(value)
        self._tape.watch(value)
        self._used[id(variable)].append(value)
        return value

    def add_update(self, update):
        """Assigns a variable."""
        variable, value = update
        # No gradient flows through an assignment; it ends at the value assigned.
        value = tf.stop_gradient(value)
        if self._tape is not None and value.dtype.is_floating:
            self._tape.watch(value)
        self._assigned[id(variable)].append(value)
        self._paths[id(variable)] = variable.path
        super().add_update((variable, value))

    @contextlib.contextmanager
    def without_effects(self) -> Iterator[None]:
        """Inside, the compiled loss is computed, which may do nothing else.

        Raises:
            NoRuleError: If it does; home computes such a loss.
        """
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        before = len(graph.get_operations()) if graph else 0
        assigned = {key: len(values) for key, values in self._assigned.items()}
        yield
        tracked = {id(variable) for variable in self._loss_variables()}
        for key in self._assigned.keys() - tracked:
            if len(self._assigned[key]) > assigned.get(key, 0):
                raise NoRuleError("a variable that it assigns")
        for effect in effects.of(graph.get_operations()[before:]) if graph else ():
            raise NoRuleError(str(effect))

    def gradients(
        self, targets: Any, seeds: Any = None
    ) -> list[tf.Tensor | tf.IndexedSlices | None]:
        """Returns each trainable variable's gradient: of all values that it has had.

        Of a variable that is cut, it is that of each shard; see `sharded.targets`.
        `seeds` are the gradients of the targets, 1 where there are none.
        """
        variables, params = self._model.trainable_variables, self._params
        values = [
            [param, *self._assigned.get(id(variable), ())]
            for variable, param in zip(variables, params, strict=True)
        ]
        looked_up = [self._looked_up[id(variable)] for variable in variables]
        rows = [[[rows for rows, _ in shards] for shards in each] for each in looked_up]
        used = [self._used[id(variable)] for variable in variables]
        of_values, of_rows, of_uses = self._tape.gradient(
            targets, [values, rows, used], seeds
        )
        gradients = []
        for i, variable in enumerate(variables):
            if variable.overwrite_with_gradient:
                uses = overwritten.stack([*of_values[i], *of_uses[i]])
                if uses is not None:
                    uses.set_shape([uses.shape[0], *params[i].shape])
                gradients.append(uses)
                continue
            if any(each.count(None) == len(each) for each in of_rows[i]):
                # It got lost, as in `vectorized_map`: the table itself is needed.
                tf.identity(params[i])
            whole, cut = reduce.add(of_values[i]), sharded.of(variable)
            elsewhere = cut is not None and cut.elsewhere
            # What other hosts have is told apart once the gradients are added.
            places = [cut] if elsewhere else sharded.places(variable)
            parts = [whole] if elsewhere else sharded.expand([variable], [whole])
            for k, (place, of_place) in enumerate(zip(places, parts, strict=True)):
                tables = [
                    _of_table(place, mine[k], shards[k][1])
                    for mine, shards in zip(of_rows[i], looked_up[i], strict=True)
                ]
                parts[k] = _shaped(reduce.add([of_place, *tables]), place)
                if id(variable) in self._alike and not (elsewhere or parts[k] is None):
                    # Else an optimizer would square each tower's part by itself.
                    parts[k] = tf.convert_to_tensor(parts[k])
            gradients += sharded.expand([variable], parts) if elsewhere else parts
        return gradients

    def looked_up(self, variable: keras.Variable) -> tf.Tensor:
        """Returns the numbers of the rows of a table that were looked up, in a vector.

        The table is one of which other hosts have parts.
        """
        dtype = value_behind(variable).ids_type
        ids = [tf.cast(ids, dtype) for ((_, ids),) in self._looked_up[id(variable)]]
        return tf.concat([*ids, tf.zeros([0], dtype)], 0)

    def new_state(self, rules: Rules, fraction: tf.Tensor) -> list[tf.Tensor | None]:
        """Returns what the call made of the model's variables; `None` where nothing.

        The rules learn how the values of all towers combine.

        Raises:
            ModelError: A value cannot be combined, or the variable is not the model's.
        """
        self._refuse_others()
        model = self._model
        for i, variable in enumerate(model.trainable_variables):
            found = self._looked_up[id(variable)]
            numbers = [ids for shards in found for _, ids in shards]
            alike = rules.rows_alike(f"rows {i}", numbers)
            # One device squares each use of a row by itself.
            if alike and self._once.get(id(variable)) == [True]:
                self._alike.add(id(variable))
        normalized = {
            id(variable)
            for layer in layers_of(model)
            if isinstance(layer, keras.layers.BatchNormalization)
            for variable in layer.non_trainable_variables
        }
        own_seeds = seed_ids(model)
        new_state = []
        variables = model.trainable_variables + not_trained(model)
        for i, variable in enumerate(variables):
            assigned = self._assigned.get(id(variable))
            new_state.append(assigned[-1] if assigned else None)
            if not assigned:
                continue
            # Of which TensorFlow may not know all, as of gradients.
            assigned[-1].set_shape(variable.shape)
            if id(variable) in normalized:
                rules.lay_down(f"state {i}", Dependence.MEAN)  # by design
                continue
            try:
                new_state[-1] = rules.state(
                    *(f"state {i}", assigned[-1], fraction),
                    alike=id(variable) in own_seeds,
                )
            except GraphWanted as error:
                raise ModelError(
                    f"Model '{model.name}' adds a sum over examples to "
                    f"'{variable.path}' while it is called, which towers can do in a "
                    "graph only; compile it with run_eagerly=False."
                ) from error
            except NoRuleError as error:
                raise ModelError(
                    f"Model '{model.name}' assigns '{variable.path}' a value that "
                    f"towers cannot put together from their local batches, "
                    f"because of {error}; expected a mean or a sum over examples, or a "
                    f"mean added to what does not depend on them, so "
                    f"{self._what_to_do(variable)}, or pass strict=False to "
                    "multi_gpu_model to accept the mean of the towers' values."
                ) from error
        return new_state

    def _what_to_do(self, variable):
        for metric in metrics_of_layers(self._model):
            if any(each is variable for each in metric.variables):
                return (
                    f"return what the metric '{metric.name}' takes as an output, and "
                    "pass the metric to `compile` for it"
                )
        return (
            "assign it in a `train_step` of the model's own, which sees the whole batch"
        )

    def _refuse_others(self):
        """Raises if the call changed a variable that a tower does not carry."""
        model = self._model
        known = [
            *(*model.trainable_variables, *not_trained(model)),
            *self._loss_variables(),
        ]
        unknown = self._assigned.keys() - {id(variable) for variable in known}
        if not unknown:
            return
        shared, first = shared_generator(), next(iter(unknown))
        value = self._assigned[first][-1]
        layer = layer_of(model, value.name) if tf.is_symbolic_tensor(value) else None
        who = f"Layer '{layer}'" if layer else f"Model '{model.name}'"
        if shared is not None and first == id(shared.state):
            raise ModelError(
                f"{who} draws random numbers by Keras's global random seed, which "
                "towers do not share; create a `keras.random.SeedGenerator` in "
                "`__init__`, and pass it as `seed` to each function of keras.random."
            )
        raise ModelError(
            f"{who} changes '{self._paths[first]}' while it is called, a variable that "
            f"is not among those of model '{model.name}'; create it with `add_weight`, "
            "or if a metric has it, make the metric an attribute of the layer."
        )

    def _loss_variables(self):
        loss = compiled_loss(self._model)
        return loss.variables if loss else ()


@contextlib.contextmanager
def stateless(
    model: keras.Model,
    params: Sequence[tf.Tensor | None],
    state: Sequence[tf.Tensor],
    tape: tf.GradientTape | None = None,
) -> Iterator[TowerScope]:
    """Inside, the model computes with the given values and assigns nothing.

    Args:
        model: A built Keras model.
        params: Values of its trainable variables; `None` for tables that stay at home.
        state: Values of the others.
        tape: Records the way to gradients, if any are wanted.
    """
    try:
        scope = TowerScope(model, params, state, tape)
        with seeds.sent_together(model, state), scope, fused.batch_normalization():
            yield scope
    except ValueError as error:
        if "stateless scope" not in str(error):
            raise
        raise ModelError(
            f"Model '{model.name}' creates a variable while it is called, which a "
            "tower cannot do; create all variables in `__init__` or `build`."
        ) from error


def _fetched(fetched, ids, variable):
    """Looks up rows among those that were fetched, or what stands in for them."""
    if fetched is None:
        shape = [tf.size(ids), variable.shape[1]]
        rows = tf.broadcast_to(tf.zeros([], variable.dtype), shape, ROWS)
        rows.set_shape([ids.shape[0], variable.shape[1]])
        return rows, ids
    numbers, rows = fetched
    places = tf.searchsorted(numbers, tf.cast(ids, numbers.dtype))
    return tf.gather(rows, places), ids


def _differ(ids, count):
    """Tells whether numbers of a table's rows are known to differ, as of positions."""
    known = tf.get_static_value(ids) if tf.is_symbolic_tensor(ids) else ids.numpy()
    if known is not None:
        # Those from the end are negative.
        return len(np.unique(known % count)) == known.size
    op = ids.op
    while op.type in ("Cast", "Identity"):
        op = op.inputs[0].op
    return op.type == "Range"


def _of_table(table, gradient, ids):
    """The gradient of a table, or a shard, from that of its rows `ids`."""
    if gradient is None:
        return None
    with tf.device(ids.device):
        indices = tf.reshape(ids, [-1])
    return tf.IndexedSlices(
        values=tf.reshape(gradient, [-1, *table.shape[1:]]),
        indices=indices,
        dense_shape=tf.constant(list(table.shape), ids.dtype),
    )


def _shaped(gradient, variable):
    """A gradient of known shape, which TensorFlow does not always infer."""
    # An idle tower has to know it.
    if isinstance(gradient, tf.IndexedSlices):
        gradient.values.set_shape([None, *variable.shape[1:]])
        shape = tf.constant(list(variable.shape), gradient.indices.dtype)
        gradient = tf.IndexedSlices(gradient.values, gradient.indices, shape)
    elif gradient is not None:
        gradient.set_shape(variable.shape)
    return gradient


def _sizes(tensor):
    """The sizes of a tensor's axes, those that are known as integers."""
    sizes = tf.shape(tensor)
    return [sizes[i] if n is None else n for i, n in enumerate(tensor.shape)]
