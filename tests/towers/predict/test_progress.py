"""What takes long at the end of a run, and with its model, shows how far it is."""

import pytest

from tests.progress_seen import Seen
from tests.towers.predict.runs import predicted
from tests.towers.train.runs import heard, run_here, write_folder
from towers.export import __main__ as export
from towers.export import arguments


@pytest.fixture
def seen(monkeypatch):
    return Seen(monkeypatch)


def test_from_the_first_listing_to_the_prediction(tmp_path, seen):
    write_folder(tmp_path / "data", ant=8, bee=8)
    run_here(
        *("--model=mlp", "--image_size=4", "--batch_size=4", "--max_train_steps=1"),
        *("--num_gpus=2", "--eval_fraction=0.25", "--class_weight=balanced"),
        f"--dataset=folder:{tmp_path}/data",
        f"--model_dir={tmp_path}/run",
    )
    assert seen.of("Listing ") == [(2, 2)]
    assert seen.of("Counting the classes") == [(12, 12)]
    # Once in `fit`, once at the end.
    assert seen.of("Evaluating") == [(1, 1)] * 2
    assert seen.of("Looking for mistakes") == [(1, None)]
    assert seen.of("Saving the model in ") == [(0, None)]
    assert len(predicted(tmp_path / "run", tmp_path / "data" / "ant")) == 8
    assert seen.of("Loading the model of ") == [(0, None)]
    assert seen.of("Predicting") == [(2, None)]
    heard(export.export, arguments.read(["", str(tmp_path / "run")], ""))
    assert seen.of("Exporting the model of ") == [(0, None)]
    assert seen.running == []
