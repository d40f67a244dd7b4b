"""towers.input_pipeline.benchmark, as a user starts it."""

import importlib.util
import json
import re

import numpy as np
import pytest
import tensorflow as tf

from tests import warm
from towers.input_pipeline import open_source
from towers.input_pipeline.benchmark import measure, report
from towers.input_pipeline.pipeline import Pipeline

SYNTHETIC = "--dataset=synthetic:8x8x3:4:100"
QUICKLY = ("--examples=64", "--batch_size=16")
TRICKS = ["scaled off", "fast_dct off", "plain_upsampling off"]
POSITIVE = ("first_batch_s", "peak_rss_mb", "cpu_cores")
GAP = "epochs without a gap off"
KEPT = ["deterministic on", "cache off", GAP]
LAST = ["parallel maps off", "private threads off", "prefetch off", "float32 on"]


def run(*flags, code=0, **options):
    """Runs to the end, which has to be with this exit code."""
    flags = *QUICKLY, *flags
    done = warm.run("towers.input_pipeline.benchmark", *flags, **options)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done


# To begin takes far longer than to read so little.
ONCE = {"towers.input_pipeline.benchmark.measure._ROUNDS": 1}


def results(*flags):
    (line,) = run("--json", *flags, changed=ONCE).stdout.splitlines()
    return json.loads(line)


def error(*flags):
    """The last line of what is said; there is no traceback before it."""
    done = run(*flags, code=1)
    assert not done.stdout and "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory, encode):
    """A folder of JPEG files, of several sizes."""
    folder = tmp_path_factory.mktemp("pictures")
    for name in ("cats", "dogs"):
        (folder / name).mkdir()
        for k in range(20):
            pixels = np.full([40 + k, 60, 3], 10 * k, np.uint8)
            (folder / name / f"{k:02}.jpg").write_bytes(encode(pixels, "JPEG"))
    return folder


@pytest.mark.slow
def test_json(tmp_path):
    # It writes the digits first, of which TFDS has things to say.
    found = results(f"--data_dir={tmp_path}", "--num_gpus=3", "--cache=none")
    stages = ["read", "parse", "decode", "batch", "augment", "copy"]
    assert list(found["stages"]) == stages
    assert found["examples_per_sec"] == found["stages"]["augment"]
    for value in (*found["stages"].values(), *(found[name] for name in POSITIVE)):
        assert value > 0
    waiting = {float(step): share for step, share in found["waiting"].items()}
    own = 1000 * 16 / found["examples_per_sec"]
    assert list(waiting) == pytest.approx([own, 2 * own, 4 * own], rel=0.01)
    assert all(0 <= share <= 1 for share in waiting.values())
    wanted = {"dataset": "digits", "batch_size": 16, "image_shape": [8, 8, 1]}
    assert wanted.items() <= found.items() and found["towers"] == 3
    assert found["versions"]["tensorflow"] == tf.__version__
    assert "ablation" not in found


def test_tables(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "stages.png"
    shown = "--step_ms=0,1.5", "--ablate", f"--plot={drawn}"
    done = run(SYNTHETIC, *shown, changed=ONCE)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "synthetic:8x8x3:4:100: batches of 16 images of 8x8x3; TensorFlow "
    )
    first = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    rules = [cell for cell in first if set(cell) == {"-"}]
    assert [cell for cell in first if cell not in rules] == [
        *("stage", "read", "parse", "augment", "copy", "all"),
        *("2 towers: ms a batch", "0", "1.5"),
        *("change", "deterministic on", GAP, *LAST),
    ]
    assert len(rules) == 3
    assert lines[-1].startswith("The bottleneck is ")


def test_the_headline_is_the_sum_of_the_table():
    results = {
        "dataset": "csv:a",
        "kept": "1 KB of numbers kept in memory",
        "batch_size": 16,
        "image_shape": (4,),
        "towers": 2,
        "versions": {"tensorflow": "2", "python": "3"},
        "stages": {"read": 1000.0, "decode": 260.0, "augment": 250.0, "copy": 200.0},
        **{"examples_per_sec": 250.0, "cpu_cores": 1.5, "first_batch_s": 1.0},
        **{"peak_rss_mb": 500.0, "waiting": {"1": 0.5}},
        "ablation": {"prefetch off": 1.5},
    }
    lines = report.text(results).splitlines()
    assert "| prefetch off | 1.50 |" in [re.sub(" +", " ", line) for line in lines]
    words = "csv:a, 1 KB of numbers kept in memory: batches of 16 rows of 4 numbers; "
    assert lines[0].startswith(words)
    assert lines[1].startswith(
        "200 examples/sec (5,000.0 µs per example) behind copy, "
    )
    cells = [[cell.strip() for cell in line.split("|")] for line in lines[3:10]]
    assert cells[0][1:4] == ["stage", "examples/sec", "adds µs per example"]
    added = [float(row[3].replace(",", "")) for row in cells[2:6]]
    assert sum(added) == pytest.approx(5000, abs=0.3)
    assert cells[6][1:4] == ["all", "200", "5,000.0"]


def test_rounds_take_turns(monkeypatch):
    asked = []

    def read(dataset, examples, *, share, use):
        asked.append((dataset, use))
        return measure.Reading(len(asked), 1.0, 0.0, 1.0)

    monkeypatch.setattr(measure, "read", read)
    monkeypatch.setattr(measure, "_ROUNDS", 2)
    found = measure._in_rounds({"a": "data", "b": "others"}, 64, {"b": print})
    assert asked == [("data", measure._nothing), ("others", print)] * 2
    assert found == {"a": [1, 3], "b": [2, 4]}


def test_a_run_reads_for_less_than_half_a_minute(monkeypatch):
    shares = []

    def read(dataset, examples, *, share=1.0, use=None):
        # What is read before, to warm up, is a part of that, too.
        shares.append(share + measure._WARM_UP)
        return measure.Reading(100, 1.0, 0.1, 1.0)

    monkeypatch.setattr(measure, "read", read)
    pipeline = Pipeline(
        *(open_source("synthetic:8x8x3:4:100"), "train"),
        **{"batch_size": 16, "image_shape": (8, 8, 3), "training": True},
        recipe="imagenet",  # has all stages
    )
    found = measure.measure(pipeline, None, ["/CPU:0"], None)
    assert len(found["stages"]) == 6 and len(found["waiting"]) == 3
    assert sum(shares) * measure._SECONDS < 30


def test_the_tricks_are_those_of_jpeg_files(pictures, digits):
    options = {"batch_size": 16, "image_shape": (16, 16, 3), "training": True}
    for source, recipe, wanted in (
        (open_source(f"folder:{pictures}"), "imagenet", ["fused_crop off", *TRICKS]),
        (open_source(f"folder:{pictures}"), "none", ["scaled off", "fast_dct off"]),
        (digits, "imagenet", []),
    ):
        pipeline = Pipeline(source, "train", **options, recipe=recipe)
        assert [f"{name} off" for name in measure._tricks(pipeline)] == wanted


@pytest.mark.slow
def test_ablation_of_pictures(pictures):
    data = f"--dataset=folder:{pictures}", "--image_size=16", "--recipe=imagenet"
    found = results(*data, "--step_ms=0", "--ablate")
    assert list(found["ablation"]) == ["fused_crop off", *TRICKS, *KEPT, *LAST]
    assert all(value > 0 for value in found["ablation"].values())


def test_ablation_leaves_out_what_cannot_matter(digits, monkeypatch):
    # PNG files, as large as they are wanted.
    pipeline = Pipeline(
        *(digits, "train"),
        batch_size=16,
        image_shape=(8, 8, 1),
        training=True,
        repeat=True,
        deterministic=False,
    )
    monkeypatch.setattr(
        *(measure, "_in_rounds"),
        lambda data, examples: {k: [2.0, 4.0 if "off" in k else 2.0] for k in data},
    )
    found = measure.ablate(pipeline, 1)
    assert list(found) == ["deterministic on", GAP, "shuffle off", *LAST]
    assert (found["deterministic on"], found[GAP]) == (1.0, 0.75)


def test_of_a_data_service_the_stages_run_elsewhere(monkeypatch):
    # Each reading is a job of the service, which takes its time to begin.
    monkeypatch.setattr(measure, "_ROUNDS", 1)
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    pipeline = Pipeline(
        *(open_source("synthetic:8x8x3:4:100"), "train"),
        batch_size=16,
        image_shape=(8, 8, 3),
        training=True,
        data_service=dispatcher.target,
    )
    found = measure.measure(pipeline, 16, ["/CPU:0"], [0.0])
    assert list(found["stages"]) == ["service", "copy"]
    del worker


def test_all_that_is_counted_is_decoded(pictures, monkeypatch):
    source, loaded = open_source(f"folder:{pictures}"), []

    def load(path):
        def count(path):
            loaded.append(path)
            return tf.io.read_file(path)

        return tf.ensure_shape(tf.py_function(count, [path], tf.string), [])

    monkeypatch.setattr(source, "load", load)
    pipeline = Pipeline(
        source, "train", batch_size=16, image_shape=(8, 8, 3), training=True
    )
    dataset = measure._prefixes(pipeline)["decode"]
    assert measure.read(dataset, examples=64).examples == 64
    assert len(loaded) >= 16 + 16 + 64


def test_what_a_stage_adds():
    # The second was slower than what holds it.
    added = measure.added_seconds({"read": 100.0, "decode": 4.0, "batch": 5.0})
    assert added == pytest.approx({"read": 0.01, "decode": 0.19, "batch": 0})
    assert "The bottleneck is decode, 95% of" in report.bottleneck(added)
    assert "(--cache)" in report.bottleneck({"read": 1.0})
    assert "are at hand already" in report.bottleneck({"read": 1.0}, kept=True)


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--batch_size=0", "--batch_size=0"),
        ("--num_gpus=0", "--num_gpus=0"),
        ("--examples=0", "--examples=0"),
        ("--recipe=alexnet", "--recipe=alexnet"),
        ("--image_size=8x", "expected pixels, as 224 or as 240x320"),
        ("--randaugment=2", "expected layers (1 to 8) and a magnitude"),
        ("--randaugment=2,11", "such as --randaugment=2,9"),
        ("--step_ms=5,x", "Received --step_ms=5,x; expected milliseconds"),
        ("--step_ms=5,nan", "Received --step_ms=5,nan; expected milliseconds"),
        ("--data_service=localhost:5050", "such as grpc://localhost:5050"),
        ("--plot=stages.gif", "Received --plot=stages.gif; expected a PNG file"),
        ("--plot=no/folder.png", "in a folder that exists"),
        ("--local_store=x", "Received --local_store=x for synthetic:8x8x3:4:100; expe"),
        ("--local_store=0:x", "Received --local_store=0:x; expected a folder, or how"),
        ("digits", "Received the argument 'digits'; expected flags only"),
        ("--dataset=digit", "unknown data set 'digit': did you mean digits?"),
        ("--split=valid", "has no split 'valid', only train, test"),
    ],
)
def test_bad_flags(flag, words):
    message = error(SYNTHETIC, flag)
    assert message.startswith("towers.input_pipeline.benchmark: ") and words in message


@pytest.mark.slow
def test_it_reads_through_a_local_store(pictures, tmp_path):
    flags = f"--dataset=folder:{pictures}", "--image_size=8", "--cache=none"
    # Each block is written at once, as nothing is done at exit here.
    changed = {"towers.input_pipeline.local_store.store._PACK_BYTES": 1, **ONCE}
    done = run(*flags, f"--local_store={tmp_path / 'store'}", changed=changed)
    assert f"{tmp_path / 'store'} keeps all of it" in done.stderr
    assert any(path.suffix == ".pack" for path in (tmp_path / "store").iterdir())


def test_the_tricks_of_a_data_service_are_not_here():
    message = error(SYNTHETIC, "--data_service=grpc://localhost:1", "--ablate")
    assert "Received --ablate and --data_service" in message


def test_sizes_that_differ(pictures):
    message = error(f"--dataset=folder:{pictures}")
    assert "differ in size, such as" in message
    assert "40x60 and 41x60; expected" in message


def test_flags_that_are_not_for_rows(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,0\n2,1\n")
    store = f"--local_store={tmp_path}/store"
    message = error(f"--dataset=csv:{tmp_path}/a.csv", "--image_size=8", store)
    assert "=8, but csv:" in message and "has rows of numbers; expected" in message
    assert (tmp_path / "store").is_dir()


def test_a_bad_record_is_named(tmp_path, encode, grey):
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        for k in range(3):
            (tmp_path / name / f"{k}.png").write_bytes(encode(grey(k)))
    bad = tmp_path / "dogs" / "1.png"
    bad.write_bytes(b"not a picture")
    message = error(f"--dataset=folder:{tmp_path}", "--image_size=8")
    assert message.startswith(f"towers.input_pipeline.benchmark: {bad}: ")


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is there"
)
def test_without_matplotlib(tmp_path):
    message = error(SYNTHETIC, f"--plot={tmp_path}/stages.png")
    assert "but matplotlib, which draws it, is not installed" in message


def test_the_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    found = {
        "dataset": "digits",
        "stages": {"read": 100.0, "copy": 50.0},
        "ablation": {"prefetch off": 1.5},
    }
    path = tmp_path / "stages.png"
    report.plot(found, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
