"""Block-sparse convolutions: against dense ones, in functions, saved, and on towers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import oracle
from towers import multi_gpu_model
from towers.models.block_sparse import BlockSparseConv2D
from towers.models.block_sparse.patterns import names

pytestmark = pytest.mark.quick_one_in(3)

PATTERNS = [name for name in names() if name != "monarch"]
# Channels, filters and a block: whole blocks; larger inputs; uneven ones; few.
SIZES = (32, 32, 8), (64, 32, 16), (40, 70, 32), (130, 64, 64), (3, 24, 8)
# Some channels that no filter reads, and filters that read none.
MATRIX = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 1, 0]])


def _layer(*args, sparsity=0.6, **options):
    options = {"bias_initializer": "glorot_uniform", "activation": "tanh", **options}
    return BlockSparseConv2D(*args, sparsity=sparsity, **options)


def _numbers(*shape, seed=0):
    # Small ones, so that "tanh" is not flat.
    return np.random.default_rng(seed).normal(0, 0.3, shape).astype("float32")


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
        x = tf.convert_to_tensor(x)
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


@pytest.mark.quick_one_in(6)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("channels, filters, block", SIZES, ids=str)
@pytest.mark.filterwarnings("ignore:The pattern")
def test_equals_a_dense_one(pattern, channels, filters, block):
    layer = _layer(filters, 3, block_size=block, pattern=pattern, padding="same")
    _check(layer, _numbers(2, 6, 5, channels))


@pytest.mark.quick_one_in(12)
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
    _check(layer, x, tolerance=0.03)
    assert layer(x).dtype == policy.removeprefix("mixed_")


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
    # With oneDNN, TensorFlow gives outputs of no examples the size of the inputs.
    layer = _layer(20, 3, block_size=4, pattern=MATRIX, dynamic=True, padding="same")
    ours = _results(layer, _numbers(0, 5, 5, 16), _numbers(0, 5, 5, 20))
    assert ours[0].shape == (0, 5, 5, 20)
    assert not any(np.any(each) for each in ours)


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("options", ({}, {"strides": 2}, {"dilation_rate": 2}), ids=str)
def test_second_derivatives(options, dynamic):
    layer = _layer(20, 3, block_size=4, pattern=MATRIX, dynamic=dynamic, **options)
    x = _numbers(2, 7, 6, 16)
    dense, mask = _dense(_built(layer, x)), np.not_equal(layer.dense_kernel(), 0)
    of_x, of_kernel, of_bias = _penalty_gradients(dense, x.astype("float64"), mask)
    expected = [of_x, _blocks(layer, of_kernel), of_bias]
    ours = _penalty_gradients(layer, x, np.ones(layer.kernels[0].shape))
    assert oracle.largest_difference(ours, expected) < 3e-6


def _penalty_gradients(layer, x, mask):
    """The gradients of the squares of gradients where the kernel is there."""
    with tf.GradientTape() as outer:
        x = tf.constant(x)
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(layer(x) ** 3)
        of_x, of_kernel = inner.gradient(loss, [x, layer.trainable_variables[0]])
        of_kernel *= tf.cast(mask, x.dtype)
        penalty = tf.reduce_sum(of_x**2) + tf.reduce_sum(of_kernel**2)
    return outer.gradient(penalty, [x, *layer.trainable_variables])


def test_first_values_are_spread_as_of_a_dense_layer():
    """One block of each 4 is there, so filters read a fourth of the channels."""
    layer = _layer(256, 3, block_size=32, pattern="random", sparsity=0.75)
    layer.build((None, None, None, 256))
    dense = keras.layers.Conv2D(64, 3)
    dense.build((None, None, None, 64))
    deviations = np.std(layer.kernels[0]), np.std(dense.kernel)
    np.testing.assert_allclose(*deviations, rtol=0.01)


# In models


def _model(sizes=(8, 7), **options):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((*sizes, 12)),
            _layer(16, 3, block_size=4, pattern="random", padding="same", **options),
            _layer(14, 3, 2, block_size=4, pattern="butterfly", sparsity=0.5),
            _layer(14, 1, block_size=4, pattern="erdos_renyi", dynamic=True),
            _layer(
                *(8, 2),
                block_size=4,
                pattern="local_strided",
                sparsity=0.5,
                dilation_rate=2,
            ),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3),
        ]
    )


def _examples(rows=9):
    return _numbers(rows, 10, 9, 12), _numbers(rows, 3, seed=1)


@pytest.mark.parametrize("data_format", ("channels_last", "channels_first"))
def test_shapes(data_format):
    first = data_format == "channels_first"
    inputs = keras.Input((12, None, 9) if first else (None, 9, 12))
    outputs = _layer(14, 3, 2, block_size=4, sparsity=0, data_format=data_format)(
        inputs
    )
    assert outputs.shape == ((None, 14, None, 4) if first else (None, None, 4, 14))


def test_saved_and_loaded(tmp_path):
    model, (x, _) = _model((10, 9), kernel_regularizer="l2"), _examples()
    places = model.layers[2].places
    places.assign(places.numpy()[::-1])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(model(x), loaded(x))
    ours = [layer.get_config() for layer in loaded.layers]
    assert ours == [layer.get_config() for layer in model.layers]


def test_a_matrix_is_saved():
    config = _layer(20, 3, block_size=4, pattern=MATRIX.astype(bool)).get_config()
    assert config["pattern"] == MATRIX.tolist()
    layer = BlockSparseConv2D.from_config(config)
    layer.build((None, None, None, 16))
    assert layer.kernels[0].shape == (MATRIX.sum(), 3, 3, 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("xla", (False, True))
def test_fit(xla):
    ours, theirs = _model((10, 9)), _model((10, 9))
    ours.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=xla)
    ours.fit(*_examples(), batch_size=9, verbose=0)
    loss = keras.losses.MeanSquaredError()
    oracle.train(theirs, keras.optimizers.SGD(0.5), loss, [_examples()])
    difference = oracle.largest_difference(ours.get_weights(), theirs.get_weights())
    assert difference < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ((10, 9), (None, None)), ids=str)
@pytest.mark.parametrize(
    "options", ({}, {"dynamic": True}, {"dilation_rate": 2}), ids=str
)
def test_towers_take_the_step_of_one_device(options, sizes, caplog):
    model, reference = _model(sizes, **options), _model(sizes, **options)
    before = model.get_weights()
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile(keras.optimizers.SGD(0.5), "mse")
    parallel.fit(*_examples(), batch_size=9, verbose=0)
    # The graph proves that examples are apart: no rows are compared.
    assert not [r.getMessage() for r in caplog.records if "Model" in r.getMessage()]
    loss = keras.losses.MeanSquaredError()
    oracle.train(reference, keras.optimizers.SGD(0.5), loss, [_examples()])
    steps = [
        [after - old for after, old in zip(each.get_weights(), before, strict=True)]
        for each in (model, reference)
    ]
    assert oracle.largest_difference(*steps) < 1e-5


# What is refused


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"pattern": "monarch"}, r"pattern='monarch'; expected a pattern of one"),
        ({"pattern": "other"}, r"pattern='other'; expected one of"),
        ({"pattern": np.eye(3)}, r"pattern of shape \(3, 3\); expected \(4, 5\)"),
        ({"filters": 0}, r"filters=0; expected a whole number"),
        ({"kernel_size": (3, 3, 3)}, r"kernel_size=\(3, 3, 3\); expected a whole"),
        ({"strides": 0}, r"strides=0; expected a whole number"),
        ({"padding": "causal"}, r"padding='causal'; expected 'valid' or 'same'"),
        ({"data_format": "last"}, r"data_format='last'; expected 'channels_last' or"),
        ({"strides": 2, "dilation_rate": 2}, r"expected one of them to be 1"),
        ({"block_size": 0}, r"block_size=0; expected"),
        ({"shape": (None, 5, 16)}, r"shape \(None, 5, 16\); expected four axes"),
        ({"shape": (None, 5, 2, 16)}, r"expected at least the height and width of"),
        ({"shape": (None, 5, 5, None)}, r"the number of channels on axis -1"),
    ],
)
def test_errors(arguments, message):
    arguments = {"filters": 20, "kernel_size": 3, "block_size": 4, **arguments}
    shape = arguments.pop("shape", (None, 5, 5, 16))
    with pytest.raises(ValueError, match=message):
        BlockSparseConv2D(**arguments).build(shape)
