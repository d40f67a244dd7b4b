"""Keras's own tests of its trainer, with models on two towers.

Among them are those of models with a `train_step`, `test_step` or `compute_loss` of
their own, which a quick run takes; `make test-slow` takes some of the others.
"""

import importlib.util

import keras
import pytest

from tests.keras_trainer import through_towers

if not keras.__version__.startswith("3.15."):
    pytest.skip("other tests than Keras 3.15's", allow_module_level=True)

# Of models that define a step, or a part of one, themselves.
OWN = "custom", "in_compute_loss", "compute_loss_no_training", "retracing"
# By a word of their names.
UNLIKE = {
    "fit_sparse": "they look into Keras's optimizer, for which towers have kernels",
    "jax_model_weights": "it is of JAX",
}
LIBRARIES = "grain", "jax", "torch"

TestTrainer = through_towers.load().TestTrainer


def _reason(name):
    for word, reason in UNLIKE.items():
        if word in name:
            return reason
    for library in LIBRARIES:
        if library in name and importlib.util.find_spec(library) is None:
            return f"it needs {library}"
    return None


for _name in [each for each in dir(TestTrainer) if each.startswith("test_")]:
    _test = getattr(TestTrainer, _name)
    if (_why := _reason(_name)) is not None:
        _test = pytest.mark.skip(reason=_why)(_test)
    elif not any(word in _name for word in OWN):
        _test = pytest.mark.slow(_test)
    setattr(TestTrainer, _name, _test)


@pytest.fixture(autouse=True)
def _on_towers(request):
    with through_towers.on_towers(2) as models:
        yield
    if any(word in request.node.name for word in OWN):
        assert models
