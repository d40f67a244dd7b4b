"""Locks of folders, which are released when their process ends, however it ends.

A lock is a file that is locked with flock(2). Some file systems have no such locks:
Lustre that is mounted without them, or NFS without its daemon. There, a link beside the
file names the process that holds the lock. A link is created together with its target,
so no process reads an incomplete name.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from typing import IO

import psutil

from towers.program import forks, voice

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_BOOT = "/proc/sys/kernel/random/boot_id"
_PROCESSES = "/proc/self/ns/pid"
_CHECK_PAUSE_S = 0.1
_WAIT_PAUSE_S = 0.05
# The locks that this process holds.
_held: set[str] = set()


@contextlib.contextmanager
def made_folder(path: str) -> Iterator[None]:
    """Creates a folder and its missing parents; they exist inside the context.

    Folders that were created are removed at the end if they are empty.

    Args:
        path: The folder.

    Raises:
        OSError: The folder cannot be created.
    """
    with contextlib.ExitStack() as stack:
        for folder in _missing(path):
            os.makedirs(folder, exist_ok=True)
            stack.callback(_remove_if_empty, folder)
        yield


def _missing(folder: str) -> list[str]:
    """Returns the missing folders of a path, the outermost first."""
    if not folder or os.path.isdir(folder):
        return []
    return [*_missing(os.path.dirname(folder)), folder]


def _remove_if_empty(folder: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(folder)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Holds a lock inside the context; this process may take it again.

    See `taken` for arguments and errors.
    """
    if _place(path) in _held:
        yield
        return
    with taken(path):
        yield


@contextlib.contextmanager
def taken(path: str) -> Iterator[None]:
    """Holds a lock inside the context, against all other threads and processes.

    The file is removed at the end. Only its owner can open it, so that no other user
    can keep it locked.

    Args:
        path: The file of the lock, in an existing folder.

    Raises:
        BlockingIOError: Another process, or this one, holds the lock already.
        OSError: The file cannot be created.
    """
    path = _place(path)
    with contextlib.ExitStack() as stack:
        _take(path, stack)
        _held.add(path)
        stack.callback(_held.discard, path)
        yield


@contextlib.contextmanager
def waited_for(path: str, seconds: float, message: str = "") -> Iterator[None]:
    """Waits for a lock, and holds it inside the context.

    Args:
        path: See `taken`.
        seconds: Maximum time to wait for a process that holds the lock.
        message: A line to print once if another process holds the lock.

    Raises:
        TimeoutError: Another process still holds the lock: it hangs, or is not a
            process of Towers.
        OSError: The file cannot be created.
    """
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(taken(path))
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise TimeoutError(
                        f"another process has held the lock {path} for {seconds:g} s"
                    ) from None
            if message:
                voice.say(message)
                message = ""
            time.sleep(_WAIT_PAUSE_S)
        yield


def is_locked(path: str) -> bool:
    """Returns whether a process holds a lock."""
    if _place(path) in _held:
        return True
    try:
        with _open(path, os.O_RDONLY) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        # Another user's file cannot be opened. If its process was killed, the file
        # stays, but then no other user can take the lock either.
        return True
    except OSError as error:
        return error.errno in (*_NO_LOCKS, errno.ENOENT) and _is_taken(_link(path))
    return False


def _place(path: str) -> str:
    """Returns the canonical path of a lock, whose folder may be a link."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


def _take(path: str, stack: contextlib.ExitStack) -> None:
    while True:
        file = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock(file)
        except OSError as error:
            file.close()
            if error.errno not in _NO_LOCKS:
                raise
            _take_link(path, error, stack)
            stack.callback(_remove, path)
            return
        if _is_at(file, path):
            break
        file.close()  # The process that held the lock has removed the file.
    # A lock ends with the process that holds it, and not with its children.
    stack.callback(_release, forks.close_in_children(file), path)


def _open(path: str, flags: int) -> IO:
    """Opens the file of a lock, and lets only its owner open it from now on."""
    # Does not wait for a pipe with this name. Follows no link, which could lead to any
    # file, and that file would be removed at the end.
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a link", path) from error
    file = os.fdopen(descriptor, "r+b" if flags & os.O_RDWR else "rb", buffering=0)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", path)
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        with contextlib.suppress(OSError):  # Some file systems have no modes.
            os.fchmod(descriptor, 0o600)
    return file


def _lock(file: IO) -> None:
    # A process that only checks for a lock holds it for a moment.
    for again in (True, True, False):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not again:
                raise
            time.sleep(_CHECK_PAUSE_S)


def _is_at(file: IO, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:  # The file or its folder has been removed.
        return False


def _release(file: IO, path: str) -> None:
    # Removed while it is locked: later it may belong to another process. In a child,
    # the descriptor is closed.
    if _is_at(file, path):
        _remove(path)
    file.close()


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.remove(path)


# Locks on file systems without flock.


def _take_link(path: str, error: OSError, stack: contextlib.ExitStack) -> None:
    link = _link(path)
    for again in (True, False):
        try:
            os.symlink(_this_process(), link)
            break
        except FileExistsError as taken:
            if not (again and _remove_if_dead(link)):
                raise BlockingIOError(
                    errno.EAGAIN, f"{link} names the process that has it", path
                ) from taken
    stack.callback(_remove_own, link, os.getpid())
    voice.say(
        f"The file system of {os.path.dirname(path)} has no locks ({error.strerror}), "
        f"so {link} names the process that uses the folder."
    )


def _remove_own(link: str, pid: int) -> None:
    if os.getpid() == pid:
        _remove(link)


def _link(path: str) -> str:
    return f"{_place(path)}.holder"


def _this_process() -> str:
    """Returns a name of this process, unique over machines and containers."""
    pid = os.getpid()
    return " ".join([*_this_machine(), str(pid), _started(pid)])


def _this_machine() -> tuple[str, str, str]:
    try:
        with open(_BOOT) as file:
            boot = file.read().strip()
        processes = str(os.stat(_PROCESSES).st_ino)
    except OSError:
        boot = processes = "unknown"
    return socket.gethostname(), boot, processes


def _started(pid: int) -> str:
    return f"{psutil.Process(pid).create_time():.2f}"


def _is_taken(link: str) -> bool:
    try:
        holder = os.readlink(link)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return not _is_dead(holder)


def _is_dead(holder: str) -> bool:
    """Returns whether a process is known to have ended; False on other machines."""
    try:
        host, boot, processes, pid, started = holder.split(" ")
        here = _this_machine()
        if host != here[0]:
            return False
        if boot != here[1]:
            return True
        return processes == here[2] and _started(int(pid)) != started
    except psutil.NoSuchProcess:
        return True
    except (ValueError, psutil.Error):
        return False


def _remove_if_dead(link: str) -> bool:
    """Removes a link that a dead process has left; returns whether it is gone."""
    try:
        holder = os.readlink(link)
        if not _is_dead(holder):
            return False
        # One process at a time: another one's new link must not be removed.
        taking = f"{link}.taking"
        os.symlink(_this_process(), taking)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if os.readlink(link) == holder:
            os.remove(link)
        return True
    except OSError:
        return False
    finally:
        _remove(taking)


os.register_at_fork(after_in_child=_held.clear)
