"""Going on with an earlier run of towers.train."""

import fcntl
import json
import re
import shutil

import keras
import numpy as np
import pytest

from tests.towers.train.runs import (
    BAD,
    EPOCHS,
    REPEATABLE,
    STEPS,
    assembled,
    assert_same_bits,
    break_checkpoints,
    continued,
    finish,
    first_done,
    ours,
    run,
    run_here,
    snapshot,
    start,
    wait_for,
    weights,
)
from towers.lifecycle.checkpoints.manager import SaveError


def test_killed_and_started_again_with_the_flags_that_it_wrote(killed, whole, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(killed, path)
    (path / "not_finite.npz").touch()
    done = run(f"--flagfile={killed / 'flags.txt'}", f"--model_dir={path}")
    before, after = ((p / "flags.txt").read_text() for p in (killed, path))
    assert f"--model_dir={killed}\n" in before
    assert "--model=mlp\n" in before
    assert "--deterministic\n" in before
    assert after == before.replace(f"={killed}\n", f"={path}\n")
    # Nothing in this run is not finite.
    assert not (path / "not_finite.npz").exists()
    epoch, batch = continued(done.stdout, path)
    assert 1 <= epoch < 8 and batch in (0, 5, 10, 15, 20)
    assert first_done(done.stdout) == epoch + 1
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["epochs"], summary["steps"]) == (8, 8 * STEPS)
    model = keras.models.load_model(path / "model.keras")
    assert int(model.optimizer.iterations) == 8 * STEPS
    # As if nothing had happened.
    assert_same_bits(model.get_weights(), weights(whole))


def test_terminated_and_started_again(data_dir, tmp_path, capsys):
    flags = (f"--data_dir={data_dir}", f"--model_dir={tmp_path}", "--model=mlp")
    process = start(*flags, "--train_epochs=1000")
    wait_for(process, "epoch 1/1000 done")
    process.terminate()
    done = finish(process)
    assert done.returncode == 143
    (said,) = ours(done)
    saved = re.fullmatch(
        rf"Stopped by SIGTERM: the last checkpoint is {tmp_path}/checkpoints/"
        r"ckpt-(\d+)-(\d+); run again to continue\.",
        said,
    )
    assert "Traceback" not in done.stderr
    epoch, batch = map(int, saved.groups())
    run_here(*flags, f"--train_epochs={epoch + 1}")
    out = capsys.readouterr().out
    assert continued(out, tmp_path) == (epoch, batch)
    assert first_done(out) == epoch + 1
    assert f"Done: {epoch + 1} epochs, {(epoch + 1) * STEPS} steps" in out


@pytest.mark.oldest
def test_finished_and_started_again(trained, data_dir, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(trained.path, path)
    run_here(
        f"--data_dir={data_dir}", f"--model_dir={path}", f"--train_epochs={EPOCHS}"
    )
    out = capsys.readouterr().out
    assert f"Nothing left to train: {path} has 8 epochs already" in out
    assert "epoch 9" not in out and "epoch 1/" not in out
    assert "Give more --train_epochs, or --clean" in out
    assert "Done: 8 epochs, 184 steps" in out
    assert_same_bits(weights(path), weights(trained.path))
    # What was measured is kept, and not said again as if it were new.
    assert "examples/sec" not in out and "a step:" not in out
    before, after = (
        json.loads((folder / "summary.json").read_text())
        for folder in (trained.path, path)
    )
    for name in ("examples_per_sec", "step_ms", "waiting", "verdict", "measured"):
        assert after[name] == before[name] is not None


def test_eval_only(trained, data_dir, capsys):
    before = snapshot(trained.path)
    run_here(f"--data_dir={data_dir}", f"--model_dir={trained.path}", "--eval_only")
    out = capsys.readouterr().out
    summary = json.loads((trained.path / "summary.json").read_text())
    last = out.splitlines()[-1]
    found = re.fullmatch(
        r"validation accuracy ([\d.]+), validation loss ([\d.]+)", last
    )
    assert float(found[1]) == pytest.approx(summary["val_accuracy"], abs=1e-4)
    assert float(found[2]) == pytest.approx(summary["val_loss"], abs=1e-4)
    assert snapshot(trained.path) == before
    # Nothing is read twice, so nothing is kept.
    assert "kept" not in out and "kept" in trained.stdout


def test_clean_starts_over(trained, data_dir, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(trained.path, path)
    (path / "notes.txt").write_text("mine")
    # Another model: its checkpoint does not matter any more.
    run_here(
        *(f"--data_dir={data_dir}", f"--model_dir={path}", "--clean", "--model=mlp"),
        "--train_epochs=1",
    )
    assert first_done(capsys.readouterr().out) == 1
    assert (path / "notes.txt").read_text() == "mine"
    assert not (path / "checkpoints/ckpt-8-0").exists()
    for name in ("train", "validation"):
        assert len(list((path / name).iterdir())) == 1


def test_checkpoint_of_another(trained, data_dir):
    before = snapshot(trained.path)
    flags = f"--data_dir={data_dir}", f"--model_dir={trained.path}", "--model=mlp"
    with pytest.raises(ValueError, match="another model") as caught:
        assembled(*flags)
    for word in ("conv2d", "dense", str(trained.path), "--clean"):
        assert word in str(caught.value)
    assert snapshot(trained.path) == before


def test_truncated_checkpoint(trained, data_dir, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(trained.path, path)
    for number in range(1, 6):  # the best may be kept
        shutil.rmtree(path / f"checkpoints/ckpt-{number}-0", ignore_errors=True)
    flags = f"--data_dir={data_dir}", f"--model_dir={path}", "--eval_only"
    first = f"Cannot read the checkpoint {path}/checkpoints/ckpt-8-0: "
    # With the newest that is whole, if there is one.
    break_checkpoints(path, 8, 7)
    before = snapshot(path)
    run_here(*flags)
    out, err = capsys.readouterr()
    older = f"{path}/checkpoints/ckpt-6-0"
    assert f"towers: Warning: {first}" in err
    assert err.endswith(f"after it is lost: going back to {older}.\n")
    assert f"Evaluating {older}: after epoch 6," in out
    assert snapshot(path) == before
    break_checkpoints(path, 6)
    before = snapshot(path)
    with pytest.raises(ValueError) as caught:
        assembled(*flags)
    said = str(caught.value)
    assert said.startswith(first) and said.endswith("or remove it.")
    assert snapshot(path) == before


@pytest.mark.slow
def test_what_has_changed_is_said(worse):
    assert "Learning rate: 1, after 0.001." in worse.stdout
    # Shares are no part of what is saved.
    assert continued(worse.stdout, worse.path) == (1, 0)
    (line,) = re.findall(r"^Changed since the last run: .*$", worse.stdout, re.M)
    for flag in (
        "no --split_ratios (before 2,3,3)",
        *("--train_epochs=2 (before 1)", "--loss_placement=auto (before gathered)"),
    ):
        assert flag in line
    assert not any(f"--{name}" in line for name in ("seed", "model_dir", "batch_size"))
    words = "goes on with other data, from their beginning: batch size 64 before, 32"
    assert [words in each for each in ours(worse)] == [True]


def test_a_worse_run_leaves_the_best_model(worse, shared):
    first = json.loads((shared / "summary.json").read_text())
    summary = json.loads((worse.path / "summary.json").read_text())
    best = worse.path / "best.keras"
    assert summary["best"] == {
        "monitor": "val_loss",
        "value": pytest.approx(first["val_loss"], rel=1e-5),
        "epoch": 1,
        "model": str(best),
        "checkpoint": f"{worse.path}/checkpoints/ckpt-1-0",
    }
    assert summary["val_loss"] > 2 * first["val_loss"]
    words = f"best model   {best}, val_loss {first['val_loss']:.4f} after epoch 1\n"
    assert words in worse.stdout
    # Of the first run, the only epoch was both.
    kept = keras.models.load_model(best).get_weights()
    assert_same_bits(kept, weights(shared))
    assert not np.array_equal(kept[0], weights(worse.path)[0])


def test_the_best_is_evaluated_and_gone_on_from(
    worse, shared, data_dir, tmp_path, capsys
):
    path = tmp_path / "run"
    shutil.copytree(worse.path, path)
    flags = (f"--data_dir={data_dir}", f"--model_dir={path}", "--model=mlp")
    first = json.loads((shared / "summary.json").read_text())
    before = snapshot(path)
    run_here(*flags, "--eval_only", "--checkpoint=best")
    out = capsys.readouterr().out
    assert f"Evaluating {path}/checkpoints/ckpt-1-0: after epoch 1" in out
    assert f"validation loss {first['val_loss']:.4f}" in out
    assert snapshot(path) == before
    run_here(*flags, "--checkpoint=best", "--train_epochs=2")
    out = capsys.readouterr().out
    assert "ckpt-1-0: after epoch 1, step 23, the best by val_loss: " in out
    assert "The training after it is given up: ckpt-2-0 will be" in out
    summary = json.loads((path / "summary.json").read_text())
    assert summary["epochs"] == summary["best"]["epoch"] == 2
    assert summary["val_loss"] < first["val_loss"]


def test_another_batch_size_in_the_middle_of_an_epoch(killed, data_dir, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(killed, path)
    for between_epochs in path.glob("checkpoints/ckpt-*-0"):
        shutil.rmtree(between_epochs)
    flags = (f"--data_dir={data_dir}", f"--model_dir={path}", *REPEATABLE)
    before = snapshot(path)
    done = run(*flags, "--batch_size=32", code=1)
    # With the flags of the run that may still go on.
    assert snapshot(path) == before
    assert "batch size" in ours(done)[0] or "batches of" in ours(done)[0]
    assert "Traceback" not in done.stderr


def test_one_run_at_a_time(data_dir, tmp_path):
    flags = (f"--data_dir={data_dir}", f"--model_dir={tmp_path}", "--model=mlp")
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SaveError, match=f"Another run writes to {tmp_path}"):
            run_here(*flags, "--train_epochs=1")
        assert not (tmp_path / "flags.txt").exists()


@pytest.mark.parametrize("name", ["flags.txt", "lock", "checkpoints"])
def test_something_in_the_way(data_dir, tmp_path, name):
    path = tmp_path / name
    path.write_text("") if name == "checkpoints" else path.mkdir()
    flags = (f"--data_dir={data_dir}", f"--model_dir={tmp_path}", "--model=mlp")
    with pytest.raises(BAD if name == "checkpoints" else SaveError) as caught:
        run_here(*flags, "--train_epochs=1")
    assert str(tmp_path) in str(caught.value)
