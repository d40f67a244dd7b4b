"""``npz:`` and ``npy:``: arrays stay in their files, and NumPy tells what is right."""

import subprocess
import sys
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from tests.limits import HANG_S
from towers.input_pipeline import make_dataset, measure_scaling, open_source
from towers.input_pipeline.sources.array_files import numpy_files
from towers.predict import arrays as predict_arrays
from towers.train.outputs.preprocessing import Preprocessing
from towers.train.parts.data import open_data
from towers.train.settings import Settings, with_absolute_path

RNG = np.random.default_rng(0)
PICTURES = RNG.integers(0, 256, [60, 5, 6], np.uint8)
LABELS = RNG.permutation(np.arange(60) % 3).astype(np.uint8)
ROWS = RNG.normal(size=[60, 4]) * [1, 10, 0, 1e-3] + [0, 5, 7, 1e9]


def _read(source, split):
    """All examples of a split, in order."""
    batches = make_dataset(source, split, 7, training=False)
    # Of masks, the third part weighs the pixels.
    x, y, *_ = zip(*batches.as_numpy_iterator(), strict=True)
    return np.concatenate(x), np.concatenate(y)


def _save(path, **arrays):
    np.savez(path, **arrays)
    return open_source(f"npz:{path}")


def test_keras_mnist_npz(tmp_path):
    source = _save(
        tmp_path / "mnist.npz",
        x_test=PICTURES[50:],
        x_train=PICTURES[:50],
        y_train=LABELS[:50],
        y_test=LABELS[50:],
    )
    assert source.splits == {"train": 50, "test": 10}
    assert source.num_classes == 3
    for split, rows in {"train": slice(50), "test": slice(50, 60)}.items():
        x, y = _read(source, split)
        assert np.array_equal(x, PICTURES[rows, ..., None])
        assert np.array_equal(y, LABELS[rows])
    assert source.notes == [
        "x_train and x_test are taken for grey pictures: one channel is added."
    ]


def test_every_example_is_either_trained_on_or_held_out(tmp_path):
    numbered = np.arange(60)[:, None, None, None].astype(np.uint8)
    source = _save(tmp_path / "a.npz", x=numbered, y=LABELS)
    (x, y), (x_test, y_test) = (_read(source, split) for split in ("train", "test"))
    numbers = np.concatenate([x, x_test]).ravel()
    assert len(x_test) == source.splits["test"] == 6
    assert np.array_equal(np.sort(numbers), np.arange(60))
    assert np.array_equal(np.concatenate([y, y_test]), LABELS[numbers])


@pytest.mark.parametrize(
    "names",
    [
        ("x_train", "y_train", "x_test", "y_test"),
        ("X_train", "Y_train", "X_val", "Y_val"),
        ("train_images", "train_labels", "val_images", "val_labels"),
        ("training_data", "training_targets", "test_data", "test_targets"),
    ],
)
def test_names_of_arrays(tmp_path, names):
    given = PICTURES[:40], LABELS[:40], PICTURES[40:], LABELS[40:]
    source = _save(tmp_path / "a.npz", **dict(zip(names, given, strict=True)))
    assert source.splits == {"train": 40, "test": 20}


def test_medmnist_is_validated_on_its_validation_data(tmp_path):
    parts = {"train": 30, "val": 20, "test": 10}
    arrays = {f"{part}_images": PICTURES[:n] for part, n in parts.items()}
    arrays |= {f"{part}_labels": LABELS[:n, None] for part, n in parts.items()}
    source = _save(tmp_path / "a.npz", **arrays)
    assert source.splits == {"train": 30, "test": 20} and source.num_classes == 3
    assert "Left out of" in source.notes[0] and "'test_images'" in source.notes[0]


def test_two_arrays_without_names_are_said(tmp_path):
    np.savez(tmp_path / "a.npz", ROWS[:, 0], LABELS)
    source = open_source(f"npz:{tmp_path / 'a.npz'}", eval_fraction=0)
    x, y = _read(source, "train")
    assert np.allclose(x, ROWS[:, :1]) and np.array_equal(y, LABELS)
    assert "'arr_0' is taken for the examples and 'arr_1'" in source.notes[0]


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_as_numpy_reads_them(tmp_path, write, order, monkeypatch):
    monkeypatch.setattr(numpy_files, "_LARGE", 1_000)
    path = str(tmp_path / "a.npz")
    given = {"x": np.asarray(ROWS, order=order), "y": LABELS, "none": np.zeros([0, 3])}
    write(path, **given)
    arrays, notes = numpy_files.load(path)
    is_large = f"'x' of {path} is compressed, and takes 2.0 KB of memory; numpy.savez "
    assert [note.startswith(is_large) for note in notes] == [True] * (
        write is not np.savez
    )
    with np.load(path) as expected:
        assert [*arrays] == [*expected]
        for name in expected:
            assert np.array_equal(arrays[name], expected[name])
    assert isinstance(arrays["x"], np.memmap) == (write is np.savez)


def test_pairs_of_npy_are_mapped(tmp_path):
    paths = [str(tmp_path / f"{name}.npy") for name in ("x", "y", "p", "q")]
    given = ROWS[:50], LABELS[:50], ROWS[50:], LABELS[50:]
    for path, array in zip(paths, given, strict=True):
        np.save(path, array)
    assert isinstance(numpy_files.load(paths[0])[0][""], np.memmap)
    source = open_source("npy:" + ",".join(paths))
    scaling = measure_scaling(source)
    assert np.allclose(scaling.mean, ROWS[:50].mean(axis=0), rtol=1e-12)
    # The third column is constant. Of the last one, float32 would keep nothing.
    std = ROWS[:50].std(axis=0)
    assert np.allclose(scaling.std, [*std[:2], 1, std[3]], rtol=1e-3)
    data = make_dataset(source, "test", 10, training=False, scaling=scaling)
    x, _ = next(iter(data))
    expected = (ROWS[50:] - ROWS[:50].mean(axis=0)) / scaling.std
    assert np.allclose(x, expected, atol=1e-5)


@pytest.mark.parametrize("missing", ["mean", "median", "fail"])
def test_missing_numbers(tmp_path, missing):
    x = ROWS[:, :2].copy()
    x[::7, 1] = np.nan
    np.savez(tmp_path / "a.npz", x=x, y=LABELS)
    spec, options = f"npz:{tmp_path / 'a.npz'}", {"eval_fraction": 0}
    if missing == "fail":
        with pytest.raises(ValueError, match=r"9 rows or more with nan, such as .* 1:"):
            open_source(spec, missing=missing, **options)
        return
    source = open_source(spec, missing=missing, **options)
    assert source.missing_columns == ("1",)
    value = {"mean": np.nanmean, "median": np.nanmedian}[missing](x, axis=0)
    assert np.allclose(measure_scaling(source).fill, value)


FLOATS = PICTURES[..., None].astype(np.float32)


@pytest.mark.parametrize(
    "x",
    [
        FLOATS / 255,
        FLOATS,
        (FLOATS / 127.5 - 1).astype(np.float64),
        FLOATS.astype(np.int64),
        np.moveaxis(np.repeat(PICTURES[..., None], 3, axis=-1), -1, 1),
    ],
    ids=["0 to 1", "0 to 255", "-1 to 1", "int64", "channels first"],
)
def test_pictures_become_bytes(tmp_path, x):
    np.savez(tmp_path / "a.npz", x=x, y=LABELS)
    source = open_source(f"npz:{tmp_path / 'a.npz'}", eval_fraction=0)
    pixels = _read(source, "train")[0]
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, np.repeat(PICTURES[..., None], pixels.shape[-1], -1))
    (note,) = source.notes
    assert "uint8 of 0 to 255" in note or "channels first" in note


def test_a_picture_unlike_those_that_were_looked_at(tmp_path):
    x = np.zeros([2001, 2, 2, 1], np.float32)
    x[1] = 3  # every second one is looked at
    source = _save(tmp_path / "a.npz", x=x, y=np.zeros(2001, int))
    with pytest.raises(ValueError, match="example 1 of x has values of 3 to 3: expec"):
        source.parse(tf.constant([0, 1], tf.int64))


@pytest.mark.parametrize(
    "y, kind, size",
    [
        (LABELS, "class", 3),
        (LABELS.astype(np.float64)[:, None], "class", 3),
        (LABELS > 0, "class", 2),
        (np.eye(3, dtype=np.float32)[LABELS], "class", 3),
        (np.array(["b", "c", "a"])[LABELS], "class", 3),
        (np.array([b"b", b"c", b"a"])[LABELS], "class", 3),
        (ROWS[:, 0], "numbers", 1),
        (ROWS[:, :2].astype(np.float32), "numbers", 2),
        ((ROWS[:, :2] > 0).astype(int), "labels", 2),
        (PICTURES % 4, "mask", 4),
    ],
)
def test_labels(tmp_path, y, kind, size):
    np.savez(tmp_path / "a.npz", x=PICTURES, y=y)
    source = open_source(f"npz:{tmp_path / 'a.npz'}", eval_fraction=0)
    assert (source.target.kind, source.target.size) == (kind, size)
    found = _read(source, "train")[1]
    if source.class_names:
        names = np.array(source.class_names)
        assert np.array_equal(names[found], y.astype(str))
    else:
        expected = y.argmax(axis=1) if y.shape == (60, 3) else y
        assert np.allclose(found.ravel(), expected.ravel())


OBJECTS = np.array([[1], [1, 2]], dtype=object)
_ERRORS = {
    "objects": ({"x": OBJECTS, "y": LABELS[:2]}, "'x' has Python objects"),
    "lengths": ({"x": PICTURES, "y": LABELS[1:]}, "as many labels as examples"),
    "names": ({"a": ROWS, "b": ROWS, "c": LABELS}, "a float64 .*: expected x_train"),
    "texts": ({"x": LABELS.astype(str), "y": LABELS}, "expected pictures"),
    "normalised": ({"x": FLOATS - 128, "y": LABELS}, "of -128 to 127: expected"),
    "infinite": (
        {"x": np.where(np.arange(4) == 3, np.inf, ROWS), "y": LABELS},
        "with inf, .* column 3: expected numbers of at",
    ),
    "videos": ({"x": np.zeros([60, 2, 2, 2, 3]), "y": LABELS}, "x is float64"),
    "no number": ({"x": ROWS, "y": ROWS[:, 0] * np.nan}, "y"),
    "masks": ({"x": PICTURES, "y": PICTURES[:, 1:]}, "masks .* as large as pictures"),
    "below 0": ({"x": PICTURES, "y": PICTURES - np.int64(1)}, "y goes from -1 to 254"),
    "axes": ({"x": PICTURES, "y": PICTURES[..., None, None]}, "6, 1, 1.: expected lab"),
    "two texts": (
        {"x": ROWS, "y": LABELS.astype(str)[:, None].repeat(2, 1)},
        r"y of .* is <U3 \[60, 2\]: expected labels",
    ),
    "labels": (
        {"x": ROWS, "y": LABELS, "x_test": ROWS, "y_test": ROWS},
        r"y of .* is float64 \[60, 4\]: expected labels",
    ),
    "negative": ({"x": ROWS, "y": -LABELS.astype(int)}, r"y\[\d+\]: y -\d is negative"),
    "nothing": ({"x": ROWS[:0], "y": LABELS[:0]}, "at least one example"),
    "shapes": (
        {"x": ROWS, "y": LABELS, "x_test": ROWS[:, 1:], "y_test": LABELS},
        "expected one shape",
    ),
}


@pytest.mark.parametrize("arrays, message", _ERRORS.values(), ids=_ERRORS)
def test_errors(tmp_path, arrays, message):
    with pytest.raises(ValueError, match=message):
        _save(tmp_path / "a.npz", **arrays)


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.npz"
    with pytest.raises(ValueError, match="no file"):
        open_source(f"npz:{path}")
    with pytest.raises(ValueError, match=r"names 1 files: expected npy:X.npy,Y.npy"):
        open_source(f"npy:{path}")
    np.savez(path, x=ROWS, y=LABELS)
    with pytest.raises(ValueError, match=r"several arrays.*npz:"):
        open_source(f"npy:{path},{path}")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"cannot be read.*numpy.savez wrote"):
        open_source(f"npz:{path}")
    np.save(tmp_path / "x.npy", ROWS)
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-1])
    with pytest.raises(ValueError, match="cannot be read"):
        numpy_files.load(str(tmp_path / "x.npy"))
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("x.npy", b"no array")
    with pytest.raises(ValueError, match="cannot be read"):
        open_source(f"npz:{tmp_path / 'b.npz'}")
    with open(tmp_path / "c.npy", "wb") as file:
        np.lib.format.write_array(file, ROWS, version=(3, 0))
    with pytest.raises(ValueError, match=r"it has format \(3, 0\), which is for arr"):
        numpy_files.load(str(tmp_path / "c.npy"))
    with pytest.raises(ValueError, match=r"gs://a/b\.npy is not on this machine: exp"):
        numpy_files.load("gs://a/b.npy")


def test_a_fraction_besides_examples_to_evaluate_on(tmp_path):
    np.savez(tmp_path / "a.npz", x=ROWS, y=LABELS, x_test=ROWS, y_test=LABELS)
    with pytest.raises(ValueError, match=r"eval_fraction is 0.2, but .* leave it out"):
        open_source(f"npz:{tmp_path / 'a.npz'}", eval_fraction=0.2)


def test_examples_to_predict_for(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", x_train=PICTURES, y_train=LABELS, x_test=PICTURES[:9])
    np.save(tmp_path / "b.npy", FLOATS / 255)
    known = Preprocessing("classification", True, "image", (5, 6, 1))
    for name, count in {"a.npz": 9, "b.npy": 60}.items():
        found = predict_arrays.examples(known, str(tmp_path / name))
        x = found.read(np.arange(len(found)))
        assert np.array_equal(x, PICTURES[:count, ..., None])
    assert "predictions are for 'x_test'" in capsys.readouterr().err
    np.savez(tmp_path / "d.npz", a=PICTURES, b=PICTURES)
    with pytest.raises(ValueError, match="expected one array of examples, or x, x_te"):
        predict_arrays.examples(known, str(tmp_path / "d.npz"))
    np.save(tmp_path / "c.npy", PICTURES[:, 1:])
    with pytest.raises(ValueError, match=r"examples \[4, 6, 1\]; expected \[5, 6, 1\]"):
        predict_arrays.examples(known, str(tmp_path / "c.npy"))


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_data_that_are_all_held_out_are_nothing_to_train_on(tmp_path, kind):
    np.savez(tmp_path / "test.npz", x_test=ROWS, y_test=LABELS)
    (tmp_path / "test.csv").write_text("a,label\n1,0\n2,1\n")
    asked = Settings(dataset=f"{kind}:{tmp_path}/test.{kind}")
    opened = open_data(asked, None)
    with pytest.raises(ValueError, match="nothing to train on"):
        opened.prepare()


def test_paths_of_arrays_are_made_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for spec in ("npz:a.npz", "npy:a.npy,b.npy"):
        kind, _, paths = spec.partition(":")
        expected = ",".join(str(tmp_path / path) for path in paths.split(","))
        assert with_absolute_path("dataset", spec) == f"{kind}:{expected}"


@pytest.mark.slow
def test_train_and_predict_mnist_npz(tmp_path):
    path, run = tmp_path / "mnist.npz", str(tmp_path / "run")
    np.savez(path, x_train=PICTURES[:50], y_train=LABELS[:50], x_test=PICTURES[50:])
    towers = [sys.executable, "-m"]
    train = ["towers.train", f"--dataset=npz:{path}", f"--model_dir={run}"]
    train += ["--train_epochs=1", "--model=mlp", "--batch_size=16"]
    subprocess.run([*towers, *train], check=True, timeout=HANG_S)
    done = subprocess.run(
        [*towers, "towers.predict", run, str(path)],
        check=True,
        timeout=HANG_S,
        capture_output=True,
        text=True,
    )
    header, *rows = done.stdout.splitlines()
    assert header.startswith("file,row,class,") and len(rows) == 10
    assert {row.split(",")[2] for row in rows} <= {"0", "1", "2"}
