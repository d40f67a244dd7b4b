"""Features are imported where somebody asks for them; see `features.py`."""

import ast
import os
import subprocess
import sys

import pytest

from tests.limits import HANG_S
from towers.hosts import group
from towers.program.features import FEATURES, feature

_PLAIN = """
import sys

import keras
import numpy as np

import towers
from towers.program.features import FEATURES

towers.configure(num_gpus=2, hosts="auto")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
parallel = towers.multi_gpu_model(model, 2, variable_update="replicated")
parallel.compile("adam", "mse")
x, y = np.ones([8, 4]), np.ones([8, 1])
parallel.fit(x, y, batch_size=4, verbose=0)
parallel.evaluate(x, y, verbose=0)
parallel.predict(x, verbose=0)
beside = "cluster", "stages", "numerics.search", "elastic", "sparse", "queue"
names = (*FEATURES, *beside)
print([name for name in names if f"towers.{name}" in sys.modules])
"""


def test_a_plain_run_imports_none_of_them():
    ours = {name for name in os.environ if name.startswith(("SLURM_", "TOWERS_"))}
    environ = {k: v for k, v in os.environ.items() if k not in {*ours, *group.STARTED}}
    done = subprocess.run(
        [sys.executable, "-c", _PLAIN],
        env=environ,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == []


def test_only_what_is_listed_is_a_feature():
    assert [feature(name).__name__ for name in FEATURES] == [
        f"towers.{name}" for name in FEATURES
    ]
    with pytest.raises(KeyError, match="none of FEATURES"):
        feature("os")
