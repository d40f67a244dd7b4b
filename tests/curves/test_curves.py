"""Losses of 50 steps of ten models, step by step, against those of one device on file.

The file was written by plain Keras (`tests/curves/record.py`). So a change of ours, of
Keras or of TensorFlow that bends a curve shows, even if it bends that of one device and
that of towers alike.
"""

import json

import numpy as np
import pytest

import towers
from tests.curves.models import MODELS, STEPS, losses
from tests.curves.record import FILE

KEPT = json.loads(FILE.read_text())


def check(name, wrap=lambda model: model):
    """Compares each step's loss with the one on file."""
    found = losses(MODELS[name], wrap)
    np.testing.assert_allclose(found, KEPT[name], MODELS[name].tolerance)


def test_each_model_has_a_curve_that_falls():
    assert KEPT.keys() == MODELS.keys()
    for name, curve in KEPT.items():
        assert len(curve) == STEPS and np.isfinite(curve).all(), name
        # The last values of the first and of the last epoch.
        assert curve[-1] < 0.996 * curve[9], name


@pytest.mark.quick_one_in(10)
@pytest.mark.parametrize("name", MODELS)
def test_one_device_still_has_the_curve(name):
    check(name)


@pytest.mark.quick_one_in(6)
@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_towers_have_the_curve_of_one_device(name, gpus):
    check(name, lambda model: towers.multi_gpu_model(model, gpus=gpus))
