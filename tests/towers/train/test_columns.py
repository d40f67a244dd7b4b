"""A run on named columns."""

import json

import pytest

from tests.towers.train.runs import run_here
from towers.predict.trained import load_model


@pytest.mark.slow
def test_a_run_on_columns_of_numbers_and_ids(tmp_path, capsys):
    run_here(
        *(
            "--dataset=zipf:3:2x9:200",
            "--model=dlrm",
            "--model_options=width=4",
            "--batch_size=50",
        ),
        *("--train_epochs=3", "--learning_rate=0.01", f"--model_dir={tmp_path}"),
        *("--variable_update=parameter_server", "--enable_xla=false", "--num_gpus=2"),
    )
    assert (
        "200 rows of 3 numbers and 2 categories to train on" in capsys.readouterr().out
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["val_accuracy"] > 0.5
    # Its layers are found by name.
    assert load_model(str(tmp_path)).model.get_layer("dlrm_interaction")
