"""The input benchmark: its data, each contender's batches, and one short race."""

import importlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, JpegImagePlugin
from sklearn.datasets import load_sample_images

from scripts.bench import report
from scripts.input_bench import data, results, worker
from scripts.input_bench.contenders import CONTENDERS
from scripts.input_bench.peers import limit
from scripts.input_bench.worker import Job
from scripts.input_bench.works import WORKS
from scripts.race import Failed
from tests.limits import HANG_S
from tests.variants import slow

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "bench_input.py"
PHOTOS = 80
SMALL = 520
# Each of the works once, and Keras.
QUICK = [
    ("photos", "tuned"),
    ("whole", "naive"),
    ("small", "ours"),
    ("arrays", "tuned_float"),
    ("photos", "keras"),
]
MORE = [
    ("photos", "ours_deterministic"),
    *itertools.product(WORKS, ("ours", "naive", "tuned", "tuned_float")),
]
TENSORFLOW = [*QUICK, *(slow(*pair) for pair in MORE if pair not in QUICK)]


def _run(*flags, **environment):
    return subprocess.run(
        [sys.executable, SCRIPT, *flags],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=os.environ | environment,
    )


def _pictures():
    return [Image.fromarray(image) for image in load_sample_images().images]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # The others need a package that the tests do without.
        patch.setattr(data, "_pictures", _pictures)
        return data.make(tmp_path_factory.mktemp("data"), PHOTOS, SMALL)


def _records(folder, name):
    paths = sorted(map(str, folder.glob(f"{name}-*-of-00008.tfrecord")))
    assert len(paths) == 8
    for record in tf.data.TFRecordDataset(paths).as_numpy_iterator():
        fields = tf.train.Example.FromString(record).features.feature
        yield (
            fields["image/encoded"].bytes_list.value[0],
            fields["image/class/label"].int64_list.value[0],
            *(
                fields[f"image/{side}"].int64_list.value[0]
                for side in ("height", "width", "channels")
            ),
        )


def test_photos_are_jpegs_in_records_and_in_a_folder(folder):
    files = {
        path.read_bytes(): path.parent.name for path in folder.glob("folder/*/*.jpg")
    }
    records = list(_records(folder, "train"))
    assert len(files) == len(records) == PHOTOS
    for jpeg, label, height, width, channels in records:
        assert files[jpeg] == f"class_{label}"
        assert tf.io.decode_jpeg(jpeg).shape == (height, width, channels)
        assert 345 <= min(height, width) <= 405
        assert 460 <= max(height, width) <= 540
    assert {label for _, label, *_ in records} == set(range(10))
    path = next(folder.glob("folder/*/*.jpg"))
    with Image.open(path) as image:
        assert JpegImagePlugin.get_sampling(image) == 2  # 4:2:0


def test_small_records_are_the_arrays(folder):
    images, labels = (np.load(folder / f"{name}.npy") for name in ("images", "labels"))
    assert images.shape == (SMALL, 32, 32, 3)
    assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
    expected = sorted(zip(map(bytes, images), labels, strict=True))
    found = list(_records(folder, "small"))
    assert sorted((pixels, label) for pixels, label, *_ in found) == expected
    assert {tuple(sides) for _, _, *sides in found} == {(32, 32, 3)}


def test_data_are_made_once_and_are_the_same(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_pictures", _pictures)
    again = data.make(tmp_path, PHOTOS, SMALL)
    assert list(_records(again, "train")) == list(_records(folder, "train"))
    assert [path.name for path in tmp_path.iterdir()] == [data.VERSION]
    monkeypatch.setattr(data, "_pictures", None)
    assert data.make(tmp_path, PHOTOS, SMALL) == again


def test_data_that_fail_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_pictures", lambda: [])
    with pytest.raises(ValueError):
        data.make(tmp_path, PHOTOS, SMALL)
    assert not list(tmp_path.iterdir())


def test_missing_photographs_are_said_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(ValueError, match=r"skimage.*; pip install -e '.\[bench\]'"):
        data.make(tmp_path)


@pytest.mark.quick_one_in(5)
@pytest.mark.parametrize(("work", "contender"), TENSORFLOW)
def test_batches_of_tensorflow(work, contender, folder):
    name = CONTENDERS[contender].module
    module = importlib.import_module(f"scripts.input_bench.peers.{name}")
    batches = module.batches(contender, work, folder)
    batch = WORKS[work].batch
    # More than an epoch.
    examples = PHOTOS if work in ("photos", "whole") else SMALL
    found = [next(batches) for _ in range(examples // batch + 2)]
    # The short one may come before others.
    images, labels = max(found, key=lambda batch: len(batch[1]))
    assert images.shape == (batch, *WORKS[work].shape)
    assert labels.shape == (batch,)
    assert images.dtype == CONTENDERS[contender].dtype
    images = np.asarray(images, np.float32)
    if CONTENDERS[contender].dtype == "float32":
        images = (images + 1) * 127.5
    assert -0.01 <= images.min() <= images.max() <= 255.01
    assert images.std() > 30
    labels = np.concatenate([labels for _, labels in found])
    assert set(labels) == set(range(10))


@pytest.mark.parametrize("contender", ["dali", "grain", "torchvision"])
def test_batches_of_others(contender, folder):
    job = Job(contender, "photos", str(folder), warmup=0, examples=100)
    try:
        runner = results.start(job, verbose=True)
    except Failed as error:
        assert "brings it" in str(error)
        pytest.skip(str(error))
    try:
        answer = runner.go()
    finally:
        runner.close()
    assert answer["examples"] >= 100
    assert answer["cpu_s"] > 0


def test_crops_in_c(folder, tmp_path):
    try:
        limit.build(tmp_path)
    except ValueError as error:
        pytest.skip(str(error))
    # Brighter to the right, and the same from top to bottom.
    ramp = np.broadcast_to(np.linspace(0, 255, 500)[:, None], (375, 500, 3))
    place = tmp_path / "folder" / "class_0"
    place.mkdir(parents=True)
    Image.fromarray(ramp.astype(np.uint8)).save(place / "ramp.jpg", quality=95)
    batches = limit.batches("c", "photos", tmp_path)
    images, labels = next(batches)
    assert images.shape == (64, 224, 224, 3)
    assert images.dtype == np.uint8
    assert not labels.any()
    images = images.astype(np.float32)
    assert np.abs(images - images.mean(axis=(1, 3), keepdims=True)).max() < 6
    slopes = np.diff(images[:, 0, ::32, 0], axis=1)
    flipped = (slopes < 0).all(axis=1)
    assert ((slopes > 0).all(axis=1) | flipped).all()
    assert 10 < flipped.sum() < 54
    widths = np.abs(images[:, 0, -1, 0] - images[:, 0, 0, 0]) / 255
    assert 0.2 < widths.min() < 0.5
    assert 0.8 < widths.max() <= 1
    batches.close()


def test_a_library_that_cannot_be_built_is_said_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="needs a C compiler") as raised:
        limit.build(tmp_path)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def _module(dtype):
    images = np.zeros((256, 32, 32, 3), dtype)
    batch = images, np.zeros(256, np.int64)
    return types.SimpleNamespace(batches=lambda *_: (batch for _ in itertools.count()))


def test_whole_batches_are_timed():
    job = Job("ours", "arrays", "", warmup=300, examples=600)
    answer = worker.measure(_module("uint8"), job)
    assert answer["examples"] == 768
    assert answer["peak_mb"] > 10
    assert answer["seconds"] > 0


def test_a_wrong_batch_is_said_in_a_line():
    with pytest.raises(ValueError, match=r"uint8 .* are expected") as raised:
        worker.measure(_module("int32"), Job("ours", "arrays", "", 0, 1))
    assert "\n" not in str(raised.value)


def _round(examples_per_sec, peak_mb=100.0):
    return {
        "first_batch_s": 1.0,
        "examples": 1000,
        "seconds": 1000 / examples_per_sec,
        "cpu_s": 2.0,
        "peak_mb": peak_mb,
    }


def test_a_ratio_is_the_median_over_rounds():
    # The machine was twice as slow in the last round.
    ours = [_round(speed) for speed in (3000.0, 4000.0, 1500.0)]
    theirs = [_round(speed, peak) for speed, peak in ((2000, 9), (1000, 7), (500, 8))]
    job = Job("tuned", "photos", "", 0, 1000)
    result = results.summary(job, _round(1.0), theirs, ours)
    assert result["ratio"] == pytest.approx(3.0)
    assert result["examples_per_sec"] == pytest.approx(1000)
    assert result["cpu_ms"] == pytest.approx(2.0)
    assert result["peak_mb"] == 9
    assert results.summary(job, _round(1.0), theirs, ours[:1])["ratio"] is None


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--contenders=ours,fastest", "--contenders has 'fastest'"),
        ("--contenders=ours,ours", "none twice"),
        ("--contenders=", "one or more"),
        ("--work=films", "--work has 'films'"),
        (f"--data_dir={SCRIPT}", "give a folder"),
        ("photos", "Received 'photos', which is not a flag"),
    ],
)
def test_a_wrong_flag_is_said_in_a_line(flag, said):
    done = _run(flag)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


@pytest.mark.slow
def test_a_short_race(folder, tmp_path):
    # Hides the package, where it is installed.
    (tmp_path / "cv2.py").write_text("raise ModuleNotFoundError('No module: cv2')")
    path = tmp_path / "results.jsonl"
    done = _run(
        "--work=photos",
        "--contenders=tuned,grain,naive",
        "--rounds=2",
        "--warmup=0",
        "--examples=64",
        f"--data_dir={folder.parent}",
        f"--json={path}",
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "grain is left out of photos: No module: cv2; pip install -e '.[bench]' brings "
        "it\n"
    )
    tuned, naive = map(json.loads, path.read_text().splitlines())
    assert (tuned["contender"], naive["contender"]) == ("tuned", "naive")
    assert tuned["ratio"] == 1
    assert naive["ratio"] > 0
    for result in (tuned, naive):
        assert len(result["rounds"]) == 2
        assert result["first_batch_s"] > 0
        assert result["peak_mb"] > 100
    table = [line for line in done.stdout.splitlines() if line.startswith("| photos")]
    assert len(table) == 2
    assert "tf.data, tuned by hand, uint8" in table[0]
    assert report.head(("work", "contender")).splitlines()[0][:-1] in done.stdout
