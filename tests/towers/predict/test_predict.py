"""towers.predict and towers.export: models of runs, used on files."""

import dataclasses

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from PIL import Image
from pyarrow import parquet

import towers
from tests.towers.predict.runs import finished, predicted
from towers import input_pipeline
from towers.export import arguments as export_arguments
from towers.export import saved_model
from towers.predict import arguments, inputs, output
from towers.predict.preprocessor import Preprocessor
from towers.predict.trained import Trained, load_model
from towers.train.outputs.preprocessing import Preprocessing
from towers.train.parts.task import TASKS


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Of a folder of pictures: their paths, and the model_dir of a run."""
    root = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (root / "data" / name).mkdir(parents=True)
        for i in range(5):
            pixels = draw.integers(0, 256, [9 + i, 12, 3]).astype(np.uint8)
            kind = "jpg" if i % 2 else "png"
            Image.fromarray(pixels).save(root / "data" / name / f"{i}.{kind}")
    model_dir = root / "run"
    model_dir.mkdir()
    flags = f"--dataset=folder:{root}/data", "--eval_fraction=0", "--image_size=8"
    job = finished(*flags, "--recipe=imagenet", "--model=mlp", model_dir=model_dir)
    return sorted((root / "data").rglob("*.*g")), model_dir, job


def test_pictures(pictures, tmp_path, capsys):
    paths, model_dir, job = pictures
    # As they are evaluated, on one device.
    data = input_pipeline.make_dataset(
        *(job.data.source, "train"),
        **{"batch_size": 4, "image_shape": (8, 8, 3), "training": False},
        recipe="imagenet",
    )
    data = data.map(lambda x, y: input_pipeline.normalize(x))
    expected = tf.nn.softmax(job.model.predict(data, verbose=0)).numpy()
    broken = tmp_path / "broken.png"
    broken.write_bytes(paths[0].read_bytes()[:50])
    ants = paths[0].parent
    rows = predicted(model_dir, ants, broken, *paths[5:], code=1)
    out, err = capsys.readouterr()
    assert out == f"{model_dir}/predictions.csv: 10 predictions on 2 towers.\n"
    assert f"towers.predict: {broken}: " in err and err.count("\n") == 2
    assert "towers.predict: 10 predictions, 1 example left out" in err
    assert [row["file"] for row in rows] == [*map(str, paths)]
    found = [float(row["probability_bee"]) for row in rows]
    np.testing.assert_allclose(sorted(found), sorted(expected[:, 1]), rtol=1e-4)
    trained = load_model(str(model_dir))
    each = trained.predict([path.read_bytes() for path in paths])
    assert [row["class"] for row in rows] == [one["class"] for one in each]
    with pytest.raises(ValueError, match="has no picture; name another"):
        predicted(model_dir, model_dir)


def test_a_mask_is_as_large_as_its_picture(tmp_path):
    Image.new("RGB", (6, 4)).save(tmp_path / "1.jpg")
    with open(tmp_path / "masks.csv", "w") as file:
        rows = output.PredictionRows(file, str(tmp_path / "masks"), as_pictures=True)
        mask = np.array([[0, 2, 1], [1, 0, 2]])
        rows.write({"file": str(tmp_path / "1.jpg")}, {"mask": mask})
    image = Image.open(tmp_path / "masks" / "1.png")
    np.testing.assert_array_equal(np.asarray(image), mask.repeat(2, 0).repeat(2, 1))
    # Red and green, as Pascal VOC has them.
    colours = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(colours[0, ::2], [[0] * 3, [0, 128, 0], [128, 0, 0]])


def test_masks_need_a_file(pictures, tmp_path):
    (tmp_path / "model.keras").touch()
    known = Preprocessing("segmentation", True, "image", (8, 8, 3), recipe="none")
    known.save(str(tmp_path))
    assert known.is_of_whole_pictures
    assert not dataclasses.replace(known, recipe="imagenet").is_of_whole_pictures
    with pytest.raises(ValueError, match="makes masks, which are files; expected --o"):
        arguments.read(["", str(tmp_path), str(pictures[0][0])], "")


def test_pixels_of_another_range_are_said(pictures):
    trained = towers.load_model(str(pictures[1]))
    pixels = np.random.default_rng(0).integers(0, 256, [2, 8, 8, 3]).astype(np.uint8)
    given = [pixels, pixels / np.float32(127.5) - 1]
    first, second = (trained.predict(each) for each in given)
    assert first[0]["class"] == second[0]["class"] in ("ant", "bee")
    probabilities = (one[0]["probability"] for one in (first, second))
    # NumPy divides, and the model multiplies: the last bit of a pixel may differ.
    np.testing.assert_allclose(*probabilities, rtol=1e-6)
    with pytest.raises(ValueError, match=r"pictures of 0 to 25\d, but .* -1 to 1; exp"):
        trained.predict(pixels.astype(np.float32))
    with pytest.raises(ValueError, match="checkpoint='first'; expected 'last' or"):
        towers.load_model(str(pictures[1]), "first")


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Of rows of numbers: the folder, and the model_dir of a run."""
    root = tmp_path_factory.mktemp("tables")
    rows = [f"{i},{1000 * i + i % 3},{'owl' if i % 3 else 'cat'}" for i in range(20)]
    (root / "rows.csv").write_text("\n".join(["a size,b,kind", *rows]))
    model_dir = root / "run"
    model_dir.mkdir()
    flags = f"--dataset=csv:{root}/rows.csv", "--label_column=kind", "--model=mlp"
    return root, model_dir, finished(*flags, model_dir=model_dir)


def test_rows(tables, capsys):
    root, model_dir, job = tables
    # Other columns, in another order.
    (root / "new.csv").write_text("b,id,a size\n3001,7,3\n\n0,8,zero\n9,9\n5002,1,5\n")
    rows = predicted(model_dir, root / "new.csv", root / "rows.csv", code=1)
    err = capsys.readouterr().err
    said = "new.csv: row 2: a size is 'zero', expected a number."
    assert said in err
    assert "new.csv: row 3: has 2 fields, expected 3 as the header." in err
    assert [int(row["row"]) for row in rows] == [1, 4, *range(1, 21)]
    numbers = np.array([[3, 3001], [5, 5002]], np.float32)
    scores = job.model.predict(job.data.scaling(numbers), verbose=0)
    expected = tf.nn.softmax(scores).numpy()[:, 1]
    found = [float(row["probability_owl"]) for row in rows[:2]]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert {row["class"] for row in rows} <= {"cat", "owl"}
    (root / "other.csv").write_text("a size,c\n1,2\n")
    with pytest.raises(ValueError, match=r"has no column 'b', which .* 'a size', 'c'"):
        predicted(model_dir, root / "other.csv")
    with pytest.raises(ValueError, match=r"Received the folder .* name those in it"):
        predicted(model_dir, root)


def test_texts(tmp_path, capsys):
    rows = [f"{'good day' if i % 2 else 'bad luck'},{i % 2}" for i in range(20)]
    (tmp_path / "mail.csv").write_text("\n".join(["subject,kind", *rows]))
    flags = f"--dataset=csv:{tmp_path}/mail.csv", "--text_column=subject"
    flags = *flags, "--sequence_length=6", "--model=transformer_encoder", "--layers=1"
    flags = *flags, "--label_column=kind", "--width=8", "--heads=1"
    job = finished(*flags, model_dir=tmp_path)
    (tmp_path / "lines.txt").write_text("good day\n\nbad luck\n")
    lines = predicted(tmp_path, tmp_path / "lines.txt", tmp_path / "mail.csv")
    assert [row["row"] for row in lines[:3]] == ["1", "3", "1"]
    batch = job.data.batches(1)[0]
    scores = tf.nn.softmax(job.model(batch[0])).numpy()[:, 1]
    given = {*(round(float(row["probability_1"]), 3) for row in lines)}
    assert {*(round(float(score), 3) for score in scores)} == given


def test_folders_of_texts(tmp_path, capsys):
    for k in range(8):
        (tmp_path / "data" / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
        text = f"{'good day' if k % 2 else 'bad luck'}\n\nsecond line {k}"
        (tmp_path / "data" / "ab"[k % 2] / f"{k}.txt").write_text(text)
    (tmp_path / "words.txt").write_text("good\nday\nbad\n")
    flags = f"--dataset=folder:{tmp_path}/data", "--sequence_length=6", "--width=8"
    flags = *flags, "--model=transformer_encoder", "--layers=1", "--heads=1"
    flags = *flags, f"--tokenizer=words:{tmp_path}/words.txt"
    (tmp_path / "run").mkdir()
    job = finished(*flags, model_dir=tmp_path / "run")
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good \xff")
    rows = predicted(tmp_path / "run", tmp_path / "data", bad, code=1)
    assert f"{bad}: is not UTF-8 at byte 5, expected text." in capsys.readouterr().err
    # A text is a whole file.
    names = sorted(map(str, (tmp_path / "data").rglob("*.txt")))
    assert [row["file"] for row in rows] == names and "row" not in rows[0]
    texts = [open(name, "rb").read() for name in names]
    tokens = job.data.source.tokenizer.encode(tf.constant(texts))[:, :6]
    scores = job.model(tokens.to_tensor(shape=[None, 6]))
    expected = tf.nn.softmax(scores).numpy()[:, 1]
    found = [float(row["probability_b"]) for row in rows]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_words_are_tagged(tmp_path, capsys):
    sentences = ["Ann PER\nsings O\n", "Bo PER\nsees O\nAnn PER\nagain O\n"]
    (tmp_path / "a.txt").write_text("\n".join(sentences * 6))
    flags = f"--dataset=conll:{tmp_path}/a.txt", "--sequence_length=3", "--layers=1"
    flags = *flags, "--model=transformer_encoder", "--width=8", "--heads=1"
    job = finished(*flags, model_dir=tmp_path)
    plain = "Ann sings\n\nBo sees Ann again\n"
    (tmp_path / "plain.txt").write_text(plain)
    (tmp_path / "new.conll").write_text("Ann\nsings\n\nBo\nsees\nAnn\nagain\n")
    names = "a.txt", "plain.txt", "new.conll"
    rows = predicted(tmp_path, *(tmp_path / name for name in names))
    # A sentence that is too long comes in parts, wherever it stands.
    lines = [
        [(row["row"], row["tags"]) for row in rows if row["file"].endswith(name)]
        for name in names
    ]
    assert [line for line, _ in lines[0][:5]] == ["1", "4", "4", "9", "12"]
    assert [line for line, _ in lines[1]] == ["1", "3", "3"]
    assert [line for line, _ in lines[2]] == ["1", "4", "4"]
    tags = [[tags for _, tags in of_file[:3]] for of_file in lines]
    assert tags[0] == tags[1] == tags[2]
    assert [len(each.split()) for each in tags[0]] == [2, 3, 1]
    words = ["Ann sings", "Bo sees Ann", "again"]
    given = job.data.source.tokenizer.encode(tf.constant(words)).to_tensor()
    names = np.array(job.setup.facts.class_names)
    best = names[np.argmax(job.model(given), axis=-1)]
    wanted = [" ".join(row[:n]) for row, n in zip(best, (2, 3, 1), strict=True)]
    assert tags[0] == wanted
    # As TensorFlow serves it: of padding, nothing is told.
    saved_model.write(load_model(str(tmp_path)), str(tmp_path / "exported"))
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    served = loaded.serve(tf.constant(words))
    found = [[tag.decode() for tag in row if tag] for row in served["class"].numpy()]
    assert [" ".join(row) for row in found] == wanted
    assert (served["label"].numpy() == -1).sum() == 3
    # Which of its columns a line has lost, nobody knows.
    (tmp_path / "bad.conll").write_text("Ann PER\nO\n\nBo PER\nsees O\n")
    (row,) = predicted(tmp_path, tmp_path / "bad.conll", code=1)
    assert row["row"] == "4"
    wanted = "bad.conll: line 2: has 1 column, expected 2, divided by spaces or tabs"
    assert wanted in capsys.readouterr().err


def test_what_is_told_depends_on_the_task(tmp_path):
    def of(task, **known):
        about = Preprocessing(task, False, "image", (), **known)
        return Trained(None, about, None, known.pop("classes", None))

    numbers = of("regression", outputs=("a", "b"))
    found = numbers.decode(np.array([[1, 2]], np.float32), None)
    assert found == [{"a": 1.0, "b": 2.0}]
    tags = dataclasses.replace(of("tagging"), classes=["O", "PER"])
    outputs = np.array([[[0.9, 0.1], [0.2, 0.8], [0.9, 0.1]]])
    assert tags.decode(outputs, [[5, 7, 0]]) == [{"tags": ["O", "PER"]}]
    # Outputs of no task that have no names.
    found = of(None).decode([np.array([1, 2]), np.array([3, 4])], None)
    assert found == [{"output_1": 1, "output_2": 3}, {"output_1": 2, "output_2": 4}]
    with open(tmp_path / "masks.csv", "w") as file:
        rows = output.PredictionRows(file, str(tmp_path / "masks"))
        mask = np.array([[0, 2], [1, 0]])
        rows.write({"file": "a/1.jpg"}, {"mask": mask})
        rows.write({"file": "b/1.jpg"}, {"mask": 1 - mask % 2})
    paths = [str(tmp_path / "masks" / name) for name in ("1.png", "1_2.png")]
    assert (tmp_path / "masks.csv").read_text().split()[1:] == [
        f"{file},{path}" for file, path in zip(("a/1.jpg", "b/1.jpg"), paths, strict=1)
    ]
    np.testing.assert_array_equal(np.asarray(Image.open(paths[0])), mask)


@pytest.mark.parametrize("known", ['{"scaling": null}', "[]", "{"])
def test_what_another_version_wrote_is_not_read(tmp_path, known):
    (tmp_path / "preprocessing.json").write_text(known)
    with pytest.raises(ValueError, match=r"Cannot read .*; expected the model_dir of"):
        load_model(str(tmp_path))


def test_scaling_is_kept_exactly(tmp_path):
    scaling = input_pipeline.Scaling(("a", "b"), (0.1, 1e9), (1 / 3, 7.0))
    about = Preprocessing(None, True, "row", (2,), features=("a", "b"), scaling=scaling)
    about.save(str(tmp_path))
    assert Preprocessing.load(str(tmp_path)) == about


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["{none}", "a.png"], "which has no model.keras; expected the model_dir of"),
        (["{run}", "--checkpoint=best", "{run}"], "which has no best.keras"),
        (["{run}", "none.png"], "There is no file none.png"),
        (["{run}"], "Received no FILES; expected it: Pictures"),
        (["{run}", "{run}", "--num_gpu=2"], "--num_gpu"),
        (["{run}", "{run}", "--num_gpus=0"], "--num_gpus=0; expected at least 1"),
        (["{run}", "{run}", "--batch_size=0"], "--batch_size=0; expected at least 1"),
        (["{run}", "{run}", "--share_gpus=0:1"], "--share_gpus"),
        (["{run}", "{run}", "--gpu_memory=a"], "a; expected growth, all"),
        (["{run}", "{run}", "--output=/proc/a/b.csv"], "choose another --output"),
    ],
)
def test_bad_arguments(pictures, tmp_path, argv, said):
    names = {"run": pictures[1], "none": tmp_path}
    with pytest.raises(ValueError, match=said):
        arguments.read(["", *(each.format(**names) for each in argv)], "")


def test_a_fraction_is_a_number(pictures):
    model_dir = str(pictures[1])
    options = arguments.read(
        ["towers.predict", model_dir, model_dir, "--gpu_memory=0.5"], ""
    )
    assert options.settings.gpu_memory_fraction == 0.5


def test_arguments_of_export(pictures, tmp_path):
    model_dir = str(pictures[1])
    assert export_arguments.read(["", model_dir], "").folder == f"{model_dir}/exported"
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match="is there already and no SavedModel"):
        export_arguments.read(["", model_dir, str(tmp_path)], "")


def test_large_numbers_are_told_apart_by_prediction_and_export(tmp_path):
    times = 1_700_000_000 + np.arange(4)
    scaling = input_pipeline.Scaling(("time",), (1_700_000_000.0,), (1.0,))
    # As the run's folder has it.
    Preprocessing(
        *("regression", False, "row", (1,)), features=("time",), scaling=scaling
    ).save(str(tmp_path))
    known = Preprocessing.load(str(tmp_path))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Activation("linear")])
    trained = Trained(model, known, Preprocessor(known))
    (tmp_path / "a.csv").write_text("\n".join(["time", *map(str, times)]))
    np.save(tmp_path / "b.npy", times[:, None])
    files = [str(tmp_path / name) for name in ("a.csv", "b.npy")]
    of_files = [
        batch for f in files for batch in inputs.batches(trained, [f], 4, print)
    ]
    assert of_files[1].names[3] == {"file": files[1], "row": 4}
    # Where a folder cannot be put into its place at once.
    saved_model.write(trained, "ram://exported")
    served = tf.saved_model.load("ram://exported")
    for found in (
        *(batch.x for batch in of_files),
        trained.prepare({"time": times}),
        trained.prepare(times[:, None]),
        served.serve([[float(time)] for time in times])["values"],
        served.serve_columns(times.astype(float).tolist())["values"],
    ):
        np.testing.assert_array_equal(found, [[0], [1], [2], [3]])


def _written(tmp_path, prediction, of_all_classes=False, **names):
    with open(tmp_path / "out.csv", "w", newline="") as file:
        rows = output.PredictionRows(file, None, of_all_classes=of_all_classes)
        rows.write({"file": "a.csv", **names}, prediction)
    return (tmp_path / "out.csv").read_text().splitlines()


@pytest.mark.parametrize(
    ("task", "scores", "of_all_classes", "header", "row"),
    [
        ("binary", [0.25], False, "class,probability_owl", "cat,0.25"),
        (
            "binary",
            [0.25],
            True,
            "class,probability_cat,probability_owl",
            "cat,0.75,0.25",
        ),
        ("classification", [0.75, 0.25], False, "class,probability_owl", "cat,0.25"),
        (
            *("text_classification", [0.75, 0.25], True),
            *("class,probability_cat,probability_owl", "cat,0.75,0.25"),
        ),
        ("classification", [0.5, 0.25, 0.25], False, "class,probability", "cat,0.5"),
        (
            *("classification", [0.25, 0.25, 0.5], True),
            *("class,probability_cat,probability_owl,probability_2", "2,0.25,0.25,0.5"),
        ),
        (
            *("multilabel", [0.75, 0.25], False),
            *("labels,probabilities_cat,probabilities_owl", "cat,0.75,0.25"),
        ),
        ("regression", [0.75], True, "value", "0.75"),
    ],
)
def test_probabilities_under_the_names_of_classes(
    tmp_path, task, scores, of_all_classes, header, row
):
    (found,) = TASKS[task].decode(np.array([scores]), ["cat", "owl"], False)
    # A SavedModel tells the same.
    known = Preprocessing(task, False, "row", (1,))
    about = Trained(None, known, None, ["cat", "owl"])
    served = saved_model._outputs(about, tf.constant([scores]))
    for name in served.keys() & {"class", "probability"}:
        assert served[name].numpy().astype(type(found[name]))[0] == found[name]
    if "probabilities" in served:
        of_classes = [*found["probabilities"].values()]
        assert served["probabilities"].numpy()[0].tolist() == of_classes
    expected = [f"file,{header}", f"a.csv,{row}"]
    assert _written(tmp_path, found, of_all_classes) == expected


def test_a_column_that_is_kept_has_its_name(tmp_path):
    prediction = {"class": "cat", "probability": 1.0, "probabilities": {"cat": 1.0}}
    found = _written(tmp_path, prediction, id="007", **{"class": "owl"})
    header = "file,id,class,predicted_class,probability"
    assert found == [header, "a.csv,007,owl,cat,1"]


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_of_tables_are_kept(tables, kind):
    root, model_dir, _ = tables
    times = [12345678901.0, 12345678902.0]
    columns = {"id": ["007", "008"], "b": [1, 2], "time": times, "a size": [3, 4]}
    new = root / f"kept.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.table(columns), new)
    else:
        rows = zip(*columns.values(), strict=True)
        new.write_text("\n".join(",".join(map(str, row)) for row in (columns, *rows)))
    rows = predicted(model_dir, new, "--keep_columns=id,time,b", "--probabilities")
    header = "file row id time b class probability_cat probability_owl"
    assert " ".join(rows[0]) == header
    kept = [(row["id"], float(row["time"]), row["b"]) for row in rows]
    assert kept == [("007", times[0], "1"), ("008", times[1], "2")]
    with pytest.raises(ValueError, match="no column 'name', which --keep_columns nam"):
        predicted(model_dir, new, "--keep_columns=name")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("row", "which predictions have, so leave out 'row'"),
        ("id,", "so leave out ''"),
        ("id,id", "expected each column once"),
    ],
)
def test_columns_that_cannot_be_kept(tables, flag, said):
    root, model_dir, _ = tables
    with pytest.raises(ValueError, match=said):
        predicted(model_dir, root / "rows.csv", f"--keep_columns={flag}")


def test_pictures_have_no_columns_to_keep(pictures):
    with pytest.raises(ValueError, match="expected CSV or Parquet files to copy col"):
        predicted(pictures[1], pictures[0][0], "--keep_columns=id")
