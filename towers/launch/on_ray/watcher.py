"""A process that ends what a host has started once the worker that started it has gone.

With a worker, Ray kills the worker's children, but not what these have started: so
whoever watches must not be a child.
"""

import subprocess
import sys

from towers.processes import strays

_START = (
    "import subprocess, sys\n"
    "subprocess.Popen([sys.executable, '-P', *sys.argv[1:]], start_new_session=True)"
)


class Watcher:
    """It runs until it is stopped, or this process has gone."""

    def __init__(self, marked: strays.Strays):
        """Starts it.

        Args:
            marked: What it is to end, at once.
        """
        mark = marked.mark[strays.LAUNCH]
        self._parent = subprocess.Popen(
            [sys.executable, "-IS", "-c", _START, strays.__file__, mark, "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._parent.wait()

    def stop(self) -> None:
        """Has it end them now, and waits for it."""
        self._parent.communicate()  # it has its parent's pipes
