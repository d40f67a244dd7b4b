"""Every command and every program in the pages is run, as a reader would.

`tests/documents` says how: `blocks.NO_RUN` lists the reasons for which a block may be
left out, and `command.OTHERWISE` what is done otherwise than the page says.

    python -m pytest tests/test_docs_run.py -k pictures.md     one page
"""

import functools
import pathlib
import re
import subprocess

import pytest

from tests.documents import blocks, command, runner
from tests.documents.blocks import ROOT
from tests.limits import HANG_S

# `make docs` writes them.
_GENERATED = "api.md", "flags.md"
PAGES = sorted(
    [ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md")]
    + [path for path in ROOT.glob("docs/**/*.md") if path.name not in _GENERATED]
)
# Its commands take hours.
BENCHMARKS = ROOT / "BENCHMARKS.md"


def of(pages):
    return pytest.mark.parametrize("page", pages, ids=name_of)


def name_of(page):
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


WITH_COMMANDS = [page for page in PAGES if any(b.runs for b in blocks.read(page))]


@of([*PAGES, BENCHMARKS])
def test_blocks_are_such_as_run(page):
    faults = [fault for block in blocks.read(page) for fault in blocks.faults(block)]
    assert not faults, "\n".join(faults)


@of([*PAGES, BENCHMARKS])
def test_bash_reads_the_commands(page):
    for block in blocks.read(page):
        if block.language == "bash":
            read = ["bash", "-n", "-c", block.code]
            done = subprocess.run(read, capture_output=True, text=True)
            assert not done.stderr, f"{block.where}: {done.stderr}"


def test_the_commands_of_benchmarks_exist():
    for block in blocks.read(BENCHMARKS):
        if block.language != "bash":
            continue
        for words in blocks.commands(block.code):
            done = command.deed(words)
            script = [word for word in words if re.match(r"scripts[/.]\w", word)]
            for path in (each.removesuffix(".py").replace(".", "/") for each in script):
                files = ROOT / f"{path}.py", ROOT / path / "__main__.py"
                assert any(file.is_file() for file in files), f"{block.where}: {words}"
            # Of other programs, the flags are tested by `test_docs.py`.
            if done.expected:
                known = _help(done.words)
                for flag in done.expected:
                    assert re.search(flag, known, re.MULTILINE), (block.where, flag)


@functools.cache
def _help(words):
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    return done.stdout + done.stderr


def test_there_are_pages_to_run():
    folders = {page.parent.name for page in WITH_COMMANDS}
    assert {"start", "data", "train", "use", "scale", "trust"} <= folders


@pytest.mark.slow
@of(WITH_COMMANDS)
def test_the_page_runs(page, tmp_path):
    for line in runner.run_page(pathlib.Path(page), tmp_path, HANG_S):
        print(line)
