"""One process has a lock, also in file systems that have no locks."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from tests.limits import HANG_S
from towers.program import locks

# Takes a lock, says so, and ends once it is told to.
HOLDER = """
import errno, fcntl, os, sys
from towers.program import locks

if sys.argv[2] != "0":
    def none(*_):
        raise OSError(int(sys.argv[2]), os.strerror(int(sys.argv[2])))

    fcntl.flock = none
with locks.taken(sys.argv[1]):
    print("taken", flush=True)
    sys.stdin.read()
"""
NO_LOCKS = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP]


@pytest.fixture
def holder(request, tmp_path):
    """Another process that has the lock."""

    def start(number=0):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path / "lock"), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        request.addfinalizer(process.kill)
        lines = iter(process.stdout.readline, "")
        assert any(line == "taken\n" for line in lines)
        return process

    return start


@pytest.fixture
def without_flock(monkeypatch):
    def fail_with(number):
        def none(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", none)

    return fail_with


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("number", [0, *NO_LOCKS])
def test_one_process_at_a_time(tmp_path, holder, without_flock, number):
    path = str(tmp_path / "lock")
    process = holder(number)
    if number:
        without_flock(number)
    with pytest.raises(BlockingIOError):
        locks.locked(path).__enter__()
    assert locks.is_locked(path)
    process.communicate("", timeout=HANG_S)
    assert not locks.is_locked(path)
    with locks.locked(path):
        assert locks.is_locked(path)
    assert not os.listdir(tmp_path)


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("number", [0, *NO_LOCKS])
def test_a_lock_ends_with_its_process_however_that_ends(
    tmp_path, holder, without_flock, number
):
    process = holder(number)
    process.send_signal(signal.SIGKILL)
    process.wait(HANG_S)
    if number:
        without_flock(number)
    path = str(tmp_path / "lock")
    assert not locks.is_locked(path)
    with locks.locked(path):
        assert locks.is_locked(path)


def test_a_file_system_without_locks_is_said(
    tmp_path, without_flock, capsys, monkeypatch
):
    without_flock(errno.ENOSYS)
    monkeypatch.setattr(locks, "_BOOT", str(tmp_path / "none"))
    with locks.locked(str(tmp_path / "lock")):
        assert " unknown unknown " in os.readlink(tmp_path / "lock.holder")
    said = capsys.readouterr()
    assert (
        f"The file system of {tmp_path} has no locks (Function not implemented), so "
        f"{tmp_path}/lock.holder names the process that uses the folder."
    ) in said.out + said.err


@pytest.mark.parametrize(
    ("field", "value", "taken"),
    [(0, "another-host", True), (1, "earlier-boot", False), (2, "1", True)],
)
def test_who_cannot_be_looked_at_may_live(tmp_path, without_flock, field, value, taken):
    without_flock(errno.ENOSYS)
    path = str(tmp_path / "lock")
    with locks.locked(path):
        fields = os.readlink(f"{path}.holder").split(" ")
    fields[field], fields[3] = value, "4194305"  # no process has that number
    os.symlink(" ".join(fields), f"{path}.holder")
    assert locks.is_locked(path) == taken


@pytest.mark.parametrize("holder", ["nobody", None])
def test_what_names_no_process_keeps_others_away(tmp_path, without_flock, holder):
    without_flock(errno.ENOSYS)
    path, link = str(tmp_path / "lock"), tmp_path / "lock.holder"
    link.symlink_to(holder) if holder else link.touch()
    assert locks.is_locked(path)
    with pytest.raises(BlockingIOError):
        locks.locked(path).__enter__()
    assert os.path.lexists(link)
    link.unlink()  # as another process may do meanwhile
    assert locks._remove_if_dead(str(link))


def test_a_process_takes_a_lock_again(tmp_path):
    path = str(tmp_path / "lock")
    with locks.locked(path):
        with locks.locked(path):
            pass
        assert locks.is_locked(path)
        with pytest.raises(BlockingIOError):
            locks.taken(path).__enter__()
    assert not locks.is_locked(path)


@pytest.mark.parametrize("is_there", [False, True])
def test_nobody_else_can_open_it(tmp_path, is_there):
    path = tmp_path / "lock"
    if is_there:
        path.touch(0o666)
        path.chmod(0o666)
    with locks.locked(str(path)):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(OSError, match="it is no regular file"):
        locks.locked(str(tmp_path / "lock")).__enter__()
    assert not locks.is_locked(str(tmp_path / "lock"))


def test_a_child_of_a_fork_does_not_keep_it(tmp_path):
    path = str(tmp_path / "lock")
    read, write = os.pipe()
    with locks.locked(path):
        if not (child := os.fork()):
            os.close(write)
            os.read(read, 1)  # until the parent has looked
            os._exit(0)
    os.close(read)
    try:
        assert not locks.is_locked(path)
        with locks.locked(path):
            pass
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_a_lock_is_waited_for(tmp_path, holder, monkeypatch):
    process, pauses = holder(), []

    def let_go(seconds):
        pauses.append(seconds)
        if not process.stdin.closed:
            process.communicate("", timeout=HANG_S)

    monkeypatch.setattr(locks.time, "sleep", let_go)
    with locks.waited_for(str(tmp_path / "lock"), 60, "Waiting."):
        pass
    assert pauses


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_in_its_place_leads_nowhere(tmp_path, is_there):
    other = tmp_path / "other"
    if is_there:
        other.write_text("of somebody")
        other.chmod(0o644)
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "lock"
    link.symlink_to(other)
    with pytest.raises(OSError, match="it is a link"), locks.taken(str(link)):
        pass
    assert link.is_symlink() and other.exists() == is_there
    assert not is_there or other.stat().st_mode & 0o777 == 0o644


def test_a_folder_that_is_a_link_has_one_lock(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with locks.taken(str(tmp_path / "run" / "lock")):
        assert locks.is_locked(str(tmp_path / "disk" / "lock"))
