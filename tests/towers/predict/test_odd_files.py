"""towers.predict and towers.export, where files and folders are not as expected."""

import dataclasses
import json
import os
import shutil
import threading
from unittest import mock

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from PIL import Image
from pyarrow import parquet

from tests.towers.predict.runs import finished, predicted
from tests.towers.train.runs import heard
from towers.export import saved_model
from towers.input_pipeline import open_source, text
from towers.input_pipeline.sources.tables import categories
from towers.predict import __main__ as predict
from towers.predict import arguments, arrays, inputs, output, sentences, tables
from towers.predict.examples import as_tensors
from towers.predict.trained import Trained, load_model
from towers.program import startup
from towers.train.outputs.preprocessing import Preprocessing
from towers.train.parts.task import TASKS

ROWS = Preprocessing(None, True, "row", (2,), features=("a", "b"))


def read(path, content, known=ROWS):
    """The rows of a table, and what is said of others, in order."""
    path.write_bytes(content)
    found = {}
    for rows in tables.blocks(known, str(path)):
        cells = zip(*(rows.columns[name] for name in known.columns), strict=True)
        found |= dict(zip(rows.numbers, map(list, cells), strict=True)) | rows.faults
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        # None of these is predicted from another column's cell.
        (b"a,b,id\n1,2,3\n1,2\n1,2,3,4\n \n", [[1, 2], "2 fields", "4 fields"]),
        (b"a,b\n1_000,2\n1e39,2\n-inf,2\n", ["'1_000'", "1e+39", "-inf"]),
        (b"\xef\xbb\xbf a, b\r3,4\r", [[3, 4]]),
        (b'a,b,c\n1,2,"x\n3,4,y\n', ["opens quotes that do not end"]),
        (b'a,b,c\n1,2,"5" pipe"\n"3",4,x\n', [[1, 2], [3, 4]]),
        (b'a,b,c\n1,2,"' + b"x" * 200_000 + b'"\n', [[1, 2]]),
    ],
)
def test_odd_csv(tmp_path, content, expected):
    for got, wanted in zip(read(tmp_path / "x.csv", content), expected, strict=True):
        assert wanted in got if isinstance(wanted, str) else got == wanted


def test_columns_of_one_name(tmp_path):
    with pytest.raises(ValueError, match=r"x\.csv has two columns 'a': expected diff"):
        read(tmp_path / "x.csv", b"a,b,a\n1,2,3\n")
    columns = [pa.array([k]) for k in range(3)]
    table = pa.Table.from_arrays(columns, names=["a", "b", "a"])
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"has two columns 'a': expected different"):
        next(tables.blocks(ROWS, str(tmp_path / "x.parquet")))


def test_columns_are_kept_of_no_good_row(tmp_path):
    (tmp_path / "x.csv").write_text('a,b,id\n"1,2,3\n')
    (rows,) = tables.blocks(ROWS, str(tmp_path / "x.csv"), ["id"])
    assert rows.kept == {"id": []} and "opens quotes" in rows.faults[1]
    path = tmp_path / "x.parquet"
    ids = [f"{'no' * 99}{k}" for k in range(3)]
    parquet.write_table(pa.table({"a": [0.0, 1, 2], "b": [1, 2, 3], "id": ids}), path)
    path.write_bytes(b"PAR1" + b"\xff" * 300 + path.read_bytes()[304:])
    (rows,) = tables.blocks(ROWS, str(path), ["id"])
    assert rows.kept == {"id": []} and "cannot be read" in rows.faults[3]
    of_text = Preprocessing("text_classification", True, "tokens", (6,), None)
    of_text = dataclasses.replace(of_text, features=("id",))
    for _, fault, copied in tables.texts(of_text, str(path), ["a"]):
        assert "cannot be read" in fault and copied == [""]


def test_spaces_around_a_text_are_those_that_tensorflow_strips(tmp_path):
    texts = ["Paris\u00a0", "\u3000Paris", " Paris\t", "Rome"]
    path = tmp_path / "x.parquet"
    table = pa.table({"city": texts * 9, "label": [0, 1, 0, 1] * 9})
    parquet.write_table(table, path)
    source = open_source(f"parquet:{path}", feature_columns=["city"], eval_fraction=0)
    (vocabulary,) = source.vocabularies.values()
    assert vocabulary == ("Paris", "Paris\u00a0", "Rome", "\u3000Paris")
    served = categories.finders(source.vocabularies)["city"](tf.constant(texts))
    x, _ = source.in_memory().parse(tf.range(4))
    np.testing.assert_array_equal(served, x["city"])
    known = Preprocessing(
        *("classification", True, "columns", (0,)),
        tables=source.table_sizes,
        vocabularies=source.vocabularies | {"city": ("Paris",)},
    )
    (rows,) = tables.blocks(known, str(path))
    assert [*rows.columns["city"][:4]] == [text.strip(" \t") for text in texts]
    assert rows.unseen == {"city": 27}


def test_fractions_of_a_microsecond_are_cut_off(tmp_path):
    moments = np.array(["1970-01-02T00:00:00.000000123"], "datetime64[ns]")
    parquet.write_table(pa.table({"a": moments, "b": [1]}), tmp_path / "x.parquet")
    (rows,) = tables.blocks(ROWS, str(tmp_path / "x.parquet"))
    assert rows.columns["a"] == [1.0]


def of_texts(task, tokenizer, features=("t",)):
    known = Preprocessing(task, True, "tokens", (6,), features=features)
    prepare = mock.Mock(side_effect=lambda found: [*found])
    trained = mock.Mock(preprocessing=known, classes=["O", "PER"], tokenizer=tokenizer)
    trained.prepare = prepare
    return trained


def test_marks_at_the_beginning_are_no_text(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfAnn PER\nsings O\n")
    path = str(tmp_path / "x.txt")
    tagging = of_texts("tagging", None)
    assert [*sentences.read(tagging, path)] == [(1, "Ann sings", "")]
    bad = []
    trained = of_texts("text_classification", text.ByteTokenizer())
    (batch,) = inputs.batches(trained, [path], 4, bad.append)
    assert batch.x == ["Ann PER", "sings O"] and not bad


def test_what_is_no_text_is_left_out(tmp_path):
    parquet.write_table(pa.table({"t": [7]}), tmp_path / "x.parquet")
    trained = of_texts("text_classification", text.ByteTokenizer())
    (batch,) = inputs.batches(trained, [str(tmp_path / "x.parquet")], 4, print)
    assert batch.x == [b"7"]
    table = pa.table({"t": [b"good", b"\xff", None]})
    parquet.write_table(table, tmp_path / "x.parquet")
    bad = []
    trained = of_texts("text_classification", text.WordTokenizer(["good"]))
    (batch,) = inputs.batches(trained, [str(tmp_path / "x.parquet")], 4, bad.append)
    assert batch.x == [b"good"]
    assert (
        "row 2: is not UTF-8" in bad[0] and "row 3: nothing in the column 't'" in bad[1]
    )
    (tmp_path / "x.txt").write_bytes(b"good\n\xff\n")
    with pytest.raises(ValueError, match=r"x\.txt is no text in UTF-8; convert it"):
        [*inputs.batches(trained, [str(tmp_path / "x.txt")], 4, bad.append)]
    (tmp_path / "x.txt").unlink()
    # A link to nothing is no reason to stop.
    (tmp_path / "gone.txt").symlink_to("nothing")
    trained = of_texts("text_classification", text.ByteTokenizer(), features=())
    assert not [*inputs.batches(trained, [str(tmp_path)], 4, bad.append)]
    assert "gone.txt: cannot be read: No such file or directory." in bad[2]


def test_nothing_is_predicted_about_a_text():
    with pytest.raises(ValueError, match="use towers generate, which continues it"):
        inputs.batches(of_texts("language_model", None), ["x.txt"], 4, print)


NAMED = {"shape": {"a": (2,), "b": ()}, "dtype": {"a": "float32", "b": "string"}}


@pytest.mark.parametrize(
    ("known", "examples", "said"),
    [
        (NAMED, {"a": [[1, 2]], "b": ["x"]}, None),
        (
            NAMED,
            {"a": [[1, 2]], "b": [1]},
            r"Received \[1\] of int64; expected arrays by",
        ),
        (
            NAMED,
            {"a": [[1, 2]], "b": ["x", "y"]},
            r"b \[2\] of <U1; expected arrays by",
        ),
        ({"shape": (2,), "dtype": "int64"}, [[1, 2]], None),
        (
            {"shape": (2,), "dtype": "int64"},
            {"a": [1]},
            r"a \[1\] of int64; expected an a",
        ),
        # As JSON has it of a tuple of inputs.
        ({"shape": ((2,), ())}, [[1, 2]], "gives several inputs without names; expect"),
        ({"shape": ((2,), ())}, None, "gives several inputs without names; expected"),
    ],
)
def test_arrays_are_as_in_training(known, examples, said):
    known = Preprocessing(None, True, "own", **known)
    if said is not None:
        with pytest.raises(ValueError, match=said):
            arrays.specs(known) if examples is None else as_tensors(known, examples)
        return
    tensors, specs = as_tensors(known, examples), arrays.specs(known)
    for tensor, spec in zip(*map(tf.nest.flatten, (tensors, specs)), strict=True):
        assert spec.is_compatible_with(tensor)


def test_what_cannot_be_read_is_not_said_of_the_output(tmp_path):
    with (
        pytest.raises(
            ValueError, match=r"/self/mem cannot be read: Input/output error"
        ),
        output.opened(str(tmp_path / "out.csv")),
    ):
        trained = mock.Mock(preprocessing=ROWS)
        next(inputs.batches(trained, ["/proc/self/mem"], 4, print))
    assert not os.listdir(tmp_path)


def test_the_output(tmp_path):
    (tmp_path / "mine.csv").write_text("a,b\n")
    (tmp_path / "link.csv").symlink_to("mine.csv")
    ROWS.save(str(tmp_path))
    (tmp_path / "model.keras").touch()

    def check(name, file="preprocessing.json"):
        argv = tmp_path, tmp_path / file, f"--output={tmp_path / name}"
        arguments.read(["", *map(str, argv)], "")

    with pytest.raises(
        ValueError, match=r"which is a folder; expected a file, such as"
    ):
        check("")
    with pytest.raises(ValueError, match=r"which is to be read; expected another file"):
        check("link.csv", "mine.csv")
    check("link.csv")
    check("new/out.csv")
    for name in ("link.csv", "new/out.csv"):
        # Two processes do not write to one file.
        with output.opened(str(tmp_path / name)) as file:
            file.write("whole")
            (unfinished,) = tmp_path.rglob("*.unfinished")
            assert str(threading.get_native_id()) in unfinished.name
        assert (tmp_path / name).read_text() == "whole"
    assert (tmp_path / "link.csv").is_symlink()
    with (
        pytest.raises(ValueError, match=r"Cannot write /proc/no/x\.csv: No such"),
        output.opened("/proc/no/x.csv"),
    ):
        pass
    # A pipe stays what it is.
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with output.opened(str(tmp_path / "pipe")) as file:
        file.write("whole")
    assert os.read(reader, 99) == b"whole" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_nothing_takes_the_place_of_another(tmp_path):
    with output.opened(str(tmp_path / "out")) as file:
        rows = output.PredictionRows(file, output.masks_of(str(tmp_path / "out")))
        for name in ("a/x_3.png", "a/x.png", "b/x.png"):
            rows.write({"file": name}, {"mask": np.zeros([2, 2])})
    names = ["x.png", "x_3.png", "x_4.png"]
    assert sorted(os.listdir(tmp_path / "out_masks")) == names
    with output.opened(str(tmp_path / "out")) as file:
        output.PredictionRows(file, None).write({"file": "a", "row": 1}, {"row": 0.5})
    assert (tmp_path / "out").read_text() == "file,row,predicted_row\na,1,0.5\n"
    # What has another name than its own.
    reader, writer = os.pipe()
    with output.opened(f"/proc/self/fd/{writer}") as file:
        file.write("whole")
    assert os.read(reader, 99) == b"whole"
    os.close(reader), os.close(writer)
    with open(tmp_path / "out", "a") as before:
        with output.opened(f"/dev/fd/{before.fileno()}") as file:
            file.write("whole")
        assert os.stat(tmp_path / "out").st_ino == os.fstat(before.fileno()).st_ino
    assert (tmp_path / "out").read_text().endswith(",0.5\nwhole")


def test_more_outputs_than_classes():
    scores = np.eye(4, dtype=np.float32)[[1, 3]]
    found = TASKS["classification"].decode(scores, ["ant", "bee"], False)
    assert [each["class"] for each in found] == ["bee", "3"]
    known = Preprocessing("classification", False, "image", (4,))
    about = Trained(None, known, None, ["ant", "bee"])
    served = saved_model._outputs(about, tf.constant(scores))
    assert served["class"].numpy().tolist() == [b"bee", b"3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The model_dir of a run on rows."""
    root = tmp_path_factory.mktemp("rows")
    rows = [f"{i},{i % 3},{'owl' if i % 3 else 'cat'}" for i in range(20)]
    (root / "rows.csv").write_text("\n".join(["a,b,kind", *rows]))
    (root / "run").mkdir()
    flags = f"--dataset=csv:{root}/rows.csv", "--label_column=kind", "--model=mlp"
    finished(*flags, model_dir=root / "run")
    return root / "run"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "classes.json",
            None,
            r"has no classes\.json; expected all that the run wrote",
        ),
        (
            "classes.json",
            "{",
            r"classes\.json \(it is no JSON: .*\); expected the names",
        ),
        ("classes.json", '{"a": 1}', r"classes\.json \(it holds no list\); expected"),
        ("preprocessing.json", {"task": "x"}, r"Cannot read .* \(task is 'x'\); expec"),
        ("preprocessing.json", {"input": "tokens"}, r"has no tokenizer; expected all"),
    ],
)
def test_edited_runs(run, tmp_path, name, content, said):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    path = folder / name
    if content is None:
        path.unlink()
    elif isinstance(content, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    else:
        path.write_text(content)
    with pytest.raises(ValueError, match=said):
        load_model(str(folder))


def test_odd_rows_in_python(run, tmp_path):
    trained = load_model(str(run))
    one = {"a": 1, "b": 2}
    assert trained.predict(one) == trained.predict([[1, 2]])
    # A number that is missing is the column's mean.
    mean = float(trained.preprocessing.scaling.mean[1])
    assert trained.predict([[1, np.nan]]) == trained.predict([[1, mean]])
    for given, said in (
        ([[1, 2, 3]], r"numbers \[1, 3\]; expected rows \[B, 2\] of a, b"),
        ([], r"numbers \[0\]; expected rows \[B, 2\] of a, b"),
        ([[1, np.inf]], "rows with something that is no number, or infinite"),
        ([one], "rows with something that is no number, or infinite"),
        ({"a": [1, "x"], "b": [2, 3]}, "the column 'a' with something that is no num"),
        ({"a": [1, 2], "b": [3]}, r"a \[2\], b \[1\]; expected lists of one length"),
    ):
        with pytest.raises(ValueError, match=said):
            trained.predict(given)
    # An edited preprocessing.json: nothing is spread over what is missing.
    shutil.copytree(run, tmp_path / "run")
    known = json.loads((run / "preprocessing.json").read_text()) | {"features": ["a"]}
    (tmp_path / "run" / "preprocessing.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match=r"numbers \[4, 1\]; expected rows \[B, 2\]"):
        predicted(tmp_path / "run", run.parent / "rows.csv")


def test_a_full_disk_is_an_error(run, tmp_path):
    options = arguments.read(["", str(run), str(run.parent / "rows.csv")], "")
    with (
        open("/dev/full", "w") as full,
        mock.patch("sys.stdout", startup.outlive(full)),
    ):
        assert predict.predict(options) == 1


def test_no_example_is_said(run, tmp_path):
    (tmp_path / "none.csv").write_text("a,b\n")
    argv = [str(run), str(tmp_path / "none.csv")]
    done = heard(predict.predict, arguments.read(["", *argv], ""))
    assert done.returncode == 0
    assert done.stderr == "towers.predict: The files have no example.\n"


def test_odd_pictures_and_texts_in_python():
    of_pictures = Preprocessing(None, True, "image", (4, 4, 3), range=(-1.0, 1.0))
    of_text = Preprocessing(None, True, "tokens", (6,))
    # As they are: bitmaps end with their last pixel.
    given = [b"ab\0\0", b"c"]
    for known in (of_pictures, of_text):
        assert as_tensors(known, given).numpy().tolist() == given
    for known, examples, said in (
        (of_pictures, ["a.png"], "Received str; expected a list of the bytes of pict"),
        (of_pictures, b"a", r"Received strings \[\]; expected a list of the bytes"),
        (of_pictures, [], r"Received pictures \[0\]; expected pixels \[B, 4, 4, 3\]"),
        (
            of_pictures,
            np.zeros([1, 5, 4, 3]),
            r"\[1, 5, 4, 3\]; expected pixels \[B, 4",
        ),
        (of_pictures, np.full([1, 4, 4, 3], np.nan), "pictures of nan to nan, but the"),
        (of_pictures, np.full([1, 4, 4, 3], 300), "pixels of 300 to 300; expected 0 t"),
        (of_text, "good day", r"Received strings \[\]; expected a list of texts"),
        (of_text, ["good", None], "Received NoneType; expected a list of texts"),
    ):
        with pytest.raises(ValueError, match=said):
            as_tensors(known, examples)


def test_names_of_files_in_no_encoding(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    os.rename(tmp_path / "a.png", name)
    trained = mock.Mock(preprocessing=ROWS)
    trained.preprocessor.picture = lambda encoded: tf.io.decode_png(encoded)
    (batch,) = inputs._pictures(trained, [name], 4, print)
    assert batch.names == [{"file": name}]
    with output.opened(str(tmp_path / "out.csv")) as file:
        output.PredictionRows(file, None).write(batch.names[0], {"value": 1})
    assert b"caf\xe9.png,1\n" in (tmp_path / "out.csv").read_bytes()


def test_a_saved_model_is_whole_or_not_there(run, tmp_path):
    trained = load_model(str(run))
    folder = tmp_path / "new" / "exported"
    archive = type(keras.export.ExportArchive())

    def half(self, path, **options):
        os.makedirs(path)
        raise tf.errors.ResourceExhaustedError(None, None, "f; No space left on device")

    with (
        mock.patch.object(archive, "write_out", half),
        pytest.raises(ValueError, match=r"exported: .*No space left .*another OUTPUT"),
    ):
        saved_model.write(trained, str(folder))
    assert not [*tmp_path.rglob("*exported*")]
    folder.mkdir(parents=True)
    (folder / "mine.txt").touch()
    for _ in range(2):
        saved_model.write(trained, str(folder))
    assert (folder / "mine.txt").exists() and os.listdir(folder.parent) == ["exported"]
    loaded = tf.saved_model.load(str(folder))
    assert len(loaded.serve([[1.0, 2.0]])["class"]) == 1
