"""The report, opened in a real browser without a network, says what the run wrote."""

import fcntl
import html
import importlib.util
import json
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests import warm
from tests.browser import needs_browser, open_browser
from towers.program.extras import install_command
from towers.report import __main__ as report
from towers.report import charts
from towers.report import page as page_of_run
from towers.report.read import Series, read

pytestmark = pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated")
EPOCHS, STEPS = 5, 20
FLAGS = "--model=cnn\n--dataset=digits\n--num_gpus=2\n--note=<b>5 & 6</b>\n"
VERDICT = "input-bound: towers waited 43% of the time; the slowest stage is map."
SUMMARY = {
    "val_loss": 0.25,
    "val_accuracy": 0.9375,
    "examples_per_sec": 1034.25,
    "tokens_per_sec": 132384.0,
    "step_ms": {"input": 3.5, "copy": 1, "compute": 5, "reduce": 2, "python": 1.25},
    "parameters": 12345,
    "waiting": 0.43,
    "verdict": VERDICT,
    "measured": "examples/sec: 1,034.2",
    "bad_records": 3,
    "best": {"monitor": "val_loss", "value": 0.125, "epoch": 3},
    "epochs": EPOCHS,
    "steps": EPOCHS * STEPS,
    "towers": ["/device:CPU:0", "/device:CPU:1"],
}
# A mean of each, over the ten steps that it is written at.
MEASURED = {
    "examples_per_sec": 1000.0,
    "examples_per_sec/tower_0": 500.0,
    "examples_per_sec/tower_1": 480.0,
    "waiting": 0.37,
    "step_ms/input": 3.0,
    "step_ms/copy": 1.0,
    "step_ms/compute": 5.0,
    "step_ms/reduce": 2.0,
    "step_ms/python": 1.5,
    "step_ms/tower_0": 4.5,
    "step_ms/tower_1": 5.0,
    "device/cpu:0/rss_mb": 812.0,
    "device/cpu:0/utilization": 0.55,
    "device/gpu:0/memory_mb": 4321.0,
    "device/gpu:0/utilization": 0.75,
    "device/gpu:0/temperature_c": 61.0,
}
TEXTS = {
    "verdict": "compute-bound: of an earlier session",
    "model": "    Total params: 12,345 (48.22 KB)\n",
    "devices": "    tower  device\n        0  /device:CPU:0\n",
    "versions": "Python 3.11 <script>fails()</script>",
    "input_labels": "1. three\n2. <i>four</i>\n3. five\n",
    "misclassified_as": "1. 3, taken for 8\n2. 9, taken for 1\n",
    "confusion_counts": "| is | 0 | 1 |\n|---|---|---|\n| 0 | 35 | 17 |\n",
}


def write_events(folder, epochs=range(EPOCHS), measured=None, loss=1.0):
    """Writes what training writes: scalars of epochs, and at each tenth step."""
    writer = tf.summary.create_file_writer(str(folder))
    measured = {"batch_loss": 2 * loss, "batch_learning_rate": 0.01} | (measured or {})
    with writer.as_default():
        for epoch in epochs:
            for step in range(STEPS * epoch + 10, STEPS * (epoch + 1) + 1, 10):
                for tag, value in measured.items():
                    tf.summary.scalar(tag, value, step)
            tf.summary.scalar("epoch_loss", loss / (epoch + 1), epoch + 1)
            tf.summary.scalar("epoch_accuracy", 0.1 * epoch, epoch + 1)
            tf.summary.scalar("epoch_learning_rate", 0.01, epoch + 1)
    writer.close()


def write_scalars(folder, values, step):
    writer = tf.summary.create_file_writer(str(folder))
    with writer.as_default(step):
        for tag, value in values.items():
            tf.summary.scalar(tag, value)
    writer.close()


def write_texts(folder, texts):
    writer = tf.summary.create_file_writer(str(folder))
    with writer.as_default(STEPS):
        for tag, text in texts.items():
            tf.summary.text(tag, text)
    writer.close()


def write_pictures(folder):
    writer = tf.summary.create_file_writer(str(folder))
    pictures = np.random.default_rng(1).integers(0, 255, [3, 8, 8, 1], np.uint8)
    with writer.as_default(STEPS):
        tf.summary.image("input", pictures, max_outputs=3)
        tf.summary.image("misclassified", pictures[:2], max_outputs=3)
        tf.summary.image("confusion", tf.zeros([1, 300, 300, 3]))
    writer.close()


def write_run(model_dir, summary=SUMMARY):
    """Writes all that a whole run does."""
    write_events(model_dir / "train", measured=MEASURED)
    write_events(model_dir / "validation", loss=0.8)
    write_texts(model_dir / "train", TEXTS)
    write_scalars(model_dir / "train", {"parameters": 12345.0}, 0)
    write_pictures(model_dir / "train")
    (model_dir / "flags.txt").write_text(FLAGS)
    if summary:
        (model_dir / "summary.json").write_text(json.dumps(summary))


@pytest.fixture(scope="module")
def page():
    """A page of a browser that has no network."""
    with open_browser() as page:
        page.context.set_offline(True)
        page.requests = []
        page.on("request", lambda request: page.requests.append(request.url))
        yield page


def show(page, model_dir):
    """Writes a run's report, and opens it."""
    page.goto(f"file://{report.write(str(model_dir))}")
    return page


def cards(page):
    """The headline figures, by their names."""
    found = page.locator(".card").all_inner_texts()
    return {name: value for value, name in (text.split("\n") for text in found)}


def notes(page):
    return page.locator(".notes li").all_inner_texts()


def captions(page, section):
    return page.locator(f"#{section} .charts figcaption").all_inner_texts()


def points(page, name):
    """Where a curve was drawn: an array of x and y, in the units of the chart."""
    path = page.locator(f'[id="{name}"] > path').get_attribute("d")
    return np.array(re.findall(r"[ML] (\S+) (\S+)", path), float)


def words_of(model_dir):
    """Writes a run's report; the words in it, as a browser without styles has them."""
    text = Path(report.write(str(model_dir))).read_text()
    text = re.sub(r"<(style|svg).*?</\1>", "", text, flags=re.DOTALL)
    lines = html.unescape(re.sub("<[^>]+>", "\n", text)).splitlines()
    return " | ".join(filter(None, map(str.strip, lines)))


def test_what_the_page_of_a_whole_run_says(tmp_path, capsys):
    write_run(tmp_path)
    assert report.main(["", str(tmp_path)]) == 0
    assert re.fullmatch(rf"{tmp_path}/report.html: \d+ KB\n", capsys.readouterr().out)
    said = words_of(tmp_path)
    for part in (
        "cnn on digits | Finished: 5 epochs, 100 steps. | ",
        "| 0.9375 | validation accuracy, last epoch | "
        "0.1250 | validation loss, best epoch: 3 | "
        "0.2500 | validation loss, last epoch | 1,034.2 | examples/sec | "
        "132,384 | tokens/sec | 43% | of the time waiting, last part | "
        "2 | towers | 12,345 | parameters | ",
        f"| training, in 4 parts | {VERDICT} | examples/sec: 1,034.2 | "
        "3 bad records were passed over: bad_records.json lists them. | "
        "Learning | Loss | Accuracy | Learning rate | Speed | Examples per second | "
        "Time of a step, ms: 12.8 on average in the last part, without the first "
        "steps | Time that a tower computes, ms | "
        "Share of the towers' time spent waiting for input | Devices | "
        "device | memory, MB | resident, MB | utilisation | temperature, °C | "
        "cpu:0 | 812 | 55% | gpu:0 | 4,321 | 75% | 61 | "
        "Memory, MB: gpu:0 | Resident, MB: cpu:0 | Utilisation | "
        "Temperature, °C: gpu:0 | Pictures | Input | three | <i>four</i> | five | "
        "Misclassified, by the best model | 3, taken for 8 | 9, taken for 1 | "
        "Confusion, by the best model | is | 0 | 1 | 0 | 35 | 17 | Environment | ",
        "| Python 3.11 <script>fails()</script> | Flags | ",
    ):
        assert part in said
    text = (tmp_path / "report.html").read_text()
    heights = {}
    for part in ("input", "copy", "compute", "reduce", "python"):
        (path,) = re.findall(rf'id="Time-of-a-step-{part}">\s*<path d="([^"]+)"', text)
        xs, ys = np.array(re.findall(r"[ML] (\S+) (\S+)", path), float).T
        heights[part] = ys.max() - ys.min()
        # The first value is of the steps before it, too.
        assert len(np.unique(xs)) == 1 + 2 * EPOCHS
    for part, height in heights.items():
        expected = MEASURED[f"step_ms/{part}"] / MEASURED["step_ms/input"]
        assert height / heights["input"] == pytest.approx(expected, abs=1e-3)
    # Shares are in percent, and of six pictures, one is not magnified.
    assert re.search("<text[^>]*>80%</text>", text)
    assert text.count('<img class="small"') == 5 and text.count("<img") == 6


def test_what_the_page_of_a_run_that_went_on_says(tmp_path):
    """From a checkpoint of its first epoch; a process trains it now."""
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY | {"steps": STEPS}))
    write_events(tmp_path / "train", range(2), {**MEASURED, "waiting": 0.5})
    nan = float("nan")
    measured = MEASURED | {"batch_loss": nan, "towers/staleness_mean": 1.5}
    write_events(tmp_path / "train", range(1, 3), measured, 7.0)
    # Another process was killed as it began to write.
    with open(tmp_path / "train" / "events.out.tfevents.9999999999.x", "wb") as file:
        file.write(b"\x18\0\0")
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = words_of(tmp_path)
    for part in (
        f"{tmp_path.name} | Still running: step 60. | ",
        "| 0.2000 | train accuracy, epoch 3 | 2.3333 | train loss, epoch 3 | "
        "1,000.0 | examples/sec | 41% | of the time waiting, all parts | 2 | towers | ",
        "| training, in 2 parts | The run ended at step 20 and has gone on since: the "
        "figures are those of its last epoch, not of summary.json. | Nothing was vali",
        "| The loss of training is not finite at step 30. | Learning | Loss | ",
        "| Time of a step, ms: 12.5 on average, without the first steps | ",
        "| Staleness of updates | ",
    ):
        assert part in said
    # What was done twice counts once.
    losses = read(str(tmp_path)).train.scalars["epoch_loss"]
    assert losses.steps.tolist() == [1, 2, 3]
    np.testing.assert_allclose(losses.values, [1, 3.5, 7 / 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("seconds", "said"), [(59.4, "59 s"), (61, "1 min 01 s"), (7300, "2 h 01 min")]
)
def test_how_long_it_took(seconds, said):
    assert page_of_run._duration(seconds) == said


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The report of a whole run, by the program; and what it said."""
    folder = tmp_path_factory.mktemp("whole")
    write_run(folder)
    done = warm.run("towers.report", folder)
    assert done.returncode == 0, done.stderr
    return folder / "report.html", done.stdout


@pytest.mark.slow
@needs_browser
def test_a_whole_run(whole, page):
    path, said = whole
    assert re.fullmatch(rf"{path}: \d+ KB\n", said)
    assert path.stat().st_size < 300_000
    page.requests.clear()
    page.goto(f"file://{path}")
    assert page.requests == [f"file://{path}"]
    assert page.title() == "cnn on digits: report"
    assert page.locator("svg").count() == 11
    legends = page.locator("#speed svg").all_text_contents()
    for tower in ("all", "tower 0", "tower 1"):
        assert tower in legends[0]
    for part in ("input", "copy", "compute", "reduce", "python"):
        assert part in legends[1]
    assert page.locator("pre.flags").inner_text() == FLAGS


@needs_browser
def test_curves_are_the_values(whole, page):
    page.goto(f"file://{whole[0]}")
    train, validation = points(page, "Loss-train"), points(page, "Loss-validation")
    values = 1 / np.arange(1, EPOCHS + 1)
    # The page's y points downwards.
    slope, zero = np.polyfit(values, train[:, 1], 1)
    assert slope < 0
    np.testing.assert_allclose(train[:, 1], zero + slope * values, atol=1e-3)
    np.testing.assert_allclose(validation[:, 1], zero + slope * 0.8 * values, atol=1e-3)
    np.testing.assert_allclose(np.diff(train[:, 0]), train[1, 0] - train[0, 0])


@needs_browser
def test_pictures_and_texts(whole, page):
    page.goto(f"file://{whole[0]}")
    assert page.locator("#pictures h3").all_inner_texts() == [
        *("Input", "Misclassified, by the best model", "Confusion, by the best model")
    ]
    assert page.locator("#pictures figcaption").all_inner_texts() == [
        *("three", "<i>four</i>", "five", "3, taken for 8", "9, taken for 1")
    ]
    # As it was, and decoded.
    widths = page.locator("#pictures img").evaluate_all(
        "images => images.map(image => image.naturalWidth)"
    )
    assert widths == [8, 8, 8, 8, 8, 300]
    assert page.locator("#pictures td").all_inner_texts() == ["0", "35", "17"]
    assert page.locator("script").count() == 0
    environment = page.locator("#environment").inner_text()
    assert "<script>fails()</script>" in environment
    assert "0  /device:CPU:0" in environment
    assert "Total params: 12,345" in environment


@needs_browser
def test_no_text_has_anything_fetched(tmp_path, page):
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = f"![x](http://127.0.0.1:{server.getsockname()[1]}/x.png)"
        write_texts(tmp_path / "train", {"versions": text})
        page.context.set_offline(False)
        show(page, tmp_path)
        page.context.set_offline(True)
        assert page.get_by_alt_text("x", exact=True).count() == 1
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@needs_browser
def test_a_run_that_has_only_begun(tmp_path, page):
    write_events(tmp_path / "train", range(1))
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        show(page, tmp_path)
    assert page.locator("h1").inner_text() == tmp_path.name
    assert page.locator(".status").inner_text() == "Still running: step 20."
    assert page.locator(".verdict").count() == 0
    assert notes(page) == [
        "There is no summary.json yet: the figures are those of the last epoch.",
        "Nothing was validated meanwhile: the curves are of training only.",
    ]
    found = cards(page)
    assert found.pop("training").endswith(" s")
    assert found == {
        "train accuracy, epoch 1": "0.0000",
        "train loss, epoch 1": "1.0000",
    }
    # By steps, of which there are more.
    assert captions(page, "learning") == ["Loss", "Learning rate"]
    assert len(points(page, "Loss-train")) == 2
    for section, missing in {
        "speed": "The run has not measured this, or not yet.",
        "devices": "The run has not measured this, or not yet.",
        "pictures": "The run has written no pictures.",
        "environment": "There is no flags.txt.",
    }.items():
        assert missing in page.locator(f"#{section}").inner_text()


@needs_browser
def test_before_the_first_step(tmp_path, page):
    writer = tf.summary.create_file_writer(str(tmp_path / "train"))
    with writer.as_default(0):
        tf.summary.text("flags", "    --model=cnn")
    writer.close()
    show(page, tmp_path)
    status = page.locator(".status").inner_text()
    assert status == "Not finished, and not running: last heard of at step 0."
    assert page.locator("svg").count() == 0


@needs_browser
def test_one_picture_of_all(tmp_path, page):
    """What stands in it, stands in its description, too."""
    write_texts(tmp_path / "train", {"input_labels": "1. three\n2. four\n3. five\n"})
    writer = tf.summary.create_file_writer(str(tmp_path / "train"))
    with writer.as_default(STEPS):
        tf.summary.image("input", tf.zeros([1, 300, 300, 3]))
    writer.close()
    show(page, tmp_path)
    assert page.locator("#pictures figcaption").count() == 0
    (alt,) = page.locator("#pictures img").evaluate_all("all => all.map(i => i.alt)")
    assert alt == "Input: three; four; five"


@pytest.mark.slow
@needs_browser
def test_one_epoch_of_one_logged_step(tmp_path, page):
    """A point in the middle of an axis that has its number, and no other."""
    for part in ("train", "validation"):
        write_scalars(tmp_path / part, {"epoch_loss": 2.3, "epoch_accuracy": 0.1}, 1)
    measured = MEASURED | {"batch_learning_rate": 0.001}
    write_scalars(tmp_path / "train", measured, 23)
    write_scalars(tmp_path / "validation", {"batch_loss": 2.3}, 23)
    show(page, tmp_path)
    assert captions(page, "learning") == ["Loss", "Accuracy", "Learning rate"]
    for section, number, at in (
        ("learning", 0, "1"),
        ("learning", 2, "23"),
        ("speed", 0, "23"),
    ):
        ticks = page.locator(f"#{section} svg").nth(number).locator('[id*="-xtick_"]')
        assert [each.strip() for each in ticks.all_text_contents()] == [at]
    assert "12.5 on average, without" in captions(page, "speed")[1]


def test_curves_that_are_the_same_are_both_seen():
    """Each is thinner than the one below it, and has gaps that show it."""
    series = Series(np.arange(100), np.ones(100))
    svg = charts.lines("x", {f"tower {k}": series for k in range(8)})
    styles = re.findall(r'<g id="x-tower-\d">\s*<path [^>]*style="([^"]*)"', svg)
    widths = [float(re.search(r"stroke-width: ([\d.]+)", style)[1]) for style in styles]
    assert len(widths) == 8 and widths == sorted(set(widths), reverse=True)
    dashes = [re.search(r"stroke-dasharray: [\d., ]+", style) for style in styles]
    assert dashes[0] is None and all(dashes[1:])


@needs_browser
def test_numbers_that_are_not_finite(tmp_path, page):
    write_events(tmp_path / "train", range(2))
    write_events(tmp_path / "train", range(2, 4), loss=float("nan"))
    show(page, tmp_path)
    assert notes(page)[-1] == "The loss of training is not finite at step 50."
    assert len(points(page, "Loss-train")) == 2


def test_long_curves_are_thinned():
    steps = np.arange(100_000)
    series = Series(steps, np.sin(steps / 9000))
    assert len(charts.lines("x", {"y": series})) < 30_000
    thin_steps, thin = charts._thinned(series.steps, series.values)
    assert len(thin) == 500 and thin_steps[-1] == steps[-1]
    np.testing.assert_allclose(thin.mean(), series.values.mean())


def test_the_same_run_is_the_same_chart():
    series = {"a": Series(np.arange(3), np.arange(3.0))}
    assert charts.lines("x", series) == charts.lines("x", series)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Received no MODEL_DIR; expected it: Folder of a run"),
        (
            ["{}", "more"],
            "Received the argument 'more'; expected flags and MODEL_DIR only",
        ),
        (["{}/absent"], "which is no directory; expected the --model_dir of a run"),
        (["{}"], "There is no run in {}: no summary.json, and nothing in train/"),
        (["{}/run", "--output={}/absent/x"], "Cannot write {}/absent/x: No such file"),
    ],
)
def test_what_does_not_fit(tmp_path, capsys, arguments, said):
    write_events(tmp_path / "run" / "train", range(1))
    assert report.main(["", *(each.format(tmp_path) for each in arguments)]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("towers.report: ") and err.count("\n") == 1
    assert said.format(tmp_path) in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is no JSON: Expecting property name"),
        ("[1]", "it holds no object"),
        ('{"a": 1}', '"epochs" is missing'),
        (json.dumps(SUMMARY | {"steps": None}), '"steps" is null'),
        (json.dumps(SUMMARY | {"waiting": "no"}), '"waiting" is "no"'),
        (json.dumps(SUMMARY | {"val_loss": [1]}), '"val_loss" is [1]'),
        (json.dumps(SUMMARY | {"towers": 2}), '"towers" is 2'),
        (json.dumps(SUMMARY | {"best": {"epoch": 1}}), '"best" is {"epoch": 1}'),
    ],
)
def test_a_summary_of_something_else(tmp_path, capsys, text, said):
    path = tmp_path / "summary.json"
    path.write_text(text)
    assert report.main(["", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert f"{path} is not as towers.train writes it ({said}" in err


def test_missing_libraries(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert report.main(["", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "towers.report: The report is made with jinja2 and matplotlib, which are not "
        f"installed; run: {install_command('report')}\n"
    )
