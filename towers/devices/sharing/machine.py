"""Reads what sharing needs from this machine: processes, clock, folder."""

import os
import stat
import tempfile
import time
from collections.abc import Mapping

import psutil

from towers.devices.sharing.errors import RegistryError

FOLDER = "TOWERS_REGISTRY"

_MEMORY = "/dev/shm"
# Linux rounds its boot time to seconds.
_SAME_S = 2.0


class SharedMachine:
    """This machine, as its processes see it."""

    def process(self) -> tuple[int, float]:
        """Returns the number of this process, and its start time as in `_began`."""
        pid = os.getpid()
        return pid, _began(pid)

    def runs(self, pid: int, started: float) -> bool:
        """Returns whether a process still runs, and no other one has its number.

        Args:
            pid: The number of the process.
            started: The start time of the process, as in `_began`.
        """
        try:
            # Only the number of a zombie is left.
            return (
                abs(_began(pid) - started) < _SAME_S
                and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            )
        except psutil.Error:
            return False  # gone, or somebody else's

    def now(self) -> float:
        """Returns the time, in seconds since an arbitrary moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits for some seconds."""
        time.sleep(seconds)


def _began(pid):
    """Returns a process's start time, from boot on: the clock may be set meanwhile."""
    # In this order, as psutil may cache the first for the second.
    machine = psutil.boot_time()
    return psutil.Process(pid).create_time() - machine


def usual_folder(environ: Mapping[str, str] = os.environ) -> str:
    """Creates and returns the folder in which this user's runs meet on this machine.

    Args:
        environ: Environment variables; `TOWERS_REGISTRY` may name another folder.

    Raises:
        RegistryError: The folder cannot be created, or belongs to another user.
    """
    if folder := environ.get(FOLDER):
        return folder
    in_memory = os.path.isdir(_MEMORY) and os.access(_MEMORY, os.W_OK)
    root = _MEMORY if in_memory else tempfile.gettempdir()
    folder = os.path.join(root, f"towers-{os.getuid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        raise RegistryError(
            f"Received no folder in which runs may meet, and {folder} cannot be made: "
            f"{error}; set {FOLDER} to another one of this machine."
        ) from error
    # Any user may create folders there, also with this name.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise RegistryError(
            f"Received {folder}, which belongs to somebody else; expected a folder of "
            f"this user's, so set {FOLDER} to another one of this machine."
        )
    return folder


def file_name() -> str:
    """Returns the file name for runs that see each other's processes.

    Two containers may share the folder, but not the numbers of processes: the runs of
    one would seem dead in the other.
    """
    try:
        return f"runs-{os.stat('/proc/self/ns/pid').st_ino}.json"
    except OSError:
        return "runs.json"
