"""What is saved of a model in stages is an ordinary model, for any other layout."""

import keras
import numpy as np
import pytest
from keras import layers

import towers

TWO = {"stages": towers.Stages(2, {"block_[01]": 0, ".*": 1}), "micro_batches": 2}
FOUR = {
    "stages": towers.Stages(4, {f"block_{k}": k for k in range(4)}),
    "micro_batches": 3,
    "recompute": "stage",
}
CHAINS = [
    [{"gpus": 2} | TWO, {"gpus": 4} | FOUR, {"gpus": 1}],
    [
        {"gpus": 1},
        {"gpus": 4, "variable_update": "replicated"} | TWO,
        {"gpus": 4} | FOUR,
    ],
]


def compiled(wrap=lambda model: model):
    keras.utils.set_random_seed(1)
    every = [layers.Dense(6, activation="tanh", name=f"block_{k}") for k in range(4)]
    model = keras.Sequential([keras.Input([6]), *every])
    parallel = wrap(model)
    parallel.compile(keras.optimizers.Adam(0.01), "mse")
    return model, parallel


def fit(model, epochs, **options):
    x = np.random.default_rng(1).normal(size=(32, 6)).astype("float32")
    model.fit(x, x[::-1], 8, epochs, verbose=0, shuffle=False, **options)
    return model


def values(model):
    return [np.array(v) for v in [*model.variables, *model.optimizer.variables]]


@pytest.mark.slow
def test_plain_keras_opens_it(tmp_path):
    model, parallel = compiled(lambda model: towers.multi_gpu_model(model, 2, **TWO))
    fit(parallel, 1)
    parallel.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    for found, expected in zip(values(opened), values(model), strict=True):
        np.testing.assert_array_equal(found, expected)
    # It goes on there as here.
    for found, expected in zip(
        values(fit(opened, 1)), values(fit(parallel, 1)), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_a_checkpoint_goes_on_with_any_layout(chain, tmp_path):
    expected = values(fit(compiled()[0], len(chain)))
    for epochs, options in enumerate(chain, start=1):
        # Each is made anew, and those that go on begin with other weights.
        model, parallel = compiled(
            lambda model, options=options: towers.multi_gpu_model(model, **options)
        )
        if epochs > 1:
            model.set_weights([weight + 1 for weight in model.get_weights()])
        checkpoint = towers.callbacks.Checkpoint(tmp_path)
        fit(parallel, epochs, callbacks=[checkpoint])
        assert int(model.optimizer.iterations) == 4 * epochs
    for found, each in zip(values(model), expected, strict=True):
        np.testing.assert_allclose(found, each, rtol=1e-5, atol=1e-6)
