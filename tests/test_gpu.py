"""What only a GPU can show; each test is a script, on one GPU split into two towers."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

_EXACT = """
import sys

import keras
import numpy as np
import towers

placed = towers.configure(num_gpus=1, gpu_split=2, gpu_memory_limit_mb=4096)
random = np.random.default_rng(0)
x = random.normal(size=(120, 12)).astype("float32")
y = random.integers(0, 5, 120)

def model():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(5)]
    return keras.Sequential([keras.Input((12,)), *layers])

def fit(model, steps=1, xla=False):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, loss, jit_compile=xla, steps_per_execution=steps)
    model.fit(x, y, batch_size=50, epochs=7, shuffle=False, verbose=0)
    return model.get_weights()

expected = fit(model())
builder, algorithm, xla = sys.argv[1:]
home = placed.home if builder == "parameter_server" else None
parallel = towers.multi_gpu_model(
    model(),
    gpus=placed.towers,
    local_parameter_device=home,
    variable_update=builder,
    all_reduce_alg=algorithm,
)
ours = fit(parallel, steps=4, xla=xla == "xla")
for a, b in zip(ours, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
"""

_REPORT = """
import keras
import numpy as np
import towers
from towers.monitoring.device_report import DeviceReport

placed = towers.configure(num_gpus=1, gpu_split=2, gpu_memory_limit_mb=4096)
model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512)])
parallel = towers.multi_gpu_model(model, gpus=placed.towers)
parallel.compile("sgd", "mse")
report = DeviceReport(placed)
x = np.ones((4096, 512), "float32")
parallel.fit(x, x, batch_size=1024, verbose=0, callbacks=[report])
for tag, value in report.measured().items():
    print(tag, value)
print(report.text())
"""


def _run(*command):
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("xla", ["xla", "plain"])
@pytest.mark.parametrize(
    ("builder", "algorithm"),
    [
        ("parameter_server", "auto"),
        ("replicated", "cpu"),
        ("replicated", "device"),
        ("replicated", "ring"),
    ],
)
def test_two_logical_gpus_equal_one(builder, algorithm, xla):
    _run("-c", _EXACT, builder, algorithm, xla)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("home", ["cpu", "gpu"])
def test_the_default_job_trains(tmp_path, dtype, home):
    out = _run(
        "-m",
        "towers.train",
        f"--model_dir={tmp_path / 'run'}",
        f"--data_dir={tmp_path / 'data'}",
        "--num_gpus=1",
        "--gpu_split=2",
        "--gpu_memory_limit_mb=4096",
        f"--dtype={dtype}",
        f"--local_parameter_device={home}",
    )
    assert "/device:GPU:1" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val_accuracy"] >= 0.98


def test_the_device_report_of_a_real_gpu():
    out = _run("-c", _REPORT)
    lines = [line.split() for line in out.splitlines() if line.startswith("device/")]
    for tower in ("gpu:0", "gpu:1"):
        values = {
            tag.rpartition("/")[2]: float(value)
            for tag, value in lines
            if tag.startswith(f"device/{tower}/")
        }
        # A share of the examples is 1 MB, and so are the weights.
        assert 0 < values["memory_mb"] <= values["peak_memory_mb"]
        assert 1 < values["peak_memory_mb"] <= values["limit_mb"] == 4096
        # TensorFlow has taken the memory of both at once.
        assert values["used_mb"] > 8192
        assert 0 <= values["utilization"] <= 1
        assert 0 < values["temperature_c"] < 120
        assert 1 < values["power_w"] < 2000
    assert "/device:GPU:1, nvidia-smi's " in out
