"""A run's folder is data: whatever it holds, no code of it runs unless it is named."""

import json
import pathlib

import keras
import numpy as np
import pytest

from tests.towers.predict.runs import finished
from towers.export import arguments as export
from towers.generate import arguments as generate
from towers.predict import arguments, trained

FILE = """
import pathlib
import keras
import numpy as np

pathlib.Path(__file__).with_name("acted").touch()
train_data = np.float32([[i, 1] for i in range(20)]), np.arange(20) % 2


def build(input_shape, num_outputs):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(num_outputs)])
"""
PREPROCESS = """

def preprocess(x, y, training):
    return x + 1, y
"""


def run(folder, more=""):
    """The model_dir of a run with a file of the user's, which tells that it ran."""
    (folder / "mine.py").write_text(FILE + more)
    flags = f"--model={folder}/mine.py", "--task=classification"
    finished(*flags, model_dir=folder)
    (folder / "acted").unlink()
    return folder


def test_a_file_that_a_run_needs_is_named_and_not_run(tmp_path):
    folder = run(tmp_path, PREPROCESS)
    said = rf"needs preprocess of {tmp_path}/mine\.py, .* name it by --model"
    with pytest.raises(ValueError, match=said):
        trained.load_model(str(folder))
    assert not (folder / "acted").exists()
    mine = f"{folder}/mine.py"
    prepared = trained.load_model(str(folder), model=mine).prepare(np.zeros([1, 2]))
    assert np.asarray(prepared).tolist() == [[1, 1]]
    assert (folder / "acted").exists()


def test_a_model_of_keras_layers_needs_no_file(tmp_path):
    folder = run(tmp_path)
    loaded = trained.load_model(str(folder))
    assert loaded.predict(np.zeros([1, 2]))[0].keys() >= {"class"}
    assert not (folder / "acted").exists()


@pytest.mark.parametrize("name", ("model.keras", "model.json"))
def test_a_lambda_is_refused(tmp_path, name):
    folder = run(tmp_path)
    act = tmp_path / "acted"

    def code(x, act=str(act)):
        __import__("pathlib").Path(act).touch()
        return x

    layers = [keras.Input((2,)), keras.layers.Lambda(code, output_shape=(2,))]
    model = keras.Sequential(layers)
    act.unlink(missing_ok=True)
    if name == "model.keras":
        model.save(folder / name)
    else:
        (folder / "model.keras").unlink()
        (folder / name).write_text(model.to_json())
        (folder / "checkpoints" / "ckpt-0-1").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"Cannot load .*[Ll]ambda"):
        trained.load_model(str(folder))
    assert not act.exists()


def test_a_module_is_not_imported(tmp_path, monkeypatch):
    folder = run(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = folder / "model.json"
    model = json.loads(path.read_text())
    model |= {"module": "mine", "class_name": "build", "registered_name": None}
    path.write_text(json.dumps(model))
    (folder / "model.keras").unlink()
    (folder / "checkpoints" / "ckpt-0-1").mkdir(parents=True)
    with pytest.raises(ValueError, match="Cannot load"):
        trained.load_model(str(folder))
    assert not (folder / "acted").exists()


@pytest.mark.parametrize("program", (arguments, export, generate))
def test_programs_take_the_file_by_a_flag(tmp_path, program):
    (tmp_path / "model.keras").touch()
    (tmp_path / "mine.py").write_text(FILE)
    here = ["", str(tmp_path)] + [__file__] * (program is arguments)
    mine = f"{tmp_path}/mine.py"
    assert program.read([*here, f"--model={mine}"], "").model == mine
    with pytest.raises(ValueError, match="expected the Python file that the run was"):
        program.read([*here, "--model=mlp"], "")
    with pytest.raises(ValueError, match=r"other\.py"):
        program.read([*here, f"--model={tmp_path}/other.py"], "")
    assert not pathlib.Path(tmp_path, "acted").exists()
