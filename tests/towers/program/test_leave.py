"""How a program leaves, once all is saved and said."""

import subprocess
import sys

import pytest

from tests.limits import HANG_S

CODE = """
import atexit, os, sys
from towers.program import startup

atexit.register(startup._end_at_once)
atexit.register(lambda: print("at exit"))

class Destructor:
    # As TensorFlow's, at times.
    def __del__(self, abort=os.abort):
        abort()

kept = Destructor()
"""


@pytest.mark.parametrize(
    ("end", "code"), [("startup.leave(3)", 3), ("startup.leave(0)", 0)]
)
def test_destructors_are_left_out(end, code):
    done = subprocess.run(
        [sys.executable, "-c", CODE + end],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert (done.returncode, done.stdout) == (code, "at exit\n")


def test_without_they_end_the_process():
    done = subprocess.run([sys.executable, "-c", CODE + "sys.exit(3)"], timeout=HANG_S)
    assert done.returncode == -6
