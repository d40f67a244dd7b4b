"""Models with loops of their own are trained as on one device, if read on towers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.variants import slow
from towers import multi_gpu_model

TURNS, FEATURES, UNITS = 4, 3, 2
X = np.random.default_rng(0).normal(size=[5, TURNS, FEATURES]).astype("float32")
Y = np.random.default_rng(1).normal(size=[5, 1]).astype("float32")


@tf.custom_gradient
def _clipped(weights):
    return weights * 1.0, lambda gradient: tf.clip_by_norm(gradient, 0.01)


class Looping(keras.layers.Layer):
    """Goes over time, in a way of its own."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.dense = keras.layers.Dense(UNITS, "tanh")
        self.total = tf.Variable(tf.zeros([UNITS]), trainable=False)
        self.seed = keras.random.SeedGenerator(1)

    def build(self, shape):
        """Makes the weights."""
        self.kernel = self.add_weight(shape=[FEATURES, UNITS])
        self.recurrent = self.add_weight(shape=[UNITS, UNITS])
        self.dense.build([None, FEATURES + UNITS])

    def call(self, x):
        """Returns a state for each example."""
        return getattr(self, self.way)(x)

    def turn(self, each, state):
        """What a turn makes of a state."""
        return tf.tanh(each @ self.kernel + state @ self.recurrent)

    def loop(self, turn, state, *others):
        """Loops over time; `turn` takes the number of the turn, and what it made."""
        return tf.while_loop(
            lambda i, *_: i < TURNS,
            lambda i, *values: (i + 1, *turn(i, *values)),
            (0, state, *others),
        )[1:]

    def start(self, x):
        """The first state."""
        return tf.zeros([tf.shape(x)[0], UNITS])

    def a_while_loop(self, x):
        """A recurrent network."""
        return self.loop(lambda i, h: [self.turn(x[:, i], h)], self.start(x))[0]

    def arrays(self, x):
        """What the turns take and make is in arrays."""
        given = tf.TensorArray(tf.float32, TURNS, clear_after_read=False)
        given = given.unstack(tf.transpose(x, [1, 0, 2]))

        def turn(i, h, made):
            h = self.turn(given.read(i), h)
            return h, made.write(i, h)

        made = tf.TensorArray(tf.float32, TURNS)
        _, made = self.loop(turn, self.start(x), made)
        return tf.reduce_sum(tf.transpose(made.stack(), [1, 0, 2]), 1)

    def a_layer(self, x):
        """A layer is called at each turn."""
        turn = lambda i, h: [self.dense(tf.concat([x[:, i], h], -1))]  # noqa: E731
        return self.loop(turn, self.start(x))[0]

    def a_scan(self, x):
        """Keras loops."""
        each = ops.transpose(x, [1, 0, 2])
        turn = lambda h, each: 2 * [self.turn(each, h)]  # noqa: E731
        last, every = ops.scan(turn, ops.zeros([ops.shape(each)[1], UNITS]), each)
        return last + ops.sum(every, 0)

    def a_loss(self, x):
        """A loss is added up."""

        def turn(i, h, loss):
            h = self.turn(x[:, i], h)
            return h, loss + tf.reduce_mean(tf.square(h))

        h, loss = self.loop(turn, self.start(x), 0.0)
        self.add_loss(loss)
        return h

    @tf.function
    def by_autograph(self, x):
        """A loop over a tensor."""
        h = self.start(x)
        for each in tf.transpose(x, [1, 0, 2]):
            h = self.turn(each, h)
        return h

    def several_rows(self, x):
        """Each example has a row for each time."""
        each = tf.reshape(x, [-1, FEATURES])
        (h,) = self.loop(lambda i, h: [self.turn(each, h)], each @ self.kernel)
        return tf.reduce_mean(tf.reshape(h, [-1, TURNS, UNITS]), 1)

    def coupled(self, x):
        """Examples meet at each turn."""

        def turn(i, h):
            return [self.turn(x[:, i], h - tf.reduce_mean(h, 0))]

        return self.loop(turn, self.start(x))[0]

    def coupled_in_a_list(self, x):
        """They do in what is written, but not in the state."""

        def turn(i, h, made):
            h = self.turn(x[:, i], h)
            return h, made.write(i, h - tf.reduce_mean(h, 0))

        made = tf.TensorArray(tf.float32, TURNS)
        h, made = self.loop(turn, self.start(x), made)
        return h + tf.reduce_sum(tf.transpose(made.stack(), [1, 0, 2]), 1)

    def coupled_behind(self, x):
        """They do behind a loop, which is read, but whose gradient is at home."""
        h = self.arrays(x)
        return h - tf.reduce_max(tf.nn.softmax(h, 0), 0)

    def a_list_for_two(self, x):
        """Two loops take a list, of which one lets examples meet."""
        given = tf.TensorArray(tf.float32, TURNS, clear_after_read=False)
        given = given.unstack(tf.transpose(x, [1, 0, 2]))

        def turn(i, h):
            return [self.turn(given.read(i), h)]

        def other(i, h):
            return [self.turn(given.read(i), h - tf.reduce_mean(h, 0))]

        (mine,) = self.loop(turn, self.start(x))
        return mine + self.loop(other, self.start(x))[0]

    def until_all_are_small(self, x):
        """All examples decide how many turns there are."""
        return tf.while_loop(
            lambda h: tf.reduce_max(tf.abs(h)) > 0.5,
            lambda h: [0.9 * tf.tanh(h @ self.recurrent)],
            [x[:, 0] @ self.kernel],
        )[0]

    def over_examples(self, x):
        """One example after the other."""
        found = tf.map_fn(lambda each: tf.reduce_sum(each @ self.kernel, 0), x)
        return tf.ensure_shape(found, [None, UNITS])

    def drawn(self, x):
        """Random numbers of each example and turn, by one seed."""
        seed = tf.cast(self.seed.next(), tf.int32)

        def turn(i, h):
            drawn = tf.random.stateless_uniform(tf.shape(h), seed + i)
            return [self.turn(x[:, i], h) * drawn]

        return self.loop(turn, self.start(x))[0]

    def a_variable(self, x):
        """A variable is assigned."""

        def turn(i, h):
            h = self.turn(x[:, i], h)
            self.total.assign_add(tf.reduce_mean(h, 0))
            return [h]

        return self.loop(turn, self.start(x))[0] + self.total

    def a_gradient_of_ones_own(self, x):
        """The gradient of weights is not that of parts, added."""

        def turn(i, h):
            return [tf.tanh(x[:, i] @ _clipped(self.kernel.value) + h)]

        return self.loop(turn, self.start(x))[0]


LONG = {"a_list_for_two", "coupled_behind", "coupled_in_a_list"}
READ = "a_while_loop arrays a_layer a_scan a_loss by_autograph several_rows".split()
AT_HOME = [
    name
    for name, value in vars(Looping).items()
    if value.__doc__
    and name not in (*READ, *"build call turn loop start __init__".split())
    and not name.startswith("_")
]


def _model(way):
    keras.utils.set_random_seed(0)
    layers = [keras.Input([TURNS, FEATURES]), Looping(way), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def _trained(model, parallel):
    """Trains a model, also on a batch whose last example is the only one."""
    alone = parallel is model
    parallel.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=alone)
    given = {"batch_size": 4, "epochs": 1, "shuffle": False, "verbose": 0}
    losses = parallel.fit(X, Y, **given).history["loss"]
    return [*losses, *model.get_weights()]


def _check(caplog, way, **options):
    """Compares with one device; returns what is said to run on one device."""
    model, plain = _model(way), _model(way)
    found = _trained(model, multi_gpu_model(model, 2, **options))
    for mine, other in zip(found, _trained(plain, plain), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    return [text for text in caplog.messages if "on one device, with the" in text]


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("way", READ)
def test_loops_that_are_read_run_on_towers(way, caplog):
    assert not _check(caplog, way)


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize("way", [slow(way) if way in LONG else way for way in AT_HOME])
def test_other_loops_run_at_home(way, caplog):
    (line,) = _check(caplog, way)
    assert "'While'" in line or "'TensorList" in line


@pytest.mark.slow
@pytest.mark.parametrize("way", ["a_while_loop", "arrays", "a_loss"])
def test_loops_run_with_copies_of_variables(way, caplog):
    options = {"variable_update": "replicated", "micro_batches": 2}
    assert not _check(caplog, way, **options)


def _turns(turn, x):
    return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, turn(i, y)), [0, x])[
        1
    ]


def _check_turn(i, y):
    del i
    tf.debugging.assert_less(y, 1e6)
    return 2.0 * y


def _branch(i, y):
    return tf.cond(i < 2, lambda: 2.0 * y, lambda: tf.tanh(y))


def _case(i, y):
    first, second = (i < 1, lambda: 2.0 * y), (i < 2, lambda: tf.tanh(y))
    return tf.case([first, second], lambda: y + 1.0)


def _switch(i, y):
    return tf.switch_case(i, [lambda: 2.0 * y, lambda: tf.tanh(y), lambda: y + 1.0])


@tf.function
def _called(y):
    return tf.tanh(y) + 1.0


def _python(i, y):
    factor = tf.py_function(lambda i: tf.cast(i, tf.float32), [i], tf.float32)
    return y * tf.ensure_shape(tf.stop_gradient(factor), [])


def _if_wide(function, x):
    """A branch that depends on no example."""
    return tf.cond(tf.shape(x)[1] > 1, lambda: function(x), lambda: x)


def _over_time(turn, x):
    """Folds each example's values over time; `turn` takes those of one time."""
    x = x[..., None] * tf.constant([1.0, 2.0, 3.0])
    return tf.reduce_sum(turn(tf.transpose(x, [2, 0, 1])), 0)


# Functions that call functions, which call others.
NESTS = {
    "check in while": lambda x: _turns(_check_turn, x),
    "cond in while": lambda x: _turns(_branch, x),
    "case in while": lambda x: _turns(_case, x),
    "switch in while": lambda x: _turns(_switch, x),
    "function in while": lambda x: _turns(lambda _, y: _called(y), x),
    "py_function in while": lambda x: _turns(_python, x),
    "while in while": lambda x: _turns(lambda _, y: _turns(_branch, y), x),
    "while in cond": lambda x: _if_wide(lambda x: _turns(_branch, x), x),
    "check in cond": lambda x: _if_wide(lambda x: _check_turn(0, x), x),
    "check in scan": lambda x: _over_time(
        lambda x: tf.scan(lambda y, x: _check_turn(0, x + y), x), x
    ),
    "check in map_fn": lambda x: _over_time(
        lambda x: tf.map_fn(lambda x: _check_turn(0, x), x), x
    ),
    "check in map_fn of examples": lambda x: tf.map_fn(
        lambda row: _check_turn(0, row), x
    ),
}


class Nest(keras.layers.Layer):
    """Computes what a function does."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        """Returns a row for each example."""
        return self.function(x)

    def compute_output_shape(self, shape):
        """Each function keeps the shape."""
        return shape


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("name", NESTS)
def test_functions_within_functions(name):
    x = X[:, 0]

    def results(wrap):
        keras.utils.set_random_seed(0)
        dense, another = keras.layers.Dense(FEATURES), keras.layers.Dense(1)
        nest = Nest(NESTS[name])
        model = wrap(keras.Sequential([keras.Input([FEATURES]), dense, nest, another]))
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        given = {"batch_size": 4, "verbose": 0}
        yield model.predict(x, **given)
        yield model.predict_on_batch(x)
        yield model.evaluate(x, Y, **given)
        yield model.test_on_batch(x, Y)
        yield model.train_on_batch(x, Y)
        yield model.fit(x, Y, shuffle=False, **given).history["loss"]

    ours, theirs = (
        results(lambda model: multi_gpu_model(model, 2)),
        results(lambda m: m),
    )
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


class Branching(keras.Model):
    """Adds, to its loss, a branch with a sum that a gradient needs as well."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        total = tf.reduce_sum(x)
        with tf.GradientTape() as tape:
            errors = tf.square(self(x) - y)
            rows, more = tf.cond(
                self.scale > 0,
                lambda: (errors * 2.0 * self.scale, total * 2.0 * self.scale),
                lambda: (errors, total),
            )
            loss = tf.reduce_sum(rows) + more
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_what_a_branch_keeps_for_its_gradient_asks_for_no_total():
    found = []
    for towers in (0, 2):
        keras.utils.set_random_seed(1)
        model = Branching()
        model(X[:1, 0])
        trained = multi_gpu_model(model, towers) if towers else model
        trained.compile(keras.optimizers.SGD(0.01))
        given = {"batch_size": 4, "shuffle": False, "verbose": 0}
        history = trained.fit(X[:, 0], Y, **given).history
        found.append([*history["loss"], *model.get_weights()])
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
