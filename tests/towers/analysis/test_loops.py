"""What is read of a loop, of its lists, and of other functions that are called."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from towers.analysis.dependence import Reader
from towers.analysis.kinds import (
    COLUMNS,
    MEAN,
    NONE,
    ROWS,
    SHAPE,
    SIZE,
    SUM,
    TURNED,
    UNKNOWN,
)

TURNS, UNITS = 3, 2
SHAPES = [None, TURNS, UNITS], [UNITS, UNITS]
DENSE = keras.layers.Dense(UNITS, "tanh", kernel_initializer="orthogonal")
DENSE.build([None, UNITS])
LIST = tf.TensorShape([])


def _loop(turn, *values, times=TURNS, **options):
    """What a loop makes of values, which counts its turns."""
    _, *found = tf.while_loop(
        lambda i, *_: i < times,
        lambda i, *values: (i + 1, *tf.nest.flatten(turn(i, *values))),
        (0, *values),
        **options,
    )
    return found[0] if len(found) == 1 else found


def _state(x, per_example=1):
    return tf.zeros([tf.shape(x)[0] * per_example, UNITS])


def _recurrent(x, w):
    return _loop(lambda i, h: tf.tanh(x[:, i] + h @ w), _state(x))


def _array(x, size=TURNS):
    return tf.TensorArray(tf.float32, size).unstack(tf.transpose(x, [1, 0, 2]))


def _filled(x, value, size=TURNS):
    """An array that a loop fills."""
    array = tf.TensorArray(tf.float32, size)
    turn = lambda i, array: array.write(i, value(i))  # noqa: E731
    return tf.while_loop(
        lambda i, _: i < TURNS, lambda i, a: (i + 1, turn(i, a)), (0, array)
    )[1]


def _some_filled(x, value):
    """Half of an array, by a branch."""
    array = tf.TensorArray(tf.float32, TURNS)
    return tf.while_loop(
        lambda i, _: i < TURNS,
        lambda i, a: (
            i + 1,
            tf.cond(i > 0, lambda: a.write(i, value(i)), lambda: a.write(i, x[:, 0])),
        ),
        (0, array),
    )[1]


@tf.function
def _by_autograph(x, w):
    h = tf.zeros_like(x[:, 0])
    for each in tf.transpose(x, [1, 0, 2]):
        h = tf.tanh(each + h @ w)
    return h


def _in_a_branch(x, w):
    return tf.cond(w[0, 0] > 5.0, lambda: x[:, 0] * 0.0, lambda: _recurrent(x, w))


def _nested(x, w):
    return _loop(lambda i, h: _loop(lambda j, h: h + x[:, j] * x[:, i], h), _state(x))


def _lists_of_pairs(x, w):
    """The rows of a list are two of each example."""
    pairs = tf.reshape(x[:, :2], [-1, UNITS])
    return _filled(x, lambda i: pairs).read(0)


def _joined_again(x, w):
    """Two rows of each example, which become one behind the loop."""
    pairs = tf.reshape(x[:, :2], [-1, UNITS])
    found = _loop(lambda i, h: tf.tanh(h @ w), pairs)
    return tf.reshape(found, [-1, 2 * UNITS])


READ = [
    (_recurrent, ROWS),
    (_by_autograph, ROWS),
    (_in_a_branch, ROWS),
    (_nested, ROWS),
    (_lists_of_pairs, ROWS),
    (_joined_again, ROWS),
    (lambda x, w: _loop(lambda i, h: DENSE(h + x[:, i]), _state(x)), ROWS),
    (lambda x, w: _loop(lambda i, h: h + tf.gather(x, i, axis=1), _state(x)), ROWS),
    (lambda x, w: _filled(x, lambda i: x[:, i] @ w).stack(), COLUMNS),
    (lambda x, w: _filled(x, lambda i: x[:, i] @ w).gather([2, 0]), COLUMNS),
    (lambda x, w: _some_filled(x, lambda i: x[:, i] @ w).stack(), COLUMNS),
    (lambda x, w: _filled(x, lambda i: tf.transpose(x[:, i])).read(1), COLUMNS),
    (lambda x, w: _filled(x, lambda i: _array(x).read(i)).stack(), COLUMNS),
    (lambda x, w: tf.map_fn(tf.tanh, tf.transpose(x, [1, 0, 2])), COLUMNS),
    (lambda x, w: tf.scan(tf.add, tf.transpose(x, [1, 0, 2])), COLUMNS),
    (lambda x, w: tf.foldl(tf.add, tf.transpose(x, [1, 0, 2])), ROWS),
    (lambda x, w: ops.map(tf.tanh, ops.transpose(x, [1, 0, 2])), COLUMNS),
    (lambda x, w: ops.fori_loop(0, TURNS, lambda i, h: h @ w, x[:, 0]), ROWS),
    (
        lambda x, w: ops.while_loop(
            lambda i, h: i < TURNS, lambda i, h: (i + 1, h @ w), (0, x[:, 0])
        )[1],
        ROWS,
    ),
    (
        lambda x, w: ops.scan(
            lambda h, each: (h + each, h * each), _state(x), _array(x).stack()
        )[1],
        COLUMNS,
    ),
    # What adds up over the examples, at each turn.
    (lambda x, w: _loop(lambda i, s: s + tf.reduce_sum(x[:, i]), 0.0), SUM),
    (lambda x, w: _loop(lambda i, s: s + tf.reduce_sum(x), tf.zeros([40, 50])), SUM),
    (lambda x, w: _loop(lambda i, s: s + tf.reduce_mean(x[:, i]), 0.0), MEAN),
    (lambda x, w: _loop(lambda i, s: s + tf.reduce_mean(x[:, i]), 1.0), MEAN),
    (lambda x, w: _filled(x, lambda i: tf.reduce_sum(x[:, i])).stack(), SUM),
    (lambda x, w: _filled(x, lambda i: x[:, i]).size(), NONE),
    (lambda x, w: _filled(x, lambda i: w[i % UNITS]).stack(), NONE),
    (lambda x, w: _loop(lambda i, n: n, tf.shape(x)[0]), SIZE),
    (lambda x, w: _loop(lambda i, n: n, tf.shape(x)), SHAPE),
    (lambda x, w: _loop(lambda i, n: n, tf.shape(tf.transpose(x))), UNKNOWN),
    (lambda x, w: tf.shape(tf.transpose(x, [1, 0, 2])), TURNED),
    (lambda x, w: tf.shape(tf.transpose(x, [1, 0, 2]))[0], NONE),
    (lambda x, w: tf.shape(tf.transpose(x, [1, 0, 2]))[-2], SIZE),
    (lambda x, w: tf.shape(tf.transpose(x, [1, 0, 2]))[:2], UNKNOWN),
    # Where examples meet, or decide.
    (lambda x, w: _loop(lambda i, h: h - tf.reduce_mean(h, 0), x), UNKNOWN),
    (lambda x, w: _loop(lambda i, h: h[::-1], x), UNKNOWN),
    (lambda x, w: _loop(lambda i, s: s + tf.reduce_sum(x), 1.0), UNKNOWN),
    (lambda x, w: _loop(lambda i, s: s * tf.reduce_sum(x), 0.0), UNKNOWN),
    (lambda x, w: _loop(lambda i, h: h @ w, x, times=tf.shape(x)[0]), UNKNOWN),
    (
        lambda x, w: tf.while_loop(
            lambda h: tf.reduce_max(h) > 0.1, lambda h: (h * 0.5,), (x,)
        )[0],
        UNKNOWN,
    ),
    # Over the examples.
    (lambda x, w: tf.map_fn(tf.tanh, x), UNKNOWN),
    (lambda x, w: tf.foldl(tf.add, x), UNKNOWN),
    (lambda x, w: _filled(x, lambda i: x[i]).stack(), UNKNOWN),
    # What one turn leaves is not what the next one takes.
    (
        lambda x, w: _loop(
            lambda i, a, b: (b, tf.reduce_max(x) + a), x[:, 0, 0], x[:, 0, 0]
        )[0],
        UNKNOWN,
    ),
    (
        lambda x, w: _loop(
            lambda i, h: tf.concat([h, x[:, i]], 0),
            x[:, 0],
            shape_invariants=(LIST, tf.TensorShape([None, UNITS])),
        ),
        UNKNOWN,
    ),
    (
        lambda x, w: _loop(
            lambda i, h: _state(x, 2),
            x[:, 0],
            shape_invariants=(LIST, tf.TensorShape([None, UNITS])),
        ),
        UNKNOWN,
    ),
    (
        lambda x, w: _loop(
            lambda i, h: h + x[:, i],
            tf.zeros([1, UNITS]),
            shape_invariants=(LIST, tf.TensorShape([None, UNITS])),
        ),
        UNKNOWN,
    ),
    # Lists of several things.
    (lambda x, w: _some_filled(x, lambda i: x[:, i] - x[:1, i]).stack(), UNKNOWN),
    (
        lambda x, w: _some_filled(x, lambda i: tf.zeros([5, UNITS])).read(0),
        UNKNOWN,
    ),
    (lambda x, w: _filled(x, lambda i: x[:, i]).concat(), UNKNOWN),
    (lambda x, w: _filled(x, lambda i: x[:, i], tf.shape(x)[0]).stack(), UNKNOWN),
    # Random numbers, a variable, and what only the host does.
    (
        lambda x, w: _loop(
            lambda i, h: h + tf.random.stateless_normal(tf.shape(h), [1, i]), x
        ),
        UNKNOWN,
    ),
    (
        lambda x, w: _loop(
            lambda i, h: h + tf.random.stateless_normal([UNITS], [1, i]), x
        ),
        ROWS,
    ),
    (lambda x, w: _loop(lambda i, h: h + tf.random.normal([UNITS]), x), UNKNOWN),
    (
        lambda x, w: _loop(lambda i, h: h + DENSE.bias.value.assign_add([1.0, 1.0]), x),
        UNKNOWN,
    ),
    (
        lambda x, w: _loop(
            lambda i, h: tf.ensure_shape(
                tf.numpy_function(np.tanh, [h], tf.float32), h.shape
            ),
            x,
        ),
        UNKNOWN,
    ),
]


@pytest.mark.parametrize(("function", "found"), READ)
def test_what_a_loop_returns(function, found):
    @tf.function(autograph=False)
    def trace(x, w):
        value = tf.convert_to_tensor(function(x, w))
        trace.found = Reader([x], {}, meets=lambda op: True).of(value)

    trace.get_concrete_function(*map(tf.TensorSpec, SHAPES))
    assert trace.found is found


def test_what_is_read_as_rows_is_computed_apart():
    random = np.random.default_rng(0)
    x = random.uniform(0.1, 1.0, [4, TURNS, UNITS]).astype("float32")
    w = random.normal(size=[UNITS, UNITS]).astype("float32")
    for number, (function, kind) in enumerate(READ):
        if kind not in (COLUMNS, ROWS, SUM):
            continue
        whole, *apart = (
            np.asarray(function(tf.constant(part), tf.constant(w)))
            for part in (x, x[:1], x[1:])
        )
        axis = int(kind is COLUMNS)
        joined = sum(apart) if kind is SUM else np.concatenate(apart, axis)
        np.testing.assert_allclose(joined, whole, rtol=1e-5, err_msg=f"case {number}")


def test_how_many_rows_a_loop_has_of_each_example():
    @tf.function(autograph=False)
    def trace(x):
        reader = Reader([x], {}, meets=lambda op: True)
        pairs = tf.reshape(x[:, :2], [-1, UNITS])
        again = _loop(lambda i, h: tf.tanh(h), pairs)
        joined = tf.concat([x[:, 0], x[:, 1]], 0)
        blocks = _loop(lambda i, h: tf.tanh(h), joined)
        assert reader.of(again) is reader.of(blocks) is ROWS
        assert reader.counts.of(again) == reader.counts.of(blocks) == 2
        assert reader.blocks.of(again) is None
        assert reader.blocks.of(blocks) == (1, 1)
        # Neither are the rows of one paired with those of the other.
        other = _loop(lambda i, h: h if i is None else h + again, joined)
        assert reader.of(other) is UNKNOWN

    trace.get_concrete_function(tf.TensorSpec(SHAPES[0]))


def test_what_is_kept_for_a_gradient_leaves_a_loop_as_it_is():
    @tf.function(autograph=False)
    def trace(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            h = _recurrent(x, w)
            loss = tf.reduce_sum(h)
        loop, before = h.op, len(h.op.outputs)
        tape.gradient(loss, w)
        reader = Reader([x], {}, meets=lambda op: True)
        assert len(loop.outputs) > before
        assert {*map(reader.of, loop.outputs)} == {NONE, ROWS, SHAPE}

    trace.get_concrete_function(*map(tf.TensorSpec, SHAPES))
