"""Steps that a model defines itself, on towers that do not wait for one another."""

import functools
import importlib
import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import executed, oracle
from tests.limits import HANG_S
from tests.valued import valued
from towers import Asynchronous, multi_gpu_model
from towers.builders.asynchronous.tower_step import TowerStep
from towers.layers import variables
from towers.numerics import NotFiniteStep

pytestmark = pytest.mark.quick_one_in(2)

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=[16, 4]).astype("float32")
Y = RANDOM.normal(size=[16, 1]).astype("float32")


class Rivals(keras.Model):
    """Trains two networks in turn; the second one reads what the first has become."""

    def __init__(self, optimizer=keras.optimizers.Adam, name=None):
        super().__init__(name=name)
        keras.utils.set_random_seed(3)
        self.of = [keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
        self.optimizers = [optimizer(0.05) for _ in range(2)]
        self.tracker = keras.metrics.Mean(name="loss")
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)
        for layer, optimizer, size in zip(
            self.of, self.optimizers, (4, 3), strict=True
        ):
            layer.build((None, size))
            optimizer.build(layer.trainable_weights)

    @property
    def metrics(self):
        """The mean loss."""
        return [self.tracker]

    def call(self, x):
        """Passes both."""
        return self.of[1](self.of[0](x))

    def train_step(self, data):
        """Trains on x and y."""
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        for layer, optimizer in zip(self.of, self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y) * tf.sqrt(x[:, :1] + 9))
            weights = layer.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
            self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def rivals(**options):
    model = Rivals(**options)
    model.compile(jit_compile=False)
    return model


def towers_of(model, gpus=2, **options):
    return multi_gpu_model(model, gpus, **valued("asynchronous", **options))


def compiled(parallel, **options):
    parallel.compile(jit_compile=False, **options)
    return parallel


def values(model):
    """All that training changes."""
    parts = *model.of, *model.optimizers, model.tracker
    found = [variable.numpy() for part in parts for variable in part.variables]
    return [*found, model.seen.numpy()]


def fit(parallel, rows=16, size=8, **options):
    data = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(size)
    return parallel.fit(data, verbose=0, **options).history


def one_after_another(parts, **options):
    """What one device makes of parts of batches."""
    model = rivals(**options)
    # Keras resets metrics in each call.
    batches = [(X[part], Y[part]) for part in parts]
    model.fit((each for each in batches), steps_per_epoch=len(batches), verbose=0)
    return values(model)


# Numbers.


@pytest.mark.slow
def test_serialised_steps_are_those_of_one_device_in_some_order():
    model = rivals()
    parallel = compiled(towers_of(model, max_staleness=0), steps_per_execution=2)
    fit(parallel)
    staleness = parallel.builder.staleness
    assert (staleness.updates, staleness.maximum) == (8, 0)
    first, second = [slice(0, 4), slice(8, 12)], [slice(4, 8), slice(12, 16)]
    found = []
    # Each tower's parts come in order.
    for mine in itertools.combinations(range(4), 2):
        left = {True: iter(first), False: iter(second)}
        order = [next(left[k in mine]) for k in range(4)]
        wanted = one_after_another(order)
        found.append(oracle.largest_difference(values(model), wanted))
    assert min(found) <= 1e-5
    # These orders differ.
    assert max(found) > 1e-3


@pytest.fixture
def second_tower_first(monkeypatch):
    """The first tower begins to compute when the second one has done its step."""
    trace, done = TowerStep.trace, threading.Event()

    def is_first(local):
        return np.array_equal(tf.nest.flatten(local)[0][0], X[0])

    def wait(function, local, *given):
        if is_first(local):
            assert done.wait(HANG_S)
        return function(local, *given)

    def end(function, local, *given):
        made = function(local, *given)
        if not is_first(local):
            done.set()
        return made

    def traced(step, spec):
        parts = trace(step, spec)
        away = next(k for k, part in enumerate(parts) if not part.at_home)
        for place, wrapped in (away, wait), (-1, end):
            function = functools.partial(wrapped, parts[place].function)
            parts[place] = parts[place]._replace(function=function)
        return parts

    monkeypatch.setattr(TowerStep, "trace", traced)


def _momentum(rate):
    # Adam counts steps as they begin, in whichever order.
    return keras.optimizers.SGD(rate, momentum=0.9)


def test_towers_do_not_wait_and_no_update_is_lost(second_tower_first):
    model = rivals(optimizer=_momentum)
    parallel = compiled(towers_of(model))
    fit(parallel, rows=8)
    staleness = parallel.builder.staleness
    # The second tower made both of its updates before the first one made any.
    assert (staleness.updates, staleness.mean, staleness.maximum) == (4, 0.5, 2)
    wanted = rivals(optimizer=_momentum)
    x, y = X[:4], Y[:4]
    losses = []

    def gradient(layer):
        with tf.GradientTape() as tape:
            roots = tf.sqrt(x[:, :1] + 9)
            loss = tf.reduce_mean(tf.square(wanted(x) - y) * roots)
        losses.append(loss)
        return tape.gradient(loss, layer.trainable_weights)

    stale = gradient(wanted.of[0])
    wanted.train_on_batch(X[4:8], Y[4:8])
    wanted.optimizers[0].apply(stale, wanted.of[0].trainable_weights)
    # What is read after an update is what it is then.
    fresh = gradient(wanted.of[1])
    wanted.optimizers[1].apply(fresh, wanted.of[1].trainable_weights)
    wanted.seen.assign_add(4)
    for loss in losses:
        wanted.tracker.update_state(loss)
    assert oracle.largest_difference(values(model), values(wanted)) <= 1e-5


def test_moving_means_move_by_each_part(second_tower_first):
    class Moving(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = keras.layers.BatchNormalization(momentum=0.5)
            self.norm.build((None, 4))

        def call(self, x):
            return self.norm(x, training=True)

        def train_step(self, data):
            return {"sum": tf.reduce_sum(self(data))}

    model, data = Moving(), tf.data.Dataset.from_tensors(X[:8])
    compiled(towers_of(model)).fit(data, verbose=0)
    # The second tower was first.
    wanted = X[4:8].mean(0) / 4 + X[:4].mean(0) / 2
    np.testing.assert_allclose(model.norm.moving_mean, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 1, 2, None])
def test_every_part_is_applied_within_the_bound(bound):
    model = rivals()
    parallel = towers_of(model, 4, max_staleness=bound)
    # Towers without rows among them.
    losses = fit(compiled(parallel, steps_per_execution=4), size=6, epochs=5)["loss"]
    assert losses[-1] < losses[0]
    parts = 5 * (4 + 4 + 4)
    assert [int(each.iterations) for each in model.optimizers] == [parts] * 2
    assert float(model.seen) == 5 * 16
    staleness = parallel.builder.staleness
    assert staleness.updates == 2 * parts
    assert bound is None or staleness.maximum <= bound
    fit(parallel, rows=1)
    assert float(model.seen) == 5 * 16 + 1


EXAMPLES = "accumulate", "dcgan", "sam", "wgan_gp", "fixmatch", "simclr", "vae"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("accumulate", 2),
        *((name, 2) for name in EXAMPLES if name != "accumulate"),
        *((name, 4) for name in EXAMPLES),
    ],
)
def test_examples_learn(name, gpus):
    keras.utils.set_random_seed(0)
    example = importlib.import_module(f"examples.steps.{name}")
    model = example.build()
    data = tf.data.Dataset.from_tensor_slices(example.data()).batch(32).take(20)
    # Staler updates with momentum make SAM learn little.
    parallel = towers_of(model, gpus, max_staleness=1)
    history = parallel.fit(data, epochs=4, verbose=0).history
    most = max(int(e.iterations) for e in variables.optimizers(model).values())
    # Three times a step, or every fourth one, by examples of their own.
    each = {"wgan_gp": 3, "accumulate": 1 / 4}.get(name, 1)
    assert most == 80 * gpus * each
    assert np.all(np.isfinite([*history.values()]))
    # The losses of rivals, and of labels that are yet to come, need not fall.
    if name not in ("dcgan", "fixmatch", "wgan_gp"):
        loss = next(k for k in ("loss", "unlike", "bound") if k in history)
        assert history[loss][-1] < history[loss][0]


class Drawing(keras.Model):
    """Keeps what it draws for each example; it trains nothing."""

    def __init__(self):
        super().__init__()
        self.noise = keras.random.SeedGenerator(2)
        self.drawn = self.add_weight(shape=(32,), initializer="zeros", trainable=False)

    def call(self, x):
        """Returns it."""
        return x

    def train_step(self, rows):
        """Draws for some rows, which are numbers."""
        noise = keras.random.normal(tf.shape(rows), seed=self.noise)
        places = tf.one_hot(tf.cast(rows[:, 0], tf.int32), 32, axis=0)
        self.drawn.assign_add(tf.matmul(places, noise)[:, 0])
        return {"norm": tf.norm(self.drawn)}


def test_each_part_draws_its_own_and_a_step_without_an_update_works():
    model = Drawing()
    parallel = compiled(towers_of(model, 4), steps_per_execution=2)
    rows = np.arange(32, dtype="float32")[:, None]
    parallel.fit(rows, batch_size=8, verbose=0)
    drawn = model.drawn.numpy()
    assert len({*drawn}) == 32 and np.all(drawn)
    assert parallel.builder.staleness.updates == 0


class Evaluated(Rivals):
    """Evaluates by a step of its own, too."""

    def test_step(self, data):
        """The mean error of the whole batch, and its largest one."""
        errors = tf.abs(self(data[0]) - data[1])
        return {"mean": tf.reduce_mean(errors), "largest": tf.reduce_max(errors)}


@pytest.mark.slow
def test_evaluation_and_prediction_are_those_of_one_device():
    model = Evaluated()
    parallel = compiled(towers_of(model, 3))
    fit(parallel)
    found = parallel.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True)
    errors = np.abs(model(X) - Y)
    assert found == pytest.approx(
        {"mean": errors.mean(), "largest": errors.max()}, rel=1e-5
    )
    np.testing.assert_allclose(parallel.predict(X, verbose=0), model(X), rtol=1e-5)


def test_a_step_may_return_the_batch_and_what_is_outside():
    class Returning(keras.Model):
        def call(self, x):
            return x

        def train_step(self, data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            return {"rows": tf.reduce_sum(x), "one": tf.constant(1.0)}

    model = Returning()
    logs = compiled(towers_of(model)).train_on_batch(X[:3], return_dict=True)
    assert logs["one"] == 1 and np.isfinite(logs["rows"])


@pytest.mark.slow
def test_sizes_of_many_lengths_are_traced_twice():
    traced = []

    class Counting(Rivals):
        def train_step(self, data):
            traced.append(data[0].shape[1])
            x = tf.reduce_mean(data[0], axis=1)
            return super().train_step((x, data[1]))

    model = Counting()
    parallel = compiled(towers_of(model))
    for length in (3, 4, 5, 6, 3):
        rows = np.repeat(X[:4, None], length, axis=1)
        parallel.train_on_batch(rows, Y[:4])
    assert {*traced} == {3, None}


@pytest.mark.slow
def test_towers_take_turns_without_graphs():
    model = rivals()
    parallel = towers_of(model)
    parallel.compile(run_eagerly=True)
    fit(parallel, rows=8)
    wanted = one_after_another([slice(0, 4), slice(4, 8)])
    assert oracle.largest_difference(values(model), wanted) <= 1e-5
    assert parallel.builder.staleness.updates == 2


@pytest.mark.slow
def test_time_is_measured():
    parallel = compiled(towers_of(rivals()))
    fit(parallel)
    totals = parallel.builder.timers.totals()
    assert totals.steps == 2 and min(totals.towers_s) > 0 and totals.reduce_s > 0


# What goes wrong.


@pytest.mark.slow
def test_the_tower_of_a_gradient_that_is_not_finite_is_named():
    model = rivals()
    parallel = compiled(towers_of(model, check_numerics=True))
    bad = X[:8].copy()
    bad[5, 0] = -10
    fit(parallel, rows=8)
    with pytest.raises(NotFiniteStep, match=r"Step \d .*gradient.*tower 1 of 2"):
        parallel.fit(bad, Y[:8], batch_size=8, shuffle=False, verbose=0)
    assert all(np.all(np.isfinite(each)) for each in model.get_weights())
    fit(parallel, rows=8)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [None, 0])
def test_a_step_that_fails_reaches_the_caller(bound):
    class Checked(Rivals):
        def train_step(self, data):
            x = tf.debugging.check_numerics(data[0], "far too large")
            return super().train_step((x, data[1]))

    model = Checked()
    parallel = compiled(towers_of(model, 3, max_staleness=bound), steps_per_execution=2)
    for row in (0, 5, 15):
        bad = X.copy()
        bad[row] = np.inf
        with pytest.raises(tf.errors.InvalidArgumentError, match="far too large"):
            parallel.fit(bad, Y, batch_size=8, shuffle=False, verbose=0)
        seen = float(model.seen)
        fit(parallel)
        assert float(model.seen) == seen + 16


# Where things run.


@pytest.mark.slow
def test_towers_compute_on_their_devices():
    devices, home = ["/device:CPU:1", "/device:CPU:2"], "/device:CPU:3"
    optimizer = functools.partial(keras.optimizers.Adam, name="own_adam")
    model = rivals(name="own_where", optimizer=optimizer)
    options = {"variable_update": Asynchronous(device=home)}
    parallel = compiled(multi_gpu_model(model, devices, **options))

    # Each part of a step is a graph of its own. TensorFlow tells of it once.
    nodes = executed.run(lambda: parallel.train_on_batch(X[:8], Y[:8]), "own_")
    products = {d for d, found in nodes.items() if any("MatMul" in n.op for n in found)}
    assert products == {*devices}
    updates = {d for d, found in nodes.items() if any("Assign" in n.op for n in found)}
    assert updates == {home}
