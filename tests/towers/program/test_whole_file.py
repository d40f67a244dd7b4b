"""A file gets its name once it is whole, and the disk has it."""

import concurrent.futures
import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.limits import HANG_S
from towers.program import small_file, whole_file

KILLED = """
import os, signal, sys
from towers.program import whole_file

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(os, sys.argv[2], die)
whole_file.write_text(sys.argv[1], "after")
"""


@pytest.mark.parametrize("follows", [True, False])
def test_a_link_stays_only_where_it_is_followed(tmp_path, follows):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    with whole_file.opened(str(link), follows_link=follows) as file:
        file.write("after")
    assert link.is_symlink() == follows
    assert target.read_text() == ("after" if follows else "before")
    assert link.read_text() == "after"
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_threads_that_write_one_file_at_a_time_leave_the_last(tmp_path):
    path, opened, ended = tmp_path / "file", threading.Event(), threading.Event()

    def write():
        with whole_file.opened(str(path)) as file:
            file.write("first")
            opened.set()
            assert ended.wait(HANG_S)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(write)
        assert opened.wait(HANG_S)
        whole_file.write_text(str(path), "second")
        assert path.read_text() == "second"
        ended.set()
        first.result()
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_kill_before_the_name_leaves_what_was_there(tmp_path, call):
    path = tmp_path / "file"
    path.write_text("before")
    command = [sys.executable, "-c", KILLED, str(path), call]
    done = subprocess.run(command, check=False, timeout=HANG_S)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "before"


def test_what_killed_processes_have_left_is_removed(tmp_path):
    others = (
        tmp_path / "file",
        tmp_path / "file.unfinished",
        tmp_path / "f.1.unfinished",
    )
    for path in (*others, tmp_path / "file.12.unfinished"):
        path.write_text("text")
    (tmp_path / "file.3.unfinished").mkdir()
    whole_file.remove_unfinished(str(tmp_path / "file"))
    assert sorted(tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    path.write_text("before")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        whole_file.write_text(str(path), "after")
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_text() == "before"


def test_the_disk_has_the_file_before_the_name_and_then_the_folder(
    tmp_path, monkeypatch
):
    calls = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, _n=name, _c=call: (calls.append(_n), _c(*args))
        )
    whole_file.write_text(str(tmp_path / "file"), "text")
    assert calls == ["fsync", "replace", "fsync"]


def test_what_has_not_changed_is_not_written(tmp_path):
    path = tmp_path / "file"
    whole_file.write_text(str(path), "text\udcff")
    before = path.stat().st_ino
    whole_file.write_text(str(path), "text\udcff")
    assert path.stat().st_ino == before
    assert path.read_bytes() == b"text\xff"
    whole_file.write_text(str(path), "other")
    assert path.read_text() == "other"


def test_a_folder_that_cannot_be_flushed_is_no_error(tmp_path, monkeypatch):
    fsync = os.fsync

    def files_only(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    whole_file.write_text(str(tmp_path / "file"), "text")
    assert (tmp_path / "file").read_text() == "text"


def test_a_folder_that_cannot_be_read_is_not_taken_for_flushed(tmp_path):
    with pytest.raises(FileNotFoundError):
        whole_file.flush_all(str(tmp_path / "gone"))


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_what_has_the_unfinished_name_is_not_written_to(tmp_path, make):
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_text("of somebody")
    make(other, f"{path}.{threading.get_native_id()}.unfinished")
    whole_file.write_text(str(path), "after")
    assert path.read_text() == "after"
    assert other.read_text() == "of somebody"


@pytest.mark.parametrize("text", ["Größe", "/data/\udcfcber", "a\nb\\u00e9"])
def test_json_is_read_as_it_was_written(tmp_path, text):
    path = tmp_path / "a.json"
    whole_file.write_json(str(path), {"path": text})
    assert small_file.read_json(path, dict) == {"path": text}
    assert ("Größe" in text) == ("Größe" in path.read_text())
