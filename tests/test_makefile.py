"""What the Makefile would install: with CUDA's libraries, or without."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest
import setuptools

from tests.limits import HANG_S

FOLDER = pathlib.Path(__file__).parents[1]
DRIVERS = [
    "proc/driver/nvidia/version",
    "dev/nvidiactl",
    "usr/lib/wsl/lib/libcuda.so.1",
]
CPU, GPU = ".[dev]", ".[dev,gpu]"

# Stands in for Python and for all programs of the environment that it makes, and writes
# down what was asked of it.
_PYTHON = """#!/bin/sh
echo "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES $0 $*" >> log
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$3/bin"
  for name in python ruff; do cp "$0" "$3/bin/$name"; done
fi
"""


class Checkout:
    """A checkout on a made-up machine."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        for name in ("Makefile", "setup.py", "pyproject.toml"):
            shutil.copy(FOLDER / name, folder)
        self.python = folder / "python"
        self.python.write_text(_PYTHON)
        self.python.chmod(0o755)
        self.log = folder / "log"

    def add_driver(self, path: str) -> None:
        file = self.folder / "root" / path
        file.parent.mkdir(parents=True)
        file.touch()

    def make(self, *args: str, code: int = 0, **environ: str) -> str:
        """Runs make; returns what it says."""
        # Under `make test`, some are set.
        of_make = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "GPU", "ROOT"}
        own = {k: v for k, v in os.environ.items() if k not in of_make}
        self.log.write_text("")
        done = subprocess.run(
            ["make", f"PYTHON={self.python}", f"ROOT={self.folder}/root", *args],
            cwd=self.folder,
            env=own | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def installed(self) -> list[str]:
        """What the last make has had installed, as it was handed to pip."""
        return re.findall(r"-m pip install .*(\.\[.*\])$", self.log.read_text(), re.M)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.mark.parametrize(
    ("driver", "args", "wanted", "ready", "why"),
    [
        (None, [], CPU, ".ready", "there is no NVIDIA driver; GPU=0 or GPU=1 decides"),
        *((path, [], GPU, ".ready-gpu", f"root/{path}; GPU=0") for path in DRIVERS),
        (DRIVERS[0], ["GPU=0"], CPU, ".ready", "GPU=0 was given"),
        (DRIVERS[0], ["GPU="], GPU, ".ready-gpu", f"root/{DRIVERS[0]}; GPU=0"),
        (None, ["GPU=1"], GPU, ".ready-gpu", "GPU=1 was given"),
    ],
)
def test_what_would_be_installed(checkout, driver, args, wanted, ready, why):
    if driver:
        checkout.add_driver(driver)
    said = checkout.make("--dry-run", "train", *args)
    assert re.findall(r"pip install .*'(.*)'", said) == [wanted]
    assert re.findall(r"touch \.venv/(.*)", said) == [ready]
    with_or_without = "with" if wanted == GPU else "without"
    (line,) = re.findall('echo "(Installing .*)"', said)
    start = f"Installing TensorFlow {with_or_without} CUDA's libraries, as "
    assert line.startswith(start)
    assert why in line


@pytest.mark.parametrize(
    "target", "test test-slow parity-report screenshots lint format".split()
)
def test_all_that_runs_something_installs_it(checkout, target):
    checkout.add_driver(DRIVERS[0])
    assert f"'{GPU}'" in checkout.make("--dry-run", target)


def test_the_environment_decides_as_well(checkout):
    said = checkout.make("lint", GPU="1")
    assert "as GPU=1 was given" in said
    assert checkout.installed() == [GPU]


def test_anything_else_is_an_error(checkout):
    said = checkout.make("lint", "GPU=yes", code=2)
    assert "Received GPU=yes; expected GPU=1 for TensorFlow with CUDA's" in said
    assert checkout.log.read_text() == ""


def test_a_change_of_mind(checkout):
    def installed(*args):
        checkout.make("lint", *args)
        return checkout.installed()

    assert installed() == [CPU]
    assert installed() == []
    checkout.add_driver(DRIVERS[0])
    assert installed() == [GPU]
    assert installed() == []
    # What pip has installed stays.
    assert installed("GPU=0") == []
    # Newer than what is ready.
    for ready in (".ready", ".ready-gpu"):
        os.utime(checkout.folder / ".venv" / ready, (0, 0))
    assert installed("GPU=0") == [CPU]
    assert installed() == [GPU]
    assert installed("GPU=1") == []


@pytest.mark.parametrize(
    ("args", "hides"), [([], "2"), (["GPU=1"], "2"), (["GPU=0"], "-1")]
)
def test_what_is_not_wanted_is_hidden(checkout, args, hides):
    checkout.make("lint", *args, CUDA_VISIBLE_DEVICES="2")
    *_, last = checkout.log.read_text().splitlines()
    assert last == f"CUDA_VISIBLE_DEVICES={hides} .venv/bin/ruff format --check ."


def test_the_extra_asks_for_the_same_tensorflow(monkeypatch):
    asked = {}
    monkeypatch.setattr(setuptools, "setup", asked.update)
    monkeypatch.chdir(FOLDER)
    exec((FOLDER / "setup.py").read_text(), {"__file__": str(FOLDER / "setup.py")})
    (core,) = [r for r in asked["install_requires"] if re.match("tensorflow[<>=]", r)]
    (extra,) = asked["extras_require"]["gpu"]
    assert extra == core.replace("tensorflow", "tensorflow[and-cuda]")
