"""Python ends while threads of TensorFlow call Python functions."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 120
# Examples on disk, whose rows Python reads; of an iterator that still reads ahead.
READS = """
import sys
import numpy as np
from towers.input_pipeline import ArraySource, make_dataset

np.save(sys.argv[1], np.zeros((640, 64, 64, 3), "uint8"))
images = np.load(sys.argv[1], mmap_mode="r")
source = ArraySource(images, np.zeros(640, "int64"), num_classes=3)
iterator = iter(make_dataset(source, "train", 64, repeat=True))
next(iterator)
raise SystemExit(7)
"""


def test_python_ends_with_its_exit_code(tmp_path):
    command = [sys.executable, "-c", READS, str(tmp_path / "images.npy")]
    done = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, capture_output=True)
    assert done.returncode == 7, done.stderr.decode()
    assert b"Traceback" not in done.stderr


def _that_call_python():
    replayed = ROOT / "towers/model/replayable.py"
    for path in [*sorted(ROOT.glob("input_pipeline/**/*.py")), replayed]:
        if "numpy_function(" in (text := path.read_text()) or "py_function(" in text:
            yield pytest.param(text, id=str(path.relative_to(ROOT)))


@pytest.mark.parametrize("text", [*_that_call_python()])
def test_all_that_data_sets_call_is_refused_at_exit(text):
    assert "until_exit" in text
