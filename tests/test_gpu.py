"""What only a GPU can show; each test is a program, on one GPU split into towers.

TOWERS_GPU_TESTS_ON_CPU=1 runs them on logical CPUs, to try the tests themselves.
"""

import json
import signal

import numpy as np
import pytest

from scripts.faults.run import saved_arrays
from tests.gpu_programs import TWO_TOWERS, has_gpu, run, start
from tests.towers.elastic import test_shares
from towers.keras_adapter.runtime import XSpace

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MODELS = "dense", "convolutions", "recurrent", "attention"

_REPORT = """
import keras
import numpy as np
import towers
from towers.monitoring.device_report import DeviceReport

placed = towers.configure(num_gpus=1, gpu_split=2, gpu_memory_limit_mb=2048)
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


@pytest.fixture
def train(tmp_path):
    """Returns the command of a run on two towers, in a folder of its own."""
    return (
        *("-m", "towers.train", *TWO_TOWERS),
        *(f"--model_dir={tmp_path / 'run'}", f"--data_dir={tmp_path / 'data'}"),
    )


def _summary(tmp_path):
    return json.loads((tmp_path / "run" / "summary.json").read_text())


@pytest.mark.parametrize("towers", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_logical_gpus_equal_one(model, towers):
    said = run("-m", "tests.on_gpu", model, str(towers))
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert len(found) >= 4
    assert {way: off for way, off in found.items() if not off < 1e-4} == {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("home", ["cpu", "gpu"])
def test_the_default_job_trains(tmp_path, train, dtype, home):
    out = run(*train, f"--dtype={dtype}", f"--local_parameter_device={home}")
    assert ":1" in out
    assert _summary(tmp_path)["val_accuracy"] >= 0.98


def test_every_operation_has_a_kernel_where_it_is_placed(tmp_path, train):
    run(*train, "--nosoft_placement", "--train_epochs=3")
    assert _summary(tmp_path)["val_accuracy"] >= 0.5


def test_a_model_of_the_catalog_trains_with_auto_and_xla(tmp_path, train):
    more = "--model=resnet20", "--dataset=synthetic:32x32x3:10:640", "--train_epochs=1"
    out = run(*train, *more, "--variable_update=auto", "--enable_xla=true")
    # On logical CPUs, all that can be tried is tried.
    assert "Updating variables by" in out
    assert (tmp_path / "run" / "model.keras").exists()


def test_a_run_that_is_killed_continues_with_the_same_bits(tmp_path):
    flags = (
        *("-m", "towers.train", *TWO_TOWERS, "--model=cnn", "--deterministic"),
        *("--train_epochs=6", "--save_every=4", "--log_steps=1"),
    )

    def command(folder):
        return (
            *flags,
            f"--model_dir={folder / 'run'}",
            f"--data_dir={tmp_path / 'data'}",
        )

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(*command(whole))
    process = start(*command(killed))
    with process:
        for line in process.stdout:
            if line.startswith("epoch 2/6 done"):
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    assert "ontinu" in run(*command(killed))
    a, b = saved_arrays(whole / "run"), saved_arrays(killed / "run")
    assert a.keys() == b.keys()
    assert [name for name in a if not np.array_equal(a[name], b[name])] == []


def test_a_step_that_is_not_finite_is_explained(tmp_path, train):
    out = run(*train, "--learning_rate=1e30", "--optimizer=sgd", code=3)
    assert "not finite" in out
    assert "ower" in out
    assert (tmp_path / "run" / "not_finite.npz").exists()


def test_a_profile_has_the_devices_and_the_towers(tmp_path, train):
    run(*train, "--profile_steps=5,9", "--train_epochs=1")
    (path,) = (tmp_path / "run").glob("**/*.xplane.pb")
    planes = {
        plane.name: sum(len(line.events) for line in plane.lines)
        for plane in XSpace.FromString(path.read_bytes()).planes
    }
    assert planes["/device:CUSTOM:towers"] > 0
    if has_gpu():
        assert planes["/device:GPU:0"] > 0, planes


def test_the_doctor_finds_nothing_wrong():
    assert "wrong" in run("-m", "towers.doctor")


@pytest.mark.slow
def test_runs_share_a_gpu(tmp_path, monkeypatch):
    """With real memory: who leaves a part of a GPU keeps what it has taken there."""
    monkeypatch.setenv("TOWERS_REGISTRY", str(tmp_path / "registry"))
    parts = "--max_gpus=1", "--gpu_split=4", "--gpu_memory=1024"
    test_shares.three_runs_share(tmp_path, *parts, gpus="0")


def test_the_device_report_of_a_real_gpu():
    if not has_gpu():
        pytest.skip("logical CPUs have no memory of their own")
    out = run("-c", _REPORT)
    lines = [line.split() for line in out.splitlines() if line.startswith("device/")]
    for tower in ("gpu:0", "gpu:1"):
        values = {
            tag.rpartition("/")[2]: float(value)
            for tag, value in lines
            if tag.startswith(f"device/{tower}/")
        }
        # A share of the examples is 1 MB, and so are the weights.
        assert 0 < values["memory_mb"] <= values["peak_memory_mb"]
        assert 1 < values["peak_memory_mb"] <= values["limit_mb"] == 2048
        # TensorFlow has taken the memory of both at once.
        assert values["used_mb"] > 4096
        assert 0 <= values["utilization"] <= 1
        assert 0 < values["temperature_c"] < 120
        assert 1 < values["power_w"] < 2000
    assert "/device:GPU:1, nvidia-smi's " in out
