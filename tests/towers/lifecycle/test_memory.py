"""Saving and restoring take memory for one copy of the state at most."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.limits import HANG_S

# In a process of its own, whose peak nothing else has raised. Its tensors are so large
# that the C library returns each to the system when it is freed.
SCRIPT = """
import json, pathlib, re, sys
import keras, numpy as np
import towers
from towers.lifecycle.checkpoints import saved_model

def status(name):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"^{name}:\\s+(\\d+) kB", text, re.M)[1]) * 1024

def peak(function):
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    function()
    return status("VmHWM") - before

width = 3300
layers = [keras.layers.Dense(width, use_bias=False) for _ in range(2)]
model = keras.Sequential([keras.Input([width]), *layers])
model.compile("adam", "mse")
model.optimizer.build(model.trainable_variables)
parallel = towers.multi_gpu_model(model, gpus=1, variable_update="parameter_server")
x = np.ones([2, width], "float32")

def fit(*callbacks):
    epochs = 2 + sum(callback.position.epoch for callback in callbacks)
    parallel.fit(x, x, batch_size=1, epochs=epochs, verbose=0, callbacks=callbacks)

fit()  # so that all is traced
peaks = {"without": peak(fit)}
for background in (False, True):
    checkpoint = towers.callbacks.Checkpoint(
        f"{sys.argv[1]}/{background}", background=background
    )
    peaks[str(background)] = peak(lambda: fit(checkpoint))
again = towers.callbacks.Checkpoint(f"{sys.argv[1]}/True")
peaks["restore"] = peak(lambda: again.restore(model))
peaks["as in"] = peak(lambda: again.as_in(again.latest, model).__enter__())
print(json.dumps({k: v / saved_model.nbytes(model) for k, v in peaks.items()}))
"""


# Three saves of 250 MB, twice.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Peaks of memory above what was taken before, as multiples of the state."""
    if not pathlib.Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells the peak of a part of a process's life")
    command = [sys.executable, "-c", SCRIPT, tmp_path_factory.mktemp("run")]
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=HANG_S
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_saving_takes_no_copy_where_training_waits(states):
    # A copy would be one; fits differ by some tens of MB of 250.
    assert states["False"] - states["without"] < 0.5


def test_saving_takes_one_copy_where_training_goes_on(states):
    # Two copies would be two; fits differ by some tens of MB of 250.
    assert 0.5 < states["True"] - states["without"] < 1.5


def test_restoring_takes_no_second_state(states):
    """One variable at a time, each a sixth."""
    assert states["restore"] < 0.5


def test_values_of_another_checkpoint_take_one_copy(states):
    assert states["as in"] < 1.5
