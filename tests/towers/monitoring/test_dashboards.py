"""A run on two towers in TensorBoard, each dashboard of it seen in a real browser."""

import platform
import re
import struct

import pytest
import tensorflow as tf

from tests import warm
from tests.browser import needs_browser, open_browser, show, tensorboard
from towers.report.read import RUNS, read

EPOCHS = 2


@pytest.mark.slow
@needs_browser
def test_dashboards(tmp_path, subtests):
    """One test, so that workers of pytest-xdist do not make a run each."""
    run = make_run(tmp_path / "seen")
    with tensorboard(run.model_dir) as board, open_browser(1400) as page:
        for name, check in globals().copy().items():
            if name.startswith("check_"):
                with subtests.test(name):
                    check(run, board, page)


def make_run(model_dir):
    """Makes a run, and returns it as the report reads it."""
    done = warm.run(
        *("towers.train", "--model=cnn", f"--model_dir={model_dir}", "--num_gpus=2"),
        *(f"--train_epochs={EPOCHS}", "--log_steps=10", "--batch_size=48"),
        *("--histograms", "--profile_steps=20,22"),
        "--variable_update=parameter_server",
    )
    assert done.returncode == 0, done.stderr
    return read(str(model_dir))


def found(page):
    """What a dashboard shows of the tags that it was asked for, above all others."""
    return page.locator("tf-category-paginated-view").first


def tags(page):
    texts = found(page).get_by_text(re.compile(r"^\s*tag: ")).all_inner_texts()
    return {text.split("tag: ")[1].strip() for text in texts}


def check_time_series(run, board, page):
    show(page, board, "timeseries")
    page.get_by_role("combobox", name="Filter tags").fill("epoch_accuracy")
    table = page.locator("scalar-card", has_text="epoch_accuracy").locator(
        "tb-data-table"
    )
    rows = table.locator("tb-data-table-content-row")
    rows.nth(1).wait_for()
    for row, name in zip(rows.all(), RUNS, strict=True):
        # Name, smoothed value, value, step, time.
        cells = row.inner_text().split()
        accuracy = getattr(run, name).scalars["epoch_accuracy"]
        assert cells[0] == name
        assert float(cells[2]) == pytest.approx(accuracy.last, abs=1e-4)
        assert int(cells[3]) == EPOCHS


def check_scalars(run, board, page):
    show(page, board, "scalars", "^examples_per_sec")
    curves = found(page).locator("vz-line-chart2")
    curves.nth(2).wait_for()
    assert curves.count() == 3
    towers = {"examples_per_sec/tower_0", "examples_per_sec/tower_1"}
    assert tags(page) == {"examples_per_sec"} | towers


def check_graphs(run, board, page):
    show(page, board, "graphs")
    node = 'g.node[data-name="{}"]'
    for name in ("tower_0", "tower_1", "reduce", "apply"):
        page.locator(node.format(name)).wait_for(state="attached")
    # Each tower is a scope, which opens. TensorBoard zooms until the graph fits: a
    # mouse may click where it was.
    page.locator(node.format("tower_1") + " > g.nodeshape").dispatch_event("dblclick")
    page.locator('g.node[data-name^="tower_1/"]').first.wait_for(state="attached")


def check_images(run, board, page):
    for tag in ("input", "misclassified", "confusion"):
        show(page, board, "images", f"^{tag}$")
        pictures = found(page).locator("tf-image-loader img")
        # Of more, the rest is on other pages.
        count = min(len(run.train.images[tag]), 12)
        pictures.nth(count - 1).wait_for()
        assert tags(page) == {tag}
        # Where PNG files have it.
        (width,) = struct.unpack(">I", run.train.images[tag][0][16:20])
        decoded = "image => image.decode().then(() => image.naturalWidth)"
        widths = [picture.evaluate(decoded) for picture in pictures.all()]
        assert widths == [width] * count


def check_text(run, board, page):
    texts = {
        "flags": ["--model=cnn", "--batch_size=48", "--num_gpus=2"],
        "model": ["conv2d", "Total params"],
        "devices": ["/device:CPU:0", "/device:CPU:1"],
        "versions": [platform.python_version(), tf.__version__],
        "verdict": ["towers waited", "examples/sec"],
        "misclassified_as": ["taken for"],
    }
    show(page, board, "text", f"^({'|'.join(texts)})$")
    for tag, words in texts.items():
        named = re.compile(rf"tag: {tag}\b")
        card = found(page).locator("tf-text-loader", has_text=named)
        for word in words:
            card.get_by_text(word).first.wait_for()
    assert tags(page) == texts.keys()


def check_hparams(run, board, page):
    show(page, board, "hparams")
    cells = page.locator("vaadin-grid-cell-content")
    accuracy = run.validation.scalars["epoch_accuracy"].last
    titles = "model", "batch_size", "towers", "validation accuracy"
    for text in (*titles, "adam", "cnn", "48.000", "2.0000", f"{accuracy:#.5g}"):
        cell = cells.get_by_text(re.compile(rf"^\s*{re.escape(text)}\s*$"))
        cell.first.wait_for(state="attached")


def check_histograms(run, board, page):
    show(page, board, "histograms", "^conv2d/")
    page.get_by_text("tag: conv2d/kernel/histogram").wait_for()
    assert {"conv2d/kernel/histogram"} <= tags(page)
    charts = found(page).locator("vz-histogram-timeseries")
    # A ridge for each epoch.
    ridges = charts.first.locator("svg .histogram")
    ridges.nth(EPOCHS - 1).wait_for(state="attached")
    assert ridges.count() == EPOCHS


def check_custom_scalars(run, board, page):
    show(page, board, "custom_scalars")
    for category in ("Is it learning?", "Is it fast?", "Is it starved?"):
        page.get_by_text(category).wait_for()
    for chart, curves in {
        "Loss": 2,
        "Accuracy": 2,
        "Learning rate": 1,
        "Examples per second": 1,
        "Examples per second, each tower": 2,
        "Milliseconds of a step": 5,
        "Share of time waiting for input": 1,
        "Utilization of devices": 1,
    }.items():
        card = page.locator("tf-custom-scalar-multi-line-chart-card").filter(
            has=page.get_by_text(chart, exact=True)
        )
        card.get_by_text(f"Matches ({curves})").wait_for()


def check_profile(run, board, page):
    pytest.importorskip("xprof")
    show(page, board, "profile")
    plugin = page.frame_locator("iframe")
    plugin.get_by_text("Host Compute Time").wait_for()
    plugin.get_by_text("Overview Page").click()
    plugin.locator("mat-option", has_text="Trace Viewer").click()
    # What each tower did has a line of its own.
    for tower in ("tower_0", "tower_1"):
        plugin.frame_locator("iframe").get_by_text(tower).first.wait_for()
