"""A real browser for pages: Debian's Chromium, without a window, by Playwright."""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import typing
from collections.abc import Iterator

import pytest

from tests.limits import HANG_S

if typing.TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium")

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="there is no browser: apt-get install chromium; pip install playwright",
)


@contextlib.contextmanager
def open_browser(width: int = 1200, height: int = 900) -> Iterator["Page"]:
    """Starts Chromium, and opens a page in it.

    Args:
        width: Of the window, in pixels.
        height: The same.

    Yields:
        The page, in a context of its own. It waits for what it is asked for.
    """
    from playwright.sync_api import sync_playwright

    # Where it is small, tabs crash.
    args = ["--disable-dev-shm-usage"]
    if os.geteuid() == 0:
        # Chromium does not start otherwise.
        args.append("--no-sandbox")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(1000 * HANG_S)
        yield page
        browser.close()


@contextlib.contextmanager
def tensorboard(logdir: str) -> Iterator[str]:
    """Starts TensorBoard as README.md says, but on a port that is free.

    Args:
        logdir: What it is to show.

    Yields:
        Its address, once it answers.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", f"--logdir={logdir}", "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"at (http://\S+) \(Press CTRL", line):
                break
        else:
            raise RuntimeError(f"TensorBoard has ended:\n{''.join(lines)}")
        # Nobody reads on, and a full pipe would stop it.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield found[1]
    finally:
        process.terminate()
        process.wait()


def show(page: "Page", board: str, dashboard: str, tags: str = "") -> None:
    """Opens a dashboard of TensorBoard.

    Args:
        page: Where.
        board: The address of TensorBoard.
        dashboard: The dashboard's name in addresses, such as "timeseries".
        tags: Regular expression of the tags to show.
    """
    # Another fragment alone would not load it anew.
    page.goto("about:blank")
    page.goto(f"{board}#{dashboard}" + (f"&tagFilter={tags}" if tags else ""))
