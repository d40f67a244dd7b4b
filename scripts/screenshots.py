"""Takes the pictures of TensorBoard and of the report in docs/images/.

The script trains the run that they show.

    python -m scripts.screenshots
    python -m scripts.screenshots --views=graphs,report

The browser is Debian's Chromium: apt-get install chromium.
"""

import contextlib
import io
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable

from absl import app, flags
from PIL import Image

from tests.browser import open_browser, show, tensorboard

ROOT = pathlib.Path(__file__).resolve().parents[1]
FLAGS = flags.FLAGS

flags.DEFINE_string("output_dir", f"{ROOT}/docs/images", "Where the pictures go.")
flags.DEFINE_list("views", [], "Which ones; all by default.")

MAX_BYTES = 300_000
WIDTH = 1280


def main(_) -> None:
    """Takes what is asked for."""
    folder = pathlib.Path(FLAGS.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    views = FLAGS.views or [*DASHBOARDS, "report"]
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        model_dir = f"{root}/digits_cnn"
        make_run(model_dir)
        board = stack.enter_context(tensorboard(model_dir))
        page = stack.enter_context(open_browser(WIDTH))
        for view in views:
            if view == "report":
                name = "report.png"
                page.set_viewport_size({"width": WIDTH, "height": 1850})
                page.goto(f"file://{model_dir}/report.html")
            else:
                name = f"tensorboard_{view}.png"
                dashboard, tags, height, wait = DASHBOARDS[view]
                page.set_viewport_size({"width": WIDTH, "height": height})
                show(page, board, dashboard, tags)
                wait(page)
            # What is there is drawn once nothing more is loaded.
            page.wait_for_load_state("networkidle")
            data = _small(page.screenshot(animations="disabled"))
            (folder / name).write_bytes(data)
            print(f"{folder / name}: {len(data)} bytes")


def make_run(model_dir: str) -> None:
    """Trains on two towers, and writes the report."""
    for module, *options in (
        (
            *("towers.train", f"--model_dir={model_dir}", "--num_gpus=2"),
            *("--train_epochs=8", "--log_steps=10", "--histograms"),
            *("--profile_steps=60,62", "--variable_update=parameter_server"),
        ),
        ("towers.report", model_dir),
    ):
        subprocess.run([sys.executable, "-m", module, *options], cwd=ROOT, check=True)


def _text(words: str) -> Callable:
    return lambda page: page.get_by_text(words).first.wait_for()


def _time_series(page):
    page.locator("scalar-card tb-data-table").first.wait_for()
    # The settings take a third of the page.
    page.locator("button", has_text="Settings").click()


def _graph(page):
    node = 'g.node[data-name="{}"]'
    for name in ("tower_0", "tower_1", "reduce"):
        page.locator(node.format(name)).wait_for(state="attached")
    page.get_by_text("Fit to screen").click()


def _trace(page):
    plugin = page.frame_locator("iframe")
    plugin.get_by_text("Overview Page").click()
    plugin.locator("mat-option", has_text="Trace Viewer").click()
    plugin.frame_locator("iframe").get_by_text("tower_1").first.wait_for()


# A view's name; the dashboard, the tags that it is to show, the height in pixels, and
# what to wait for. Another view is another line here.
DASHBOARDS: dict[str, tuple[str, str, int, Callable]] = {
    "custom_scalars": ("custom_scalars", "", 1900, _text("Is it starved?")),
    "timeseries": ("timeseries", "", 700, _time_series),
    "graphs": ("graphs", "", 560, _graph),
    "images": ("images", "input|confusion", 900, _text("tag: confusion")),
    "text": ("text", "devices|versions|verdict", 900, _text("tag: versions")),
    "hparams": ("hparams", "", 480, _text("adam")),
    "histograms": ("histograms", "^conv2d", 700, _text("tag: conv2d/kernel/histogram")),
    "profile": ("profile", "", 700, _trace),
}


def _small(png: bytes) -> bytes:
    """Encodes with as many colors as ``MAX_BYTES`` allow."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for colors in (256, 128, 64, 32):
        buffer = io.BytesIO()
        image.quantize(colors).save(buffer, "PNG", optimize=True)
        if buffer.tell() < MAX_BYTES:
            break
    return buffer.getvalue()


if __name__ == "__main__":
    app.run(main)
