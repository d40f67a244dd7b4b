"""towers.export: SavedModels take what files have, and need nothing but TensorFlow.

Columns of a table and arrays of the user's own, as towers.predict takes them, too.
"""

import json
import subprocess
import sys

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from PIL import Image
from pyarrow import parquet

import towers
from tests.towers.predict.runs import finished, predicted
from tests.towers.train.runs import heard
from towers.export import __main__ as export
from towers.export import arguments, saved_model
from towers.predict.preprocessor import Preprocessor
from towers.predict.trained import Trained, load_model
from towers.train.outputs.preprocessing import Preprocessing

PLAIN = """
import json, sys
for name in ("towers", "keras"):
    sys.modules[name] = None
import tensorflow as tf

def tensor(name, value, spec):
    if name == "pictures":
        value = [open(path, "rb").read() for path in value]
    return tf.constant(value, spec.dtype)

def plain(value):
    found = value.tolist()
    return [each.decode() for each in found] if value.dtype == object else found

told = []
for folder, signature, given in json.load(open(sys.argv[1])):
    model = tf.saved_model.load(folder)
    function = model.signatures[signature]
    specs = function.structured_input_signature[1]
    given = {name: tensor(name, value, specs[name]) for name, value in given.items()}
    found = function(**given)
    told.append({name: plain(each.numpy()) for name, each in found.items()})
print(json.dumps(told))
"""


def told(folder, *calls):
    """What plain TensorFlow gets: of each folder, signature and values by name."""
    (folder / "calls.json").write_text(json.dumps(calls))
    argv = [sys.executable, "-c", PLAIN, folder / "calls.json"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def exported(run, *calls):
    """Exports a run; calls of its SavedModel."""
    said = heard(export.export, arguments.read(["", str(run)], "")).stdout
    return [(str(run / "exported"), *call) for call in calls], said


def pictures(root):
    """A run on a folder of pictures."""
    draw = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (root / "data" / name).mkdir(parents=True)
        for i in range(5):
            pixels = draw.integers(0, 256, [9 + i, 12, 3]).astype(np.uint8)
            Image.fromarray(pixels).save(root / "data" / name / f"{i}.png")
    (root / "run").mkdir()
    flags = f"--dataset=folder:{root}/data", "--eval_fraction=0", "--image_size=8"
    finished(*flags, "--recipe=imagenet", "--model=mlp", model_dir=root / "run")
    return root / "run"


ROWS = [
    f"{i},{1000 * i + i % 3},{'no' if i % 4 else 'so '},{'owl' if i % 3 else 'cat'}"
    for i in range(20)
]
CHOSEN = "--feature_columns=a size,mood,2a-size"


def table(root, *flags):
    """A run on a table."""
    root.mkdir()
    (root / "rows.csv").write_text("\n".join(["a size,2a-size,mood,kind", *ROWS]))
    flags = f"--dataset=csv:{root}/rows.csv", "--label_column=kind", *flags
    return root, finished(*flags, model_dir=root)


DLRM = "--model=dlrm", "--model_options=width=2", CHOSEN


@pytest.mark.slow
def test_exported_models_need_tensorflow_only(tmp_path):
    of_pictures = pictures(tmp_path / "pictures")
    of_rows, _ = table(
        tmp_path / "rows", "--feature_columns=a size,2a-size", "--model=mlp"
    )
    of_columns, _ = table(tmp_path / "columns", *DLRM)
    paths = sorted(map(str, of_pictures.parent.rglob("data/*/*.png")))[3:6]
    numbers = {"a_size": [3.0, 5.0], "arg_2a_size": [3001.0, 5002.0]}
    mood = {"mood": [" so", "odd"]}
    # As the rows of a file.
    fields = [["3", "3001", " so"], [" 5.0", "5002", "odd"]]
    rows = [[3.0, 3001.0], [5.0, 5002.0]]
    calls, said = zip(
        exported(of_pictures, ("serve", {"pictures": paths})),
        exported(
            of_rows, ("serving_default", {"rows": rows}), ("serve_columns", numbers)
        ),
        exported(
            of_columns,
            ("serving_default", {"rows": fields}),
            ("serve_columns", numbers | mood),
        ),
        strict=True,
    )
    assert (
        ": serve takes rows of a size" in said[2] and ": returns label, prob" in said[2]
    )
    assert ": serve_columns takes a_size, arg_2a_size, mood.\n" in said[2]
    of_files, by_row, by_column, *of_categories = told(
        tmp_path, *(call for each in calls for call in each)
    )
    assert by_row == by_column and of_categories[0] == of_categories[1]
    examples = [open(path, "rb").read() for path in paths]
    columns = {"a size": [3, 5], "2a-size": [3001, 5002], **mood}
    for found, run, given in (
        (of_files, of_pictures, examples),
        (by_row, of_rows, rows),
        (of_categories[0], of_columns, columns),
    ):
        model = load_model(str(run))
        expected = model.predict(given)
        assert found["class"] == [each["class"] for each in expected]
        np.testing.assert_allclose(
            found["probability"], [each["probability"] for each in expected], rtol=1e-5
        )
        scores = tf.nn.softmax(model.model(model.prepare(given)))
        np.testing.assert_allclose(found["probabilities"], scores, atol=1e-6)


def test_columns_are_predicted_as_keras_does(tmp_path, capsys):
    run, job = table(tmp_path / "run", *DLRM)
    # Other columns, in another order; a text that training has not seen, or none.
    new = "mood,id,2a-size,a size\n so,7,3001,3\nodd,8,4001,four\nodd,9,5002,5\nso\n"
    (run / "new.csv").write_text(new)
    found = predicted(run, run / "new.csv", run / "rows.csv", code=1)
    err = capsys.readouterr().err
    assert "new.csv: row 2: a size is 'four', expected a number." in err
    assert "new.csv: row 4: has 1 field, expected 4 as the header." in err
    assert "Texts that training has not seen are all one: 1 in 'mood'." in err
    assert [row["row"] for row in found[:2]] == ["1", "3"] and len(found) == 22
    # Keras's own, of what is computed here by hand.
    numbers = np.array(
        [[3, 3001], [5, 5002], *([i, 1000 * i + i % 3] for i in range(20))]
    )
    moods = [2, 0, *(1 if i % 4 else 2 for i in range(20))]
    scaling = job.data.scaling
    dense = np.float32((numbers - scaling.mean) / scaling.std)
    scores = job.model.predict({"dense": dense, "mood": np.array(moods)}, verbose=0)
    expected = tf.nn.softmax(scores).numpy()
    chances = [float(row["probability_owl"]) for row in found]
    np.testing.assert_allclose(chances, expected[:, 1], rtol=1e-5)
    assert [row["class"] for row in found] == [
        ("cat", "owl")[k] for k in expected.argmax(axis=1)
    ]
    # Nothing in Parquet is the empty text, as in training.
    some = {"a size": [3.0, 5.0], "2a-size": [3001, 5002], "mood": ["so", None]}
    parquet.write_table(pa.table(some), run / "new.parquet")
    again = predicted(run, run / "new.parquet")
    # Of a batch of other size, the last bit may differ.
    again = [float(row["probability_owl"]) for row in again]
    np.testing.assert_allclose(again, chances[:2], rtol=1e-5)
    trained = towers.load_model(str(run))
    scores = trained.model(trained.prepare({**some, "mood": [b"so", None]}))
    # As TensorFlow serves it: rows of a file, or columns.
    saved_model.write(trained, str(run / "exported"))
    served = tf.saved_model.load(str(run / "exported"))
    rows = served.serve([["3", "3001", " so"], [" 5.0", "5002", ""]])
    columns = served.serve_columns([3.0, 5.0], [3001.0, 5002.0], [" so", ""])
    of_serving = [each["probabilities"] for each in (rows, columns)]
    for each in (tf.nn.softmax(scores), *of_serving):
        np.testing.assert_allclose(each, expected[:2], rtol=1e-5)
    with pytest.raises(ValueError, match="columns a size, 2a-size, mood; expected a d"):
        trained.predict([[1, 2, "so"]])
    with pytest.raises(ValueError, match="expected also 2a-size, mood, which the"):
        trained.predict({"a size": [1]})


def test_names_of_columns_in_a_signature():
    names = "a b", "a_b", "2a", "self"
    known = Preprocessing("regression", False, "row", (4,), features=names)
    specs = saved_model._column_specs(known)
    assert [spec.name for spec in specs] == ["a_b", "a_b_", "arg_2a", "self_"]


def test_ids_stay_in_their_range(tmp_path, capsys):
    argv = "--dataset=zipf:1:1x3:50", "--model=dlrm", "--model_options=width=2"
    job = finished(*argv, model_dir=tmp_path)
    (tmp_path / "new.csv").write_text("table_0,number_0\n2,0.5\n3,0.5\n1.0,0.5\n")
    found = predicted(tmp_path, tmp_path / "new.csv", code=1)
    assert [row["row"] for row in found] == ["1", "3"]
    said = "row 2: column 'table_0' is 3, expected an id of 0 to 2."
    assert said in capsys.readouterr().err
    x = {"dense": np.float32([[0.5], [0.5]]), "table_0": np.array([2, 1])}
    expected = tf.nn.softmax(job.model.predict(x, verbose=0)).numpy()[:, 1]
    chances = [float(row["probability_1"]) for row in found]
    np.testing.assert_allclose(chances, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="'table_0' has ids of 3 to 3; expected 0 to"):
        towers.load_model(str(tmp_path)).predict({"number_0": [1], "table_0": [3]})


OWN = """
import keras
import numpy as np

loss = {"price": "mse", "pair": "mse"}
x = {"size": np.float32([[i] for i in range(20)]), "rooms": np.arange(20)}
y = {"price": x["size"], "pair": x["size"] * np.float32([1, 2])}
train_data = x, y


def build(input_shape):
    inputs = {
        "size": keras.Input(input_shape["size"], name="size"),
        "rooms": keras.Input(input_shape["rooms"], name="rooms"),
    }
    rooms = keras.layers.Reshape((1,))(inputs["rooms"])
    joined = keras.layers.Concatenate()([inputs["size"], rooms])
    outputs = {n: keras.layers.Dense(k, name=n)(joined) for n, k in
               (("price", 1), ("pair", 2))}
    return keras.Model(inputs, outputs)


def preprocess(x, y, training):
    return {**x, "size": x["size"] / 10}, y
"""


def test_arrays_of_the_users_own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    job = finished(f"--model={tmp_path}/mine.py", model_dir=tmp_path)
    x = {"size": np.float64([[3], [5]]), "rooms": np.array([1, 2])}
    np.savez(tmp_path / "new.npz", **x)
    prepared = {"size": np.float32([[0.3], [0.5]]), "rooms": np.float32([1, 2])}
    expected = job.model.predict(prepared, verbose=0)
    mine = tmp_path / "mine.py"
    found = predicted(tmp_path, tmp_path / "new.npz", f"--model={mine}")
    assert [row["row"] for row in found] == ["1", "2"]
    for name in ("price", "pair"):
        values = [[*map(float, row[name].split())] for row in found]
        np.testing.assert_allclose(values, expected[name], rtol=1e-5)
    trained = load_model(str(tmp_path), model=str(mine))
    saved_model.write(trained, str(tmp_path / "exported"))
    serve = tf.saved_model.load(str(tmp_path / "exported")).signatures["serve"]
    given = {
        "size": tf.constant([[3.0], [5.0]]),
        "rooms": tf.constant([1, 2], tf.int64),
    }
    for name, values in serve(**given).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-5)
    with pytest.raises(
        ValueError, match=r"Received size \[1\] of float64; expected .*"
    ):
        trained.predict({"size": np.ones([1])})
    (tmp_path / "new.csv").write_text("size,rooms\n1,2\n")
    said = (
        r"new.csv has no arrays, and only .*mine.py knows .*; expected arrays by name"
    )
    with pytest.raises(
        ValueError, match=said + r", size \[B, 1\] of float32, rooms \[B"
    ):
        predicted(tmp_path, tmp_path / "new.csv", f"--model={mine}")


ONE = """
import keras
import numpy as np

train_data = np.float32([[i, 1] for i in range(20)]), np.arange(20) % 2


def build(input_shape, num_outputs):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(num_outputs)])


def preprocess(x, y):
    return x, y + 0
"""


def test_an_array_and_what_needs_a_target(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ONE.replace("y + 0", "y"))
    flags = f"--model={file}", "--task=classification"
    job = finished(*flags, model_dir=tmp_path)
    x = np.float32([[1, 1], [2, 1], [3, 1], [4, 1], [5, 1]])
    np.save(tmp_path / "x.npy", x)
    found = predicted(tmp_path, tmp_path / "x.npy", f"--model={file}")
    expected = tf.nn.softmax(job.model.predict(x, verbose=0)).numpy()
    chances = [float(row["probability_1"]) for row in found]
    np.testing.assert_allclose(chances, expected[:, 1], rtol=1e-5)
    assert [int(row["class"]) for row in found] == expected.argmax(axis=1).tolist()
    trained = load_model(str(tmp_path), model=str(file))
    with pytest.raises(ValueError, match=r"\[2, 3\] of float64; expected .* \[B, 2\]"):
        trained.predict(np.ones([2, 3]))
    file.write_text(ONE)
    with pytest.raises(ValueError, match=r"raised TypeError .* with y=None; expected"):
        load_model(str(tmp_path), model=str(file)).predict(x)


@pytest.mark.slow
def test_pictures_that_the_users_file_prepares(tmp_path):
    root = tmp_path / "pictures"
    (tmp_path / "mine.py").write_text(
        ONE.replace("train_data =", "unused =")
        .replace(
            "), keras.layers.Dense", "), keras.layers.Flatten(), keras.layers.Dense"
        )
        .replace("return x, y + 0", "return keras.ops.cast(x, 'float32') / 255, y")
    )
    draw = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (root / name).mkdir(parents=True)
        pixels = draw.integers(0, 256, [4, 4, 3]).astype(np.uint8)
        Image.fromarray(pixels).save(root / name / "0.png")
    flags = f"--dataset=folder:{root}", "--eval_fraction=0", "--image_size=4"
    job = finished(*flags, f"--model={tmp_path}/mine.py", model_dir=tmp_path)
    mine = f"{tmp_path}/mine.py"
    (row,) = predicted(tmp_path, root / "bee" / "0.png", f"--model={mine}")
    scores = tf.nn.softmax(job.model(pixels[None] / np.float32(255))).numpy()
    assert row["class"] == ("ant", "bee")[scores.argmax()]
    found = float(row["probability_bee"])
    np.testing.assert_allclose(found, scores[0, 1], rtol=1e-5)
    trained = load_model(str(tmp_path), model=mine)
    assert trained.predict(pixels[None])[0]["class"] == row["class"]


def test_a_language_model_takes_tokens(tmp_path):
    inputs = keras.Input((2,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Embedding(3, 3)(inputs))
    known = Preprocessing("language_model", True, "tokens", (2,))
    trained = Trained(model, known, Preprocessor(known))
    takes, _ = saved_model.write(trained, str(tmp_path / "exported"))
    assert takes == {"serve": ["tokens"]}
    given = [[0, 2], [1, 1]]
    (found,) = told(tmp_path, ("exported", "serve", {"tokens": given}))
    expected = tf.nn.softmax(model(np.array(given))).numpy()
    np.testing.assert_allclose(found["probabilities"], expected, rtol=1e-5)
    assert found["label"] == expected.argmax(axis=-1).tolist()


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    file = f"{tmp_path}/exported.1.unfinished/variables/x.tempstate1"
    said = f"{{{{function_node}}}} {file}; No space left on device [Op:SaveV2]"

    def full(*_):
        raise tf.errors.ResourceExhaustedError(None, None, said)

    monkeypatch.setattr(saved_model, "_write", full)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    known = Preprocessing("classification", True, "tokens", (2,))
    trained = Trained(model, known, lambda texts: tf.zeros([tf.size(texts), 2]))
    expected = f"^Cannot write {tmp_path}: No space left on device; choose another OUT"
    with pytest.raises(ValueError, match=expected):
        saved_model.write(trained, str(tmp_path))
