"""Block-sparse dense layers: against `keras.layers.Dense`, in models, and saved."""

import functools
import itertools
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import oracle
from tests.limits import HANG_S
from towers.models.block_sparse import BlockSparseDense
from towers.models.block_sparse.patterns import names

# Inputs, units and a block: whole blocks; larger inputs; uneven ones; few.
SIZES = (
    (64, 64, 8),
    (96, 64, 16),
    (50, 70, 8),
    (150, 128, 32),
    (200, 130, 64),
    (3, 8, 2),
)
# Some inputs that no unit reads, and units that read none.
MATRIX = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 1, 0]])
# How near numbers are to those of float64, relative to the norm of each array.
LIMITS = {
    "float32": 1e-6,
    "float64": 1e-12,
    "mixed_bfloat16": 2e-2,
    "mixed_float16": 2e-3,
    "bfloat16": 3e-2,
}

pytestmark = [
    pytest.mark.quick_one_in(3),
    pytest.mark.filterwarnings("ignore:The pattern"),
]


def _layer(*args, **options):
    options = {"bias_initializer": "glorot_uniform", "activation": "tanh", **options}
    return BlockSparseDense(*args, **options)


def _numbers(*shape, seed=0):
    # Small ones, so that "tanh" is not flat.
    return np.random.default_rng(seed).normal(0, 0.5, shape).astype("float32")


def _built(layer, inputs):
    layer.build((None, inputs))
    if layer.use_bias:
        layer.bias.assign(_numbers(layer.units, seed=2))
    if layer.dynamic:
        _move(layer)
    return layer


def _move(layer):
    """Pairs of blocks exchange what they read, and some are dropped."""
    (layout,), random = layer.layouts, np.random.default_rng(1)
    inputs, outputs = layout.inputs.copy(), layout.outputs
    for a, b in random.integers(layout.num_blocks, size=(20, 2)):
        places = {*zip(inputs, outputs, strict=True)}
        if not places & {(inputs[b], outputs[a]), (inputs[a], outputs[b])}:
            inputs[[a, b]] = inputs[[b, a]]
    layer.places.assign(inputs)
    layer.present.assign(random.random(layout.num_blocks) < 0.8)


def _placed(layer, number, blocks):
    """The matrix of one layout, block by block."""
    layout = layer.layouts[number]
    (into, out), mask = layout.block_shape, layout.mask
    outputs, inputs = np.argwhere(mask.T).T
    if layer.dynamic:
        inputs = layer.places.numpy()
        blocks = blocks * layer.present.numpy()[:, None, None]
    matrix = np.zeros((len(mask) * into, len(mask[0]) * out))
    for block, i, o in zip(blocks, inputs, outputs, strict=True):
        matrix[i * into :, o * out :][:into, :out] += block
    return matrix


def _dealing(layout):
    """The permutation matrix that deals out what groups return."""
    groups, size = layout.mask.shape[1], layout.block_shape[1]
    permutation = np.zeros((groups * size,) * 2)
    for group in range(groups):
        for feature in range(size):
            permutation[group * size + feature, feature * groups + group] = 1
    return permutation


def _factors(layer):
    """The matrix of each layout, and what deals out its outputs."""
    found = []
    for number, layout in enumerate(layer.layouts):
        several = len(layer.layouts) > 1
        dealing = _dealing(layout) if several else np.eye(layout.shape[1])
        blocks = np.asarray(layer.kernels[number], "float64")
        found.append((_placed(layer, number, blocks), dealing))
    return found


def _product(factors, size):
    """The product of matrices, of which the first has as many rows."""
    return functools.reduce(np.matmul, itertools.chain(*factors), np.eye(size))


def _kernel(layer):
    """The dense kernel, in numpy's float64."""
    kernel = _product(_factors(layer), layer.layouts[0].shape[0])
    return kernel[: layer.dense_shape[0], : layer.units]


def _results(layer, x, upstream):
    """Outputs, and gradients of inputs and of weights."""
    with tf.GradientTape() as tape:
        x = tf.convert_to_tensor(x)
        tape.watch(x)
        y = layer(x)
        loss = tf.reduce_sum(tf.cast(y, upstream.dtype) * upstream)
    of_x, *of_weights = tape.gradient(loss, [x, *layer.trainable_variables])
    return [y, of_x, *of_weights]


def _dense(layer, kernel=None):
    """The same layer by Keras, in float64."""
    dense = keras.layers.Dense(
        layer.units, layer.activation, use_bias=layer.use_bias, dtype="float64"
    )
    kernel = layer.dense_kernel() if kernel is None else kernel
    dense.build((None, kernel.shape[0]))
    dense.set_weights([kernel, layer.bias] if layer.use_bias else [kernel])
    return dense


def _of_blocks(layer, of_kernel):
    """The gradients of blocks, of that of the dense kernel: in numpy's float64."""
    factors, first, last = _factors(layer), layer.layouts[0], layer.layouts[-1]
    upstream = np.zeros((first.shape[0], last.shape[1]))
    upstream[: len(of_kernel), : layer.units] = of_kernel
    found = []
    for number, (_, dealing) in enumerate(factors):
        before = _product(factors[:number], first.shape[0])
        after = dealing @ _product(factors[number + 1 :], len(dealing))
        found.append(_cut(layer, number, before.T @ upstream @ after.T))
    return found


def _cut(layer, number, of_matrix):
    """The gradients of the blocks of one layout."""
    layout = layer.layouts[number]
    (into, out), (outputs, inputs) = layout.block_shape, np.argwhere(layout.mask.T).T
    present = np.ones(layout.num_blocks)
    if layer.dynamic:
        inputs, present = layer.places.numpy(), layer.present.numpy()
    return np.stack(
        [
            of_matrix[i * into :, o * out :][:into, :out] * there
            for i, o, there in zip(inputs, outputs, present, strict=True)
        ]
    )


def _expected(layer, x, upstream):
    """Outputs and gradients by way of `keras.layers.Dense`."""
    kernel, dtype = layer.dense_kernel(), layer.compute_dtype
    if len(layer.kernels) == 1:
        # As it is multiplied: what is rounded before is not the product's error.
        kernel = tf.cast(tf.cast(kernel, dtype), "float64")
    x = tf.cast(tf.cast(x, dtype), "float64")
    upstream = tf.cast(upstream, "float64")
    dense = _dense(layer, kernel)
    y, of_x, of_kernel, *of_bias = _results(dense, x, upstream)
    return [y, of_x, *_of_blocks(layer, of_kernel.numpy()), *of_bias]


def _apart(found, expected):
    """The largest difference, relative to the norm of each array."""
    differences = []
    for mine, theirs in zip(found, expected, strict=True):
        mine, theirs = (tf.cast(each, "float64").numpy() for each in (mine, theirs))
        assert mine.shape == theirs.shape
        difference = np.linalg.norm(mine - theirs)
        differences.append(difference / max(np.linalg.norm(theirs), 1e-30))
    return max(differences)


def _check(layer, x):
    """Compares outputs and all gradients with those of a dense layer."""
    x = x.astype(layer.variable_dtype)
    _built(layer, x.shape[-1])
    shape = *x.shape[:-1], layer.units
    assert layer.compute_output_shape(x.shape) == shape
    upstream = tf.cast(_numbers(*shape, seed=1), layer.compute_dtype)
    found = _results(layer, x, upstream)
    assert found[0].shape == shape and found[0].dtype == layer.compute_dtype
    limit = LIMITS[layer.dtype_policy.name]
    kernels = [layer.dense_kernel()], [_kernel(layer)]
    assert _apart(*kernels) <= LIMITS[layer.variable_dtype]
    assert _apart(found, _expected(layer, x, upstream)) <= limit


def _has(pattern, inputs, units, size, dynamic=False):
    if not isinstance(pattern, str) or pattern != "monarch":
        return True
    blocks, rest = divmod(min(inputs, units), size)
    return not rest and blocks > 1 and not dynamic


@pytest.mark.quick_one_in(9)
@pytest.mark.parametrize("pattern", names())
@pytest.mark.parametrize("inputs, units, size", SIZES, ids=str)
@pytest.mark.parametrize("sparsity", (0.1, 0.7))
def test_equals_a_dense_layer(pattern, inputs, units, size, sparsity):
    for dynamic in False, True:
        if _has(pattern, inputs, units, size, dynamic):
            layer = _layer(units, size, pattern, sparsity, dynamic=dynamic)
            _check(layer, _numbers(6, inputs))


@pytest.mark.parametrize("sparsity", (0, 0.1, 0.5, 0.75))
@pytest.mark.parametrize("inputs, units", ((150, 128), (128, 150), (64, 70), (70, 64)))
def test_monarch_of_padded_features(inputs, units, sparsity):
    """One of its matrices may have groups of other sizes than the other one."""
    size = 32 if max(inputs, units) > 100 else 8
    _check(_layer(units, size, "monarch", sparsity), _numbers(5, inputs))


@pytest.mark.parametrize("side", (2, 4, 8))
def test_monarch_is_what_its_paper_defines(side):
    """M = P L P^T R, with P that turns [side, side] features around."""
    features = side**2
    layer = _layer(features, 1, "monarch", 1 - 2 / side if side > 2 else 0.0)
    layer.build((None, features))
    first, second = (np.asarray(each, "float64") for each in layer.kernels)
    assert first.shape == second.shape == (side,) * 3
    turned = np.arange(features).reshape(side, side).T.ravel()
    p = np.eye(features)[turned]
    left, right = np.zeros((2, features, features))
    for block in range(side):
        place = slice(block * side, (block + 1) * side)
        # A layer multiplies from the other side.
        right[place, place], left[place, place] = first[block].T, second[block].T
    assert _apart([layer.dense_kernel()], [(p @ left @ p.T @ right).T]) < 1e-6


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("dynamic", (False, True), ids=("", "dynamic"))
@pytest.mark.parametrize("shape", ((1,), (0,), (3, 5), (2, 1, 3)), ids=str)
@pytest.mark.parametrize("use_bias", (False, True), ids=("", "bias"))
def test_axes_of_examples(shape, dynamic, use_bias):
    layer = _layer(20, 4, MATRIX, dynamic=dynamic, use_bias=use_bias)
    _check(layer, _numbers(*shape, 16))


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("policy", LIMITS)
@pytest.mark.parametrize("pattern", ("butterfly", "random", "monarch", "local_strided"))
def test_policies(pattern, policy):
    for dynamic in False, True:
        if _has(pattern, 96, 64, 8, dynamic):
            layer = _layer(64, 8, pattern, 0.6, dynamic=dynamic, dtype=policy)
            _check(layer, _numbers(3, 5, 96))


@pytest.mark.parametrize("activation", (None, "relu", "gelu", "softmax"))
def test_activations(activation):
    layer = _layer(64, 16, "random", activation=activation)
    _check(layer, _numbers(6, 64))


@pytest.mark.parametrize("xla", (False, True), ids=("", "xla"))
@pytest.mark.parametrize("dynamic", (False, True), ids=("", "dynamic"))
def test_functions_of_unknown_sizes(dynamic, xla):
    layer = _built(_layer(20, 4, MATRIX, dynamic=dynamic), 16)

    @tf.function(
        jit_compile=xla,
        input_signature=[
            tf.TensorSpec([None, None, 16]),
            tf.TensorSpec([None, None, 20]),
        ],
    )
    def results(x, upstream):
        return _results(layer, x, upstream)

    x, upstream = _numbers(3, 5, 16), _numbers(3, 5, 20, seed=1)
    assert _apart(results(x, upstream), _expected(layer, x, upstream)) < 1e-6


def test_unnamed_arguments_are_those_documented():
    layer = BlockSparseDense(256)
    layer.build((None, 512))
    assert (layer.block_size, layer.pattern, layer.sparsity) == (32, "butterfly", 0.75)
    kernel = layer.dense_kernel().numpy()
    assert np.mean(kernel == 0) == 0.75
    assert layer.activation is keras.activations.linear


# What it holds


@pytest.mark.parametrize("pattern", names())
@pytest.mark.parametrize("density", (0.5, 0.25))
def test_weights_and_slots_are_as_many_as_the_density(pattern, density):
    layer = _layer(512, 16, pattern, 1 - density, use_bias=False)
    layer.build((None, 512))
    optimizer = keras.optimizers.Adam()
    optimizer.build(layer.trainable_variables)
    numbers = sum(each.shape.num_elements() for each in map(_tensor, layer.kernels))
    assert abs(numbers / 512**2 - density) <= 0.05
    assert layer.count_params() == numbers
    held = [*map(_tensor, optimizer.variables)]
    slots = sum(each.shape.num_elements() for each in held if each.shape.rank)
    assert slots == 2 * numbers


def _tensor(variable):
    return tf.convert_to_tensor(variable)


def test_dynamic_layers_train_only_blocks():
    layer = _layer(20, 4, MATRIX, dynamic=True)
    layer.build((None, 16))
    assert [w.name for w in layer.trainable_variables] == ["kernel", "bias"]
    assert [w.name for w in layer.non_trainable_variables] == ["places", "present"]
    np.testing.assert_array_equal(layer.places, np.argwhere(MATRIX.T)[:, 1])
    np.testing.assert_array_equal(layer.present, np.ones(MATRIX.sum()))


@pytest.mark.parametrize(
    "initializer",
    ("glorot_uniform", "glorot_normal", "he_normal", "lecun_normal", "lecun_uniform"),
)
@pytest.mark.parametrize("pattern", ("butterfly", "random", "block_diagonal"))
def test_outputs_are_spread_as_of_a_dense_layer(pattern, initializer):
    """If they count inputs: one of two matrices would be counted twice."""
    x = np.random.default_rng(0).normal(size=(500, 512)).astype("float32")
    options = {"kernel_initializer": initializer, "use_bias": False}
    ours = BlockSparseDense(512, 16, pattern, 0.75, **options)
    theirs = keras.layers.Dense(512, **options)
    np.testing.assert_allclose(np.std(ours(x)), np.std(theirs(x)), rtol=0.05)


def test_outputs_of_monarch_are_spread_as_of_a_dense_layer():
    x = np.random.default_rng(0).normal(size=(500, 512)).astype("float32")
    options = {"kernel_initializer": "lecun_normal"}
    ours = BlockSparseDense(512, 16, "monarch", 0.75, **options)
    theirs = keras.layers.Dense(512, **options)
    np.testing.assert_allclose(np.std(ours(x)), np.std(theirs(x)), rtol=0.05)


def test_other_initializers_are_used_as_they_are():
    layer = _layer(20, 4, MATRIX, kernel_initializer=keras.initializers.Constant(3))
    layer.build((None, 16))
    np.testing.assert_array_equal(layer.kernels[0], np.full((MATRIX.sum(), 4, 4), 3))


@pytest.mark.parametrize("regularizer", ("l1", "l2", "L1L2"))
def test_regularizers_are_those_of_the_dense_kernel(regularizer):
    layer = _layer(20, 4, MATRIX, kernel_regularizer=regularizer, bias_regularizer="l2")
    layer.build((None, 16))
    expected = keras.regularizers.get(regularizer)(layer.dense_kernel())
    expected += keras.regularizers.L2()(layer.bias)
    np.testing.assert_allclose(sum(layer.losses), expected, rtol=1e-6)


def test_constraints_are_of_blocks():
    constraint = keras.constraints.NonNeg()
    layer = _layer(
        20, 4, MATRIX, kernel_constraint=constraint, bias_constraint="MaxNorm"
    )
    layer.build((None, 16))
    optimizer = keras.optimizers.SGD(0.1)
    weights = layer.trainable_variables
    optimizer.apply([tf.ones(weight.shape) for weight in weights], weights)
    assert np.min(layer.kernels[0]) == 0
    assert layer.bias.constraint is not None


# In models


def _model(**options):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((16,)),
            _layer(20, 4, MATRIX, kernel_regularizer="l2", **options),
            _layer(24, 4, "monarch", 0.5),
            _layer(32, 4, "random", 0.5, seed=3, dynamic=True),
            _layer(7, 4, "barabasi_albert", 0.5),
        ]
    )


def _examples(rows=9):
    return _numbers(rows, 16), _numbers(rows, 7, seed=1)


def _dataset(rows=9):
    return tf.data.Dataset.from_tensor_slices(_examples(rows)).batch(rows)


@pytest.mark.parametrize("dynamic", (False, True), ids=("", "dynamic"))
def test_saved_and_loaded(dynamic, tmp_path):
    model, (x, _) = _model(dynamic=dynamic), _examples()
    for layer in model.layers:
        if layer.dynamic:
            _move(layer)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x), model(x))
    for ours, theirs in zip(model.layers, loaded.layers, strict=True):
        np.testing.assert_array_equal(ours.dense_kernel(), theirs.dense_kernel())
        assert ours.get_config() == theirs.get_config()
    model.save_weights(tmp_path / "only.weights.h5")
    other = _model(dynamic=dynamic)
    other.load_weights(tmp_path / "only.weights.h5")
    np.testing.assert_array_equal(other(x), model(x))


def test_a_config_of_all_arguments():
    config = {
        "units": 20,
        "block_size": 4,
        "pattern": MATRIX.tolist(),
        "sparsity": 0.3,
        "activation": "gelu",
        "use_bias": False,
        "dynamic": True,
        "seed": 5,
        "name": "sparse",
        "trainable": False,
    }
    layer = BlockSparseDense.from_config(config)
    assert config.items() <= layer.get_config().items()
    options = {
        **{"kernel_initializer": "he_normal", "bias_initializer": "ones"},
        **{"kernel_regularizer": "l1", "bias_regularizer": "l2"},
        **{"kernel_constraint": "non_neg", "bias_constraint": "unit_norm"},
    }
    layer = BlockSparseDense(20, **options)
    again = BlockSparseDense.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    for name in options:
        assert type(getattr(again, name)) is type(getattr(layer, name))


def test_masks_pass_through():
    ids = np.array([[1, 2, 0], [2, 0, 0]])
    embedded = keras.layers.Embedding(3, 16, mask_zero=True)(ids)
    outputs = _layer(20, 4, MATRIX)(embedded)
    np.testing.assert_array_equal(outputs._keras_mask, ids != 0)


@pytest.mark.slow
@pytest.mark.parametrize("xla", (False, True), ids=("", "xla"))
def test_fit(xla):
    ours, theirs = _model(), _model()
    ours.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=xla)
    ours.fit(_dataset(), epochs=3, verbose=0)
    loss, before = keras.losses.MeanSquaredError(), theirs.get_weights()
    optimizer = keras.optimizers.Adam(0.01)
    oracle.train(theirs, optimizer, loss, [_examples()] * 3)
    steps = [
        [after - old for after, old in zip(each.get_weights(), before, strict=True)]
        for each in (ours, theirs)
    ]
    assert _apart(*steps) < 1e-3


def test_it_trains_as_a_dense_layer_that_is_masked():
    """Gradient descent, of which zeros stay zeros."""
    layer = _layer(20, 4, MATRIX)
    model = keras.Sequential([keras.Input((16,)), layer])
    model.compile(keras.optimizers.SGD(0.3), "mse")
    mask = np.kron(MATRIX, np.ones((4, 4)))
    dense = _dense(layer)
    x, y = _numbers(9, 16), _numbers(9, 20, seed=1)
    model.fit(tf.data.Dataset.from_tensors((x, y)).repeat(5), verbose=0)
    optimizer, loss = keras.optimizers.SGD(0.3), keras.losses.MeanSquaredError()
    for _ in range(5):
        oracle.train(dense, optimizer, loss, [(x.astype("float64"), y)])
        dense.kernel.assign(dense.kernel * mask)
    found = [layer.dense_kernel(), layer.bias.value]
    assert _apart(found, [dense.kernel.value, dense.bias.value]) < 1e-6


# What is refused


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"pattern": "other"}, r"pattern='other'; expected one of"),
        ({"pattern": np.eye(3)}, r"pattern of shape \(3, 3\); expected \(4, 5\)"),
        (
            {"pattern": np.eye(4, 5) * 2},
            r"4 values other than 0 and 1, and 0 of 1; expected",
        ),
        ({"pattern": "random", "sparsity": 1}, r"sparsity=1; expected at least 0 and"),
        ({"block_size": 0}, r"block_size=0; expected a whole number"),
        ({"block_size": "8"}, r"block_size='8'; expected a whole number"),
        (
            {"pattern": "monarch", "dynamic": True},
            r"dynamic=True with pattern='monarch'; expected a pattern of one matrix",
        ),
        (
            {"pattern": "monarch", "block_size": 16},
            r"expected the smaller number to be",
        ),
        ({"activation": "no"}, r"no"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockSparseDense(**{"units": 20, "block_size": 4, **arguments}).build(
            (None, 16)
        )


def test_inputs_of_another_size():
    layer = _layer(20, 4, MATRIX)
    layer.build((None, 16))
    with pytest.raises(
        ValueError, match="expected axis -1 of input shape to have value"
    ):
        layer(tf.zeros((2, 12)))


def test_layers_draw_seeds_of_their_own_and_keep_them():
    keras.utils.set_random_seed(1)
    one, other = (BlockSparseDense(64, 4, "random") for _ in range(2))
    again = BlockSparseDense.from_config(one.get_config())
    for layer in (one, other, again):
        layer.build((None, 64))
    assert (one.layouts[0].mask == again.layouts[0].mask).all()
    assert (one.layouts[0].mask != other.layouts[0].mask).any()


@pytest.mark.parametrize("kernel_initializer", ["glorot_uniform", "he_normal"])
def test_factors_of_monarch_begin_apart_and_scale_as_one(kernel_initializer):
    keras.utils.set_random_seed(1)
    options = {"kernel_initializer": kernel_initializer, "use_bias": False}
    layer = BlockSparseDense(512, 32, "monarch", **options)
    dense = keras.layers.Dense(512, **options)
    x = np.random.default_rng(0).normal(size=(256, 512))
    outputs = [np.std(each(x)) for each in (layer, dense)]
    assert not np.array_equal(*layer.kernels)
    assert outputs[0] == pytest.approx(outputs[1], rel=0.1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"units": 0}, "Received units=0; expected a whole number"),
        ({"units": "64"}, "Received units='64'"),
        ({"sparsity": "a"}, "Received sparsity='a'"),
        ({"sparsity": None}, "Received sparsity=None"),
        ({"seed": -1}, "Received seed=-1"),
    ],
)
def test_wrong_numbers(wrong, message):
    with pytest.raises(ValueError, match=message):
        BlockSparseDense(**{"units": 8, **wrong})


@pytest.mark.slow
def test_one_import_is_enough_to_load(tmp_path):
    model = keras.Sequential([keras.Input((64,)), BlockSparseDense(32, 8)])
    model.save(tmp_path / "m.keras")
    program = (
        "import keras, towers.models.block_sparse; "
        f"keras.saving.load_model({str(tmp_path / 'm.keras')!r})"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S)
