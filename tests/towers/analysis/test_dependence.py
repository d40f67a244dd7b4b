"""How a traced value depends on the examples: proved, or not at all."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from towers.analysis.dependence import Reader
from towers.analysis.kinds import Dependence
from towers.analysis.layer_calls import is_trusted, recorded_layers
from towers.keras_adapter.layers import set_tag
from towers.models.block_sparse import block_sparse_matmul

SUM, MEAN, ROWS, NONE = (
    Dependence.SUM,
    Dependence.MEAN,
    Dependence.ROWS,
    Dependence.NONE,
)
COLUMNS, LAST, COUPLED, UNKNOWN = (
    Dependence.COLUMNS,
    Dependence.LAST,
    Dependence.COUPLED,
    Dependence.UNKNOWN,
)


def _read(function):
    """Reads what a function of x (n, 4), y (n,) and weights (4, 2) returns."""

    @tf.function(autograph=False)
    def trace(x, y, weights):
        with recorded_layers() as calls:
            value = function(x, y, weights)
        trace.found = Reader([x, y], calls).of(tf.convert_to_tensor(value))

    trace.get_concrete_function(
        tf.TensorSpec([None, 4]), tf.TensorSpec([None]), tf.TensorSpec([4, 2])
    )
    return trace.found


def _size(x):
    return ops.cast(ops.shape(x)[0], "float32")


def _halved(x):
    return ops.cast(ops.cast(0.5 * _size(x), "int32"), "float32")


@tf.custom_gradient
def _clipped(x):
    return x, lambda gradient: tf.clip_by_norm(gradient, 0.1)


@tf.function(autograph=False)
def _in_function(x, y):
    return tf.reduce_mean(tf.square(y - tf.reduce_sum(x, -1)))


def _turned(x, last=2):
    """As queries and keys are laid out: (2, n, 2)."""
    return tf.transpose(tf.reshape(x, [-1, 4 // last, last]), [1, 0, 2])


def _slabs(x, last=-1):
    """As block-sparse products have features: (2, 2, n)."""
    return tf.reshape(tf.transpose(x), [2, 2, last])


def _joined(x, rows=None):
    """Makes one row of two."""
    return tf.reshape(x, [-1 if rows is None else rows, 2, *x.shape[1:]])


def _halves(x):
    return tf.reshape(x, [-1, 2])


def _written(values):
    """An array with values written into it one by one, as a recurrent layer does."""
    array = tf.TensorArray(tf.float32, size=len(values))
    for place, value in enumerate(values):
        array = array.write(place, value)
    return array


def _convolve(x, w):
    kernel = tf.reshape(w, [2, 2, 1, 2])
    return tf.nn.conv2d(x[:, None, :, None], kernel, 1, "SAME")


CASES = [
    (lambda x, y, w: ops.sum(w), NONE),
    (lambda x, y, w: x * 2 + 1, ROWS),
    (lambda x, y, w: ops.matmul(x, w), ROWS),
    (lambda x, y, w: ops.softmax(x), ROWS),
    (lambda x, y, w: tf.slice(tf.shape(x), [0], [1]), Dependence.SHAPE),
    (lambda x, y, w: tf.slice(tf.shape(x), [tf.rank(x) - 1], [1]), NONE),
    (lambda x, y, w: tf.nn.softmax_cross_entropy_with_logits(x, x), ROWS),
    (lambda x, y, w: keras.losses.CategoricalCrossentropy()(x, ops.exp(x)), MEAN),
    (
        lambda x, y, w: keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=0.1
        )(x, x),
        MEAN,
    ),
    (lambda x, y, w: ops.max(x, axis=-1), ROWS),
    (lambda x, y, w: ops.reshape(x, [-1, 2]), ROWS),
    (lambda x, y, w: x[..., 0] * y, ROWS),
    (lambda x, y, w: x[:, 1:3], ROWS),
    (lambda x, y, w: ops.zeros_like(x), ROWS),
    (lambda x, y, w: ops.pad(x, [[0, 0], [1, 2]]), ROWS),
    (lambda x, y, w: tf.tile(x, [1, 3]), ROWS),
    (lambda x, y, w: ops.cumsum(x, axis=-1), ROWS),
    (lambda x, y, w: tf.einsum("bi,io->bo", x, w), ROWS),
    (lambda x, y, w: tf.einsum("bi,bj->bij", x, x), ROWS),
    (lambda x, y, w: tf.einsum("bi,bj->ij", x, x), SUM),
    (lambda x, y, w: tf.einsum("bi,ci->bc", x, x), COUPLED),
    (
        lambda x, y, w: tf.split(x, 2, axis=1)[1] + tf.unstack(x, axis=1)[0][:, None],
        ROWS,
    ),
    (lambda x, y, w: x[0:] / ops.cast(ops.shape(x)[-1], "float32"), ROWS),
    (lambda x, y, w: ops.top_k(x, 2)[0], ROWS),
    (
        lambda x, y, w: tf.nn.conv2d(
            x[:, None, :, None], tf.reshape(w, [2, 2, 1, 2]), 1, "SAME"
        ),
        ROWS,
    ),
    (lambda x, y, w: ops.sum(x), SUM),
    (lambda x, y, w: ops.sum(x, axis=0), SUM),
    (lambda x, y, w: 2 * ops.sum(x**2) + ops.sum(y), SUM),
    (lambda x, y, w: ops.matmul(ops.transpose(x), x), SUM),
    (lambda x, y, w: tf.nn.l2_loss(x), SUM),
    (lambda x, y, w: 0.0 + ops.sum(x), SUM),
    (lambda x, y, w: ops.sum(ops.matmul(ops.transpose(x**2), x)), SUM),
    (lambda x, y, w: tf.matmul(x, x, transpose_a=True), SUM),
    (lambda x, y, w: ops.mean(x), MEAN),
    (lambda x, y, w: ops.mean(ops.sum(x, axis=-1)), MEAN),
    (lambda x, y, w: ops.mean(x) + ops.sum(w**2), MEAN),
    (lambda x, y, w: ops.sum(x) / _size(x), MEAN),
    (lambda x, y, w: 0.9 * ops.sum(w) - 0.1 * ops.mean(y), MEAN),
    (lambda x, y, w: ops.sum(ops.stack([ops.mean(x), ops.sum(w)])), MEAN),
    (lambda x, y, w: keras.losses.MeanSquaredError()(y, x[:, 0]), MEAN),
    (lambda x, y, w: keras.losses.MeanSquaredError("sum")(x, 2 * x), SUM),
    (
        lambda x, y, w: keras.losses.SparseCategoricalCrossentropy()(
            y, ops.softmax(x), sample_weight=y
        ),
        MEAN,
    ),
    # With gradients of their own: of TensorFlow, and of a user's.
    (lambda x, y, w: tf.nn.silu(x), ROWS),
    (lambda x, y, w: _clipped(x), UNKNOWN),
    (lambda x, y, w: _in_function(x, y), MEAN),
    (lambda x, y, w: tf.cond(w[0, 0] > 0, lambda: x, lambda: x + 1), ROWS),
    (lambda x, y, w: tf.cond(w[0, 0] > 0, lambda: x, lambda: x[:1] + x), UNKNOWN),
    (lambda x, y, w: tf.cond(y[0] > 0, lambda: x, lambda: x + 1), COUPLED),
    (lambda x, y, w: tf.gather(tf.shape(x), 1), NONE),
    (lambda x, y, w: tf.gather(tf.shape(x), [0, 1]), Dependence.SHAPE),
    (lambda x, y, w: tf.tile(w[:1], [tf.shape(x)[0], 1]), ROWS),
    (lambda x, y, w: tf.tile(w, [tf.shape(x)[0], 1]), UNKNOWN),
    # None of these can be put together from shares.
    (lambda x, y, w: ops.sum(x) + ops.sum(w), COUPLED),
    (lambda x, y, w: ops.sum(x) + ops.mean(x), COUPLED),
    (lambda x, y, w: ops.sqrt(ops.mean(x**2)), COUPLED),
    (lambda x, y, w: ops.mean(x) * ops.mean(y), COUPLED),
    (lambda x, y, w: ops.sum(x) / ops.sum(y), COUPLED),
    (lambda x, y, w: ops.var(x), COUPLED),
    (lambda x, y, w: ops.max(x), COUPLED),
    (lambda x, y, w: x - ops.mean(x, axis=0), COUPLED),
    (lambda x, y, w: x / _size(x), COUPLED),
    (lambda x, y, w: tf.matmul(x, x, transpose_b=True), COUPLED),
    (lambda x, y, w: ops.sum(y * ops.expand_dims(y, -1)), UNKNOWN),
    (lambda x, y, w: ops.sum(x * ops.reshape(w, [8, 1])[:4]), UNKNOWN),
    (lambda x, y, w: ops.sum(ops.cumsum(x, axis=0)), COUPLED),
    (lambda x, y, w: ops.flip(x, axis=0), COUPLED),
    (lambda x, y, w: tf.roll(x, 1, 0), COUPLED),
    (lambda x, y, w: ops.matmul(x, ops.transpose(x)), COUPLED),
    (lambda x, y, w: x - x[:1], COUPLED),
    (lambda x, y, w: ops.sum(x) / tf.maximum(0.1 * _size(x), 1.0), COUPLED),
    (lambda x, y, w: ops.sum(x) / _size(x[:, None] * 0.5), MEAN),
    (lambda x, y, w: ops.sum(x) / _halved(x), UNKNOWN),
    (lambda x, y, w: _clipped(ops.mean(x)), UNKNOWN),
    (lambda x, y, w: ops.sum(x[1:]), COUPLED),
    (lambda x, y, w: ops.sum(tf.tile(x, [2, 1])), UNKNOWN),
    (lambda x, y, w: ops.sum(ops.pad(x, [[1, 0], [0, 0]]) ** 2), UNKNOWN),
    (lambda x, y, w: ops.sum(x[::2]), COUPLED),
    (lambda x, y, w: ops.sum(x[0]), COUPLED),
    (lambda x, y, w: tf.reduce_mean(tf.cast(y, "int32")), UNKNOWN),
    (lambda x, y, w: ops.sum(ops.reshape(x, [-1, 3]) ** 2), UNKNOWN),
    (lambda x, y, w: ops.concatenate([x, x], axis=0), UNKNOWN),
    (lambda x, y, w: ops.sum(ops.softmax(x, axis=0)), UNKNOWN),
    # The examples' axis is the last of three for a while.
    (lambda x, y, w: _slabs(x), LAST),
    (lambda x, y, w: tf.transpose(tf.reshape(_slabs(x), [4, -1])), ROWS),
    (lambda x, y, w: tf.reshape(_slabs(x), [4, -1]), COLUMNS),
    (lambda x, y, w: tf.reshape(_slabs(x), [2, -1]), UNKNOWN),
    (lambda x, y, w: tf.reshape(_slabs(x), [-1, 2]), UNKNOWN),
    (lambda x, y, w: tf.reshape(_slabs(x), [1, 2, 2, -1]), LAST),
    (lambda x, y, w: tf.reshape(_slabs(x), [1, -1, 4]), UNKNOWN),
    (lambda x, y, w: tf.transpose(_slabs(x), [1, 0, 2]), LAST),
    (lambda x, y, w: tf.transpose(_slabs(x), [2, 0, 1]), ROWS),
    (lambda x, y, w: tf.transpose(_slabs(x), [-1, 0, 1]), ROWS),
    (lambda x, y, w: tf.reshape(tf.transpose(x), [4, -1, 1]), COLUMNS),
    (lambda x, y, w: tf.transpose(_slabs(x), [0, 2, 1]), COLUMNS),
    (lambda x, y, w: tf.gather(_slabs(x), [[0, 1, 1]]), LAST),
    (lambda x, y, w: tf.gather(_slabs(x), [1], axis=1), LAST),
    (lambda x, y, w: tf.gather(_slabs(x), [0], axis=2), UNKNOWN),
    (lambda x, y, w: tf.gather(_slabs(x), 1), COLUMNS),
    (lambda x, y, w: tf.pad(_slabs(x), [[0, 1], [0, 0], [0, 0]]), LAST),
    (lambda x, y, w: tf.pad(_slabs(x), [[0, 0], [0, 0], [0, 1]]), UNKNOWN),
    (lambda x, y, w: tf.pad(tf.transpose(x), [[0, 1], [0, 0]]), COLUMNS),
    (lambda x, y, w: tf.pad(tf.transpose(x), [[0, 0], [0, 1]]), UNKNOWN),
    (lambda x, y, w: tf.concat([_slabs(x)] * 2, 0), LAST),
    (lambda x, y, w: tf.concat([_slabs(x)] * 2, 2), UNKNOWN),
    (lambda x, y, w: tf.stack([_slabs(x)] * 2), LAST),
    (lambda x, y, w: tf.stack([_slabs(x)] * 2, -1), UNKNOWN),
    (lambda x, y, w: tf.tanh(_slabs(x)) * _slabs(x), LAST),
    (lambda x, y, w: _slabs(x) + w[:2, :, None], LAST),
    (lambda x, y, w: _slabs(x) + w[:2, None], UNKNOWN),
    (lambda x, y, w: tf.matmul(w[:2], _slabs(x)), LAST),
    (lambda x, y, w: tf.matmul(w[:2][None], _slabs(x)), LAST),
    (lambda x, y, w: tf.matmul(_slabs(x), _slabs(x), transpose_b=True), SUM),
    (lambda x, y, w: tf.matmul(_slabs(x), _slabs(x), transpose_a=True), UNKNOWN),
    (
        lambda x, y, w: tf.pad(
            tf.gather(tf.matmul(_slabs(x), _slabs(x), transpose_b=True), [1]),
            [[0, 1], [0, 0], [0, 0]],
        ),
        SUM,
    ),
    (lambda x, y, w: block_sparse_matmul(x, w[None, :2], [[1], [0]]), ROWS),
    (lambda x, y, w: block_sparse_matmul(x, w[None, :2], [[0], [1]]) ** 2, ROWS),
    # The examples' axis is the second for a while.
    (lambda x, y, w: tf.transpose(x), COLUMNS),
    (lambda x, y, w: tf.unstack(_turned(x))[1], ROWS),
    (lambda x, y, w: tf.unstack(_turned(x), axis=2)[1], COLUMNS),
    (lambda x, y, w: tf.squeeze(tf.split(_turned(x), 2, 0)[1], 0), ROWS),
    (lambda x, y, w: tf.split(_turned(x), [1, 1], 0)[1], COLUMNS),
    (lambda x, y, w: _turned(x)[0], ROWS),
    (lambda x, y, w: _turned(x)[..., 0], COLUMNS),
    (lambda x, y, w: _turned(x)[:, 1:], UNKNOWN),
    (lambda x, y, w: _turned(x)[:, 0], UNKNOWN),
    (lambda x, y, w: tf.transpose(_turned(x), [1, 2, 0]), ROWS),
    (lambda x, y, w: tf.transpose(_turned(x), [0, 2, 1]), LAST),
    (lambda x, y, w: _turned(x) + x[:2, None, :2] * 0 + w[:2, None], COUPLED),
    (lambda x, y, w: tf.nn.softmax(_turned(x) * w[:2, None]), COLUMNS),
    (lambda x, y, w: _turned(x) + w[:2], UNKNOWN),
    (lambda x, y, w: tf.transpose(x) + w[:, :1], COLUMNS),
    (lambda x, y, w: tf.transpose(x) + w, UNKNOWN),
    (lambda x, y, w: tf.transpose(x) + w[:, 0], UNKNOWN),
    (lambda x, y, w: tf.transpose(x)[..., None], COLUMNS),
    (lambda x, y, w: tf.transpose(x)[:, None], UNKNOWN),
    (lambda x, y, w: _turned(x)[0, None], COLUMNS),
    (lambda x, y, w: _turned(x)[:, None], UNKNOWN),
    (lambda x, y, w: _turned(x)[::-1, :, 1:], COLUMNS),
    (lambda x, y, w: _turned(x)[:, ::-1], UNKNOWN),
    (lambda x, y, w: tf.expand_dims(x, 0), COLUMNS),
    (lambda x, y, w: tf.stack([x, x + 1]), COLUMNS),
    (lambda x, y, w: tf.stack([_turned(x)] * 2, -1), COLUMNS),
    (lambda x, y, w: tf.stack([_turned(x)] * 2), UNKNOWN),
    (lambda x, y, w: tf.concat([_turned(x)] * 2, 0), COLUMNS),
    (lambda x, y, w: tf.concat([_turned(x)] * 2, 1), UNKNOWN),
    (lambda x, y, w: ops.sum(_turned(x), axis=0), ROWS),
    (lambda x, y, w: ops.max(_turned(x), axis=0, keepdims=True), COLUMNS),
    (lambda x, y, w: ops.mean(_turned(x), axis=1), UNKNOWN),
    (lambda x, y, w: tf.matmul(_turned(x), w[:2]), COLUMNS),
    (lambda x, y, w: tf.matmul(_turned(x), tf.stack([w[:2], w[2:]])), COLUMNS),
    (lambda x, y, w: tf.matmul(_turned(x), _turned(x), transpose_b=True), UNKNOWN),
    (
        lambda x, y, w: tf.matmul(_turned(x)[..., None], _turned(x)[..., None, :]),
        COLUMNS,
    ),
    (lambda x, y, w: tf.einsum("bi,io->ob", x, w), COLUMNS),
    (lambda x, y, w: tf.einsum("ib,io->bo", tf.transpose(x), w), ROWS),
    (lambda x, y, w: tf.einsum("ebi,eci->ebc", _turned(x), _turned(x)), COUPLED),
    (lambda x, y, w: tf.einsum("ebi,bj->eij", _turned(x), x), SUM),
    (
        lambda x, y, w: tf.reshape(_turned(x, 4), [1, tf.shape(x)[0] * 2, 2]),
        COLUMNS,
    ),
    (lambda x, y, w: tf.reshape(_turned(x), [1, -1, 4]), UNKNOWN),
    (lambda x, y, w: tf.reshape(_turned(x), [-1, 2]), UNKNOWN),
    (lambda x, y, w: tf.split(x, [1, 3], 1)[1], ROWS),
    (lambda x, y, w: tf.split(x, [1, -1], 0)[1], UNKNOWN),
    # As many rows an example as are put together again.
    (lambda x, y, w: _joined(_halves(x) + 1), ROWS),
    (lambda x, y, w: _joined(_halves(x), tf.shape(_halves(x))[0] // 2), ROWS),
    # Of numbers that are no whole multiples, nothing is counted.
    (lambda x, y, w: ops.sum(x) / (_size(x) // 1.5), COUPLED),
    (lambda x, y, w: ops.sum(x) / (_size(x) // 0.5), COUPLED),
    (lambda x, y, w: tf.shape(_halves(x))[0] // tf.constant([1, 2]), UNKNOWN),
    (lambda x, y, w: tf.shape(x)[0] * tf.constant([1, 2]), Dependence.SIZE),
    # An order that is computed.
    (lambda x, y, w: tf.transpose(x, 1 - tf.range(2)), COLUMNS),
    (lambda x, y, w: _joined(x), UNKNOWN),
    (lambda x, y, w: _joined(x, tf.shape(x)[0] // 2), UNKNOWN),
    (lambda x, y, w: _joined(_halves(x), tf.shape(_halves(x))[0] // 2)[:, 0], ROWS),
    (lambda x, y, w: _joined(_joined(_halves(x))), UNKNOWN),
    (lambda x, y, w: _joined(tf.unstack(_turned(x))[0]), UNKNOWN),
    (
        lambda x, y, w: _joined(
            tf.unstack(tf.reshape(_turned(x), [2, tf.shape(x)[0] * 2, 1]))[0]
        ),
        ROWS,
    ),
    (
        lambda x, y, w: _joined(
            tf.cond(w[0, 0] > 0, lambda: _halves(x), lambda: _halves(x) + 1)
        ),
        ROWS,
    ),
    # Lists of tensors.
    (lambda x, y, w: _written([x, x + 1]).stack(), COLUMNS),
    (lambda x, y, w: _written([x, x + 1]).read(1), ROWS),
    (lambda x, y, w: _written([x, x[:1]]).stack(), COUPLED),
    (lambda x, y, w: _written([w, x[:, :2]]).read(0), UNKNOWN),
    (
        lambda x, y, w: (
            tf.TensorArray(tf.float32, 2).unstack([w, w]).write(1, x[:, :2]).read(0)
        ),
        UNKNOWN,
    ),
    (
        lambda x, y, w: tf.TensorArray(tf.float32, 2).unstack(_turned(x)).read(0),
        ROWS,
    ),
    (
        lambda x, y, w: tf.TensorArray(tf.float32, 0).unstack(x).read(0),
        UNKNOWN,
    ),
]


@pytest.mark.parametrize(("function", "found"), CASES)
def test_reading(function, found):
    assert _read(function) is found


def test_what_is_read_as_rows_is_computed_apart():
    random = np.random.default_rng(0)
    x, y, weights = (
        random.uniform(0.1, 1.0, shape).astype("float32")
        for shape in [(4, 4), (4,), (4, 2)]
    )
    parts = slice(0, 1), slice(1, 4)
    for number, (function, found) in enumerate(CASES):
        if found not in (ROWS, COLUMNS):
            continue
        whole, *apart = (
            np.asarray(function(*map(tf.constant, (x[part], y[part], weights))))
            for part in (slice(None), *parts)
        )
        joined = np.concatenate(apart, axis=int(found is COLUMNS))
        np.testing.assert_allclose(joined, whole, rtol=1e-5, err_msg=f"case {number}")


def _centred(x):
    return x - ops.mean(x, axis=0)


class Centred(keras.layers.Layer):
    def call(self, x):
        return _centred(x)


class MaskedByOthers(keras.layers.Layer):
    """Gives a layer that is trusted a mask for which examples are compared."""

    def build(self, shape):
        self.lstm = keras.layers.LSTM(3)
        self.lstm.build((*shape, 1))

    def call(self, x):
        x = ops.expand_dims(x, -1)
        set_tag(x, "_keras_mask", _centred(x)[..., 0] > 0)
        return self.lstm(x)


class Sorted(keras.layers.Layer):
    def call(self, x):
        return ops.sort(x, axis=-1)


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (lambda: keras.layers.LSTM(3), ROWS),
        (lambda: keras.layers.BatchNormalization(), ROWS),
        (lambda: keras.layers.Softmax(), ROWS),
        (lambda: keras.layers.UnitNormalization(axis=0), COUPLED),
        (lambda: keras.layers.Activation(_centred), COUPLED),
        (Sorted, ROWS),
        (Centred, COUPLED),
        (MaskedByOthers, COUPLED),
        # It passes on what a softmax, behind which its logits are kept, has returned.
        (
            lambda: keras.Sequential(
                [keras.layers.Softmax(), keras.layers.Dropout(0.0)]
            ),
            ROWS,
        ),
        (lambda: keras.layers.Lambda(lambda x: x / ops.max(x)), COUPLED),
        (lambda: keras.Sequential([keras.layers.Dense(4), Centred()]), COUPLED),
    ],
)
def test_layers(layer, found):
    layer = layer()
    layer.build((None, 4, 1) if isinstance(layer, keras.layers.LSTM) else (None, 4))

    def call(x, y, w):
        if isinstance(layer, keras.layers.LSTM):
            x = ops.expand_dims(x, -1)
        return layer(x, training=True)

    with keras.StatelessScope():
        assert _read(call) is found


class Cell:
    """Keras takes any object with such methods for a cell."""

    state_size = output_size = 1
    compute_dtype = "float32"

    def __call__(self, x, states, training=False):
        return self.call(x, states)

    def call(self, x, states, training=False):
        return x - ops.mean(x, axis=0), states


@pytest.mark.parametrize("cell", [Cell, lambda: keras.layers.StackedRNNCells([Cell()])])
def test_a_cell_that_is_no_layer_is_not_trusted(cell):
    assert is_trusted(keras.layers.RNN(keras.layers.GRUCell(1)))
    assert not is_trusted(keras.layers.RNN(cell()))


def test_the_culprit_is_named():
    @tf.function(autograph=False)
    def trace(x):
        with tf.name_scope("norm"):
            centred = tf.subtract(x, tf.reduce_mean(x, axis=0), name="centre")
        reader = Reader(x, {})
        loss = tf.reduce_mean(tf.square(centred))
        assert reader.of(loss) is COUPLED
        trace.why = str(reader.why(loss))

    trace.get_concrete_function(tf.TensorSpec([None, 4]))
    assert trace.why == "operation 'norm/centre' (Sub)"


@pytest.mark.parametrize(
    ("function", "found", "totals"),
    [
        (lambda x, p: ops.sum(p * x) / ops.sum(x), SUM, 1),
        (lambda x, p: ops.mean(p), MEAN, 0),
        # A divisor that a variable decides would need a second exchange.
        (lambda x, p: ops.sum(x) / ops.sum(p), NONE, 2),
        (lambda x, p: ops.sum(p * x) / ops.max(x), SUM, 1),
        (lambda x, p: ops.sum(p) / ops.max(p), SUM, 1),
    ],
)
def test_totals_are_of_the_whole_batch(function, found, totals):
    @tf.function(autograph=False)
    def trace(x, factor):
        outputs = x * factor
        value = function(x, outputs)
        reader = Reader([x], {}, meets=lambda op: True)
        trace.found = reader.of(value), len(reader.totals)

    trace.get_concrete_function(tf.TensorSpec([None, 4]), tf.TensorSpec([]))
    assert trace.found == (found, totals)
