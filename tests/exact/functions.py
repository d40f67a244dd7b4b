"""Functions of a user's layer, for bodies.py: data."""

import keras
import tensorflow as tf
from keras import ops


def _standard(t, axis):
    mean, variance = tf.nn.moments(t, axis, keepdims=True)
    return (t - mean) / ops.sqrt(variance + 1e-2)


def gram(t, other=None):
    other = t if other is None else other
    return ops.matmul(ops.softmax(ops.matmul(t, ops.transpose(other))), other)


def _matrices(t):
    return ops.reshape(t, (-1, 2, 2, 2))


def _groups(t):
    """Adds the mean of three examples to each of them."""
    rows = ops.reshape(t, (-1, 3, 8))
    return ops.reshape(rows + ops.mean(rows, axis=1, keepdims=True), (-1, 8))


def _values(t):
    """How many values there are."""
    found, _ = tf.unique(tf.reshape(tf.cast(3 * t, "int32"), [-1]))
    return tf.cast(tf.size(found), t.dtype)


def _scan(t):
    return ops.scan(lambda c, row: (c + row, c + row), ops.zeros_like(t[0]), t)[1]


# Functions of rows of eight numbers, which treat each example by itself.
FUNCTIONS = {
    "sort": lambda t: ops.sort(t, axis=1),
    "top_k": lambda t: ops.top_k(t, 3)[0],
    "take": lambda t: ops.take(t, [2, 0, 1], axis=1),
    "take_along": lambda t: ops.take_along_axis(t, ops.argsort(t, axis=1), axis=1),
    "cumsum": lambda t: ops.cumsum(t, axis=1),
    "flip": lambda t: ops.flip(t, axis=1),
    "roll": lambda t: ops.roll(t, 2, axis=1),
    "norm": lambda t: t / (0.1 + ops.norm(t, axis=-1, keepdims=True)),
    "where": lambda t: ops.where(t > 0, t, ops.exp(t) - 1),
    "split": lambda t: ops.multiply(*ops.split(t, 2, axis=1)),
    "one_hot": lambda t: t * ops.one_hot(ops.argmax(t, axis=1), 8),
    "outer": lambda t: ops.reshape(t[:, :, None] * t[:, None, :], (-1, 64)),
    "einsum": lambda t: ops.reshape(ops.einsum("bi,bj->bij", t, t), (-1, 64)),
    "map_fn": lambda t: tf.map_fn(lambda r: r * tf.reduce_sum(r), t),
    "vmap": lambda t: tf.vectorized_map(lambda r: r * tf.reduce_sum(r), t),
    "matrices": lambda t: ops.reshape(ops.matmul(_matrices(t), _matrices(t)), (-1, 8)),
    "determinants": lambda t: ops.concatenate([t, tf.linalg.det(_matrices(t))], axis=1),
    "fft": lambda t: tf.math.real(tf.signal.fft(tf.cast(t, tf.complex64))),
    "pad": lambda t: ops.pad(t, ((0, 0), (1, 2))),
    "logsumexp": lambda t: t - ops.logsumexp(t, axis=1, keepdims=True),
    "clip": lambda t: ops.clip(t, -0.5, 0.5) + ops.stop_gradient(t),
    "threshold": lambda t: keras.activations.threshold(t, 0.1, 0.0),
    "standard": lambda t: _standard(t, [1]),
    "median": lambda t: t - ops.median(t, axis=1, keepdims=True),
    "quantile": lambda t: t - ops.quantile(t, 0.3, axis=1, keepdims=True),
    "tile": lambda t: ops.tile(t, (1, 2)),
    "repeat": lambda t: ops.repeat(t, 2, axis=1),
    "swap": lambda t: ops.swapaxes(ops.reshape(t, (-1, 2, 4)), 1, 2),
    "scan": lambda t: ops.transpose(_scan(ops.transpose(t))),
    "fori": lambda t: ops.fori_loop(0, 3, lambda i, s: ops.tanh(s) + 0.1, t),
    "while": lambda t: ops.while_loop(
        lambda i, s: i < 3, lambda i, s: (i + 1, s * 0.5), (0, t)
    )[1],
}
# Those in which examples meet.
COUPLED = {
    "softmax_0": lambda t: ops.softmax(t, axis=0),
    "sort_0": lambda t: ops.sort(t, axis=0),
    "argsort_0": lambda t: ops.cast(ops.argsort(t, axis=0), t.dtype) + t,
    "median_0": lambda t: t - ops.median(t, axis=0),
    "cumsum_0": lambda t: ops.cumsum(t, axis=0),
    "cumprod_0": lambda t: ops.cumprod(t, axis=0),
    "flip_0": lambda t: t + ops.flip(t, axis=0),
    "roll_0": lambda t: t + ops.roll(t, 1, axis=0),
    "gram": gram,
    "first": lambda t: t - t[:1],
    "last": lambda t: t - t[-1],
    "max_0": lambda t: t / (1 + ops.max(ops.abs(t), axis=0, keepdims=True)),
    "max_all": lambda t: t / (1 + ops.max(ops.abs(t))),
    "std_0": lambda t: t / (1 + ops.std(t, axis=0)),
    "norm_all": lambda t: t / (1 + ops.norm(t)),
    "einsum_0": lambda t: ops.matmul(t, ops.einsum("bi,bj->ij", t, t)),
    "one_row": lambda t: t * ops.sum(ops.reshape(t, (1, -1))[:, :4], axis=1),
    "scan_0": _scan,
    "segments": lambda t: (
        t + ops.segment_sum(t, ops.cast(t[:, 0] > 0, "int32"), num_segments=2)[0]
    ),
    "take_0": lambda t: t + ops.take(t, [0], axis=0),
    "top_k_turned": lambda t: t + ops.top_k(ops.transpose(t), 1)[0][:, 0],
    "cond": lambda t: ops.cond(ops.sum(t) > 0, lambda: t * 2, lambda: t),
    "mask": lambda t: t + tf.reduce_sum(tf.boolean_mask(t, t[:, 0] > 0), axis=0),
    "number": lambda t: t / ops.cast(ops.shape(t)[0], t.dtype),
    "range": lambda t: t * ops.cast(tf.range(tf.shape(t)[0]), t.dtype)[:, None],
    "mean_all": lambda t: t - ops.mean(t),
    "groups": _groups,
    "unique": lambda t: t * _values(t),
    "standard_0": lambda t: _standard(t, [0]),
}
