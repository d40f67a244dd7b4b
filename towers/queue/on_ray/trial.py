"""What runs on a node of Ray's cluster for a run: towers.train, in a process.

Ray Tune has ways of its own to stop, to save and to print. So it only chooses where and
when; the table, the record and the exit code are the queue's.
"""

import dataclasses
import os
import queue
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import tune

from towers.launch.on_ray.watcher import Watcher
from towers.processes.strays import Strays
from towers.queue.process import Process

# For what a run has started to end after it.
_LAST_WORDS_S = 1.0


@dataclasses.dataclass(frozen=True)
class TrialWork:
    """A run, as a node gets it.

    Attributes:
        number: Its number in the queue.
        flags: Those of towers.train.
        log: The file of its output.
        environ: What to add to the environment.
    """

    number: int
    flags: Sequence[str]
    log: str
    environ: Mapping[str, str]


def run(work: TrialWork, orders: Any, news: Any) -> None:
    """Runs it to its end.

    Args:
        work: What to run.
        orders: The desk where the queue leaves "begin" first, and "stop" for each
            signal.
        news: The desk where the queue hears of it.
    """

    def tell(*message):
        ray.get(news.tell.remote(*message))

    known = ray.get(orders.after.remote(0))
    if ("stop",) in known:
        return
    strays = Strays()
    # Where Ray ends this process, nobody else ends the run.
    watcher = Watcher(strays)
    events: queue.SimpleQueue = queue.SimpleQueue()
    try:
        process = Process(
            work.flags,
            work.log,
            {**os.environ, **work.environ, **strays.mark},
            told=lambda process, told: events.put(told),
            ended=lambda process: events.put(None),
        )
        tell("began", work.number, ray.util.get_node_ip_address())
        listens = threading.Thread(
            target=_listen, args=(process, orders, len(known)), daemon=True
        )
        listens.start()
        while (told := events.get()) is not None:
            if "progress" in told:
                tell("told", work.number, told["progress"])
            else:
                # Of this thread alone, Ray takes it.
                tune.report(told["metrics"])
        reason = process.reason if process.code else ""
        tell("ended", work.number, process.exit_code, reason)
    finally:
        strays.end(_LAST_WORDS_S)
        watcher.stop()
    # Not as an error, of which Ray would print a traceback.
    tune.report({"exit_code": process.exit_code})


def _listen(process, orders, seen):
    """Passes on what asks for the end; whoever insists kills the run."""
    stops = 0
    while process.code is None:
        messages = ray.get(orders.after.remote(seen))
        seen += len(messages)
        for _ in messages:
            stops += 1
            process.signal(signal.SIGTERM if stops < 3 else signal.SIGKILL)
            process.signal(signal.SIGCONT)
