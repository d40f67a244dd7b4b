"""Files of a cache: whole or not there, whatever is killed."""

import signal
import subprocess
import sys

import pytest

from tests.limits import HANG_S
from towers.input_pipeline import checked_files

_ENDS = (".a", ".b")

_KILLED = """
import os, signal, sys
from towers.input_pipeline import checked_files
with checked_files.written(sys.argv[1], (".a", ".b")) as new:
    with open(new + ".a", "w") as file:
        file.write("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _write(base, content):
    with checked_files.written(base, _ENDS) as new:
        for end in _ENDS:
            with open(new + end, "wb") as file:
                file.write(content)


def test_what_killed_processes_leave_is_removed(tmp_path):
    base = f"{tmp_path}/x"
    for _ in range(3):
        command = [sys.executable, "-c", _KILLED, base]
        done = subprocess.run(command, timeout=HANG_S, check=False)
        assert done.returncode == -signal.SIGKILL
    assert len([*tmp_path.iterdir()]) == 3
    assert not checked_files.are_good(base, _ENDS)
    assert not [*tmp_path.iterdir()]


def test_what_another_one_writes_stays(tmp_path):
    base = f"{tmp_path}/x"
    with checked_files.written(base, _ENDS) as new:
        for end in _ENDS:
            with open(new + end, "wb") as file:
                file.write(b"content")
        assert not checked_files.are_good(base, _ENDS)
    assert checked_files.are_good(base, _ENDS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.a", "x.b", "x.sums"]


def test_each_block_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(checked_files, "_BLOCK", 10)
    base = f"{tmp_path}/x"
    for size in 0, 9, 10, 11, 25:
        _write(base, bytes(size))
        assert checked_files.are_good(base, _ENDS)
    for place in 0, 9, 10, 24:
        for end in _ENDS:
            _write(base, bytes(25))
            with open(base + end, "r+b") as file:
                file.seek(place)
                file.write(b"1")
            assert not checked_files.are_good(base, _ENDS)


def test_a_failed_write_changes_nothing(tmp_path):
    base = f"{tmp_path}/x"
    _write(base, b"before")
    with pytest.raises(KeyboardInterrupt), checked_files.written(base, _ENDS):
        raise KeyboardInterrupt
    assert checked_files.are_good(base, _ENDS)
    assert len([*tmp_path.iterdir()]) == 3
