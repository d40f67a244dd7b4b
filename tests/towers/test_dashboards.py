"""A run on two towers in TensorBoard, each dashboard of it seen in a real browser."""

import importlib.util
import platform
import re

import pytest
import tensorflow as tf

from tests import warm
from tests.browser import needs_browser, open_browser, show, tensorboard
from towers.report.read import read

pytestmark = [pytest.mark.slow, needs_browser]
TIMEOUT_S = 300
EPOCHS = 2
needs_profile_plugin = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard_plugin_profile") is None,
    reason="there is no profile plugin: pip install tensorboard-plugin-profile",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run, as the report reads it."""
    model_dir = tmp_path_factory.mktemp("runs") / "cnn"
    done = warm.run(
        *("towers.train", "--model=cnn", f"--model_dir={model_dir}", "--num_gpus=2"),
        *(f"--train_epochs={EPOCHS}", "--log_steps=10", "--batch_size=48"),
        *("--histograms", "--profile_steps=20,22"),
        "--variable_update=parameter_server",
        timeout_s=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return read(str(model_dir))


@pytest.fixture(scope="module")
def board(run):
    with tensorboard(run.model_dir) as address:
        yield address


@pytest.fixture(scope="module")
def page():
    with open_browser(1400) as page:
        yield page


def tags(page):
    """The tags of what a dashboard shows."""
    found = page.get_by_text(re.compile("^ *tag: ")).all_inner_texts()
    return {text.split("tag: ")[1].strip() for text in found}


def test_time_series(run, board, page):
    show(page, board, "timeseries", "epoch_accuracy")
    card = page.locator("scalar-card", has_text="epoch_accuracy")
    card.get_by_text("validation").wait_for()
    rows = card.locator("tb-data-table-content-row").all_inner_texts()
    for events, text in zip((run.train, run.validation), sorted(rows), strict=True):
        name, _, value, step, *_ = re.split(r"\s*\n\s*|\s*\t\s*", text.strip())
        series = events.scalars["epoch_accuracy"]
        assert name in ("train", "validation")
        assert float(value) == pytest.approx(series.last, abs=1e-4)
        assert int(step) == EPOCHS - 1


def test_scalars(run, board, page):
    show(page, board, "scalars", "^(samples_per_sec|epoch_)")
    page.get_by_text("tag: samples_per_sec/tower_1").wait_for()
    expected = {
        tag for tag in run.train.scalars if re.match("samples_per_sec|epoch_", tag)
    }
    assert {"epoch_loss", "samples_per_sec/tower_0"} <= expected
    assert expected <= tags(page)


def test_graphs(board, page):
    show(page, board, "graphs")
    node = 'g.node[data-name="{}"]'
    for name in ("tower_0", "tower_1", "reduce", "apply"):
        page.locator(node.format(name)).wait_for(state="attached")
    # Each tower is a scope, which opens.
    page.locator(node.format("tower_1")).dispatch_event("dblclick")
    inside = page.locator('g.node[data-name^="tower_1/"]')
    inside.first.wait_for(state="attached")
    names = inside.evaluate_all("nodes => nodes.map(node => node.dataset.name)")
    assert any("conv2d" in name for name in names), names


@pytest.mark.parametrize("tag", ["input", "misclassified", "confusion"])
def test_images(run, board, page, tag):
    show(page, board, "images", f"^{tag}$")
    pictures = page.locator("tf-image-loader img")
    pictures.first.wait_for()
    # Up to twelve on a page.
    count = min(len(run.train.images[tag]), 12)
    assert pictures.count() == count
    loaded = "images => images.every(image => image.naturalWidth > 0)"
    page.wait_for_function(
        "() => true"
    )  # the event loop of the page has turned once more
    assert pictures.evaluate_all(loaded)
    assert tags(page) == {tag}


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("flags", ["--model=cnn", "--batch_size=48", "--num_gpus=2"]),
        ("devices", ["/device:CPU:0", "/device:CPU:1"]),
        ("versions", [platform.python_version(), tf.__version__]),
        ("misclassified_as", ["taken for"]),
    ],
)
def test_text(board, page, tag, words):
    show(page, board, "text", f"^{tag}$")
    for word in words:
        page.locator("tf-text-loader").get_by_text(word).first.wait_for()
    assert tags(page) == {tag}


def test_hparams(run, board, page):
    show(page, board, "hparams")
    page.get_by_text("TABLE VIEW").wait_for()
    cells = page.locator("vaadin-grid-cell-content")
    cells.get_by_text(run.model_dir).wait_for()
    texts = [text.strip() for text in cells.all_text_contents()]
    assert {"dataset", "digits", "batch_size", "48.000"} <= set(texts)


def test_histograms(board, page):
    show(page, board, "histograms", "^conv2d/")
    page.get_by_text("tag: conv2d/kernel/histogram").wait_for()
    # A ridge for each epoch.
    ridges = page.locator(
        "vz-histogram-timeseries path.histogram-area, .histogram path"
    )
    ridges.first.wait_for(state="attached")
    assert "conv2d/kernel/histogram" in tags(page)


def test_custom_scalars(run, board, page):
    show(page, board, "custom_scalars")
    charts = page.locator("tf-custom-scalar-multi-line-chart-card")
    for category in ("Is it learning?", "Is it fast?", "Is it starved?"):
        page.get_by_text(category).wait_for()
    loss = charts.filter(has_text="Loss").first
    loss.get_by_text("Matches (2)").wait_for()
    towers = charts.filter(has_text="each tower").first
    towers.get_by_text("Matches (2)").wait_for()


@needs_profile_plugin
def test_profile(board, page):
    show(page, board, "profile")
    plugin = page.frame_locator("iframe")
    plugin.get_by_text("Host Compute Time").wait_for()
    plugin.get_by_text("Overview Page").click()
    with page.expect_response(re.compile(r"/profile/data\?.*trace_viewer")) as answer:
        plugin.locator("mat-option", has_text="Trace Viewer").click()
    trace = answer.value.text()
    for tower in ("tower_0/", "tower_1/"):
        assert tower in trace
    viewer = plugin.frame_locator("iframe")
    viewer.get_by_text("tf_Compute").first.wait_for()
