"""What runs on a node of Ray's cluster for a host that comes and goes."""

import os
import queue
import sys
from collections.abc import Mapping, Sequence

import ray

from towers.launch.host import Host
from towers.launch.on_ray.watcher import Watcher
from towers.processes.strays import Strays

# For what a host has started to end after it.
_LAST_WORDS_S = 1.0


@ray.remote(max_restarts=0, max_concurrency=3)
class HostActor:
    """Starts a process for the host: signals reach the main thread, which is Ray's."""

    def start(
        self,
        number: int,
        command: Sequence[str],
        folder: str | None,
        environ: Mapping[str, str],
    ) -> tuple[int, str]:
        """Starts it.

        Args:
            number: Its number among the hosts.
            command: What it runs; this Python takes the place of "python".
            folder: Where, if that is there; `None` for Ray's folder.
            environ: What to add to the environment.

        Returns:
            The number of its process, and what Ray calls its node.

        Raises:
            ValueError: It cannot be started.
        """
        self._strays, self._ended = Strays(), queue.SimpleQueue()
        # Where Ray ends this process, nobody else ends the host.
        self._watcher = Watcher(self._strays)
        if folder is not None and os.path.isdir(folder):
            os.chdir(folder)
        first, *others = command
        command = [sys.executable if first == "python" else first, *others]
        environ = {**os.environ, **environ, **self._strays.mark}
        self._host = Host(number, command, environ, None, self._ended.put)
        return self._host.pid, ray.get_runtime_context().get_node_id()

    def wait(self) -> tuple[int, str]:
        """Returns its exit code and how it has ended, once it has."""
        self._ended.get()
        self._strays.end(_LAST_WORDS_S)
        self._watcher.stop()
        return self._host.code, self._host.how

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        self._host.signal(number)
