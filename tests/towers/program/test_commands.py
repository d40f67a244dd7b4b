"""`towers COMMAND`: which program runs, and what it is like to mistype it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S
from towers import __main__ as commands

ROOT = Path(__file__).parents[3]


@pytest.fixture
def called(monkeypatch):
    """Calls `main` as a command does, and returns what is printed and the exit code."""

    def call(*command):
        monkeypatch.setattr(sys, "argv", ["towers", *command])
        try:
            return commands.main()
        except SystemExit as end:
            return end.code

    return call


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trian", "train"),
        ("find-batchsize", "find_batch_size"),
        ("towers.doctor", "doctor"),
        ("Report", "report"),
        ("frobnicate", None),
    ],
)
def test_an_unknown_command(called, name, meant):
    said = called(name, "--num_gpus=2")
    assert said.startswith(f"towers: Received the command {name}; expected one of ")
    assert said.endswith(f"service (did you mean {meant}?)." if meant else "service.")


def test_a_hyphen_is_an_underscore(called, capsys):
    assert called("find-batch-size", "--help") == 0
    assert "towers.find_batch_size" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [(), ("--help",), ("-h",), ("help",)])
def test_the_help_names_all_commands(called, capsys, flags):
    assert called(*flags) == 0
    lines = capsys.readouterr().out.splitlines()
    named = [
        line.split()[0] for line in lines if line.startswith("  ") and line[2:3] != " "
    ]
    assert named == list(commands.COMMANDS)
    assert max(map(len, lines)) <= 88


def python(code, *flags, cwd=None):
    return subprocess.run(
        [sys.executable, "-c", code, *flags],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        timeout=HANG_S,
    )


def test_only_a_program_imports_tensorflow():
    code = (
        "import sys; from towers.__main__ import main; main(); "
        "assert not {'tensorflow', 'keras', 'absl'} & {*sys.modules}"
    )
    done = python(code, "--help")
    assert (done.returncode, done.stderr) == (0, "")


PROGRAM = """
import sys, my_blocks
assert __name__ == "__main__" and sys.modules["__main__"].my_blocks is my_blocks
print(sys.argv[1:], my_blocks.NAME)
sys.exit(3)
"""


def test_a_program_runs_as_by_python_m(tmp_path):
    """It is `__main__`, has its own flags and exit code, and finds modules here."""
    (tmp_path / "my_program.py").write_text(PROGRAM)
    (tmp_path / "my_blocks.py").write_text("NAME = 'mine'")
    # As a console script, whose own folder is the first in the path, not this one.
    code = (
        "import sys; sys.path.remove(''); from towers import __main__ as commands; "
        "commands.COMMANDS['mine'] = 'my_program', ''; sys.exit(commands.main())"
    )
    done = python(code, "mine", "--a=b", "c", cwd=tmp_path)
    assert (done.stderr, done.returncode) == ("", 3)
    assert done.stdout == "['--a=b', 'c'] mine\n"
