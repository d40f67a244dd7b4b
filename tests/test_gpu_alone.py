"""What only a GPU can show, and only while no other test uses it.

TOWERS_GPU_TESTS_ON_CPU=1 runs these tests on logical CPUs, to try the tests themselves.
"""

import contextlib
import json
import signal

import pytest

from tests.gpu_programs import TWO_TOWERS, has_gpu, run, start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# Of these steps, the GPU has something to do for a second or two.
LONG_ENOUGH = (
    *("--model=resnet20", "--dataset=synthetic:32x32x3:10:12800"),
    *("--train_epochs=1", "--batch_size=128"),
)
ENDLESS = "--dataset=synthetic:4x4x1:3:64", "--model=mlp", "--train_epochs=100000"


def _train(folder, *flags):
    return "-m", "towers.train", f"--model_dir={folder}", *flags


def _summary(folder):
    return json.loads((folder / "summary.json").read_text())


@contextlib.contextmanager
def _training(folder, *flags):
    """Inside, a run trains; Ctrl-C ends it."""
    with start(*_train(folder, *ENDLESS, *flags)) as process:
        try:
            assert any(line.startswith("epoch 1") for line in process.stdout)
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            for _ in process.stdout:
                pass  # It would wait for a reader.
    assert process.returncode == 130


def _holders():
    (first, *_) = json.loads(run("-m", "towers.doctor", "--gpus", "--json"))
    return first, [each for each in first["holders"] if not each["process"]["outside"]]


def test_who_holds_the_gpu(tmp_path):
    free = _train(tmp_path / "free", *ENDLESS[:2], "--gpu_indices=free")
    with _training(tmp_path / "run", *TWO_TOWERS) as process:
        if not has_gpu():
            refused = run("-m", "towers.doctor", "--gpus", code=1)
            assert "driver" in refused
            assert "TensorFlow finds no GPU" in run(*free, code=1)
            return
        card, holders = _holders()
        assert card["used_mb"] > 4096
        assert [(each["process"]["pid"], each["model_dir"]) for each in holders] == [
            (process.pid, str(tmp_path / "run"))
        ]
        refused = run(*free, code=1)
        assert f"process {process.pid}" in refused
    card, holders = _holders()
    assert (holders, card["used_mb"] < 4096) == ([], True)
    assert "the run takes 0" in run(*free, "--train_epochs=1")


def test_a_part_of_the_memory(tmp_path):
    flags = "--num_gpus=1", "--gpu_memory=0.25"
    if not has_gpu():
        run(*_train(tmp_path, *ENDLESS[:2], "--train_epochs=1", *flags))
        return
    with _training(tmp_path, *flags):
        card, _ = _holders()
    # Beside what TensorFlow takes, CUDA and its libraries take some.
    part = card["used_mb"] / card["memory_mb"]
    assert 0.25 < part < 0.25 + 2_000 / card["memory_mb"]


def test_how_busy_the_gpu_is(tmp_path):
    said = run(*_train(tmp_path, *LONG_ENOUGH, "--num_gpus=1"))
    assert "busy" in said
    busy = _summary(tmp_path)["utilization"]
    if has_gpu():
        found = busy["gpu:0"]
        assert 0 <= found["min"] <= found["p10"] <= found["median"] <= 1
        assert found["median"] > 0.1


def test_runs_of_a_queue_share_a_gpu(tmp_path):
    said = run(
        *("-m", "towers.queue", "--devices=1", "--runs_per_gpu=2"),
        *(f"--queue_dir={tmp_path}", "--sweep=learning_rate=1e-3,1e-2,1e-1"),
        *("--model=mlp", "--train_epochs=2"),
    )
    assert "3 runs" in said or "3 finished" in said
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json")]
    assert len(found) == 3
    assert all("val_accuracy" in each for each in found)
    if has_gpu():
        assert {tower["name"] for each in found for tower in each["towers"]} == {
            "/device:GPU:0"
        }


def test_one_gpu_is_recommended_where_there_is_one(tmp_path):
    model = "--model=mlp", "--dataset=digits", f"--data_dir={tmp_path}"
    said = run("-m", "towers.scaling", *model, "--num_gpus=1", "--seconds=3", "--json")
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    (trial,) = found["trials"]
    assert trial["memory"] == ("GPU" if has_gpu() else "process")
    assert "1 tower (--num_gpus=1)" in found["recommendation"]


def test_the_default_run_counts_its_gpus(tmp_path):
    said = run(*_train(tmp_path, *ENDLESS[:2], "--train_epochs=1", "--num_gpus=auto"))
    assert "--num_gpus=auto: Recommended: " in said
    if has_gpu():
        assert {each["name"] for each in _summary(tmp_path)["towers"]} <= {
            f"/device:GPU:{k}" for k in range(8)
        }


def test_the_largest_batch_is_found_and_trains(tmp_path):
    model = (
        *("--model=resnet20", "--dataset=synthetic:32x32x3:10:8192"),
        *("--batch_size=1024", "--train_epochs=1"),
    )
    # Logical CPUs have all the memory of the host.
    most = 16384 if has_gpu() else 2048
    search = "--probe_steps=2", f"--max_batch_size={most}", "--json"
    said = run("-m", "towers.find_batch_size", *TWO_TOWERS, *model, *search)
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    if found["memory"] == "GPU":
        assert found["too_large"] is not None, found
    train = _train(tmp_path, *TWO_TOWERS, *model[:2], *model[3:])
    run(*train, f"--batch_size={found['largest']}")
