"""The asynchronous builder: the staleness rule, and what towers do without waiting."""

import collections
import functools
import random
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from tests import executed, oracle
from tests.variants import slow
from towers import Asynchronous, multi_gpu_model
from towers.builders.asynchronous.staleness import Staleness
from towers.builders.asynchronous.training import Streams
from towers.tower.errors import ModelError

pytestmark = pytest.mark.quick_one_in(2)

FEATURES, OUTPUTS = 6, 3


def _numbers(rows, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, *shape)).astype("float32")


def _data(rows=40):
    return _numbers(rows, FEATURES), _numbers(rows, OUTPUTS, seed=1)


def _mlp(*more):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(8, "tanh"),
            *more,
            layers.Dense(OUTPUTS),
        ]
    )


def _towers(model, gpus=2, optimizer=None, loss="mse", max_staleness=None, **options):
    parallel = multi_gpu_model(model, gpus, variable_update=Asynchronous(max_staleness))
    parallel.compile(optimizer or keras.optimizers.SGD(0.05), loss, **options)
    return parallel


def _batches(*data):
    return tf.data.Dataset.from_tensor_slices(data).batch(8)


def _fit(parallel, x, y, **options):
    return parallel.fit(_batches(x, y), shuffle=False, verbose=0, **options)


# The rule.


class _Schedule:
    """Towers that are scheduled at random, in one thread."""

    def __init__(self, towers, bound, seed):
        self.staleness = Staleness(bound)
        self._random = random.Random(seed)
        self._in_flight = {}  # by tower, the version it has read
        self._version = 0
        self._towers = range(towers)
        self.found = []

    def may(self, tower):
        if tower in self._in_flight:
            return self.staleness._may_update(tower)
        return self.staleness._may_read()

    def step(self):
        ready = [tower for tower in self._towers if self.may(tower)]
        assert ready, "deadlock"
        tower = self._random.choice(ready)
        if tower not in self._in_flight:
            with self.staleness.reading(tower):
                self._in_flight[tower] = self._version
        elif self._random.random() < 0.2:
            with self.staleness.reading(tower):
                self._in_flight[tower] = self._version
        elif self._random.random() < 0.1:
            self.staleness.drop(tower)
            del self._in_flight[tower]
        else:
            goes_on = self._random.random() < 0.5
            with self.staleness.updating(tower, goes_on):
                self.found.append(self._version - self._in_flight.pop(tower))
            self._version += 1
            if goes_on:
                self._in_flight[tower] = self._version


@pytest.mark.parametrize("towers", [1, 2, 5])
@pytest.mark.parametrize("bound", [0, 1, 3, None])
def test_no_update_exceeds_the_bound_and_one_tower_can_always_go_on(bound, towers):
    reached = 0
    for seed in range(20):
        schedule = _Schedule(towers, bound, seed)
        for _ in range(100):
            schedule.step()
        staleness, found = schedule.staleness, schedule.found
        assert bound is None or max(found) <= bound
        assert staleness.updates == len(found)
        assert staleness.maximum == max(found)
        assert staleness.mean == pytest.approx(np.mean(found))
        reached = max(reached, *found)
    # As much as is allowed does happen.
    if towers > 1 and bound is not None:
        assert reached == bound


def test_without_a_bound_nobody_waits():
    staleness = Staleness()
    for tower in range(4):
        with staleness.reading(tower):
            pass
    for tower in (3, 1, 2, 0):
        with staleness.updating(tower):
            pass
    assert (staleness.updates, staleness.mean, staleness.maximum) == (4, 1.5, 3)
    tags = {"towers/staleness_mean": 1.5, "towers/staleness_max": 3}
    assert staleness.measured() == tags
    # Since it was last asked.
    assert staleness.measured() == {} and staleness.updates == 0


def test_it_is_measured_anew_after_a_reset():
    staleness = Staleness()
    assert (staleness.updates, staleness.mean, staleness.maximum) == (0, 0.0, 0)
    for tower in range(2):
        with staleness.reading(tower):
            pass
    with staleness.updating(0):
        pass
    staleness.reset()
    assert (staleness.updates, staleness.mean, staleness.maximum) == (0, 0.0, 0)
    with staleness.updating(1):
        pass
    assert (staleness.updates, staleness.mean, staleness.maximum) == (1, 1.0, 1)


def test_a_tower_that_has_not_read_does_so_as_it_updates():
    staleness = Staleness(0)
    with staleness.updating(0, goes_on=True):
        pass
    assert not staleness._may_read()
    with staleness.alone():
        pass
    with staleness.updating(0):
        pass
    assert staleness._may_read()
    assert (staleness.updates, staleness.maximum) == (2, 0)


def test_an_older_tower_goes_first_where_the_bound_asks_for_it():
    staleness = Staleness(1)
    order = []
    for tower in range(2):
        with staleness.reading(tower):
            pass

    def newer():
        with staleness.updating(1):
            order.append("newer")

    # If the newer one went first, twice, the older one would exceed the bound.
    thread = threading.Thread(target=newer)
    thread.start()
    thread.join()
    with staleness.reading(1):
        pass
    assert not staleness._may_update(1)
    thread = threading.Thread(target=newer)
    thread.start()
    with staleness.updating(0):
        order.append("older")
    thread.join()
    assert order == ["newer", "older", "newer"]
    assert staleness.maximum == 1


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_threads_keep_the_bound(bound):
    staleness = Staleness(bound)
    inside = []

    def work(tower):
        for _ in range(200):
            with staleness.reading(tower):
                inside.append(tower)
                assert inside.pop() == tower
            with staleness.updating(tower):
                inside.append(tower)
                assert inside.pop() == tower

    threads = [threading.Thread(target=work, args=[tower]) for tower in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert staleness.updates == 800
    assert staleness.maximum <= bound


def test_a_tower_that_gives_up_lets_the_others_go_on():
    staleness = Staleness(0)
    with staleness.reading(0):
        pass
    assert not staleness._may_read()
    staleness.drop(0)
    staleness.drop(0)
    with staleness.reading(1):
        pass
    with pytest.raises(ZeroDivisionError), staleness.updating(1):
        raise ZeroDivisionError
    staleness.drop(1)
    assert staleness._may_read() and staleness.updates == 0


# The streams.


def test_each_tower_has_a_stream_of_its_own():
    streams = Streams(2)
    assert streams.put("ab")
    # The first tower is done with its share before the second has begun.
    first = streams.of(0)
    assert next(first) == "a"
    assert streams.put("cd") and streams.put("ef")
    assert next(first) == "c"
    streams.close()
    assert not streams.put("gh")
    assert list(first) == ["e"]
    assert list(streams.of(1)) == ["b", "d", "f"]


def test_what_was_not_begun_is_taken_back():
    streams = Streams(2)
    streams.put("ab")
    streams.stop()
    assert list(streams.of(0)) == [] and not streams.put("cd")


# Training.


@functools.cache
def _of_one_device():
    model = _mlp()
    options = {"metrics": ["mae"], "run_eagerly": True}
    model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    return _fit(model, *_data(21), epochs=2).history, model.get_weights()


# Not packed, it is in the table of exact cases.
@pytest.mark.slow
@pytest.mark.parametrize("packed", [None, True])
def test_one_tower_is_one_device(packed):
    x, y = _data(21)
    history, expected = _of_one_device()
    model = _mlp()
    options = {"metrics": ["mae"], "steps_per_execution": 2}
    parallel = multi_gpu_model(model, 1, variable_update=Asynchronous(packed=packed))
    parallel.compile(keras.optimizers.Adam(0.01), "mse", **options)
    for name, found in _fit(parallel, x, y, epochs=2).history.items():
        assert found == pytest.approx(history[name], rel=1e-5)
    assert oracle.largest_difference(model.get_weights(), expected) <= 1e-5
    assert parallel.builder.staleness.maximum == 0


def _slope(y, outputs):
    """A loss whose gradient is the same wherever the weights are."""
    return keras.ops.mean(y * outputs)


def test_serialised_updates_are_those_of_one_device_one_after_another():
    x, y = _data(20)

    def make():
        keras.utils.set_random_seed(5)
        return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(OUTPUTS)])

    expected, model = make(), make()
    expected.compile(keras.optimizers.SGD(0.05), _slope, run_eagerly=True)
    for start, end in [(0, 3), (3, 6), (6, 8), (8, 11), (11, 14), (14, 16)]:
        expected.train_on_batch(x[start:end], y[start:end])
    for start, end in [(16, 18), (18, 19), (19, 20)]:
        expected.train_on_batch(x[start:end], y[start:end])
    parallel = _towers(model, 3, loss=_slope, max_staleness=0, steps_per_execution=2)
    _fit(parallel, x, y)
    assert int(model.optimizer.iterations) == 9
    # Only the order is left to chance, which does not matter to this loss.
    weights = model.get_weights(), expected.get_weights()
    assert oracle.largest_difference(*weights) <= 1e-5
    assert parallel.builder.staleness.updates == 9
    assert parallel.builder.staleness.maximum == 0


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1, 2])
def test_the_bound_holds_while_training(bound):
    parallel = _towers(_mlp(), 4, max_staleness=bound, steps_per_execution=10)
    _fit(parallel, *_data(160), epochs=2)
    assert parallel.builder.staleness.updates == 160
    assert parallel.builder.staleness.maximum <= bound


@pytest.mark.slow
def test_without_a_bound_staleness_is_within_a_call():
    parallel = _towers(_mlp(), 4, steps_per_execution=2)
    _fit(parallel, *_data(48))
    staleness = parallel.builder.staleness
    assert staleness.updates == 24
    assert 0 <= staleness.mean <= staleness.maximum < 8


@pytest.mark.parametrize("steps", [slow(1), 10])
def test_each_share_is_an_update(steps):
    model = _mlp()
    parallel = _towers(model, steps_per_execution=steps, metrics=["mae"])
    staleness = parallel.builder.staleness
    for rows, updates in [(40, 10), (37, 10), (33, 9), (1, 1)]:
        before = int(model.optimizer.iterations)
        staleness.reset()
        history = _fit(parallel, *_data(rows), epochs=2).history
        assert int(model.optimizer.iterations) - before == 2 * updates
        assert staleness.updates == 2 * updates
        # Without a bound, it is within a call: at most two updates of five batches.
        assert 0 <= staleness.mean <= staleness.maximum < 2 * min(steps, 5)
        assert np.all(np.isfinite(history["loss"] + history["mae"]))


@pytest.mark.slow
def test_metrics_count_each_example_once():
    x, y = _data(37)
    model = _mlp()
    # Nothing learned, so that the loss does not depend on the order.
    parallel = _towers(
        model, 3, keras.optimizers.SGD(0.0), metrics=["mae"], steps_per_execution=4
    )
    found = _fit(parallel, x, y).history
    model.compile(loss="mse", metrics=["mae"], run_eagerly=True)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    assert {k: v[0] for k, v in found.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_train_on_batch_and_generators():
    x, y = _data(32)
    model = _mlp()
    parallel = _towers(model, 3)
    logs = parallel.train_on_batch(x[:8], y[:8], return_dict=True)
    assert np.isfinite(logs["loss"]) and int(model.optimizer.iterations) == 3
    parallel.fit(((x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)), verbose=0)
    assert int(model.optimizer.iterations) == 12


class Watched(layers.Layer):
    """Tells the shapes that it is traced with in training."""

    def __init__(self, tell):
        super().__init__()
        self.tell = tell

    def call(self, x, training=False):
        if training:
            self.tell(tuple(x.shape))
        return x


def test_a_model_is_built_and_traced_once_for_all_towers_and_sizes():
    traced = []
    keras.utils.set_random_seed(1)
    model = keras.Sequential([Watched(traced.append), layers.Dense(OUTPUTS)])
    parallel = _towers(model, 3)
    x, y = _data(30)
    _fit(parallel, x, y, epochs=2)
    # TensorFlow traces once more what creates variables.
    assert traced == [(None, FEATURES)] * 2
    assert model.built


@pytest.mark.slow
def test_sequences_of_many_lengths_are_traced_twice():
    traced = []
    model = keras.Sequential(
        [
            keras.Input((None, 2)),
            Watched(traced.append),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )
    parallel = _towers(model)
    for length in (3, 4, 5, 6, 3):
        parallel.train_on_batch(_numbers(4, length, 2), _numbers(4, 1))
    assert traced == [(None, 3, 2), (None, None, 2)]


def _words():
    ids = np.random.default_rng(0).integers(0, 12, (30, 5))
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(12, 4),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    return model, ids, _numbers(30, 1), "mse"


def _tied():
    ids = np.random.default_rng(0).integers(0, 12, (30, 5))
    a = keras.Input((5,), dtype="int32")
    table = layers.Embedding(12, 4)
    hidden = layers.Dense(4)(layers.Flatten()(table(a)))
    scores = keras.ops.matmul(hidden, keras.ops.transpose(table(keras.ops.arange(12))))
    return keras.Model(a, layers.Dense(1)(scores)), ids, _numbers(30, 1), "mse"


def _two_outputs():
    a = keras.Input((FEATURES,))
    hidden = layers.Dense(8, "tanh")(a)
    outputs = {
        "kind": layers.Dense(OUTPUTS, "softmax", name="kind")(hidden),
        "size": layers.Dense(1, name="size")(hidden),
    }
    labels = np.arange(30) % OUTPUTS
    y = {"kind": labels, "size": _numbers(30, 1)}
    loss = {"kind": "sparse_categorical_crossentropy", "size": "mse"}
    return keras.Model(a, outputs), _numbers(30, FEATURES), y, loss


def _normalised():
    body = layers.BatchNormalization(), layers.Dropout(0.5)
    return _mlp(*body), *_data(30), "mse"


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return keras.ops.mean(keras.ops.square(y - y_pred))


def _own_loss():
    model = OwnLoss([keras.Input((FEATURES,)), layers.Dense(OUTPUTS)])
    return model, *_data(30), "mse"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "eager"),
    [
        (_words, False),
        (_tied, False),
        (_two_outputs, False),
        (_normalised, False),
        (_own_loss, False),
        (_normalised, True),
        (_own_loss, True),
    ],
)
def test_models_of_all_kinds_learn(make, eager):
    model, x, y, loss = make()
    parallel = _towers(
        model,
        3,
        keras.optimizers.Adam(0.02),
        loss,
        steps_per_execution=3,
        run_eagerly=eager,
    )
    losses = _fit(parallel, x, y, epochs=4).history["loss"]
    assert losses[-1] < losses[0]
    assert int(model.optimizer.iterations) == 4 * 12
    # Without a graph, nobody knows.
    assert parallel.loss_placement == (None if eager else "tower")
    parallel.evaluate(_batches(x, y), verbose=0)
    parallel.predict(_batches(x), verbose=0)


@pytest.mark.slow
def test_xla_compiles_the_towers():
    model = _mlp()
    parallel = _towers(model, jit_compile=True)
    losses = _fit(parallel, *_data(32), epochs=3).history["loss"]
    assert losses[-1] < losses[0]
    assert parallel.builder.context.facts.compiled


class _Counter(layers.Layer):
    """Counts its calls in training, and keeps a moving mean."""

    def build(self, shape):
        state = {"shape": (), "initializer": "zeros", "trainable": False}
        self.count = self.add_weight(dtype="int32", **state)
        self.mean = self.add_weight(**state)

    def call(self, x, training=False):
        if training:
            self.count.assign(self.count + 1)
            self.mean.assign(0.9 * self.mean + 0.1)
        return x


@pytest.mark.slow
def test_what_layers_assign_is_added_up():
    model = _mlp(_Counter(), layers.Dropout(0.5))
    parallel = _towers(model, 4, steps_per_execution=5)
    seed = model.layers[2].seed_generator.state
    key, counter = seed.numpy()
    _fit(parallel, *_data(40))
    counting = model.layers[1]
    assert int(counting.count) == 20
    # Stale ones add up to more than one after another would, but never to less.
    assert float(counting.mean) >= (1 - 0.9**20) * 0.999
    np.testing.assert_array_equal(seed.numpy(), [key, counter + 20])


class _Noise(layers.Layer):
    """Adds noise to nothing, and returns it."""

    def __init__(self):
        super().__init__()
        self.generator = keras.random.SeedGenerator(3)
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        noise = keras.random.normal(keras.ops.shape(x), seed=self.generator)
        return x + self.scale * noise


class _Seen(keras.metrics.Metric):
    """Keeps the outputs of all examples, by their number."""

    def __init__(self):
        super().__init__(name="seen")
        self.values = self.add_variable((32, 4), "zeros")

    def update_state(self, y, outputs, sample_weight=None):
        rows = keras.ops.one_hot(keras.ops.cast(y[:, 0], "int32"), 32, axis=0)
        self.values.assign_add(keras.ops.matmul(rows, outputs))

    def result(self):
        return keras.ops.sum(self.values)


def test_each_tower_and_step_draws_its_own():
    seen = _Seen()
    parallel = _towers(
        keras.Sequential([keras.Input((4,)), _Noise()]),
        4,
        keras.optimizers.SGD(0.0),
        metrics=[seen],
        steps_per_execution=4,
    )
    numbers = np.arange(32, dtype="float32")[:, None]
    _fit(parallel, np.zeros((32, 4), "float32"), np.tile(numbers, 4))
    noise = seen.values.numpy()
    assert len(np.unique(noise)) == noise.size


def test_the_loss_scale_is_taken_off_as_it_was_put_on():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(OUTPUTS)])
    # It grows with every update, so that those in flight have an old one.
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05), initial_scale=2.0, dynamic_growth_steps=1
    )
    parallel = _towers(model, 4, optimizer, _slope, steps_per_execution=2)
    x, y = _data(16)
    before = model.get_weights()
    _fit(parallel, x, y)
    steps = [old - new for old, new in zip(before, model.get_weights(), strict=True)]
    # Of each of eight shares of two rows, by hand.
    kernel = x.T @ y / 2 / OUTPUTS * 0.05
    bias = y.sum(0) / 2 / OUTPUTS * 0.05
    assert oracle.largest_difference(steps, [kernel, bias]) < 1e-2


# What goes wrong.


class _Checked(layers.Layer):
    """Fails where an input is larger than 100."""

    def call(self, x):
        check = tf.debugging.assert_less(x, 100.0, "far too large")
        with tf.control_dependencies([check] if check is not None else []):
            return tf.identity(x)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [None, 0, 1])
def test_what_fails_on_one_tower_reaches_the_caller(bound):
    x, y = _data(24)
    model = _mlp(_Checked())
    model.layers[0].activation = keras.activations.linear
    parallel = _towers(model, 3, max_staleness=bound, steps_per_execution=3)
    for row in (0, 5, 21):
        bad = x.copy()
        bad[row] = 1000
        with pytest.raises(tf.errors.InvalidArgumentError, match="far too large"):
            _fit(parallel, bad, y)
        parallel.builder.staleness.reset()
        model.optimizer.iterations.assign(0)
        _fit(parallel, x, y)
        assert int(model.optimizer.iterations) == 9
        assert parallel.builder.staleness.updates == 9


@pytest.mark.parametrize("error", [KeyboardInterrupt, slow(ZeroDivisionError)])
def test_what_fails_in_the_callers_thread_stops_the_towers(error):
    x, y = _data(24)
    model = _mlp()
    parallel = _towers(model, 3, max_staleness=1, steps_per_execution=10)

    def batches():
        yield x[:8], y[:8]
        yield x[8:16], y[8:16]
        raise error

    function = parallel.builder.train_function(parallel._self_program.step_scope)
    with pytest.raises(error):
        function(batches())
    updates = int(model.optimizer.iterations)
    assert updates <= 6
    function(iter([(x, y)]))
    assert int(model.optimizer.iterations) == updates + 3


def test_a_step_of_unknown_size_is_refused():
    parallel = _towers(_mlp())
    spec = tf.TensorSpec([None, FEATURES]), tf.TensorSpec([None, OUTPUTS])
    with pytest.raises(ValueError, match="unknown size"):
        tf.function(parallel.train_step, autograph=False).get_concrete_function(spec)


def test_the_end_of_the_data():
    parallel = _towers(_mlp(), steps_per_execution=2)
    parallel.make_train_function()
    with pytest.raises(StopIteration):
        parallel.train_function(iter([]))


@pytest.mark.slow
def test_layers_that_need_all_towers_are_refused():
    x, y = _data(8)
    model = _mlp(layers.BatchNormalization(synchronized=True))
    with pytest.raises(ModelError, match="use variable_update='parameter_server'"):
        _towers(model).train_on_batch(x, y)
    _towers(_mlp(layers.BatchNormalization(synchronized=True)), 1).train_on_batch(x, y)
    stateful = keras.Sequential(
        [keras.Input(batch_shape=(4, 5, 2)), layers.LSTM(3, stateful=True)]
    )
    with pytest.raises(ModelError, match="stateful"):
        _towers(stateful).train_on_batch(_numbers(4, 5, 2), _numbers(4, 3))


@pytest.mark.parametrize("bound", [-1, 0.5, "none", True])
def test_bad_bounds(bound):
    with pytest.raises(ValueError, match=f"Received max_staleness={bound!r}; expected"):
        Asynchronous(max_staleness=bound)


# Where things run, and what comes of it.


# Forth go four parameters; back four gradients, the loss and two sums of a metric.
@pytest.mark.slow
@pytest.mark.parametrize(("packed", "forth", "back"), [(False, 4, 7), (True, 1, 1)])
def test_towers_compute_on_their_devices(packed, forth, back):
    name = f"asynchronous_{packed}"
    nodes = _executed(name, name, packed=packed)
    products = {d for d, found in nodes.items() if any("MatMul" in n.op for n in found)}
    assert products == {*DEVICES}
    # TensorFlow may tell of graphs that threads begin at once as of one. The others,
    # that apply gradients, run on no tower.
    found = [w[:2] for w in executed.transfers(nodes) if {*w[:2]} & {*DEVICES}]
    ways = collections.Counter(found)
    expected = {(HOME, device): forth for device in DEVICES}
    assert ways == expected | {(device, HOME): back for device in DEVICES}


DEVICES, HOME = ["/device:CPU:1", "/device:CPU:2"], "/device:CPU:3"


def _executed(model_name, name, **options):
    model = keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(8, "tanh"), layers.Dense(OUTPUTS)],
        name=model_name,
    )
    parallel = multi_gpu_model(
        model,
        DEVICES,
        variable_update=Asynchronous(device=HOME, **options),
    )
    parallel.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    return executed.run(lambda: parallel.train_on_batch(*_data(8)), name)


@pytest.mark.slow
def test_digits_are_learned():
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(64, "relu"), layers.Dense(10, "softmax")]
    )
    parallel = _towers(
        model,
        2,
        keras.optimizers.Adam(3e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=23,
    )
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64).cache()
    parallel.fit(data, epochs=20, verbose=0, shuffle=False)
    # How stale gradients are depends on what else the machine does: 0.97 mostly.
    assert parallel.evaluate(x_test, y_test, verbose=0)[1] >= 0.95
