"""The README's first Python example does what it says."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.documents.blocks import read
from tests.limits import HANG_S

README = pathlib.Path(__file__).parents[1] / "README.md"

_CHECK = """
assert [d[-5:] for d in parallel.builder.plan.devices] == ["CPU:0", "CPU:1"]
loss = keras.models.load_model("quadratic.keras").evaluate(x, y, verbose=0)
assert loss < 0.01, loss
"""


@pytest.mark.slow
def test_the_first_python_example(tmp_path):
    code = next(block.code for block in read(README) if block.language == "python")
    # Keras draws the seeds of weights from `random`.
    start = f"import os, random; os.chdir({str(tmp_path)!r}); random.seed(1)\n"
    program = start + code + _CHECK
    # From its start: TensorFlow says nothing beside.
    environ = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(README.parent)},
    )
    assert (done.returncode, done.stderr) == (0, "")
