"""Runs whose examples come into memory while they train."""

import re
import shutil
import signal

import pytest

from tests import warm
from tests.towers.train import runs

# Of 12 batches, as many of which as possible are saved.
COUNT, BATCH, STEPS = 96, 8, 12
FLAGS = (
    *("--model=mlp", f"--batch_size={BATCH}", "--deterministic"),
    *("--train_epochs=3", "--save_every=2", "--keep_checkpoints=99", "--log_steps=4"),
)


def _write(path, kind):
    """Writes images of a folder or of records, or rows; returns the flags of them."""
    for i in range(COUNT):
        folder = path / "train" / str(i % 3)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:02}.png").write_bytes(runs.png(2 * i))
    if kind == "folder":
        shutil.copytree(path / "train", path / "val")
        return f"--dataset=folder:{path}", "--image_size=8"
    if kind == "csv":
        rows = [f"{i},{i % 7},{i % 3}" for i in range(COUNT)]
        (path / "rows.csv").write_text("\n".join(["a,b,label", *rows]))
        return f"--dataset=csv:{path}/rows.csv", "--eval_fraction=0"
    (path / "records").mkdir()
    for file in range(3):
        some = range(file, COUNT, 3)
        images = [runs.png(2 * i) for i in some]
        labels = [i % 5 for i in some]
        runs.write_tfrecord(path / "records" / f"train-{file}", images, labels)
    return f"--dataset=tfrecord:{path}/records/*", "--image_size=8"


def _epochs(out):
    """What was measured of each epoch."""
    line = r"epoch (\d+)/3 done, step \S+ (loss .*?), (?:[\d,.]+ examples|after)"
    return dict(re.findall(line, " ".join(out.split())))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "epoch", "kept"),
    [
        ("folder", 0, "of pixels kept in memory"),
        ("records", 0, "of pixels kept in memory"),
        ("folder", 1, "of pixels kept in memory"),
        ("records", 1, "of pixels kept in memory"),
        ("csv", 0, "of numbers kept in memory"),
        ("csv", 1, ""),
    ],
)
def test_killed_while_the_memory_is_filled(kind, epoch, kept, tmp_path):
    dataset = *_write(tmp_path, kind), *(["--cache=none"] * (not kept))
    whole, path = tmp_path / "whole", tmp_path / "run"
    expected = runs.run(*dataset, *FLAGS, f"--model_dir={whole}").stdout
    assert kept in expected and ("kept in memory" in expected) == bool(kept)
    flags = *runs.QUICKLY, *dataset, *FLAGS, f"--model_dir={path}"
    killed = warm.run("tests.towers.train.dies", epoch, *flags)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    again = runs.run(*dataset, *FLAGS, f"--model_dir={path}").stdout
    went_on, batch = runs.continued(again, path, STEPS)
    assert went_on == epoch and 0 < batch < STEPS
    assert _epochs(again) == {
        number: measured
        for number, measured in _epochs(expected).items()
        if int(number) > epoch
    }
    runs.assert_same_bits(runs.weights(path), runs.weights(whole))


@pytest.mark.slow
@pytest.mark.parametrize("batches", [0, 3])
def test_data_that_were_changed_are_noticed(batches, tmp_path, capsys):
    dataset, path = _write(tmp_path, "records"), tmp_path / "run"
    flags = *dataset, *FLAGS, f"--model_dir={path}"
    steps = STEPS + batches
    runs.run_here(*flags, "--eval_steps=1", f"--max_train_steps={steps}")
    # As many records as before.
    images = [runs.png(value, side=9) for value in range(COUNT // 3)]
    labels = [value % 5 for value in range(COUNT // 3)]
    runs.write_tfrecord(tmp_path / "records" / "train-1", images, labels)
    capsys.readouterr()
    more = *flags, f"--max_train_steps={steps + 1}"
    if batches:
        with pytest.raises(ValueError, match="the data are others: bytes "):
            runs.run_here(*more)
        return
    runs.run_here(*more)
    said = "goes on with other data, from their beginning: bytes "
    assert said in capsys.readouterr().err
