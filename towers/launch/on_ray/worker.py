"""What runs on each of Ray Train's workers: a host, as a process of its own.

TensorFlow cannot leave a cluster that it has joined, and signals reach the main thread
only, which is Ray's.
"""

import dataclasses
import json
import os
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray
import ray.train
from ray.train import collective

from towers.cluster import environment
from towers.hosts.group import ProcessPlace
from towers.launch.host import Host
from towers.launch.on_ray.watcher import Watcher
from towers.processes.strays import Strays
from towers.train.settings import REPORTS

# For what a host has started to end after it.
_LAST_WORDS_S = 1.0


@dataclasses.dataclass(frozen=True)
class HostWork:
    """What the launcher asks of each worker.

    Attributes:
        desk: Where messages are left.
        command: What the host runs.
        python: The launcher's Python; a worker takes its own instead.
        folder: The launcher's, where hosts run if it is there; `None` for Ray's.
        environ: What to add to the environment.
        model_dir: Where Ray looks for checkpoints; `None` if the launcher knows none.
    """

    desk: Any
    command: Sequence[str]
    python: str
    folder: str | None
    environ: dict[str, str]
    model_dir: str | None


class HostError(RuntimeError):
    """A host has failed: Ray is to start all workers anew, or to give up."""


def run(work: HostWork) -> None:
    """Runs the host of this worker to its end.

    Raises:
        HostError: One of the hosts has failed.
    """
    context = ray.train.get_context()
    is_first = context.get_world_rank() == 0
    place = environment.find({**os.environ, **work.environ})
    begun = ray.get(work.desk.next_generation.remote()) if is_first else None
    generation = collective.broadcast_from_rank_zero(begun)
    environ = {**os.environ, **work.environ}
    # Ray Train counts the generations, also of a single host.
    place = place or ProcessPlace(0, 1, "127.0.0.1:1", secrets.token_hex(16))
    place = dataclasses.replace(place, generation=generation)
    environ |= environment.variables(place)
    strays = Strays()
    watcher = Watcher(strays)
    try:
        _HostWorker(work, generation, environ | strays.mark).run()
    finally:
        strays.end(_LAST_WORDS_S)
        watcher.stop()


class _HostWorker:
    """A host, and the messages about it."""

    def __init__(self, work: HostWork, generation: int, environ: dict[str, str]):
        self._desk, self._generation = work.desk, generation
        self._model_dir = work.model_dir
        context = ray.train.get_context()
        self._rank, self._count = context.get_world_rank(), context.get_world_size()
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        if work.folder is not None and os.path.isdir(work.folder):
            os.chdir(work.folder)
        first, *others = work.command
        command = [sys.executable if first == work.python else first, *others]
        receive, send = os.pipe()
        try:
            self._host = Host(
                *(
                    self._rank,
                    command,
                    environ | {REPORTS: str(send)},
                    None,
                ),
                ended=lambda host: self._events.put(("ended", host)),
                pass_fds=[send],
            )
        finally:
            os.close(send)
        self._tell("began", generation, self._rank, self._count, self._host.pid)
        _thread(self._read, receive)
        _thread(self._listen)

    def _tell(self, *message):
        ray.get(self._desk.tell.remote(*message))

    def run(self) -> None:
        """Waits until all hosts have ended."""
        newest = None
        while True:
            # Ray takes seconds for one: of what has come meanwhile, it gets the last.
            if newest is not None and self._events.empty():
                self._report(newest)
                newest = None
            name, value = self._events.get()
            if name == "reported":
                newest = value
            elif name == "report" and self._rank:
                ray.train.report({})
            elif name == "ended":
                if newest is not None:
                    self._report(newest)
                    newest = None
                self._tell("ended", self._generation, self._rank, value.code, value.how)
            elif name == "over":
                if value is not None:
                    raise HostError(value)
                return

    def _report(self, said):
        """Has all workers report, as Ray wants it, what the first one has to tell."""
        self._tell("report", self._generation)
        path = said["checkpoint"] if self._model_dir else None
        ray.train.report(
            said["metrics"],
            checkpoint=ray.train.Checkpoint(path) if path else None,
            # It stays where it is, and is Towers' own.
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
            delete_local_checkpoint_after_upload=False,
        )

    def _read(self, receive):
        """Reads what the host says at the ends of its epochs."""
        with open(receive) as lines:
            for line in lines:
                told = json.loads(line)
                if self._rank == 0 and "metrics" in told:
                    self._events.put(("reported", told))

    def _listen(self):
        """Reads messages from the first one on, as some may be there already."""
        seen = 0
        while True:
            messages = ray.get(self._desk.after.remote(seen))
            seen += len(messages)
            for name, *values in messages:
                if name == "signal" and values[:2] == [self._generation, self._rank]:
                    self._host.signal(values[2])
                elif name == "report" and values == [self._generation]:
                    self._events.put((name, None))
                elif name == "over" and values[0] == self._generation:
                    self._events.put((name, values[1]))
                    return


def _thread(target: Callable, *args) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()
