"""A model that reads on draws the tokens that plain logits of whole windows give."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.generate import cached, sampling
from towers.models.text import transformer_encoder, transformer_lm
from towers.models.text.layers import SelfAttention

LENGTH, VOCABULARY = 12, 17


def language_model(**options):
    keras.utils.set_random_seed(3)
    model = transformer_lm.build(
        VOCABULARY, LENGTH, **{"layers": 2, "width": 16, "heads": 2, **options}
    )
    # First weights are so small that all tokens are about as likely.
    random = np.random.default_rng(0)
    for weight in model.weights:
        if len(weight.shape) > 1:
            weight.assign(0.3 * random.normal(size=weight.shape))
    return model


def plain_tokens(model, begun, count, seed, temperature, top_k):
    """Draws tokens from logits of the whole window, one text alone."""
    read, plain = [*begun], tf.function(model)
    for step in range(count):
        window = read[-LENGTH:]
        padded = tf.constant([window + [0] * (LENGTH - len(window))])
        logits = np.array(plain(padded, training=False)[0, len(window) - 1])
        logits[0] = -np.inf
        if temperature == 0:
            read.append(int(np.argmax(logits)))
            continue
        if top_k is not None:
            logits[logits < np.sort(logits)[-top_k]] = -np.inf
        drawn = tf.random.stateless_categorical(
            [logits / np.float32(temperature)], 1, [seed, step]
        )
        read.append(int(drawn[0, 0]))
    return read[len(begun) :]


@pytest.fixture
def built(monkeypatch):
    """The models that read on, as they are built."""
    models, build = [], cached.build
    monkeypatch.setattr(
        cached, "build", lambda *args: models.append(build(*args)) or models[-1]
    )
    return models


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"positions": "learned"},
        {"layers": 1, "heads": 4},
        {"width": 32, "sparsity": 0.5},
    ],
    ids=["rotary", "learned", "one_layer", "sparse"],
)
@pytest.mark.parametrize(("temperature", "top_k"), [(0, None), (1.3, None), (1.3, 4)])
def test_tokens_are_those_of_whole_windows(built, options, temperature, top_k):
    model = language_model(**options)
    seen = set()
    # The longest ones go on beyond the window.
    for begun, count in [([1], 5), ([3, 0, 9], LENGTH - 2), ([*range(1, 8)], 20)]:
        columns = sampling.tokens(
            model,
            begun,
            LENGTH,
            seeds=[4, 5, 6],
            temperature=temperature,
            top_k=top_k,
        )
        texts = np.stack([*itertools.islice(columns, count)], axis=1).tolist()
        assert texts == [
            plain_tokens(model, begun, count, seed, temperature, top_k)
            for seed in (4, 5, 6)
        ]
        seen |= {*texts[0]}
    assert len(seen) > 1
    assert len(built) == 3
    assert None not in built


@pytest.mark.parametrize("count", [LENGTH, LENGTH + 5])
def test_a_prompt_that_fills_the_window(count):
    model = language_model()
    begun = [1 + number % (VOCABULARY - 1) for number in range(count)]
    columns = sampling.tokens(model, begun, LENGTH, seeds=[1], temperature=1)
    drawn = [int(column[0]) for column in itertools.islice(columns, 6)]
    assert drawn == plain_tokens(model, begun, 6, 1, 1, None)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_logits_of_tokens_one_by_one(dtype):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        model = language_model()
    finally:
        keras.config.set_dtype_policy(policy)
    window = np.random.default_rng(0).integers(0, VOCABULARY, [2, LENGTH])
    start = tf.Variable(0)
    reader = cached.build(model, 2, LENGTH, start)
    parts = []
    for begin, end in itertools.pairwise([0, 5, 6, 7, 11, LENGTH]):
        start.assign(begin)
        parts.append(reader(window[:, begin:end], training=False))
    expected = model(window, training=False)
    tolerance = 1e-4 if dtype == "float32" else 0.2
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, atol=tolerance)


def test_the_model_is_as_before(tmp_path):
    model = language_model()
    model.compile("adam", "sparse_categorical_crossentropy")
    config, weights = model.to_json(), len(model.weights)
    reader = cached.build(model, 1, LENGTH, tf.Variable(0))
    assert (model.to_json(), len(model.weights)) == (config, weights)
    assert not reader.compiled
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    window = np.ones([1, LENGTH], np.int32)
    np.testing.assert_array_equal(loaded(window), model(window))


def mixes_tokens():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 8)(inputs)
    x = SelfAttention(2, causal=True)(x)
    return keras.Model(inputs, keras.layers.GRU(VOCABULARY, return_sequences=True)(x))


def calls_an_operation():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = SelfAttention(2, causal=True)(keras.layers.Embedding(VOCABULARY, 8)(inputs))
    return keras.Model(inputs, keras.ops.cumsum(x, axis=1))


class Subclassed(keras.Model):
    def call(self, inputs):
        return inputs


@pytest.mark.parametrize(
    "make",
    [
        mixes_tokens,
        calls_an_operation,
        Subclassed,
        lambda: transformer_encoder.build(VOCABULARY, 3, LENGTH),
    ],
    ids=["gru", "operation", "subclassed", "encoder"],
)
def test_other_models_read_whole_windows(make):
    assert cached.build(make(), 1, LENGTH, tf.Variable(0)) is None
