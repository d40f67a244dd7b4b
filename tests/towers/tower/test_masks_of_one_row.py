"""Masks that stand for all examples at once, against plain Keras."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import towers

pytestmark = pytest.mark.quick_one_in(2)

X = np.random.RandomState(0).normal(size=(11, 5, 4)).astype("float32")


def _attention():
    given = keras.Input((5, 4))
    attended, scores = layers.MultiHeadAttention(2, 3)(
        given, given, return_attention_scores=True, use_causal_mask=True
    )
    out = layers.Dense(1)(layers.GlobalAveragePooling1D()(attended))
    return keras.Model(given, {"out": out, "scores": scores})


class _FirstSteps(layers.Layer):
    def call(self, x):
        return x * 1.0

    def compute_mask(self, x, mask=None):
        return ops.arange(5)[None] < 3


def _masked():
    given = keras.Input((5, 4))
    out = layers.Dense(1)(_FirstSteps()(layers.Dense(4, "tanh")(given)))
    return keras.Model(given, {"out": out})


# The model, its targets for `out`, and metrics.
MODELS = {
    "scores of causal attention": (_attention, X.mean(axis=(1, 2))[:, None], None),
    "a mask of a loss": (_masked, X.mean(axis=2, keepdims=True), {"out": ["mae"]}),
}


def _numbers(make, targets, metrics, wrap):
    keras.utils.set_random_seed(1)
    model = wrap(make())
    model.compile("sgd", {"out": "mse"}, metrics=metrics)
    history = model.fit(X, {"out": targets}, 4, 2, shuffle=False, verbose=0).history
    return {**history, **model.predict(X, verbose=0)}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_mask_for_all_examples_is_one_for_each(model, capfd):
    plain = _numbers(*model, lambda model: model)
    ours = _numbers(*model, lambda model: towers.multi_gpu_model(model, gpus=2))
    assert plain.keys() == ours.keys()
    for name in plain:
        np.testing.assert_allclose(ours[name], plain[name], 1e-5, 1e-6, err_msg=name)
    assert "cannot be read" not in "".join(capfd.readouterr())
