"""Block-sparse attention: against a dense one, in functions, saved, and on towers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import oracle
from towers import multi_gpu_model
from towers.models.block_sparse import BlockSparseAttention

pytestmark = pytest.mark.quick_one_in(3)

HEADS, KEY, WIDTH = 2, 4, 6
PATTERNS = "local", "strided", "global", "matrix"
# Tokens of a block and of an example: a part of a block, whole ones, a single one. The
# type, and how near numbers are to those of float64. Gradients of kernels are not as
# near with bfloat16: those of a dense attention are off by up to 2.6e-2 here.
CASES = [
    (8, 77, "float32", 1e-6),
    (16, 80, "float32", 1e-6),
    (32, 150, "float32", 1e-6),
    (64, 61, "float32", 1e-6),
    (8, 77, "float64", 1e-12),
    (8, 77, "mixed_bfloat16", 2e-2),
]
# In blocks.
WINDOW, STRIDE, GLOBAL = 1, 3, 2


def _matrix(count):
    """Rows and columns that have few blocks and many; some blocks nobody looks at."""
    random = np.random.default_rng(5).random((count, count))
    looks = random < np.linspace(0.1, 0.9, count)
    looks |= np.eye(count, dtype=bool)
    if count > 2:
        looks[:, 1], looks[1, 0] = False, True
    return looks


def _layer(pattern, size, tokens, **options):
    if pattern == "matrix":
        pattern = _matrix(-(-tokens // size)).astype(int).tolist()
    numbers = {"window": WINDOW, "stride": STRIDE, "global_blocks": GLOBAL}
    options = {"bias_initializer": "glorot_uniform", **numbers, **options}
    return BlockSparseAttention(HEADS, KEY, size, pattern, **options)


def _looks(pattern, size, tokens, causal):
    """Which tokens look at which, bool [queries, keys]."""
    query, key = np.arange(tokens)[:, None], np.arange(tokens)
    apart = np.abs(query // size - key // size)
    looks = apart <= WINDOW
    if pattern == "strided":
        looks |= apart % STRIDE == 0
    if pattern == "global":
        looks |= (query < GLOBAL * size) | (key < GLOBAL * size)
    if pattern == "matrix":
        looks = _matrix(-(-tokens // size))[query // size, key // size]
    return looks & (query >= key) if causal else looks


def _dense(x, weights, looks):
    """Attention with all scores; `looks` is bool [batch or 1, queries, keys]."""
    kernels, biases = weights[::2], weights[1::2]
    query, key, value = (
        tf.einsum("btw,whd->bhtd", x, kernel) + bias[:, None]
        for kernel, bias in zip(kernels[:3], biases[:3], strict=True)
    )
    scores = tf.einsum("bhqd,bhkd->bhqk", query, key) / KEY**0.5
    scores = tf.where(looks[:, None], scores, -1e9)
    sees = np.any(looks, -1)[:, None, :, None]
    attended = tf.where(sees, tf.nn.softmax(scores) @ value, 0.0)
    return tf.einsum("bhtd,hdw->btw", attended, kernels[3]) + biases[3]


def _examples(tokens, dtype="float32"):
    random = np.random.default_rng(0)
    x, upstream = random.normal(size=(2, 3, tokens, WIDTH)).astype(dtype)
    mask = random.random((3, tokens)) < 0.7
    mask[0] = False
    mask[1, tokens // 2 :] = False
    return tf.constant(x), tf.constant(upstream), mask


def _with_gradients(function, x, weights, upstream):
    """The output, and the gradients of x and of weights."""
    with tf.GradientTape() as tape:
        tape.watch([x, *weights])
        output = function(x)
        loss = tf.reduce_sum(output * tf.cast(upstream, output.dtype))
    return [output, *tape.gradient(loss, [x, *weights])]


def _expected(layer, x, upstream, looks):
    """What dense attention makes of the same numbers, with float64."""
    x, upstream, *weights = (
        tf.cast(tf.cast(each, layer.compute_dtype), "float64")
        for each in (x, upstream, *layer.weights[:8])
    )
    return _with_gradients(lambda x: _dense(x, weights, looks), x, weights, upstream)


def _assert_near(found, expected, limit):
    """Compares the output, the gradient of x, and those of each projection.

    Differences are relative to the size (the norm) of each. A projection's kernel and
    bias count together: the gradient of the keys' bias is zero, as it changes no weight
    of attention, and what is found is rounding.
    """
    for pair in slice(0, 1), slice(1, 2), *(slice(i, i + 2) for i in (2, 4, 6, 8)):
        mine, theirs = (
            np.concatenate([np.array(tf.cast(e, "float64")).ravel() for e in each])
            for each in (found[pair], expected[pair])
        )
        wider = 2 if limit > 1e-2 and pair.start > 1 else 1
        assert np.linalg.norm(mine - theirs) <= wider * limit * np.linalg.norm(theirs)


def _variables(layer):
    return [variable.value for variable in layer.trainable_variables]


@pytest.mark.quick_one_in(18)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("size", "tokens", "dtype", "limit"), CASES)
def test_equals_dense_attention(size, tokens, dtype, limit, pattern, causal, masked):
    layer = _layer(pattern, size, tokens, causal=causal, dtype=dtype)
    x, upstream, mask = _examples(tokens, layer.variable_dtype)
    looks = _looks(pattern, size, tokens, causal)[None]
    options = {}
    if masked:
        options, looks = {"padding_mask": mask}, looks & mask[:, None]
    layer.build(x.shape)
    found = _with_gradients(
        lambda x: layer(x, **options), x, _variables(layer), upstream
    )
    assert found[0].dtype == layer.compute_dtype
    _assert_near(found, _expected(layer, x, upstream, looks), limit)


def test_softmax_is_float32_in_mixed_precision():
    layer = _layer("local", 8, 16, dtype="mixed_bfloat16")
    layer.build((None, 16, WIDTH))
    ops = _traced(layer, tf.TensorSpec((1, 16, WIDTH))).get_operations()
    assert {op.outputs[0].dtype for op in ops if op.type == "Softmax"} == {tf.float32}


def test_weights_are_those_of_multi_head_attention():
    x, _, mask = _examples(77)
    theirs = keras.layers.MultiHeadAttention(
        HEADS, KEY, bias_initializer="glorot_uniform"
    )
    theirs.build(x.shape, x.shape)
    ours = _layer("strided", 8, 77)
    ours.build(x.shape)
    ours.set_weights(theirs.get_weights())
    looks = _looks("strided", 8, 77, False) & mask[1:, None]
    expected = theirs(x[1:], x[1:], attention_mask=looks)
    found = ours(x[1:], padding_mask=mask[1:])
    assert oracle.largest_difference([found], [expected]) <= 1e-6


def test_projections_begin_with_different_numbers():
    layer = _layer("local", 8, 77)
    layer.build((None, 77, WIDTH))
    assert len({weight.tobytes() for weight in layer.get_weights()}) == 8


def test_without_biases():
    layer = _layer("local", 8, 77, use_bias=False)
    x, _, _ = _examples(77)
    found, kernels = layer(x), layer.weights
    assert [kernel.ndim for kernel in kernels] == [3] * 4
    weights = [each for kernel in kernels for each in (kernel.value, tf.zeros((1, 1)))]
    looks = _looks("local", 8, 77, False)[None]
    assert oracle.largest_difference([found], [_dense(x, weights, looks)]) <= 1e-6


def test_tokens_that_see_none_get_zeros():
    layer = _layer("local", 8, 77, causal=True)
    x, upstream, _ = _examples(77)
    layer.build(x.shape)
    # Of the last 40 tokens, some look at none, and some are in blocks that see some.
    mask = np.arange(77) < 37
    mask = np.stack([mask, mask, ~np.ones(77, bool)])
    found = _with_gradients(
        lambda x: layer(x, padding_mask=mask), x, _variables(layer), upstream
    )
    assert all(np.isfinite(each).all() for each in found)
    bias = np.broadcast_to(layer.weights[-1], (77, WIDTH))
    np.testing.assert_array_equal(found[0][2], bias)
    np.testing.assert_array_equal(found[0][:, 48:], [bias[48:]] * 3)
    assert np.abs(found[0][0, :48] - bias[:48]).min(axis=0).max() > 0


def test_the_mask_of_an_embedding():
    ids = np.random.default_rng(0).integers(0, 3, (3, 20))
    embedding = keras.layers.Embedding(3, WIDTH, mask_zero=True)
    layer = _layer("local", 8, 20)
    found = keras.Sequential([embedding, layer])(ids)
    expected = layer(tf.gather(embedding.embeddings, ids), padding_mask=ids != 0)
    np.testing.assert_array_equal(found, expected)
    other = layer(tf.gather(embedding.embeddings, ids))
    assert np.abs(found - other).max() > 1e-3


def test_dropout():
    tokens = 64
    layer = _layer("strided", 8, tokens, dropout=0.25, bias_initializer="ones")
    layer.build((None, tokens, WIDTH))
    # All values are 1, so attention returns sums of weights.
    layer.weights[4].assign(tf.zeros_like(layer.weights[4]))
    x, _, _ = _examples(tokens)
    one, other = (layer(x, training=True).numpy() for _ in range(2))
    whole = layer(x, training=False).numpy()
    assert np.abs(one - other).max() > 1e-2
    np.testing.assert_allclose([one.mean(), other.mean()], whole.mean(), rtol=0.1)
    np.testing.assert_allclose(
        whole, np.broadcast_to(whole[0, 0], whole.shape), rtol=1e-5
    )


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("pattern", ["strided", "matrix"])
def test_second_derivatives(pattern, causal):
    layer = _layer(pattern, 8, 61, causal=causal, dtype="float64")
    x, upstream, mask = _examples(61, "float64")
    layer.build(x.shape)
    looks = _looks(pattern, 8, 61, causal) & mask[:, None]

    def second(function, weights):
        def first(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(function(x) ** 2)
            return tape.gradient(loss, x)

        return _with_gradients(first, x, weights, upstream)

    weights = _variables(layer)
    found = second(lambda x: layer(x, padding_mask=mask), weights)
    expected = second(lambda x: _dense(x, weights, looks), weights)
    _assert_near(found, expected, 1e-11)


# In graphs


@pytest.mark.parametrize("jit", [False, True], ids=["", "jit"])
def test_in_a_function_for_any_number_of_examples(jit):
    layer = _layer("matrix", 8, 77, causal=True)
    x, upstream, mask = _examples(77)
    layer.build(x.shape)

    @tf.function(
        input_signature=[
            tf.TensorSpec((None, 77, WIDTH)),
            tf.TensorSpec((None, 77), tf.bool),
            tf.TensorSpec((None, 77, WIDTH)),
        ],
        jit_compile=jit,
    )
    def function(x, mask, upstream):
        return _with_gradients(
            lambda x: layer(x, padding_mask=mask), x, _variables(layer), upstream
        )

    looks = _looks("matrix", 8, 77, True) & mask[:, None]
    for rows in 3, 2:
        found = function(x[:rows], mask[:rows], upstream[:rows])
        expected = _expected(layer, x[:rows], upstream[:rows], looks[:rows])
        _assert_near(found, expected, 1e-6)


def _traced(layer, *specs):
    return tf.function(layer).get_concrete_function(*specs).graph


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("pattern", ["local", "global"])
def test_memory_grows_with_the_number_of_blocks(pattern, causal):
    size = 8

    def numbers(tokens):
        """How many numbers the tensors of first and second gradients have."""
        layer = BlockSparseAttention(1, 4, size, pattern, causal=causal)
        layer.build((None, tokens, 4))

        @tf.function
        def function(x, mask):
            with tf.GradientTape() as outer:
                outer.watch(x)
                gradients = _with_gradients(
                    lambda x: layer(x, padding_mask=mask), x, _variables(layer), x
                )
                loss = tf.add_n([tf.reduce_sum(each**2) for each in gradients])
            return gradients, outer.gradient(loss, [x, *layer.trainable_variables])

        specs = tf.TensorSpec((1, tokens, 4)), tf.TensorSpec((1, tokens), tf.bool)
        operations = function.get_concrete_function(*specs).graph.get_operations()
        types = {op.type for op in operations}
        # Nothing is added up in any order, and there is no other graph to look into.
        assert not {t for t in types if "Scatter" in t or "Segment" in t or "Call" in t}
        outputs = [output for op in operations for output in op.outputs]
        sizes = [output.shape.num_elements() for output in outputs]
        assert None not in sizes
        assert max(sizes) <= tokens**2 / 8
        return sum(sizes)

    assert numbers(1024) <= 2.1 * numbers(512)


@pytest.mark.slow
def test_fit_compiled_by_xla():
    layer = _layer("local", 8, 29, causal=True, dropout=0.1)
    model = keras.Sequential([keras.Input((29, WIDTH)), layer])
    assert model.output_shape == (None, 29, WIDTH)
    model.compile("adam", "mse", jit_compile=True)
    x, y, _ = _examples(29)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(3).repeat(4)
    losses = model.fit(data, epochs=3, verbose=0).history["loss"]
    assert losses[0] > losses[1] > losses[2]


# Saved


@pytest.mark.parametrize("pattern", PATTERNS)
def test_saved_and_loaded(pattern, tmp_path):
    layer = _layer(
        *(pattern, 8, 77),
        causal=True,
        dropout=0.5,
        kernel_regularizer="l2",
        kernel_constraint="max_norm",
        seed=3,
    )
    model = keras.Sequential([keras.Input((77, WIDTH)), layer])
    x, _, _ = _examples(77)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x), model(x))
    np.testing.assert_array_equal(loaded(x, training=True), model(x, training=True))
    assert loaded.layers[0].get_config() == layer.get_config()
    np.testing.assert_allclose(loaded.losses, model.losses)


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "near"}, "pattern='near'; expected one of local, strided, global"),
        ({"block_size": 0}, "block_size=0; expected a whole number of at least 1"),
        ({"window": -1}, "window=-1; expected a whole number of at least 0"),
        ({"stride": 2.0}, r"stride=2\.0; expected a whole number"),
        ({"global_blocks": 0}, "global_blocks=0; expected"),
        ({"num_heads": 0}, "num_heads=0; expected"),
        ({"key_dim": None}, "key_dim=None; expected"),
    ],
)
def test_arguments_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        BlockSparseAttention(**{"num_heads": 2, "key_dim": 4, **options})


@pytest.mark.parametrize(
    ("pattern", "shape", "message"),
    [
        (
            *("local", (None, 6)),
            r"shape \(None, None, 6\); expected \[batch, tokens, width\] with a known "
            "number .* so tell keras.Input that number",
        ),
        ("local", (6,), r"shape \(None, 6\); expected \[batch, tokens, width\]"),
        (
            *(np.ones((2, 2)), (77, 6)),
            r"shape \(2, 2\) for 77 tokens; expected .* \(10, 10\), for the blocks of",
        ),
        (np.full((2, 2), 2), (16, 6), "expected 0 and 1"),
        (
            *([[1, 1], [0, 0]], (16, 6)),
            "causal=False in which query block 1 looks at no key block; .* diagonal",
        ),
    ],
)
def test_inputs_that_do_not_fit(pattern, shape, message):
    layer = BlockSparseAttention(2, 4, 8, pattern)
    with pytest.raises(ValueError, match=message):
        layer(keras.Input(shape))


def test_a_block_that_sees_only_later_ones():
    layer = BlockSparseAttention(2, 4, 8, [[0, 1], [1, 1]], causal=True)
    with pytest.raises(ValueError, match="causal=True in which query block 0 looks at"):
        layer.build((None, 16, 6))


def test_tokens_become_unknown():
    layer = BlockSparseAttention(2, 4, 8)
    layer.build((None, 16, 6))
    # Any number that is known will do.
    assert layer(tf.zeros((1, 40, 6))).shape == (1, 40, 6)
    with pytest.raises(ValueError, match="with a known number of tokens"):
        _traced(layer, tf.TensorSpec((None, None, 6)))


# On towers


def _model():
    keras.utils.set_random_seed(1)
    inputs, mask = keras.Input((77, WIDTH)), keras.Input((77,), dtype="bool")
    attended = _layer("strided", 8, 77, causal=True)(inputs, padding_mask=mask)
    return keras.Model([inputs, mask], keras.layers.Dense(2)(attended))


@pytest.mark.slow
def test_on_towers_as_on_one_device(caplog):
    x, y, mask = _examples(77)
    data = tf.data.Dataset.from_tensor_slices(((x, mask), y[..., :2])).batch(3)
    model, reference, loss = _model(), _model(), keras.losses.MeanSquaredError()
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile(keras.optimizers.SGD(0.5), loss)
    parallel.fit(data, verbose=0)
    # The graph proves that examples are apart: no rows are compared.
    assert not [r.getMessage() for r in caplog.records if "Model" in r.getMessage()]
    oracle.train(reference, keras.optimizers.SGD(0.5), loss, data)
    before = _model().get_weights()
    steps = [
        [after - old for after, old in zip(each.get_weights(), before, strict=True)]
        for each in (model, reference)
    ]
    # The gradient of the bias of keys is rounding.
    del steps[0][3], steps[1][3]
    assert oracle.largest_difference(*steps) <= 1e-5
