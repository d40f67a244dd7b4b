"""What a function does besides computing is found wherever it does so."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tests import oracle
from tests.variants import slow
from towers import multi_gpu_model
from towers.analysis import effects

FEATURES = 6


class State:
    """All kinds of state that is not Keras's."""

    def __init__(self):
        self.count = tf.Variable(0.0)
        self.vector = tf.Variable(tf.zeros([4]))
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
        values = tf.lookup.KeyValueTensorInitializer([1], [2])
        self.constants = tf.lookup.StaticHashTable(values, 0)
        self.queue = tf.queue.FIFOQueue(9, [tf.float32])
        self.generator = tf.random.Generator.from_seed(1)

    def add(self, x):
        self.count.assign_add(1.0)
        return x

    def add_in_branches(self, x):
        def inner():
            return tf.cond(tf.size(x) > 1, lambda: self.add(x), lambda: x)

        return tf.cond(tf.size(x) > 0, inner, lambda: x)

    def add_in_a_case(self, x):
        return tf.switch_case(tf.size(x) % 2, [lambda: self.add(x), lambda: x])

    def add_in_a_loop(self, x):
        return tf.while_loop(lambda _: False, lambda x: (self.add(x),), [x])[0]

    def add_by_rows(self, x):
        return tf.map_fn(self.add, x)

    def add_in_a_function(self, x):
        return tf.function(tf.function(self.add, autograph=False))(x)

    def add_for_xla(self, x):
        return tf.function(self.add, jit_compile=True)(x)

    def add_backwards(self, x):
        pure = tf.custom_gradient(lambda x: (tf.identity(x), self.add))
        return tf.gradients(pure(x), x)[0]

    def scatter(self, x):
        self.vector.scatter_add(tf.IndexedSlices([1.0], [0]))
        return x

    def assign_a_slice(self, x):
        self.vector[1].assign(1.0)
        return x

    def insert(self, x):
        self.table.insert(tf.constant([1], tf.int64), tf.constant([2], tf.int64))
        return x

    def enqueue(self, x):
        self.queue.enqueue(1.0)
        return x

    def stage(self, x):
        tf.raw_ops.Stage(values=[x])
        return x

    def draw(self, x):
        return x + tf.random.normal([])

    def draw_from_a_generator(self, x):
        return x + self.generator.normal([])

    def shuffle(self, x):
        return tf.random.shuffle(x)

    def call_python(self, x):
        return tf.py_function(lambda x: x, [x], tf.float32)

    def call_numpy(self, x):
        return tf.numpy_function(lambda x: x, [x], tf.float32)

    def print(self, x):
        tf.print(x, output_stream="file:///dev/null")
        return x

    def read(self, x):
        return x + self.count + self.vector[0] + tf.gather(self.vector, 1)

    def look_up(self, x):
        found = self.constants.lookup(tf.cast(x, tf.int32))
        return x + tf.cast(found, x.dtype)

    def check(self, x):
        tf.debugging.assert_greater(x, -99.0)
        return tf.debugging.check_numerics(x, "not finite")

    def compute(self, x):
        def body(i, rows):
            return i + 1, rows.write(i, tf.cond(i > 1, lambda: x[i], lambda: x[0]))

        array = tf.TensorArray(x.dtype, tf.shape(x)[0])
        done = tf.while_loop(lambda i, _: i < tf.shape(x)[0], body, [0, array])
        return tf.recompute_grad(tf.square)(done[1].stack())

    def draw_by_a_seed(self, x):
        return (
            x + tf.random.stateless_normal([], [1, 2]) + keras.random.normal([], seed=3)
        )


ASSIGNED = "AssignAddVariableOp"
FOUND = {
    State.add: ASSIGNED,
    State.add_in_branches: ASSIGNED,
    State.add_in_a_case: ASSIGNED,
    State.add_in_a_loop: ASSIGNED,
    State.add_by_rows: ASSIGNED,
    State.add_in_a_function: ASSIGNED,
    State.add_for_xla: ASSIGNED,
    State.add_backwards: ASSIGNED,
    State.scatter: "ResourceScatterAdd",
    State.assign_a_slice: "ResourceStridedSliceAssign",
    State.insert: "LookupTableInsertV2",
    State.enqueue: "QueueEnqueueV2",
    State.stage: "Stage",
    State.draw: "RandomStandardNormal",
    State.draw_from_a_generator: "RngReadAndSkip",
    State.shuffle: "RandomShuffle",
    State.call_python: "EagerPyFunc",
    State.call_numpy: "PyFunc",
    State.print: "PrintV2",
    State.read: None,
    State.look_up: None,
    State.check: None,
    State.compute: None,
    State.draw_by_a_seed: None,
}
REFUSED = [*FOUND][:13]


def test_effects_are_found_wherever_they_are():
    state = State()
    for function, type_ in FOUND.items():
        traced = tf.function(lambda x, f=function: f(state, x), autograph=False)
        graph = traced.get_concrete_function(tf.TensorSpec([None])).graph
        found = {effect.type for effect in effects.of(graph.get_operations())}
        assert found == ({type_} if type_ else set()), function.__name__
        refused = found - effects.RANDOM - effects.REPEATED
        assert bool(refused) == (function in REFUSED), function.__name__


def test_each_call_of_one_function_has_its_effects():
    first, second = tf.Variable(1.0), tf.Variable(1.0)
    add = tf.function(lambda variable: variable.assign_add(1.0), autograph=False)
    one = add.get_concrete_function(first)

    def both():
        one(first)
        one(second)

    graph = tf.function(both, autograph=False).get_concrete_function().graph
    assert effects.changed(graph) == {id(first.handle), id(second.handle)}


def test_what_is_listed_is_stateful():
    """Anything else that is, counts; so a list of names cannot be too short unseen."""
    names = [effects.HARMLESS, effects.REPEATED, effects.RANDOM]
    assert len(set.union(*names)) == sum(map(len, names))
    for name in set.union(*names):
        assert op_def_registry.get(name).is_stateful, name


class Does(keras.layers.Layer):
    """A user's layer that does something besides."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self._function, self._state = function, State()

    def call(self, x):
        return self._function(self._state, x)


def _data(rows=21):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, FEATURES)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)


def _model(*layers):
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(1)])


@pytest.mark.parametrize(
    "function", [State.add_in_branches, State.scatter, State.insert, State.print]
)
def test_a_model_s_effects_happen_once_a_batch(function):
    found = []
    for towers in (0, 2):
        model = _model(Does(function, name="user"))
        trained = multi_gpu_model(model, gpus=towers) if towers else model
        trained.compile("sgd", "mse", jit_compile=False)
        history = trained.fit(_data(), verbose=0, shuffle=False).history
        state = model.layers[0]._state
        numbers = state.count, state.vector, state.table.export()[1]
        found.append([history["loss"], *model.get_weights(), *map(np.sum, numbers)])
    assert oracle.largest_difference(found[1], found[0]) < 1e-5


@keras.saving.register_keras_serializable("test_effects")
class Annealed(keras.losses.Loss):
    """A user's loss that counts its calls, and falls with them."""

    def __init__(self, raw):
        super().__init__()
        count = tf.Variable if raw else keras.Variable
        self.count = count(1.0, trainable=False)

    def call(self, y, predicted):
        self.count.assign(self.count + 1.0)
        return keras.ops.square(y - predicted) / self.count


@pytest.mark.parametrize("raw", [slow(False), True])
def test_a_loss_with_a_state_of_its_own_is_computed_once(raw):
    found = []
    for towers in (0, 2):
        model, loss = _model(), Annealed(raw)
        trained = multi_gpu_model(model, gpus=towers) if towers else model
        trained.compile("sgd", loss, jit_compile=False, run_eagerly=not towers)
        history = trained.fit(_data(), epochs=2, verbose=0, shuffle=False).history
        found.append([*history.values(), *model.get_weights(), loss.count.numpy()])
    assert found[0][-1] == 7
    assert oracle.largest_difference(found[1], found[0]) < 1e-6


class Counted(keras.metrics.Mean):
    """A user's metric with a state that is none of its `variables`."""

    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0, trainable=False)

    def state(self):
        return self.calls

    def factor(self, y):
        return keras.ops.cast(self.calls.assign_add(1), y.dtype)

    def update_state(self, y, predicted, sample_weight=None):
        super().update_state(keras.ops.square(y - predicted) * self.factor(y))


class Drawn(Counted):
    """It draws by a seed generator, which Keras does not list, either."""

    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator(1)

    def state(self):
        return self.generator.state

    def factor(self, y):
        return keras.random.uniform(keras.ops.shape(y), seed=self.generator)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Drawn, Counted])
def test_a_metric_with_a_state_that_it_does_not_list_is_computed_once(kind):
    found = []
    for towers in (0, 2):
        model, metric = _model(), kind()
        trained = multi_gpu_model(model, gpus=towers) if towers else model
        trained.compile("sgd", "mse", metrics=[metric], jit_compile=False)
        history = trained.fit(_data(), epochs=2, verbose=0, shuffle=False).history
        state = metric.state().numpy().max()
        found.append([*history.values(), *model.get_weights(), state])
    assert found[0][-1] == 6
    assert oracle.largest_difference(found[1], found[0]) < 1e-6


class CountsTwice(keras.Model):
    """A step that calls one graph for each of two variables."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.first, self.second = (tf.Variable(0.0, trainable=False) for _ in "ab")
        add = tf.function(lambda variable: variable.assign_add(1.0), autograph=False)
        self.add = add.get_concrete_function(self.first)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        self.add(self.first)
        self.add(self.second)
        return super().train_step(data)


def test_a_step_may_call_one_graph_for_two_variables():
    model = CountsTwice()
    x = np.ones([8, 4], "float32")
    model(x[:2])
    parallel = multi_gpu_model(model, 2)
    parallel.compile("sgd", "mse")
    parallel.fit(x, x[:, :1], batch_size=4, verbose=0)
    assert (float(model.first), float(model.second)) == (2, 2)
