"""Going on with an earlier run of towers.train."""

import fcntl
import re
import shutil
from unittest import mock

import keras
import numpy as np
import pytest

from tests.towers.train.runs import (
    BAD,
    REPEATABLE,
    STEPS,
    SYNTHETIC,
    TWO_STEPS,
    assembled,
    assert_same_bits,
    break_checkpoints,
    continued,
    finish,
    first_done,
    main_here,
    ours,
    run,
    run_here,
    snapshot,
    start,
    summary_of,
    wait_for,
    weights,
)
from tests.variants import slow
from towers.lifecycle.checkpoints.manager import SaveError
from towers.train import run as train_run
from towers.train.outputs import start as start_lines


@pytest.mark.slow
def test_killed_and_started_again_with_the_flags_that_it_wrote(killed, resumed):
    path = resumed.path
    before, after = ((p / "flags.txt").read_text() for p in (killed.path, path))
    assert f"--model_dir={killed.path}\n" in before
    assert "--model=mlp\n" in before
    assert "--deterministic\n" in before
    assert after == before.replace(f"={killed.path}\n", f"={path}\n")
    # Nothing in this run is not finite.
    assert not (path / "not_finite.npz").exists()
    epoch, batch = continued(resumed.stdout, path)
    assert 1 <= epoch < 8 and batch in (0, 5, 10, 15, 20)
    # With a progress bar, which says so as an epoch begins.
    assert re.search(r"^Epoch (\d+)/8", resumed.stdout, re.M)[1] == f"{epoch + 1}"
    summary = summary_of(path)
    assert (summary["epochs"], summary["steps"]) == (8, 8 * STEPS)
    model = keras.models.load_model(path / "model.keras")
    assert int(model.optimizer.iterations) == 8 * STEPS


@pytest.mark.slow
def test_killed_and_started_again_ends_as_if_nothing_had_happened(killed, tmp_path):
    path, whole = tmp_path / "run", tmp_path / "whole"
    shutil.copytree(killed.path, path)
    for folder in (path, whole):
        run(f"--flagfile={killed.path / 'flags.txt'}", f"--model_dir={folder}")
    assert_same_bits(weights(path), weights(whole))


@pytest.mark.slow
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
def test_finished_and_started_again(resumed, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(resumed.path, path)
    run_here(f"--flagfile={path / 'flags.txt'}", f"--model_dir={path}")
    out = capsys.readouterr().out
    assert f"Nothing left to train: {path} has 8 epochs already" in out
    assert "epoch 9" not in out and "epoch 1/" not in out
    assert "Give more --train_epochs, or --clean" in out
    assert "Done: 8 epochs, 184 steps" in out
    assert_same_bits(weights(path), weights(resumed.path))
    # What was measured is kept, and not said again as if it were new.
    assert "examples/sec" not in out and "a step:" not in out
    before, after = (summary_of(folder) for folder in (resumed.path, path))
    for name in ("examples_per_sec", "step_ms", "waiting", "verdict", "measured"):
        assert after[name] == before[name] is not None


@pytest.mark.slow
def test_eval_only(trained, capsys):
    path, before = trained.path, snapshot(trained.path)
    run_here(f"--flagfile={path / 'flags.txt'}", "--eval_only")
    out = capsys.readouterr().out
    summary = summary_of(path)
    last = out.splitlines()[-1]
    found = re.fullmatch(
        r"validation accuracy ([\d.]+), validation loss ([\d.]+)", last
    )
    assert float(found[1]) == pytest.approx(summary["val_accuracy"], abs=1e-4)
    assert float(found[2]) == pytest.approx(summary["val_loss"], abs=1e-4)
    assert snapshot(path) == before
    # Nothing is read twice, so nothing is kept.
    assert "kept" not in out and "kept" in trained.stdout


def clean_flags(trained, path):
    shutil.copytree(trained.path, path)
    (path / "notes.txt").write_text("mine")
    # Another model: its checkpoint does not matter any more.
    return f"--model_dir={path}", "--clean", *TWO_STEPS, "--train_epochs=1"


@pytest.mark.slow
def test_clean_starts_over(trained, tmp_path, monkeypatch):
    path = tmp_path / "run"
    job = assembled(*clean_flags(trained, path))
    assert (job.epoch, job.step) == (0, 0)
    # Until it trains, nothing is gone.
    assert (path / "checkpoints/ckpt-4-0").exists()
    monkeypatch.setattr(train_run, "train", mock.Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        train_run.run(job)
    assert {p.name for p in path.iterdir()} == {"notes.txt"}


@pytest.mark.slow
def test_a_clean_run(trained, tmp_path, capsys):
    path = tmp_path / "run"
    run_here(*clean_flags(trained, path))
    assert first_done(capsys.readouterr().out) == 1
    assert (path / "notes.txt").read_text() == "mine"
    assert not (path / "checkpoints/ckpt-4-0").exists()
    assert len(list((path / "train").glob("*.v2"))) == 1


def test_checkpoint_of_another(trained, data_dir):
    before = snapshot(trained.path)
    flags = f"--data_dir={data_dir}", f"--model_dir={trained.path}", "--model=cnn"
    with pytest.raises(ValueError, match="another model") as caught:
        assembled(*flags)
    for word in ("conv2d", "dense", str(trained.path), "--clean"):
        assert word in str(caught.value)
    assert snapshot(trained.path) == before


@pytest.mark.slow
def test_truncated_checkpoint(trained, data_dir, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(trained.path, path)
    shutil.rmtree(path / "checkpoints/ckpt-1-0", ignore_errors=True)  # the best, maybe
    flags = f"--data_dir={data_dir}", f"--model_dir={path}", "--model=mlp"
    flags = *flags, "--eval_only"
    first = f"Cannot read the checkpoint {path}/checkpoints/ckpt-4-0: "
    # With the newest that is whole, if there is one.
    break_checkpoints(path, 4, 3)
    before = snapshot(path)
    older = f"{path}/checkpoints/ckpt-2-0"
    job = assembled(*flags)
    assert f"Evaluating {older}: after epoch 2," in start_lines.text(job)
    err = capsys.readouterr().err
    assert f"towers: Warning: {first}" in err
    assert err.endswith(f"after it is lost: going back to {older}.\n")
    break_checkpoints(path, 2)
    before = snapshot(path)
    with pytest.raises(ValueError) as caught:
        assembled(*flags)
    said = str(caught.value)
    assert said.startswith(first) and said.endswith("or remove it.")
    assert snapshot(path) == before


@pytest.mark.slow
def test_what_has_changed_is_said(worse):
    assert "Learning rate: 1, after 0.001." in worse.stdout
    # Ratios are no part of what is saved.
    assert continued(worse.stdout, worse.path) == (8, 0)
    # Long lines are wrapped, and go on with blanks.
    changed = r"^Changed since the last run: .*(?:\n  .*)*"
    (line,) = re.findall(changed, worse.stdout, re.MULTILINE)
    line = " ".join(line.split())
    for flag in (
        "--split_ratios=2,3,3 (not given before)",
        *("--train_epochs=9 (before 8)", "--loss_placement=gathered (before auto)"),
        "--save_every=10min (before 5)",
    ):
        assert flag in line
    assert not any(f"--{name}=" in line for name in ("seed", "model_dir", "batch_size"))
    words = "goes on with other data, from their beginning: batch size 64 before, 32"
    old, other_data = ours(worse)
    assert "'gathered' is 'auto'" in old and words in other_data


@pytest.mark.slow
def test_a_worse_run_leaves_the_best_model(worse, resumed):
    first, summary = summary_of(resumed.path), summary_of(worse.path)
    best, epoch = worse.path / "best.keras", first["best"]["epoch"]
    assert summary["best"] == {
        "monitor": "val_loss",
        "value": pytest.approx(first["best"]["value"], rel=1e-5),
        "epoch": epoch,
        "logs": first["best"]["logs"],
        "model": str(best),
        "checkpoint": f"{worse.path}/checkpoints/ckpt-{epoch}-0",
    }
    assert summary["val_loss"] > 2 * first["val_loss"]
    assert f"best epoch {epoch}, by val_loss: " in worse.stdout
    assert f"  best model   {best}\n" in worse.stdout
    ours, theirs, last = (
        keras.models.load_model(path).get_weights()
        for path in (best, first["best"]["model"], summary["model"])
    )
    assert_same_bits(ours, theirs)
    assert not np.array_equal(ours[0], last[0])


def test_the_best_is_evaluated(resumed):
    flags = f"--flagfile={resumed.path / 'flags.txt'}", "--eval_only"
    job = assembled(*flags, "--checkpoint=best")
    name = "ckpt-{epoch}-0: after epoch {epoch}".format(
        **summary_of(resumed.path)["best"]
    )
    said = start_lines.text(job)
    assert f"Evaluating {resumed.path}/checkpoints/{name}" in said
    assert "Changed since" not in said
    other = start_lines.text(assembled(*flags, "--dtype=bf16"))
    assert "Changed since the last run: --dtype=bf16 (before fp32)." in other


@pytest.mark.slow
def test_the_best_is_evaluated_and_gone_on_from(worse, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(worse.path, path)
    flags = f"--model_dir={path}", *SYNTHETIC
    best = summary_of(path)["best"]
    name, after = f"ckpt-{best['epoch']}-0", f"after epoch {best['epoch']}"
    before = snapshot(path)
    run_here(*flags, "--eval_only", "--checkpoint=best")
    out = capsys.readouterr().out
    assert f"Evaluating {path}/checkpoints/{name}: {after}" in out
    assert f"validation loss {best['value']:.4f}" in out
    assert snapshot(path) == before
    job = assembled(*flags, "--checkpoint=best", "--train_epochs=9")
    out = start_lines.text(job)
    step = STEPS * best["epoch"]
    assert f"{name}: {after}, step {step}, the best by val_loss: " in out
    assert "The training after it is given up: ckpt-9-0 " in out
    train_run.run(job)
    summary = summary_of(path)
    assert summary["epochs"] == 9
    assert summary["val_loss"] < 2 * best["value"]


@pytest.mark.slow
def test_another_batch_size_in_the_middle_of_an_epoch(killed, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(killed.path, path)
    for between_epochs in path.glob("checkpoints/ckpt-*-0"):
        shutil.rmtree(between_epochs)
    # Killed runs leave their locks, and the next one takes them.
    for lock in path.rglob("lock"):
        lock.unlink()
    before = snapshot(path)
    done = main_here(f"--model_dir={path}", *REPEATABLE, "--batch_size=32")
    assert done.returncode == 1
    # With the flags of the run that may still go on.
    assert snapshot(path) == before
    assert "batch size" in ours(done)[0] or "batches of" in ours(done)[0]
    assert "Traceback" not in done.stderr


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--batch_size=16", "--elastic_batch=at_start", "--num_gpus=3"],
            "batch size 64, but received 48 (by --batch_size=16, "
            "--elastic_batch=at_start, --num_gpus=3); steps_per_epoch 23, but received "
            "31; expected",
        ),
        (["--batch_size=32"], "batch size 64, but received 32 (by --batch_size=32); "),
        (["--seed=4"], "seed 3, but received 4 (by --seed=4)"),
        (
            ["--dataset=synthetic:4x4x1:3:1408"],
            "examples 1472, but received 1408 (by --dataset=synthetic:4x4x1:3:1408)",
        ),
    ],
)
def test_other_data_in_the_middle_of_an_epoch_are_told_by_flags(
    killed, tmp_path, flags, said
):
    path = tmp_path / "run"
    shutil.copytree(killed.path, path)
    for between_epochs in path.glob("checkpoints/ckpt-*-0"):
        shutil.rmtree(between_epochs)
    done = main_here(f"--model_dir={path}", *REPEATABLE, *flags)
    assert done.returncode == 1
    assert said in ours(done)[-1]


def test_one_run_at_a_time(tmp_path):
    flags = *TWO_STEPS, f"--model_dir={tmp_path}"
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SaveError, match=f"Another run writes to {tmp_path}"):
            run_here(*flags, "--train_epochs=1")
        assert not (tmp_path / "flags.txt").exists()


@pytest.mark.parametrize("name", [slow("flags.txt"), slow("lock"), "checkpoints"])
def test_something_in_the_way(tmp_path, name):
    path = tmp_path / name
    path.write_text("") if name == "checkpoints" else path.mkdir()
    flags = *TWO_STEPS, f"--model_dir={tmp_path}"
    with pytest.raises(BAD if name == "checkpoints" else SaveError) as caught:
        run_here(*flags, "--train_epochs=1")
    assert str(tmp_path) in str(caught.value)
