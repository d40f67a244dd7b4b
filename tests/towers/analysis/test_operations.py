"""Operations that treat rows by themselves are read so, and the others are not."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from towers.analysis.dependence import Reader
from towers.analysis.kinds import (
    COLUMNS,
    COUPLED,
    NONE,
    PACKED,
    ROWS,
    SHAPE,
    SIZE,
    SUM,
    UNKNOWN,
)
from towers.analysis.operations import of_layer

RANDOM = np.random.default_rng(0)
VECTORS, MATRICES, IMAGES, WAVES = (5, 4), (5, 4, 4), (5, 4, 4, 3), (5, 64)
VOLUMES = (5, 4, 4, 4, 2)


def _symmetric(x):
    return x + tf.linalg.matrix_transpose(x) + 4 * tf.eye(4)


def _complex(x):
    return tf.complex(x, x)


def _normalized(x, training):
    ones = tf.ones([3])
    given = () if training else (ones, ones)
    normalize = tf.compat.v1.nn.fused_batch_norm
    return normalize(x, ones, ones, *given, is_training=training)[0]


def _transposed_convolution(x):
    size = tf.stack([tf.shape(x)[0], 8, 8, 5])
    return tf.nn.conv2d_transpose(x, tf.ones([2, 2, 5, 3]), size, 2)


def _pooled(x, from_first):
    pool = tf.nn.max_pool_with_argmax
    return pool(x, 2, 2, "SAME", include_batch_in_index=from_first)[1]


def _hidden(value, shape=None):
    """A value that the graph does not know, nor more of its shape than is said."""
    return tf.compat.v1.placeholder_with_default(value, shape)


def _features_first(x):
    return tf.transpose(x, [*range(1, x.shape.rank), 0])


def _gathered(x, batch_dims):
    places = tf.zeros([5, 1], tf.int32)
    return tf.raw_ops.GatherV2(params=x, indices=places, axis=1, batch_dims=batch_dims)


def _integers(x):
    return tf.cast(x[:, 0], tf.int32)


ONES, SQUARES = [1, 1, 1, 1], [1, 2, 2, 1]
APART = {
    VECTORS: [
        lambda x: tf.repeat(x, 3, axis=0),
        lambda x: tf.repeat(x[:, 0], 3),
        lambda x: ops.repeat(x, 2, axis=0),
        lambda x: tf.reshape(tf.repeat(x, 3, axis=0), [-1, 3, 4])[:, 0],
        lambda x: tf.reshape(tf.repeat(x, 3, axis=0), [tf.shape(x)[0], 12]),
        lambda x: tf.math.bessel_i0(x) + tf.math.special.dawsn(x) + tf.math.erfinv(x),
        lambda x: (
            tf.math.betainc(x, x, x) + tf.math.igamma(x, x) + tf.math.zeta(2.0, x)
        ),
        lambda x: tf.math.cumulative_logsumexp(x, 1),
        lambda x: tf.math.in_top_k(tf.cast(4 * x[:, 0], tf.int32), x, 2),
        lambda x: tf.math.reduce_euclidean_norm(x, 1),
        lambda x: tf.reverse_sequence(x, tf.cast(4 * x[:, 0], tf.int32), 1),
        lambda x: tf.searchsorted(tf.sort(x), x),
        lambda x: tf.nn.isotonic_regression(x)[0],
        lambda x: tf.linalg.cross(x[:, 1:], x[:, :3]),
        lambda x: tf.linalg.diag(x),
        lambda x: tf.linalg.matvec(tf.ones([5, 4]), x),
        lambda x: tf.one_hot(tf.cast(4 * x, tf.int32), 4, axis=1),
        lambda x: tf.slice(x, [0, 1], [-1, 2]),
        lambda x: tf.slice(x, [0, 1], [tf.shape(x)[0], 2]),
        lambda x: x[: tf.shape(x)[0]],
        lambda x: tf.ensure_shape(x, [None, 4]),
        lambda x: tf.pad(x, tf.stack([[0, 0], [1, tf.unstack(tf.shape(x))[1]]])),
        lambda x: ops.median(x, axis=1),
        lambda x: ops.digitize(x, [0.3, 0.6]),
        lambda x: tf.quantization.fake_quant_with_min_max_vars(x, 0.0, 0.5),
    ],
    MATRICES: [
        lambda x: tf.linalg.cholesky(_symmetric(x)),
        lambda x: tf.linalg.det(x),
        lambda x: tf.linalg.eigvalsh(_symmetric(x)),
        lambda x: tf.linalg.inv(x),
        lambda x: tf.linalg.lu(x)[0],
        lambda x: tf.linalg.pinv(x),
        lambda x: tf.abs(tf.linalg.qr(x)[1]),
        lambda x: tf.linalg.slogdet(x)[1],
        lambda x: tf.linalg.svd(x, compute_uv=False),
        lambda x: tf.linalg.solve(x, x + 1),
        lambda x: tf.linalg.triangular_solve(_symmetric(x), x),
        lambda x: tf.linalg.lstsq(_symmetric(x), x, fast=False),
        lambda x: tf.linalg.set_diag(x, x[:, 0]),
        lambda x: tf.linalg.tridiagonal_matmul(x[:, :3], x, "compact"),
        lambda x: tf.matmul(x, tf.ones([1, 4, 5])),
        lambda x: tf.matmul(tf.ones([3, 4]), x),
        lambda x: tf.matmul(x[:, None], tf.ones([2, 4, 5])),
        lambda x: tf.einsum("bhi,hij->bhj", x, tf.ones([4, 4, 2])),
        lambda x: tf.reduce_sum(x, tf.shape(x)[1:2] - 3),
    ],
    IMAGES: [
        lambda x: tf.image.extract_patches(x, SQUARES, ONES, ONES, "VALID"),
        lambda x: ops.image.extract_patches(x, (2, 2)),
        lambda x: tf.image.adjust_contrast(x, 2.0),
        lambda x: tf.image.adjust_hue(x, 0.1) + tf.image.adjust_saturation(x, 0.5),
        lambda x: tf.image.rgb_to_hsv(x) + tf.image.hsv_to_rgb(x),
        lambda x: tf.image.central_crop(x, 0.5),
        lambda x: tf.image.crop_to_bounding_box(x, 1, 1, 2, 2),
        lambda x: tf.image.resize_with_pad(x, 6, 5),
        lambda x: tf.image.resize(x, (6, 6), "area"),
        lambda x: tf.image.resize(x, (6, 6), "lanczos3"),
        lambda x: tf.image.ssim(x, 1 - x, 1.0, filter_size=3),
        lambda x: ops.image.affine_transform(x, tf.ones([1, 8])),
        lambda x: ops.image.affine_transform(x, ops.reshape(x[:, :2, :2, :2], [-1, 8])),
        lambda x: tf.nn.dilation2d(x, tf.ones([2, 2, 3]), ONES, "SAME", "NHWC", ONES),
        lambda x: tf.nn.local_response_normalization(x),
        lambda x: _pooled(x, False),
        lambda x: _normalized(x, False),
        _transposed_convolution,
    ],
    WAVES: [
        lambda x: tf.signal.frame(x, 16, 8),
        lambda x: tf.abs(tf.signal.stft(x, 16, 8)),
        lambda x: tf.signal.mdct(x, 16),
        lambda x: tf.signal.overlap_and_add(tf.reshape(x, [-1, 8, 8]), 4),
        lambda x: tf.abs(tf.signal.fft3d(_complex(tf.reshape(x, [-1, 4, 4, 4])))),
    ],
    VOLUMES: [
        lambda x: tf.compat.v1.extract_volume_patches(
            x, [1, 2, 2, 2, 1], [1, 1, 1, 1, 1], "VALID"
        ),
    ],
}
CASES = [(function, shape) for shape, found in APART.items() for function in found]
# Second axes, sums, and what looks as if it treated rows by themselves.
OTHERS = [
    (lambda x: tf.matmul(x, tf.ones([2, 4, 5])), VECTORS, COLUMNS),
    (lambda x: tf.matmul(tf.ones([3, 4]), x, transpose_b=True), VECTORS, COLUMNS),
    (lambda x: tf.matmul(tf.transpose(x), x), VECTORS, SUM),
    (lambda x: tf.matmul(x, tf.ones([5, 4, 3])), MATRICES, UNKNOWN),
    (lambda x: tf.matmul(x[:, None], tf.ones([5, 1, 4, 3])), MATRICES, UNKNOWN),
    (lambda x: tf.matmul(tf.ones([2, 5]), x), VECTORS, UNKNOWN),
    (lambda x: tf.repeat(x, [1, 2, 1, 1, 3], axis=0), VECTORS, UNKNOWN),
    (lambda x: tf.reshape(tf.repeat(x, 3, axis=0), [3, -1, 4]), VECTORS, UNKNOWN),
    (lambda x: tf.reshape(tf.repeat(x, 3, axis=0), [-1, 8]), VECTORS, UNKNOWN),
    (lambda x: tf.repeat(x, 2, axis=0)[: tf.shape(x)[0]], VECTORS, UNKNOWN),
    (lambda x: x[1 : tf.shape(x)[0]], VECTORS, UNKNOWN),
    (lambda x: tf.slice(x, [0, 0], [2, 4]), VECTORS, UNKNOWN),
    (lambda x: tf.slice(x, [1, 0], [-1, 4]), VECTORS, UNKNOWN),
    (lambda x: tf.ensure_shape(x, [5, 4]), VECTORS, UNKNOWN),
    # The first row's paddings are those of the first axis: 0 before, and 1 behind.
    (lambda x: tf.pad(x, tf.stack([[0, 0], [1, 1]], axis=1)), VECTORS, UNKNOWN),
    (lambda x: tf.one_hot(tf.cast(x, tf.int32), 4, axis=0), VECTORS, UNKNOWN),
    (lambda x: tf.math.cumulative_logsumexp(x, 0), VECTORS, COUPLED),
    (lambda x: tf.math.reduce_euclidean_norm(x, 0), VECTORS, COUPLED),
    (lambda x: tf.linalg.det(x), VECTORS[:1] * 2, UNKNOWN),
    (lambda x: tf.image.adjust_contrast(x, 2.0), MATRICES, UNKNOWN),
    (lambda x: ops.image.affine_transform(x, tf.ones([5, 8])), IMAGES, UNKNOWN),
    (lambda x: _pooled(x, True), IMAGES, UNKNOWN),
    (lambda x: _normalized(x, True), IMAGES, UNKNOWN),
    (lambda x: tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]]), IMAGES, UNKNOWN),
    # What is not known when the graph is read may be anything.
    *(
        (function, None, UNKNOWN)
        for function in (
            lambda x: tf.reduce_sum(x, 1),
            lambda x: tf.matmul(x, tf.ones([4, 4])),
            lambda x: tf.gather(x, [0], axis=1),
            lambda x: tf.cumsum(x, 1),
            lambda x: tf.squeeze(x, 1),
            lambda x: tf.expand_dims(x, 1),
            lambda x: tf.concat([x, x], 1),
            lambda x: tf.shape(x)[:-1],
        )
    ),
    *(
        (function, VECTORS, UNKNOWN)
        for function in (
            lambda x: x + _hidden(tf.ones([4])),
            lambda x: tf.reduce_sum(tf.transpose(x), _hidden([0], [1])),
            lambda x: tf.reduce_sum(x, _hidden([0, 1], [2])[1]),
            lambda x: tf.reduce_sum(x, tf.shape(_hidden([1], [None]))[tf.newaxis, 0]),
            lambda x: tf.pad(x, tf.stack([[_hidden(0, []), 0], [0, 0]])),
            lambda x: tf.shape(x)[_hidden(0, []) :],
            lambda x: tf.slice(tf.shape(x), _hidden([0], [1]), [1]),
            lambda x: tf.split(tf.shape(x), _hidden([1, 1], [2]), num=2)[0],
            lambda x: tf.transpose(x, _integers(x)),
            lambda x: tf.reshape(x, _integers(x)),
            lambda x: _gathered(x, batch_dims=-1),
            lambda x: tf.reshape(tf.ones([4]), _integers(x)),
        )
    ),
    (lambda x: _features_first(x) + _hidden(tf.ones([1])), MATRICES, UNKNOWN),
    (lambda x: tf.transpose(x)[_hidden(0, []) :], VECTORS, COLUMNS),
    (lambda x: tf.transpose(x)[:, _hidden(0, []) :], VECTORS, UNKNOWN),
    (lambda x: x[:, _hidden(0, [])], VECTORS, ROWS),
    (lambda x: x[_hidden(0, []) :], VECTORS, UNKNOWN),
    (lambda x: tf.gather(tf.transpose(x), _hidden(0, [])), VECTORS, ROWS),
    (lambda x: tf.gather(tf.transpose(x), [1, 0]), VECTORS, COLUMNS),
    (lambda x: tf.gather(tf.transpose(x), [1, 0], axis=1), VECTORS, UNKNOWN),
    # Numbers of examples are in no other place than the first.
    (lambda x: tf.reshape(tf.shape(x)[0], []), VECTORS, SIZE),
    (lambda x: tf.gather(tf.shape(x), [1, 0]), VECTORS, UNKNOWN),
    (lambda x: tf.shape(x)[::-1], VECTORS, UNKNOWN),
    (lambda x: tf.cast(x[:, :2], tf.int32) + tf.shape(x), VECTORS, UNKNOWN),
    # Examples meet, or would where their number is another.
    (lambda x: tf.transpose(x) + x, VECTORS, UNKNOWN),
    (lambda x: tf.transpose(x) + tf.transpose(x)[..., None], VECTORS, UNKNOWN),
    (lambda x: tf.matmul(x[:, None], x), VECTORS, UNKNOWN),
    (lambda x: tf.linalg.triangular_solve(tf.eye(4)[None], x), MATRICES, UNKNOWN),
    (lambda x: _features_first(x) + tf.ones([1, 4, 4, 1]), MATRICES, UNKNOWN),
    (lambda x: tf.cumsum(_features_first(x), 0), MATRICES, UNKNOWN),
    (lambda x: tf.einsum("bi,bj->bij", x, tf.ones([5, 4])), VECTORS, UNKNOWN),
    (lambda x: tf.einsum("b...,...->b...", x, tf.ones([2, 4])), VECTORS, UNKNOWN),
    # Sums stay what they are beside one another, and have a shape.
    (lambda x: tf.stack([tf.reduce_sum(x), tf.reduce_sum(x * x)]), VECTORS, SUM),
    (lambda x: tf.raw_ops.Shape(input=tf.reduce_sum(x, 0)), VECTORS, NONE),
    (lambda x: tf.cast(tf.reduce_mean(x), tf.int32), VECTORS, COUPLED),
]


def _twice(x):
    return tf.concat([x, 2 * x], 0)


# Of rows in blocks: of examples, and again of examples.
BLOCKS = [
    (lambda x: _twice(x), ROWS),
    (lambda x: _twice(x)[: tf.shape(x)[0]] + x, ROWS),
    (lambda x: _twice(x)[tf.shape(x)[0] :] + x, ROWS),
    (lambda x: _twice(x)[0 : tf.shape(x)[0]] + x, ROWS),
    (lambda x: tf.split(_twice(x), 2)[1] + x, ROWS),
    (lambda x: tf.split(_twice(_twice(x)), 2)[1] + _twice(x), ROWS),
    (lambda x: tf.split(_twice(x), 2, axis=1)[0], ROWS),
    # Other rows beside one another.
    (lambda x: tf.split(_twice(_twice(x)), 2)[1] + tf.repeat(x, 2, axis=0), UNKNOWN),
    (lambda x: tf.split(tf.concat([x, x, x], 0), 2)[0], UNKNOWN),
    (lambda x: _twice(tf.repeat(x, 2, axis=0))[: tf.shape(x)[0]], UNKNOWN),
    (lambda x: _twice(x)[::2], COUPLED),
    (lambda x: _twice(x)[:3], COUPLED),
]


def _read(function, shape, **options):
    @tf.function(autograph=False)
    def trace(x):
        trace.found = Reader([x], {}, **options).of(function(x))

    trace.get_concrete_function(tf.TensorSpec(shape and [None, *shape[1:]]))
    return trace.found


@pytest.mark.parametrize(("function", "shape"), CASES)
def test_rows_are_read(function, shape):
    assert _read(function, shape) is ROWS


@pytest.mark.quick_one_in(5)
@pytest.mark.parametrize(("function", "shape"), CASES)
def test_rows_are_apart(function, shape):
    x = tf.constant(RANDOM.uniform(0.1, 0.9, shape).astype("float32"))
    apart = tf.concat([function(x[:1]), function(x[1:])], 0)
    np.testing.assert_allclose(function(x), apart, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("function", "shape", "found"), OTHERS)
def test_what_else_is_read(function, shape, found):
    assert _read(function, shape) is found


@pytest.mark.parametrize(("function", "found"), BLOCKS)
def test_rows_in_blocks(function, found):
    assert _read(function, VECTORS, meets=lambda op: True) is found


@pytest.mark.parametrize(
    ("shape", "kinds", "packed", "found"),
    [
        ([None, 3], [ROWS, NONE], False, ROWS),
        ([None, 3], [ROWS], True, PACKED),
        ([None, 3], [ROWS, SUM], False, COUPLED),
        ([None, 3], [ROWS, SHAPE], False, UNKNOWN),
        ([], [ROWS], False, UNKNOWN),
        ([5, 3], [ROWS], False, UNKNOWN),
        # As long as the longest of them.
        ([None, None], [PACKED], False, UNKNOWN),
    ],
)
def test_what_a_layer_returns(shape, kinds, packed, found):
    assert of_layer(tf.TensorSpec(shape), [], kinds, packed) is found


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (keras.layers.Dense(3, "relu"), VECTORS),
        (keras.layers.Dense(3, "tanh"), VECTORS),
        (keras.layers.Conv2D(2, 2, activation="sigmoid"), IMAGES),
        (keras.layers.DepthwiseConv2D(2, activation="softplus"), IMAGES),
        (keras.layers.MaxPooling2D(), IMAGES),
        (keras.layers.AveragePooling2D(2), IMAGES),
        (keras.layers.UpSampling2D(interpolation="bilinear"), IMAGES),
    ],
)
def test_gradients_are_read_operation_by_operation(layer, shape):
    """Of a root, which is no sum: so its gradient is not known as a whole."""
    layer.build((None, *shape[1:]))

    @tf.function(autograph=False)
    def trace(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            root = tf.sqrt(tf.reduce_mean(tf.square(layer(x))))
        sources = [x, *layer.trainable_variables]
        found = tape.gradient(root, [getattr(s, "value", s) for s in sources])
        reader = Reader([x], {}, meets=lambda op: True)
        trace.found = [reader.of(tf.convert_to_tensor(each)) for each in found]

    trace.get_concrete_function(tf.TensorSpec([None, *shape[1:]]))
    assert trace.found == [ROWS, *[SUM] * (len(trace.found) - 1)]
