"""The notebooks in examples/ run from top to bottom, and reach what they promise."""

import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.limits import HANG_S

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))


@pytest.fixture(autouse=True)
def _environ(monkeypatch):
    """The kernel, a process of its own, finds this checkout and no GPU."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def run(notebook: nbformat.NotebookNode, folder: pathlib.Path) -> str:
    """Runs all cells in `folder`, and returns what they printed."""
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=HANG_S, resources=resources).execute()
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    printed = run(nbformat.read(path, as_version=4), tmp_path)
    (accuracy,) = re.findall(r"validation accuracy ([\d.]+)", printed)
    assert float(accuracy) > 0.9, printed
    assert [*tmp_path.glob("*.keras")]


@pytest.mark.slow
def test_a_cell_that_raises_is_reported(tmp_path):
    cell = nbformat.v4.new_code_cell("raise ValueError('a cell that fails')")
    with pytest.raises(CellExecutionError, match="a cell that fails"):
        run(nbformat.v4.new_notebook(cells=[cell]), tmp_path)


def test_there_are_two_without_outputs():
    """Outputs in git go stale, and hide what a cell needs."""
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert not any(cell.get("outputs") for cell in cells), path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets
    assert all((path.parent / target).is_file() for target in targets), targets
