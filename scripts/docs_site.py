"""Hooks of mkdocs: they add the pages at the root of the repository to the site.

In the repository, links are paths. In the site, they lead to the page that a file has
become, and to a folder, to the table of its pages. Of a link to a file without a page,
only the text stays. Fences say more than mkdocs knows: why a test does not run a block.
"""

import pathlib
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[1]
_INDEX = {"README.md": "index.md", "README.zh.md": "index.zh.md"}
_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!\w+:|#)([^()#\s]+)(#[^()\s]*)?\)")

_FENCE = re.compile(r"^( *`{3,}[\w+-]*)([^`\n]*)$", re.MULTILINE)
_TITLE = re.compile(r' title="[^"]*"')


def pages_at_root() -> dict[str, str]:
    """Returns the paths in the site of the pages at the root, by their names."""
    names = [path.name for path in ROOT.glob("*.md")]
    return {name: _INDEX.get(name, f"project/{name}") for name in names}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages at the root."""
    for name, uri in pages_at_root().items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Leads links to pages of the site, and leaves out of fences what tests read."""
    in_site = pages_at_root()
    here = page.file.src_uri
    at_root = {uri: name for name, uri in in_site.items()}
    folder = posixpath.dirname(at_root.get(here, f"docs/{here}"))

    def lead(link: re.Match) -> str:
        image, text, path, anchor = link.groups(default="")
        path = posixpath.normpath(posixpath.join(folder, path))
        if (ROOT / path / "README.md").is_file():
            path = posixpath.normpath(posixpath.join(path, "README.md"))
        uri = in_site.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(uri) is None:
            return text
        uri = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        return f"{image}[{text}]({uri}{anchor})"

    return _FENCE.sub(_fence, _LINK.sub(lead, markdown))


def _fence(fence: re.Match) -> str:
    """The line that begins a block, with its language and its title only."""
    return fence[1] + "".join(_TITLE.findall(fence[2])[:1])
