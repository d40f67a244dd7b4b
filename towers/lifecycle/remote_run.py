"""Keeps the folder of a run at an address such as `s3://bucket/run`.

A run works in a folder of this machine, as always. The folder is fetched before, and
stored with each checkpoint and at the end. So all that writes files needs nothing new:
event files of TensorBoard, which are appended to, and models of Keras, too.

A store has no rename, so a checkpoint has another proof that it is whole. Its objects
lie below a name that is used once, `ckpt-EPOCH-BATCH.N`, and the object that is written
last is called `whole`. Only with this one are the others read. What is to go is removed
after all else is stored, and `whole` goes first. So a process that is killed leaves the
new checkpoint, or the one before, or both. Any other file is one object, which a store
replaces in one go.
"""

import contextlib
import os
import posixpath
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from towers.program import forks, object_store
from towers.program.voice import say, warn

# Beside files at the top, what is fetched; others may keep data there.
_FOLDERS = ("checkpoints", "train", "validation", "tokenizer")
# A file of a checkpoint, in a store and on a disk.
_OBJECT = re.compile(r"(checkpoints/ckpt-\d+-\d+)\.(\d+)/([^/]+)")
_FILE = re.compile(r"(checkpoints/ckpt-\d+-\d+)/([^/]+)")
_WHOLE = "whole"
# Locks, requests of `towers resize`, what is not whole yet, and the output that `towers
# launch` and `towers queue` write, also before the run begins.
_OF_THIS_MACHINE = re.compile(
    r"(.*/)?(lock[^/]*|resize(_answer)?\.json|[^/]*\.log"
    r"|[^/]*\.(unfinished|replaced)\b.*)"
)
_AT_ONCE = 8


class RemoteRun:
    """The folder of a run at an address, and a copy of it on this machine.

    Attributes:
        address: The address.
        folder: The copy.
    """

    def __init__(self, address: str, folder: str):
        """Reads and writes nothing yet.

        Raises:
            ValueError: The scheme is unknown, or its package is missing.
        """
        self.address, self.folder = address.rstrip("/"), folder
        self._system = object_store.file_system(address)
        self._lock = threading.Lock()
        # Of files that are stored as they are: the object, and size and time.
        self._objects: dict[str, str] = {}
        self._states: dict[str, tuple[int, int]] = {}
        # The objects that make a checkpoint whole, of this run.
        self._whole: set[str] = set()

    def fetch(self) -> None:
        """Makes the copy equal to what is stored.

        Raises:
            StoreError: The store cannot be read.
        """
        with self._lock, self._explained("read"):
            names = self._names()
            self._whole = _whole(names)
            newest: dict[str, int] = {}
            for name in self._whole:
                folder, number, _ = _OBJECT.fullmatch(name).groups()
                newest[folder] = max(int(number), newest.get(folder, 0))
            self._objects = {}
            for name in names - self._whole:
                if match := _OBJECT.fullmatch(name):
                    folder, number, file = match.groups()
                    if newest.get(folder) == int(number):
                        self._objects[f"{folder}/{file}"] = name
                elif "/" not in name or name.startswith(
                    tuple(f"{f}/" for f in _FOLDERS)
                ):
                    if not _OF_THIS_MACHINE.fullmatch(name):
                        self._objects[name] = name
            for path in self._files():
                os.remove(self._local(path))
            for path in self._objects:
                os.makedirs(os.path.dirname(self._local(path)), exist_ok=True)
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                [*pool.map(self._get, self._objects.values(), self._objects)]
            self._states = self._files()
            self._remove_empty_folders()

    def store(self) -> None:
        """Stores what has changed in the copy, and removes what it no longer has.

        Raises:
            StoreError: The store cannot be written to, or another run writes there.
        """
        with self._lock, self._explained("write"):
            names = self._names()
            if others := _whole(names) - self._whole:
                raise OSError(f"another run has stored {min(others)} meanwhile")
            files = self._files()
            changed = {
                path
                for path, state in files.items()
                # Somebody may have removed the object.
                if self._states.get(path) != state or self._objects[path] not in names
            }
            folders = {m[1] for m in map(_FILE.fullmatch, changed) if m}
            objects = {path: self._objects.get(path, path) for path in files}
            for folder in folders:
                number = _next_number(folder, names)
                for path in filter(_FILE.fullmatch, files):
                    if posixpath.dirname(path) == folder:
                        name = posixpath.basename(path)
                        objects[path] = f"{folder}.{number}/{name}"
            changed |= {p for p in files if objects[p] != self._objects.get(p)}
            self._put({p: objects[p] for p in changed if not _FILE.fullmatch(p)})
            self._put({p: objects[p] for p in changed if _FILE.fullmatch(p)})
            whole = {
                f"{posixpath.dirname(objects[path])}/{_WHOLE}"
                for path in filter(_FILE.fullmatch, files)
            }
            for name in sorted(whole - names):
                self._whole.add(name)
                self._system.pipe_file(self._remote(name), b"")
            # What was left out of the copy, and what a killed process has left.
            ours = {*self._objects.values()} | {*filter(_OBJECT.fullmatch, names)}
            gone = (ours & names) - {*objects.values()} - whole
            for name in sorted(gone, key=lambda name: name not in self._whole):
                self._system.rm_file(self._remote(name))
            self._whole, self._objects, self._states = whole, objects, files

    def _put(self, objects: dict[str, str]) -> None:
        locals_ = map(self._local, objects)
        remotes = map(self._remote, objects.values())
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            [*pool.map(self._system.put_file, locals_, remotes)]

    def _get(self, name: str, path: str) -> None:
        self._system.get_file(self._remote(name), self._local(path))

    def _remote(self, name: str) -> str:
        return f"{self.address}/{name}"

    def _local(self, path: str) -> str:
        return os.path.join(self.folder, path)

    def _names(self) -> set[str]:
        """Lists the objects of the run, by their names below its address."""
        self._system.invalidate_cache()
        root = object_store.without_scheme(self.address) + "/"
        names = {path.removeprefix(root) for path in self._system.find(self.address)}
        names = {name for name in names if not name.endswith("/")}
        # A store takes any name, and a file of this machine is made of it.
        for name in names:
            if {"", ".", ".."} & {*name.split("/")}:
                raise OSError(f"it has the name {name!r}, which is none of a run")
        return names

    def _files(self) -> dict[str, tuple[int, int]]:
        """Returns the files of the copy that are to be stored, with size and time."""
        files = {}
        for parent, _, names in os.walk(self.folder):
            for name in names:
                local = os.path.join(parent, name)
                path = os.path.relpath(local, self.folder).replace(os.sep, "/")
                if not _OF_THIS_MACHINE.fullmatch(path):
                    # It may go meanwhile.
                    with contextlib.suppress(FileNotFoundError):
                        stat = os.stat(local)
                        files[path] = stat.st_size, stat.st_mtime_ns
        return files

    def _remove_empty_folders(self) -> None:
        for parent, _, _ in os.walk(self.folder, topdown=False):
            if parent != self.folder and not os.listdir(parent):
                os.rmdir(parent)

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Makes an `OSError` of any error of a store, which has errors of its own."""
        try:
            yield
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise object_store.StoreError(
                f"Cannot {what} {self.address}: {reason}."
            ) from error


def _whole(names: Iterable[str]) -> set[str]:
    return {
        name
        for name in names
        if (match := _OBJECT.fullmatch(name)) and match[3] == _WHOLE
    }


def _next_number(folder: str, names: Iterable[str]) -> int:
    matches = map(_OBJECT.fullmatch, names)
    return 1 + max((int(m[2]) for m in matches if m and m[1] == folder), default=0)


_kept: dict[str, RemoteRun] = {}


@contextlib.contextmanager
def kept(address: str, folder: str) -> Iterator[None]:
    """Inside, a folder has what is stored at an address; it is stored at the end.

    Args:
        address: The address of a run.
        folder: The folder of this machine; nobody else writes there.

    Raises:
        StoreError: The store cannot be read or written to.
        ValueError: The scheme is unknown, or its package is missing.
    """
    say(f"The run is kept in {address}; it works in {folder}.")
    run = RemoteRun(address, folder)
    run.fetch()
    _kept[folder] = run
    try:
        yield
    except BaseException:
        # That is what has to be said.
        try:
            run.store()
        except object_store.StoreError as error:
            warn(f"The run is not stored as it ended: {error}")
        raise
    else:
        run.store()
        say(f"The run is stored in {address}.")
    finally:
        del _kept[folder]


def store(folder: str) -> None:
    """Stores a folder that is kept; does nothing for others.

    Raises:
        StoreError: The store cannot be written to.
    """
    if folder in _kept:
        _kept[folder].store()


def fetched(address: str) -> str:
    """Returns a copy of a run, which is removed when the process ends.

    Raises:
        ValueError: The store cannot be read, or its package is missing.
    """
    folder = tempfile.mkdtemp(prefix="towers-")
    forks.at_exit(shutil.rmtree, folder, ignore_errors=True)
    try:
        RemoteRun(address, folder).fetch()
    except object_store.StoreError as error:
        raise ValueError(str(error)) from error
    return folder
