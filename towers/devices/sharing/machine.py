"""What sharing needs to know of this machine: its processes, its clock, its folder."""

import os
import stat
import tempfile
import time
from collections.abc import Mapping

import psutil

from towers.devices.sharing.errors import RegistryError

FOLDER = "TOWERS_REGISTRY"

_MEMORY = "/dev/shm"
# Linux rounds the time of its start to seconds.
_SAME_S = 2.0


class SharedMachine:
    """This machine, as its processes see it."""

    def process(self) -> tuple[int, float]:
        """Returns this process's number, and when it began, as `began` does."""
        pid = os.getpid()
        return pid, _began(pid)

    def runs(self, pid: int, started: float) -> bool:
        """Tells whether a process still runs, and not another one with its number.

        Args:
            pid: Its number.
            started: When it began.
        """
        try:
            # Of a zombie nothing is left but its number.
            return (
                abs(_began(pid) - started) < _SAME_S
                and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            )
        except psutil.Error:
            return False  # gone, or somebody else's

    def now(self) -> float:
        """Returns the time, in seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)


def _began(pid):
    """When a process began, after the machine: the clock may have been set since."""
    # In this order, as psutil may keep the first for the second.
    machine = psutil.boot_time()
    return psutil.Process(pid).create_time() - machine


def usual_folder(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the folder of this machine and user in which runs meet, and makes it.

    Args:
        environ: The variables, of which `TOWERS_REGISTRY` may name another one.

    Raises:
        RegistryError: It cannot be made, or is not this user's.
    """
    if folder := environ.get(FOLDER):
        return folder
    in_memory = os.path.isdir(_MEMORY) and os.access(_MEMORY, os.W_OK)
    root = _MEMORY if in_memory else tempfile.gettempdir()
    folder = os.path.join(root, f"towers-{os.getuid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        raise RegistryError(
            f"Received no folder in which runs may meet, and {folder} cannot be made: "
            f"{error}; set {FOLDER} to another one of this machine."
        ) from error
    # Anybody may make folders there, also by this name.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RegistryError(
            f"Received {folder}, which belongs to somebody else; expected a folder of "
            f"this user's, so set {FOLDER} to another one of this machine."
        )
    return folder


def file_name() -> str:
    """Returns the name of the file of runs that see each other's processes.

    Two containers may have the same folder, and other numbers of processes: the runs of
    one would seem dead in the other.
    """
    try:
        return f"runs-{os.stat('/proc/self/ns/pid').st_ino}.json"
    except OSError:
        return "runs.json"
