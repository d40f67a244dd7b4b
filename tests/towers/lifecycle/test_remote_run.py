"""A run at an address: what a store has after each thing that may happen."""

import itertools
import os

import pytest

from towers.lifecycle import remote_run
from towers.lifecycle.remote_run import RemoteRun
from towers.program import object_store

OLD, NEW = {"variables.data": b"old", "about": b"1"}, {"variables.data": b"new"}


class Killed(BaseException):
    """Stands for the end of a process."""


class Dies:
    """A file system that does so many things more, and then nothing."""

    def __init__(self, system, count):
        self._system, self._count = system, itertools.count(-count)

    def __getattr__(self, name):
        if name in ("put_file", "pipe_file", "rm_file") and next(self._count) >= 0:
            raise Killed
        return getattr(self._system, name)


@pytest.fixture
def address(request):
    address = f"memory://{request.node.name.partition('[')[0]}"
    yield address
    system = object_store.file_system(address)
    if system.exists(address):
        system.rm(address, recursive=True)


def names(address):
    system = object_store.file_system(address)
    root = f"{object_store.without_scheme(address)}/"
    return {name.removeprefix(root) for name in system.find(address)}


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def checkpoint(name, files):
    return {f"checkpoints/{name}/{file}": content for file, content in files.items()}


def read(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def fetch(address, folder):
    folder.mkdir()
    RemoteRun(address, str(folder)).fetch()
    return read(folder)


def checkpoints_in(files):
    found = {}
    for path, content in files.items():
        if path.startswith("checkpoints/"):
            _, name, file = path.split("/")
            found.setdefault(name, {})[file] = content
    return found


def test_what_is_stored_comes_back(address, tmp_path):
    files = checkpoint("ckpt-1-0", OLD) | {"log.csv": b"1", "train/events": b"2"}
    write(tmp_path / "a", files)
    RemoteRun(address, str(tmp_path / "a")).store()
    assert fetch(address, tmp_path / "b") == files


def test_only_what_has_changed_is_stored(address, tmp_path, monkeypatch):
    write(tmp_path, checkpoint("ckpt-1-0", OLD) | {"log.csv": b"1", "gone": b"2"})
    run = RemoteRun(address, str(tmp_path))
    run.store()
    (tmp_path / "gone").unlink()
    write(tmp_path, {"log.csv": b"longer"})
    stored = []
    monkeypatch.setattr(run, "_put", stored.append)
    run.store()
    assert stored == [{"log.csv": "log.csv"}, {}]
    assert names(address) == {
        "checkpoints/ckpt-1-0.1/about",
        "checkpoints/ckpt-1-0.1/variables.data",
        "checkpoints/ckpt-1-0.1/whole",
        "log.csv",
    }


def test_what_somebody_has_removed_is_stored_again(address, tmp_path):
    files = checkpoint("ckpt-1-0", OLD) | {"log.csv": b"1"}
    write(tmp_path / "a", files)
    run = RemoteRun(address, str(tmp_path / "a"))
    run.store()
    for name in ("log.csv", "checkpoints/ckpt-1-0.1/about"):
        object_store.file_system(address).rm_file(f"{address}/{name}")
    run.store()
    assert fetch(address, tmp_path / "b") == files


def test_what_is_of_this_machine_stays_there(address, tmp_path):
    mine = {
        **{"lock": b"", "checkpoints/lock": b"", "resize.json": b"{}"},
        **{"checkpoints/.unfinished/variables": b"", "log.csv.7.unfinished": b""},
        "checkpoints/ckpt-1-0.replaced/variables": b"",
    }
    write(tmp_path / "a", mine | {"log.csv": b""})
    RemoteRun(address, str(tmp_path / "a")).store()
    assert names(address) == {"log.csv"}
    # Fetching leaves it alone, and removes what the store does not have.
    write(tmp_path / "b", {"lock": b"", "output.log": b"", "old.csv": b""})
    RemoteRun(address, str(tmp_path / "b")).fetch()
    assert read(tmp_path / "b").keys() == {"lock", "output.log", "log.csv"}


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_killed_process_leaves_a_whole_checkpoint(address, tmp_path, is_replaced):
    """It is killed before each thing that it does to the store, one after another."""
    for count in itertools.count():
        folder, at = tmp_path / f"{count}", f"{address}/{count}"
        write(folder, checkpoint("ckpt-1-0", OLD) | {"log.csv": b"1"})
        run = RemoteRun(at, str(folder))
        run.store()
        for file in (folder / "checkpoints/ckpt-1-0").iterdir():
            file.unlink()
        name = "ckpt-1-0" if is_replaced else "ckpt-2-0"
        write(folder, checkpoint(name, NEW) | {"log.csv": b"12"})
        run._system = Dies(run._system, count)
        try:
            run.store()
            is_killed = False
        except Killed:
            is_killed = True
        found = checkpoints_in(fetch(at, tmp_path / f"{count} after"))
        if is_replaced:
            assert found in ({name: OLD}, {name: NEW})
        else:
            assert found in (
                *({"ckpt-1-0": OLD}, {name: NEW}),
                {"ckpt-1-0": OLD, name: NEW},
            )
        # The next run removes what is left.
        again = RemoteRun(at, str(tmp_path / f"{count} after"))
        again.fetch()
        again.store()
        kept = fetch(at, tmp_path / f"{count} again")
        assert checkpoints_in(kept) == found
        wholes = [name for name in names(at) if name.endswith("/whole")]
        assert len(wholes) == len(found)
        assert len(names(at)) == len(kept) + len(wholes)
        if not is_killed:
            assert found == {name: NEW}
            break
    assert count == 6


def test_another_run_is_said(address, tmp_path):
    write(tmp_path / "a", checkpoint("ckpt-1-0", OLD))
    write(tmp_path / "b", checkpoint("ckpt-2-0", NEW))
    one, other = (RemoteRun(address, str(tmp_path / name)) for name in "ab")
    other.store()
    with pytest.raises(object_store.StoreError, match="another run has stored"):
        one.store()
    assert checkpoints_in(fetch(address, tmp_path / "c")) == {"ckpt-2-0": NEW}


def test_other_peoples_data_are_left_alone(address, tmp_path):
    system = object_store.file_system(address)
    for name in ("pictures/a.png", "log.csv"):
        system.pipe_file(f"{address}/{name}", b"")
    run = RemoteRun(address, str(tmp_path))
    run.fetch()
    assert os.listdir(tmp_path) == ["log.csv"]
    (tmp_path / "log.csv").unlink()
    run.store()
    assert names(address) == {"pictures/a.png"}


def test_a_name_leads_nowhere_else(address, tmp_path):
    system = object_store.file_system(address)
    system.store[f"{object_store.without_scheme(address)}/train/../../x"] = system.open(
        f"{address}/train/x", "wb"
    )
    with pytest.raises(object_store.StoreError, match="which is none of a run"):
        RemoteRun(address, str(tmp_path)).fetch()


def test_it_is_stored_whatever_ends_it(address, tmp_path):
    folder = str(tmp_path)
    with pytest.raises(ZeroDivisionError), remote_run.kept(address, folder):
        write(tmp_path, {"log.csv": b"1"})
        remote_run.store(folder)
        assert names(address) == {"log.csv"}
        write(tmp_path, {"flags.txt": b"2"})
        raise ZeroDivisionError
    assert names(address) == {"log.csv", "flags.txt"}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("s3://bucket/run/", "/cache/towers/s3/bucket/run"),
        ("/a/b/../c", "/a/c"),
    ],
)
def test_where_a_run_works(address, expected, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert object_store.working_folder(address) == expected


@pytest.mark.parametrize("address", ["s3://bucket/../run", "s3://", "s3://a//b"])
def test_an_address_leads_nowhere_else(address):
    with pytest.raises(ValueError, match="without empty parts"):
        object_store.working_folder(address)
