"""Block-sparse convolutions: against dense ones, in functions, saved, and on towers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import oracle
from towers import multi_gpu_model
from towers.models.block_sparse import BlockSparseConv2D, names

PATTERNS = [name for name in names() if name != "monarch"]
# Channels, filters and a block: whole blocks; larger inputs; uneven ones; few.
SIZES = (32, 32, 8), (64, 32, 16), (40, 70, 32), (130, 64, 64), (3, 24, 8)
# Some channels that no filter reads, and filters that read none.
MATRIX = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 1, 0]])


def _layer(*args, sparsity=0.6, **options):
    options = {"bias_initializer": "glorot_uniform", "activation": "tanh", **options}
    return BlockSparseConv2D(*args, sparsity=sparsity, **options)


def _numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def _built(layer, x):
    layer.build((None, *x.shape[1:]))
    for place in [layer.places] if layer.dynamic else []:
        # As if blocks had moved: another block of channels for each.
        inputs = layer.layouts[0].inputs
        names = np.random.default_rng(1).permutation(inputs.max() + 1)
        place.assign(names[inputs])
    return layer


def _dense(layer):
    """The same convolution by Keras: in float64, of pictures with channels last."""
    dense = keras.layers.Conv2D(
        layer.filters,
        layer.kernel_size,
        layer.strides,
        layer.padding,
        dilation_rate=layer.dilation_rate,
        activation=layer.activation,
        use_bias=layer.use_bias,
        dtype="float64",
    )
    kernel = layer.dense_kernel()
    dense.build((None, None, None, kernel.shape[2]))
    dense.set_weights([kernel, layer.bias] if layer.use_bias else [kernel])
    return dense


def _results(layer, x, weights):
    """Outputs, and gradients of pictures, kernel and bias."""
    with tf.GradientTape() as tape:
        x = tf.constant(x)
        tape.watch(x)
        y = layer(x)
        loss = tf.reduce_sum(tf.cast(y, weights.dtype) * weights)
    of_x, *of_weights = tape.gradient(loss, [x, *layer.trainable_variables])
    return [y, of_x, *of_weights]


def _blocks(layer, kernel):
    """The blocks of a dense kernel, by plain slices."""
    (into, out), places = layer.layouts[0].block_shape, layer.layouts[0]
    inputs = layer.places.numpy() if layer.dynamic else places.inputs
    rows, columns = places.shape
    more = ((0, 0), (0, 0), (0, rows - kernel.shape[2]), (0, columns - kernel.shape[3]))
    kernel = np.pad(kernel, more)
    return np.stack(
        [
            kernel[:, :, i * into : (i + 1) * into, o * out : (o + 1) * out]
            for i, o in zip(inputs, places.outputs, strict=True)
        ]
    )


def _expected(layer, x, weights):
    x, weights = x.astype("float64"), weights.astype("float64")
    y, of_x, of_kernel, *of_bias = _results(_dense(layer), x, weights)
    return [y, of_x, _blocks(layer, of_kernel), *of_bias]


def _check(layer, x, tolerance=1e-6):
    _built(layer, x)
    last = layer.data_format == "channels_last"
    shape = layer.compute_output_shape(x.shape)
    weights = _numbers(*shape, seed=1)
    ours = _results(layer, x, weights)
    assert ours[0].shape == shape
    if not last:
        x, weights = x.transpose(0, 2, 3, 1), weights.transpose(0, 2, 3, 1)
        ours[:2] = [np.transpose(each, (0, 2, 3, 1)) for each in ours[:2]]
    ours = [np.asarray(each, "float32") for each in ours]
    assert oracle.largest_difference(ours, _expected(layer, x, weights)) < tolerance


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("channels, filters, block", SIZES, ids=str)
@pytest.mark.filterwarnings("ignore:The pattern")
def test_equals_a_dense_one(pattern, channels, filters, block):
    layer = _layer(filters, 3, block_size=block, pattern=pattern, padding="same")
    _check(layer, _numbers(2, 6, 5, channels))


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("data_format", ("channels_last", "channels_first"))
@pytest.mark.parametrize("padding", ("same", "valid"))
@pytest.mark.parametrize(
    "options",
    (
        {},
        {"strides": 2},
        {"strides": (3, 1)},
        {"dilation_rate": 2},
        {"dilation_rate": (1, 3)},
        {"use_bias": False, "activation": None},
    ),
    ids=str,
)
def test_windows(options, padding, data_format, dynamic):
    shape = (9, 8, 16) if data_format == "channels_last" else (16, 9, 8)
    layer = _layer(
        *(18, (3, 2)),
        block_size=4,
        pattern=MATRIX,
        padding=padding,
        data_format=data_format,
        dynamic=dynamic,
        **options,
    )
    _check(layer, _numbers(3, *shape))


@pytest.mark.parametrize("strides", (1, 2))
def test_one_by_one(strides):
    layer = _layer(64, 1, strides, block_size=16, pattern="random")
    _check(layer, _numbers(2, 5, 5, 48))


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16"))
@pytest.mark.parametrize("dynamic", (False, True))
def test_16_bits(policy, dynamic):
    layer = _layer(
        *(32, 3), block_size=8, pattern="erdos_renyi", dynamic=dynamic, dtype=policy
    )
    x = _numbers(2, 6, 6, 24)
    assert layer(x).dtype == policy.removeprefix("mixed_")
    _check(layer, x, tolerance=0.03)


@pytest.mark.parametrize("xla", (False, True))
@pytest.mark.parametrize("dynamic", (False, True))
def test_functions_of_unknown_sizes(xla, dynamic):
    """Batch, height and width are unknown to the graph."""
    layer = _layer(20, 3, block_size=4, pattern=MATRIX, dynamic=dynamic, padding="same")
    x = _numbers(3, 5, 4, 16)
    _built(layer, x)
    weights = _numbers(*layer.compute_output_shape(x.shape), seed=1)

    @tf.function(
        jit_compile=xla,
        input_signature=[
            tf.TensorSpec([None, None, None, 16]),
            tf.TensorSpec([None, None, None, 20]),
        ],
    )
    def results(x, weights):
        return _results(layer, x, weights)

    expected = _expected(layer, x, weights)
    assert oracle.largest_difference(results(x, weights), expected) < 1e-6


def test_no_examples():
    layer = _layer(20, 3, block_size=4, pattern=MATRIX, dynamic=True)
    ours = _results(layer, _numbers(0, 5, 5, 16), _numbers(0, 3, 3, 20))
    assert ours[0].shape == (0, 3, 3, 20)
    assert not any(np.any(each) for each in ours)


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("options", ({}, {"strides": 2}), ids=str)
def test_second_derivatives(options, dynamic):
    layer = _layer(20, 3, block_size=4, pattern=MATRIX, dynamic=dynamic, **options)
    x = _numbers(2, 7, 6, 16)
    _built(layer, x)

    def penalised(layer):
        with tf.GradientTape() as outer:
            y = tf.constant(x)
            outer.watch(y)
            with tf.GradientTape() as tape:
                tape.watch(y)
                loss = tf.reduce_sum(layer(y) ** 3)
            gradients = tape.gradient(loss, [y, layer.trainable_variables[0]])
            penalty = tf.add_n([tf.reduce_sum(each**2) for each in gradients])
        return outer.gradient(penalty, [y, *layer.trainable_variables])

    # The dense kernel's gradient where there are no blocks is no part of the penalty.
    dense = _dense(layer)
    kernel = dense.kernel
    mask = np.not_equal(layer.dense_kernel(), 0).astype("float32")

    class Masked(keras.layers.Layer):
        def call(self, x):
            y = ops_conv(x, kernel * mask, layer) + dense.bias
            return tf.tanh(y)

    masked = Masked()
    masked._trainable_variables = [kernel, dense.bias]
    of_x, of_kernel, of_bias = penalised(masked)
    expected = [of_x, _blocks(layer, of_kernel), of_bias]
    assert oracle.largest_difference(penalised(layer), expected) < 1e-5
