"""The model of a run that has not ended is that of its newest checkpoint."""

import dataclasses
import shutil

import numpy as np
import pytest

import towers
from tests.towers.train.runs import assembled
from towers.generate.sampling import generate
from towers.lifecycle.checkpoints import store
from towers.predict import arguments
from towers.train import run
from towers.train.outputs import files
from towers.train.parts.training import averaged

SMALL = (
    *("--model=transformer_lm", "--model_options=layers=1,width=8,heads=1"),
    *("--sequence_length=8", "--batch_size=4", "--train_epochs=1", "--num_gpus=1"),
    *("--ema=0.5", "--eval_steps=1", "--max_train_steps=3", "--learning_rate=0.1"),
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped after three steps, before model.keras was written."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("def f(x):\n    return x + 1\n" * 20)
    job = assembled(
        *(f"--dataset=text:{folder}/text.txt", f"--model_dir={folder}/run", *SMALL)
    )
    with files.alone(job.model_dir):
        run.train(job)
    return job


def weights(model_dir):
    return towers.load_model(model_dir).model.get_weights()


@pytest.mark.slow
def test_it_has_the_averages_of_the_newest_checkpoint(stopped, capsys):
    with averaged(stopped.settings, stopped.model):
        expected = stopped.model.get_weights()
    found = weights(stopped.model_dir)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    saved = store.load(stopped.checkpoint.latest).values["model"]
    assert not np.array_equal(found[0], saved[0])
    said = capsys.readouterr().err
    assert (
        f"has not ended, so this is the model of its checkpoint {stopped.model_dir}"
        in said
    )
    assert "with the averages of its weights." in said


def test_it_writes_text(stopped):
    arguments.check_model(arguments.read(["", stopped.model_dir, __file__], ""))
    model = towers.load_model(stopped.model_dir)
    assert generate(model, "def ", max_tokens=3).startswith("def ")


def test_best_is_there_only_at_the_end(stopped):
    argv = [stopped.model_dir, __file__, "--checkpoint=best"]
    with pytest.raises(ValueError, match=r"has no best\.keras; .* that has ended\."):
        arguments.read(["", *argv], "")


def test_a_damaged_checkpoint_is_a_sentence(stopped, tmp_path):
    (tmp_path / "checkpoints" / "ckpt-0-1").mkdir(parents=True)
    for path in ("model.json", "preprocessing.json"):
        (tmp_path / path).write_text(open(f"{stopped.model_dir}/{path}").read())
    with pytest.raises(ValueError, match=r"Cannot load .*ckpt-0-1"):
        towers.load_model(tmp_path)


def ended(job, folder):
    """Makes a copy of a run, as its end leaves it."""
    shutil.copytree(job.model_dir, folder)
    copy = dataclasses.replace(job, settings=job.settings.but(model_dir=str(folder)))
    files.end(copy, run.summarise(copy, run.evaluate(copy), None))


def test_a_run_that_has_ended_says_nothing(stopped, tmp_path, capsys):
    ended(stopped, tmp_path / "run")
    before = weights(tmp_path / "run")
    assert "has not ended" not in capsys.readouterr().err
    with averaged(stopped.settings, stopped.model):
        for a, b in zip(before, stopped.model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("place", ("begin", "middle", "end"))
def test_a_damaged_model_is_a_sentence(stopped, tmp_path, place):
    ended(stopped, tmp_path / "run")
    path = tmp_path / "run" / "model.keras"
    content = bytearray(path.read_bytes())
    first = {"begin": 0, "middle": len(content) // 2, "end": len(content) - 64}[place]
    content[first : first + 64] = bytes(64)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.keras is damaged; expected"):
        towers.load_model(tmp_path / "run")
