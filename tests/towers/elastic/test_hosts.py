"""A run whose hosts are started again, in another number: it ends as on one device."""

import signal

import numpy as np
import psutil
import pytest

from tests.limits import HANG_S
from tests.towers.launch.launching import ROOT, launch
from tests.towers.train import runs
from tests.variants import slow
from towers.program.ending import ANOTHER_FAILED

# Without a ReLU: where rounding decides on which side of 0 an output is, the weights
# of two equal runs part.
SMOOTH = (ROOT / "scripts/elastic/smooth.py").read_text()


def flags_of(path, model):
    return (
        *("--dataset=synthetic:4x4x1:3:1472", f"--model={model}", "--deterministic"),
        *("--variable_update=parameter_server", "--num_gpus=1", "--train_epochs=12"),
        *("--save_every=5", f"--model_dir={path}"),
    )


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "smooth.py"
    file.write_text(SMOOTH)
    return file


def launched(hosts, flags):
    environ = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ["PYTHONUNBUFFERED"] = "1"
    words = f"--hosts={hosts}", "--", *flags
    return launch(*words, environ=environ, cwd=ROOT)


def hosts_of(process):
    """The launcher's hosts, in the order of their ranks."""
    found = {}
    for child in psutil.Process(process.pid).children():
        if rank := child.environ().get("TOWERS_HOST_RANK"):
            found[int(rank)] = child
    return [found[rank] for rank in sorted(found)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "number", "victim"),
    [
        (2, 1, signal.SIGTERM, 1),
        (2, 3, signal.SIGKILL, 1),
        slow(2, 1, signal.SIGKILL, 0),
        slow(1, 2, signal.SIGTERM, 0),
    ],
)
def test_another_number_goes_on(tmp_path, model, before, after, number, victim):
    alone, folder = tmp_path / "alone", tmp_path / "run"
    runs.run(*flags_of(alone, model))
    flags = flags_of(folder, model)
    with launched(before, flags) as process:
        runs.wait_for(process, "epoch 2/")
        hosts = hosts_of(process)
        assert len(hosts) == before
        hosts[victim].send_signal(number)
        out, err = process.communicate(timeout=HANG_S)
    by_signal = process.returncode in (128 + number, ANOTHER_FAILED)
    assert by_signal, out + err
    with launched(after, flags) as process:
        out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, out + err
    found, expected = (runs.summary_of(each) for each in (folder, alone))
    assert found["steps"] == expected["steps"]
    for name in ("val_loss", "val_accuracy"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
    for ours, theirs in zip(*map(runs.weights, (folder, alone)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert len(found["towers"]) == after
    # It has begun where the first hosts have saved.
    assert "epoch 12/" in out and "epoch 1/" not in out
