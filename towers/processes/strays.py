"""Sees to it that what a program starts does not outlive it, even if that is killed.

The environment of each process has a mark, which whatever it starts inherits. Thus a
process is found also if its parent has gone, or it has a session of its own.

A program that was killed tells nobody, so a small process waits for a pipe to close,
and then ends whatever has the mark.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

import psutil

LAUNCH = "TOWERS_LAUNCH"
# For a process to be gone after SIGKILL.
_KILLED_S = 10.0


class Strays:
    """What a program starts, by the mark in its environment.

    Attributes:
        mark: What to add to the environment of a process.
    """

    def __init__(self, mark: str | None = None, name: str = LAUNCH):
        """Makes a new mark.

        Args:
            mark: Its value; `None` for one that nobody else has.
            name: Its variable. Those with different ones do not hide one another.
        """
        self._name, self._value = name, mark or f"{os.getpid()}-{secrets.token_hex(8)}"
        self.mark = {name: self._value}
        self._watcher: subprocess.Popen | None = None

    def processes(self) -> list[psutil.Process]:
        """Lists the processes that run."""
        return [each for each in psutil.process_iter() if _has(each, self.mark)]

    def signal(self, number: int) -> None:
        """Sends each a signal."""
        for each in self.processes():
            with contextlib.suppress(psutil.Error):  # it has gone
                each.send_signal(number)

    def end(self, seconds: float) -> None:
        """Waits for them to end by themselves, and kills the rest.

        Args:
            seconds: How long to wait.
        """
        limit = time.monotonic() + seconds
        # Not `psutil.wait_procs`, which would take a child's exit code from `Popen`.
        while self.processes():
            if time.monotonic() > limit + _KILLED_S:
                return  # the kernel holds it
            if time.monotonic() > limit:
                self.signal(signal.SIGKILL)
            time.sleep(0.02)

    def watch(self, seconds: float) -> None:
        """Has a process of its own end them all when this one has gone.

        Args:
            seconds: How long they may take after SIGTERM, before SIGKILL.
        """
        # A new process, as a fork of one with threads is not safe. Whoever reads this
        # one's output sees its end.
        self._watcher = subprocess.Popen(
            [sys.executable, "-P", __file__, self._value, str(seconds), self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def _has(process: psutil.Process, mark: Mapping[str, str]) -> bool:
    try:
        # Of a zombie nothing is left but its number.
        return (
            mark.items() <= process.environ().items()
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.Error, OSError):
        return False  # somebody else's, or gone


def _main(mark: str, seconds: str, name: str = LAUNCH) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()  # until nobody can write any more
    strays = Strays(mark, name)
    strays.signal(signal.SIGTERM)
    strays.end(float(seconds))


if __name__ == "__main__":
    _main(*sys.argv[1:])
