"""The report of `scripts.newest`, made from results that pytest has written."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.limits import HANG_S

FILES = {
    "test_contracts.py": """
        import types
        import pytest

        @pytest.mark.parametrize("name", ["_kept", "keras.src.moved.Trainer"])
        def test_contract(name):
            assert name == "_kept"

        def test_attribute():
            module = types.ModuleType("tensorflow.python.eager")
            module.gone

        def test_other():
            assert 1 == 2
    """,
    "test_import.py": "from keras.src.backend.tensorflow import numpy_of_before",
    "test_module.py": "import keras.src.nowhere",
    "test_ours.py": "import towers; from towers import nothing_of_this_name",
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("newest")
    for name, text in FILES.items():
        (folder / name).write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "scripts.newest", sys.executable, "-m", "pytest"]
    done = subprocess.run(
        [*command, "-q", f"--rootdir={folder}", folder],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 1, done.stderr
    return done.stdout


def test_names_what_changed_and_which_tests_failed(shown):
    report = shown[shown.index("Private names") :]
    names, _, tests = report.partition("Tests that failed:\n")
    assert names.splitlines()[1:] == [
        "  keras.src.backend.tensorflow.numpy_of_before",
        "  keras.src.moved.Trainer",
        "  keras.src.nowhere",
        "  tensorflow.python.eager.gone",
    ]
    assert {line.split("::")[-1] for line in tests.splitlines()} == {
        "test_contract[keras.src.moved.Trainer]",
        "test_attribute",
        "test_other",
        "test_import",
        "test_module",
        "test_ours",
    }
