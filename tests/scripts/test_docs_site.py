"""The site: it builds, every page fits wide and narrow windows, and search finds.

pip install -e '.[docs]' && apt-get install chromium
"""

import functools
import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
import urllib.parse

import pytest

from tests import once
from tests.browser import needs_browser, open_browser
from tests.documents.blocks import ROOT
from tests.limits import HANG_S

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None
    or importlib.util.find_spec("material") is None,
    reason="needs mkdocs: pip install -e '.[docs]'",
)
# The windows of a desk and of a phone.
WIDTHS = 1280, 390
# What is wrong with a page that is shown.
_FAULTS = """() => {
  const said = [];
  const wide = document.documentElement.scrollWidth - window.innerWidth;
  if (wide > 0) {
    const out = [...document.querySelectorAll('article *')].filter(
      e => e.getBoundingClientRect().right > window.innerWidth + 1
           && !e.closest('pre, .md-typeset__scrollwrap, .md-typeset__table'));
    said.push(`is ${wide} px too wide: ` +
              out.slice(0, 3).map(e => e.outerHTML.slice(0, 120)).join(' | '));
  }
  for (const image of document.images)
    if (!image.complete || !image.naturalWidth)
      said.push(`does not show ${image.src}`);
  for (const code of document.querySelectorAll('article pre > code')) {
    const block = code.closest('.highlight') ?? code.parentElement;
    if (!block.querySelector('button'))
      said.push(`has no button to copy: ${code.innerText.slice(0, 60)}`);
  }
  if (document.body.innerText.includes('```'))
    said.push('shows a fence that is not understood');
  return said;
}"""


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the site, built as `make docs` does."""
    return once.make(tmp_path_factory, "site", _build)


def _build(folder):
    command = "-m", "mkdocs", "build", "--strict", f"--site-dir={folder}"
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture
def address(site):
    """The address of a server of the site."""
    handler = functools.partial(_Quiet, directory=os.fspath(site))
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def pages(site):
    """The addresses of all pages, from the root of the site."""
    found = site.rglob("index.html")
    return sorted(path.parent.relative_to(site).as_posix() for path in found)


def test_every_page_is_in_the_site(site):
    built = {*pages(site)}
    for page in ROOT.glob("docs/**/*.md"):
        folder = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        assert folder.removesuffix("/README") in built
    # Titles of files are shown, and reasons of tests are not.
    text = "".join(path.read_text() for path in site.rglob("index.html"))
    assert "no-run=" not in text and "program=&quot;new" not in text


def test_links_lead_to_pages(site):
    for page in site.rglob("index.html"):
        for link in _links(page):
            if link.scheme or not link.path or link.path.startswith("/"):
                continue
            target = (page.parent / urllib.parse.unquote(link.path)).resolve()
            assert target.exists(), f"{page} links to {link.path}"


def _links(page):
    for link in re.findall(r'<a[^>]* href="([^"]*)"', page.read_text()):
        yield urllib.parse.urlsplit(link)


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_shown(site, address, width):
    faults = []
    with open_browser(width) as page:
        for path in pages(site):
            page.goto(f"{address}/{path}/", wait_until="load")
            page.wait_for_load_state("networkidle")
            faults += [f"{path} {fault}" for fault in page.evaluate(_FAULTS)]
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@needs_browser
def test_what_is_wrong_with_a_page_is_seen(address):
    wrong = """
        <div style="width: 3000px">wide</div><img src="gone.png">
        <pre><code>ls</code></pre>```
    """
    with open_browser(WIDTHS[0]) as page:
        page.goto(address)
        add = "html => document.querySelector('article').innerHTML += html"
        page.evaluate(add, wrong)
        page.wait_for_load_state("networkidle")
        faults = " ".join(page.evaluate(_FAULTS))
    for said in ("too wide", "does not show", "has no button", "shows a fence"):
        assert said in faults


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_search_finds_a_page(address, width):
    with open_browser(width) as page:
        page.goto(address)
        if width < 1000:
            page.locator("label[for=__search]").first.click()
        # As somebody types: the index is loaded meanwhile.
        asked = page.locator("input.md-search__input").first
        asked.press_sequentially("checkpoint", delay=50)
        found = page.locator(".md-search-result__item a").first
        found.wait_for()
        page.goto(found.get_attribute("href"))
        assert "checkpoint" in page.locator("article").inner_text().lower()


@pytest.mark.parametrize(
    ("here", "text", "shown"),
    [
        ("index.md", "[a](docs/data/)", "[a](data/README.md)"),
        ("index.md", "[a](docs/data/text.md#b)", "[a](data/text.md#b)"),
        ("data/text.md", "[a](../train)", "[a](../train/README.md)"),
        ("data/text.md", "[a](../../README.md)", "[a](../index.md)"),
        ("data/text.md", "[a](../../setup.py)", "a"),
        ("data/text.md", "![a](../images/cifar.jpg)", "![a](../images/cifar.jpg)"),
        ("data/text.md", '```bash no-run="x"\nls\n```', "```bash\nls\n```"),
        (
            "data/text.md",
            '```python title="a.py" program="new"\nx\n```',
            '```python title="a.py"\nx\n```',
        ),
    ],
)
def test_a_page_of_the_repository_becomes_one_of_the_site(here, text, shown):
    from scripts import docs_site

    class Page:
        """What the hook reads of a page."""

        class file:
            src_uri = here

    class Files:
        """The site has each page of docs/, those of the root, and pictures."""

        @staticmethod
        def get_file_from_path(uri):
            at_root = uri in docs_site.pages_at_root().values()
            return uri if at_root or (ROOT / "docs" / uri).is_file() else None

    assert docs_site.on_page_markdown(text, Page, None, Files) == shown
