"""`towers.sparsify`, against numpy."""

import keras
import numpy as np
import pytest
from keras import layers

import towers
from tests.towers.sparse import networks
from towers.models.block_sparse import BlockSparseConv2D, BlockSparseDense
from towers.models.text import transformer_lm

pytestmark = pytest.mark.quick_one_in(2)

LIMIT = 1e-5


def check(model, x, sparsity=0.5, block_size=4, names=None, **options):
    """Compares a sparse copy with the model in which numpy has set blocks to zero."""
    copy = towers.sparsify(
        model, sparsity=sparsity, block_size=block_size, layers=names, **options
    )
    assert copy is not model
    wanted = names or [
        each.name for each in copy._flatten_layers() if hasattr(each, "dense_kernel")
    ]
    assert wanted
    found = {each.name: each for each in copy._flatten_layers()}
    for layer in model._flatten_layers():
        if layer.name not in wanted:
            continue
        sparse = isinstance(layer, (BlockSparseDense, BlockSparseConv2D))
        kernel = np.array(layer.dense_kernel() if sparse else layer.kernel)
        sums = networks.block_squares(kernel, block_size)
        order = np.argsort(-sums, axis=None)
        kept = np.zeros(sums.size, bool)
        kept[order[: round((1 - sparsity) * sums.size)]] = True
        kernel = networks.masked(kernel, kept.reshape(sums.shape), block_size)
        np.testing.assert_allclose(
            found[layer.name].dense_kernel(), kernel, atol=1e-6, rtol=0
        )
        if not sparse:
            layer.kernel.assign(kernel)
    if not any(hasattr(each, "dense_kernel") for each in model._flatten_layers()):
        np.testing.assert_allclose(copy(x), model(x), atol=LIMIT, rtol=1e-4)
    return copy


def chain(shape, *made):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input(shape), *made])
    for weight in model.trainable_weights:  # no bias is zero
        weight.assign(keras.random.normal(weight.shape, seed=len(weight.path)))
    return model, np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")


CASES = {
    "dense": ((16,), layers.Dense(24, activation="relu", name="it")),
    "without bias": ((16,), layers.Dense(24, use_bias=False, name="it")),
    "uneven": ((13,), layers.Dense(18, name="it")),
    "sequences": ((3, 16), layers.Dense(12, name="it")),
    "einsum": ((5, 10), layers.EinsumDense("btw,wo->bto", (5, 12), name="it")),
    "einsum with bias": (
        (5, 10),
        layers.EinsumDense("btw,wo->bto", (5, 12), bias_axes="o", name="it"),
    ),
    "einsum of any axes": (
        (5, 10),
        layers.EinsumDense("...w,wo->...o", 12, bias_axes="o", name="it"),
    ),
    "convolution": ((6, 6, 8), layers.Conv2D(12, 3, name="it")),
    "strides": (
        (7, 6, 9),
        layers.Conv2D(10, (3, 2), strides=(2, 1), padding="same", name="it"),
    ),
    "dilation": ((9, 9, 8), layers.Conv2D(8, 3, dilation_rate=2, name="it")),
    "half": ((16,), layers.Dense(24, dtype="mixed_bfloat16", name="it")),
}


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("sparsity", [0.0, 0.5])
@pytest.mark.parametrize("case", CASES)
def test_keeps_the_largest_blocks(case, sparsity):
    shape, layer = CASES[case]
    model, x = chain(shape, type(layer).from_config(layer.get_config()))
    copy = check(model, x, sparsity)
    assert copy.get_layer("it").dtype_policy.name == layer.dtype_policy.name
    assert model.get_layer("it").kernel.shape[-1]  # it is still there, and dense


def test_channels_first():
    layer = layers.Conv2D(8, 3, data_format="channels_first", name="it")
    model, x = chain((9, 6, 6), layer)
    copy = towers.sparsify(model, sparsity=0.0, block_size=4)
    last = keras.ops.conv(np.moveaxis(x, 1, -1), layer.kernel) + layer.bias
    np.testing.assert_allclose(copy(x), np.moveaxis(last, -1, 1), atol=1e-4)


def test_shared_and_nested_layers():
    keras.utils.set_random_seed(1)
    inner = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, activation="tanh", name="within")]
    )
    shared = layers.Dense(8, activation="tanh", name="shared")
    x = keras.Input((8,))
    model = keras.Model(x, shared(inner(inner(shared(x)))))
    copy = check(model, np.random.default_rng(0).normal(size=(3, 8)), block_size=2)
    assert len(copy.weights) == 4


def test_layers_that_have_blocks_are_made_sparse_again():
    model, x = chain((16,), layers.Dense(24, name="it"))
    half = check(model, x, 0.5)
    assert half.get_layer("it").layouts[0].num_blocks == 12
    fewer = check(half, x, 0.75)
    assert fewer.get_layer("it").layouts[0].num_blocks == 6
    again = towers.sparsify(fewer, sparsity=0.75, block_size=4)
    np.testing.assert_array_equal(again(x), fewer(x))


def test_other_weights_are_copied():
    made = layers.Embedding(9, 8), layers.Dense(16, name="it")
    model, x = chain((3,), *made, layers.BatchNormalization(), layers.Dropout(0.5))
    for weight in model.non_trainable_weights:
        weight.assign(weight + 1.5)
    check(model, np.abs(x).astype(int), block_size=2)


def test_named_patterns_keep_their_blocks():
    model, _ = chain((16,), layers.Dense(16, name="it"))
    options = {"sparsity": 0.5, "block_size": 4, "seed": 5}
    for pattern in ("random", "erdos_renyi", "butterfly", np.eye(4)):
        layer = towers.sparsify(model, pattern, **options).get_layer("it")
        alone = BlockSparseDense(16, pattern=pattern, **options)
        alone.build((None, 16))
        (layout,), (expected,) = layer.layouts, alone.layouts
        np.testing.assert_array_equal(layout.mask, expected.mask)
        kept = np.kron(layout.mask, np.ones(layout.block_shape))
        kernel = model.get_layer("it").kernel * kept
        np.testing.assert_allclose(layer.dense_kernel(), kernel, atol=1e-6)


def test_takes_names_and_says_what_it_did(caplog):
    model = networks.dense()
    check(model, networks.batch()[0], 0.5, 4, names=["hidden"])
    (line,) = caplog.messages
    assert "Block-sparse: hidden; unchanged: conv, last." in line
    assert f" instead of {model.count_params():,}." in line


def test_small_layers_stay_dense():
    model, _ = chain((16,), layers.Dense(16, name="large"), layers.Dense(7))
    copy = towers.sparsify(model, block_size=4, sparsity=0.5)
    assert isinstance(copy.get_layer("large"), BlockSparseDense)
    assert isinstance(copy.layers[-1], layers.Dense)


class Twice(layers.Dense):
    def call(self, inputs):
        return 2 * super().call(inputs)


class Named(layers.Dense):
    """Computes what its base class does."""


def test_what_computes_something_else_stays():
    model, x = chain(
        *((6, 8), Twice(8), Named(8, name="it")),
        layers.EinsumDense("btw,wo->bto", (6, 8), bias_axes="t"),
        layers.EinsumDense("btw,wo->bto", (6, 8), bias_axes="to"),
        layers.EinsumDense("btw,wto->bto", (6, 8)),
        layers.Dense(8, kernel_constraint="non_neg"),
        layers.Conv1D(8, 1),
        layers.TimeDistributed(layers.Dense(8)),
    )
    copy = check(model, x, 0.0, 2)
    kinds = [type(layer) for layer in copy.layers]
    assert kinds.count(BlockSparseDense) == 1 and Twice in kinds


def test_regularizers_are_kept():
    given = {"kernel_regularizer": "l2", "activity_regularizer": "l2"}
    model, x = chain((8,), layers.Dense(8, bias_regularizer="l1", **given))
    copy = towers.sparsify(model, sparsity=0.0, block_size=2)
    model(x), copy(x)
    assert len(copy.losses) == 3
    np.testing.assert_allclose(sum(copy.losses), sum(model.losses), rtol=1e-5)


def test_a_frozen_layer_stays_frozen():
    model, _ = chain((8,), layers.Dense(8, trainable=False))
    assert not towers.sparsify(model, block_size=2, dynamic=True).trainable_weights


@pytest.mark.slow
def test_is_saved_and_trained(tmp_path):
    x, y = networks.batch()
    copy = networks.sparse(pattern="magnitude")
    copy.compile("adam", "mse")
    copy.fit(x, y, verbose=0)
    copy.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(x), copy(x), atol=1e-6)


class OwnModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(8)

    def call(self, inputs):
        return self.dense(inputs)


def own():
    model = OwnModel()
    model(np.ones((1, 8)))
    return model


@pytest.mark.quick_one_in(1)
@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda: towers.multi_gpu_model(networks.dense(), gpus=2),
            *({}, "call sparsify before multi_gpu_model"),
        ),
        (own, {}, "whose layers are not known; expected a functional or sequential"),
        (
            lambda: keras.Sequential([layers.Dense(8)]),
            *({}, "whose layers are not known"),
        ),
        (
            lambda: keras.Sequential(
                [keras.Input((8,)), layers.Dense(8, kernel_constraint="non_neg")]
            ),
            *({}, "in which no layer can be made sparse; expected Dense"),
        ),
        (networks.dense, {"pattern": "monarch"}, "a product of two matrices"),
        (
            *(networks.dense, {"pattern": "stripes", "block_size": 2}),
            "Received pattern='stripes'",
        ),
        (
            *(networks.dense, {"layers": ["hidden", "hiden"]}),
            r"layers=\['hiden'\].* some of its layers with a kernel: conv, hidden, las",
        ),
        (networks.dense, {"block_size": 99}, "block_size=99; expected a layer whose"),
        (networks.dense, {"block_size": 0}, "block_size=0; expected a whole number"),
        (networks.dense, {"sparsity": 1.0, "block_size": 2}, "Received sparsity=1.0"),
        (networks.dense, {"sparsity": -0.1, "block_size": 2}, "Received sparsity=-0."),
    ],
)
def test_says_what_is_wrong(make, options, message):
    with pytest.raises(ValueError, match=message):
        towers.sparsify(make(), **options)


def test_operations_of_a_functional_model_are_copied():
    inputs = keras.Input((64,))
    model = keras.Model(inputs, keras.layers.Dense(64)(inputs) + inputs)
    copy = towers.sparsify(model, sparsity=0.0)
    x = np.random.default_rng(0).normal(size=(4, 64)).astype("float32")
    np.testing.assert_allclose(copy(x), model(x), rtol=1e-4, atol=1e-5)


def test_layers_with_blocks_keep_their_size():
    layer = BlockSparseDense(64, 16, "random", 0.5)
    model = keras.Sequential([keras.Input((64,)), layer])
    copy = towers.sparsify(model, sparsity=0.5)
    x = np.random.default_rng(0).normal(size=(4, 64)).astype("float32")
    np.testing.assert_allclose(copy(x), model(x), rtol=1e-4, atol=1e-5)


def test_transformers_are_made_sparse():
    model = transformer_lm.build(50, 16, width=64, layers=1, heads=2)
    copy = towers.sparsify(model, sparsity=0.0)
    tokens = np.arange(16)[None]
    np.testing.assert_allclose(copy(tokens), model(tokens), rtol=1e-4, atol=1e-5)
    assert isinstance(copy.get_layer("expand_0"), BlockSparseDense)


def test_quantized_models_are_refused():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    model.quantize("int8")
    with pytest.raises(ValueError, match="call sparsify before quantize"):
        towers.sparsify(model)
