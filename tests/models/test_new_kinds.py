"""Models of text, of named columns and of masks: what they compute, and on towers."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import oracle
from tests.variants import slow
from towers import models, multi_gpu_model
from towers.models import dlrm
from towers.models.text import layers

TOKENS = 11
SMALL = {"layers": 2, "width": 8, "heads": 2, "dropout": 0.0}


def _text(length, task="language_model", outputs=TOKENS):
    return models.Facts(
        input_shape=(length,),
        num_outputs=outputs,
        task=task,
        vocabulary_size=TOKENS,
        sequence_length=length,
    )


def _columns(dense=3):
    shape = {"user": (), "film": ()} | ({"dense": (dense,)} if dense else {})
    tables = {"user": 5, "film": 7}
    return models.Facts(input_shape=shape, num_outputs=2, table_sizes=tables)


def _row():
    return models.Facts(input_shape=(3,), num_outputs=2)


def _masks(side=8):
    return models.Facts(input_shape=(side, side, 1), num_outputs=3, task="segmentation")


def _examples(facts, rows=6):
    random = np.random.default_rng(0)
    if facts.input_kind == "tokens":
        x = random.integers(1, TOKENS, (rows, facts.sequence_length or 9))
        x = x.astype(np.int32)
        x[0, 4:] = 0
        return x
    if facts.input_kind == "columns":
        ids = {n: random.integers(0, k, rows) for n, k in facts.table_sizes.items()}
        dense = random.normal(size=(rows, 3)).astype("float32")
        return ids | ({"dense": dense} if "dense" in facts.input_shape else {})
    return random.normal(size=(rows, *facts.input_shape)).astype("float32")


# A name, what the data have, and options.
CASES = {
    "lm": ("transformer_lm", _text(6), SMALL),
    "learned": ("transformer_lm", _text(6), {**SMALL, "positions": "learned"}),
    "texts": ("transformer_encoder", _text(6, "text_classification", 3), SMALL),
    "tags": ("transformer_encoder", _text(6, "tagging", 3), SMALL),
    "dlrm": ("dlrm", _columns(), {"width": 4}),
    "unet": ("unet", _masks(), {"layers": 2, "width": 4}),
}
SHAPES = {
    "lm": (6, 6, TOKENS),
    "learned": (6, 6, TOKENS),
    "texts": (6, 3),
    "tags": (6, 6, 3),
    "dlrm": (6, 2),
    "unet": (6, 8, 8, 3),
}


def _built(case, **more):
    name, facts, options = CASES[case]
    return models.build(name, facts, options={**options, **more}, seed=3)


def _called(model, x):
    return keras.ops.convert_to_numpy(model(x))


@pytest.mark.parametrize("case", ["lm", "texts", *map(slow, ["dlrm", "unet"])])
def test_logits_are_float32_under_mixed_precision(case):
    keras.config.set_dtype_policy("mixed_float16")
    model = _built(case)
    logits = _called(model, _examples(CASES[case][1]))
    assert model.compute_dtype == "float16"
    assert (logits.dtype, logits.shape) == (np.float32, SHAPES[case])
    assert np.isfinite(logits).all()


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded(case, tmp_path):
    model, x = _built(case), _examples(CASES[case][1])
    assert _called(model, x).shape == SHAPES[case]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(_called(loaded, x), _called(model, x))


# Text


@pytest.mark.parametrize("case", ["lm", slow("learned")])
def test_a_language_model_does_not_see_what_comes(case):
    model, x = _built(case), _examples(_text(6))
    changed = x.copy()
    changed[:, 3:] = (changed[:, 3:] + 1) % TOKENS
    one, other = _called(model, x), _called(model, changed)
    np.testing.assert_allclose(one[:, :3], other[:, :3], atol=1e-6)
    assert (np.abs(one[:, 3] - other[:, 3]).max(axis=-1) > 1e-3).all()


def test_the_table_of_the_embedding_makes_the_logits():
    model = _built("lm")
    width, depth = SMALL["width"], SMALL["layers"]
    attention = 4 * (width * width + width)
    perceptron = 2 * 4 * width * width + 5 * width
    norms = (2 * depth + 1) * 2 * width
    expected = TOKENS * width + depth * (attention + perceptron) + norms
    assert model.count_params() == expected
    table = model.get_layer("embedding").embeddings
    features = keras.Model(model.input, model.get_layer("norm").output)
    x = _examples(_text(6))
    np.testing.assert_allclose(
        _called(model, x), _called(features, x) @ table.numpy().T, rtol=1e-4, atol=1e-6
    )


def test_rotary_positions_tell_distances():
    query, key = np.random.default_rng(0).normal(size=(2, 8)).astype("float32")
    turned = [
        keras.ops.convert_to_numpy(layers.turned(np.tile(each, (1, 9, 1, 1))))
        for each in (query, key)
    ]
    scores = turned[0][0, :, 0] @ turned[1][0, :, 0].T
    for distance in range(-8, 9):
        same = np.diagonal(scores, distance)
        np.testing.assert_allclose(same, same[0], rtol=1e-4)
    assert np.ptp(scores[0]) > 0.1
    np.testing.assert_allclose(scores[0, 0], query @ key, rtol=1e-5)


def test_attention_equals_keras_own():
    ours = layers.SelfAttention(2, causal=True)
    x = np.random.default_rng(0).normal(size=(3, 5, 8)).astype("float32")
    ours(x)
    theirs = keras.layers.MultiHeadAttention(2, 4)
    theirs.build(x.shape, x.shape)
    (kernel, bias, out, out_bias) = (w.numpy() for w in ours.weights)
    parts = []
    for part in range(3):
        heads = slice(2 * part, 2 * part + 2)
        parts += [kernel[:, heads] * 30, bias[heads]]
    ours.weights[0].assign(kernel * 30)
    # Query, key, value.
    theirs.set_weights([*parts, out, out_bias])
    expected = theirs(x, x, use_causal_mask=True)
    np.testing.assert_allclose(ours(x), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("task", ["text_classification", "tagging"])
def test_padding_changes_nothing(task):
    model = models.build("transformer_encoder", _text(None, task, 3), options=SMALL)
    x = np.array([[5, 3, 8]], np.int32)
    longer = np.pad(x, ((0, 1), (0, 4)))  # and a text without tokens
    one, other = _called(model, x), _called(model, longer)
    if task == "tagging":
        other = other[:, :3]
    np.testing.assert_allclose(one[0], other[0], rtol=1e-4, atol=1e-6)
    assert np.isfinite(other).all()


@pytest.mark.parametrize(
    ("name", "facts", "options", "message"),
    [
        ("transformer_lm", _text(6), {"layers": 0}, "received layers=0; expected at"),
        (
            "transformer_lm",
            _text(6),
            {"width": 30, "heads": 4},
            "width=30 and heads=4; expected a width that the heads divide, .* width=28",
        ),
        (
            *("transformer_encoder", _text(6), {"width": 6, "heads": 2}),
            "heads of 3; expected an even number for rotary",
        ),
        ("transformer_lm", _text(6), {"positions": "sine"}, "one of rotary, learned"),
        ("transformer_lm", _text(6), {"dropout": 1}, "dropout=1; expected at least 0"),
        (
            *("transformer_lm", _text(None), {"positions": "learned"}),
            "for texts of any length; expected positions=rotary",
        ),
        ("cnn", _text(6), {}, r"'cnn' needs images .*but tokens of text .*transformer"),
        ("transformer_lm", _masks(), {}, "needs tokens of text, but images .* use cnn"),
        ("cnn", _columns(), {}, r"but several inputs, by name with .* use dlrm, mlp, "),
        ("dlrm", _masks(), {}, "'dlrm' needs several inputs, by name, but images"),
        ("dlrm", _row(), {}, "use mlp, a model of your own, or columns of text, which"),
        (
            *("unet", _masks(20), {}),
            r"multiples of 8, but input_shape=\(20, 20, 1\) .*--image_size=24x24, or f",
        ),
    ],
)
def test_what_does_not_fit(name, facts, options, message):
    with pytest.raises(ValueError, match=message):
        models.build(name, facts, options=options)


# Columns


def test_interactions_are_dot_products_of_pairs():
    vectors = np.random.default_rng(0).normal(size=(3, 2, 4)).astype("float32")
    got = keras.ops.convert_to_numpy(dlrm.DotInteraction()([*vectors]))
    pairs = [(1, 0), (2, 0), (2, 1)]
    expected = [(vectors[i] * vectors[j]).sum(axis=-1) for i, j in pairs]
    np.testing.assert_allclose(got, np.transpose(expected), rtol=1e-5)


def test_dlrm_without_numbers():
    facts = _columns(dense=0)
    model = models.build("dlrm", facts, options={"width": 4})
    assert _called(model, _examples(facts)).shape == (6, 2)
    assert model.get_layer("dlrm_table_film").embeddings.shape == (7, 4)


def test_dlrm_with_any_names_of_columns(tmp_path):
    names = ["a b", "a_b", "städte", "x:0", "100%", "(y)", "a\\b"]
    inputs = {name: () for name in names} | {"dense": (1,)}
    model = dlrm.build(
        inputs, num_outputs=2, table_sizes=dict.fromkeys(names, 2), width=2
    )
    given = {name: np.array([0, 1]) for name in names} | {"dense": np.eye(2)[:, :1]}
    expected = model.predict_on_batch(given)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict_on_batch(given), expected, rtol=1e-6)


# On towers


@functools.cache
def _targets(case):
    shape = SHAPES[case]
    return np.random.default_rng(1).integers(0, shape[-1], shape[:-1])


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    "case", ["lm", "dlrm", *map(slow, ["learned", "texts", "tags", "unet"])]
)
def test_on_towers_as_on_one_device(case, caplog):
    x, y = _examples(CASES[case][1]), _targets(case)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    few = {"layers": 1} if CASES[case][2] is SMALL else {}
    model, reference = _built(case, **few), _built(case, **few)
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile(keras.optimizers.SGD(0.05), loss)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    ours = parallel.fit(data, epochs=2, verbose=0).history["loss"]
    assert not [r for r in caplog.records if "cannot be read" in r.getMessage()]
    if case == "unet":
        return  # each tower normalises its own pictures
    optimizer = keras.optimizers.SGD(0.05)
    theirs = oracle.train(reference, optimizer, loss, [*data, *data])
    difference = oracle.largest_difference(model.get_weights(), reference.get_weights())
    assert difference <= 1e-5
    # An epoch's loss is the mean over its examples.
    expected = np.average(np.reshape(theirs, (2, 2)), axis=1, weights=(4, 2))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
