"""What a queue remembers: the runs that are finished, and how to find those that run.

It is one file, replaced as a whole, so a queue that is killed loses nothing.

It has only what is finished: a run's own checkpoint says how far it is. A run whose end
was not written starts again, and finds nothing left to train.
"""

import contextlib
import os
from collections.abc import Iterator

from towers.elastic import requests
from towers.processes.strays import Strays
from towers.program import locks, small_file, whole_file
from towers.program.voice import say, warn
from towers.queue.runs import Run

FILE = "queue.json"
MARK = "TOWERS_QUEUE"
"""The variable in the environment of what a queue starts; see `Strays`."""
SAVE_S = 120.0
"""Seconds in which runs may save that have no queue any more; then they are killed."""


class Record:
    """The record of a queue, in its folder."""

    def __init__(self, queue_dir: str):
        """Reads what an earlier queue has left."""
        self._path = os.path.join(queue_dir, FILE)
        self._finished: dict[str, str] = {}
        self._pruned: dict[str, list[str]] = {}
        self._mark: str | None = None
        try:
            found = small_file.read_json(self._path, dict)
            self._finished = {**found["finished"]}
            self._mark = found["mark"]
            self._pruned = {**found.get("pruned", {})}
        except FileNotFoundError:
            pass
        except (ValueError, LookupError, TypeError) as error:
            warn(
                f"{self._path} cannot be read ({error}), so all runs start again; "
                "those that have ended find nothing left to train."
            )

    def is_finished(self, run: Run) -> bool:
        """Tells whether a run has ended well, with the flags that it has now."""
        there = os.path.exists(os.path.join(run.model_dir, "summary.json"))
        return there and self._finished.get(run.model_dir) == run.settings.as_text()

    def is_pruned(self, run: Run, scheduler: str | None) -> bool:
        """Tells whether this scheduler has stopped a run with the flags it has now."""
        return self._pruned.get(run.model_dir) == [run.settings.as_text(), scheduler]

    def finish(self, run: Run) -> None:
        """Notes that a run has ended well; says so if that cannot be written."""
        self._finished[run.model_dir] = run.settings.as_text()
        self._note(run)

    def prune(self, run: Run, scheduler: str) -> None:
        """Notes that a scheduler has stopped a run."""
        self._pruned[run.model_dir] = [run.settings.as_text(), scheduler]
        self._note(run)

    def _note(self, run):
        try:
            self._write()
        except OSError as error:
            warn(
                f"{self._path} cannot be written ({error.strerror}), so {run.name} may "
                "start again with the next queue, and finds nothing left to train."
            )

    def begin(self, strays: Strays) -> None:
        """Waits for what an earlier queue has left running, and notes what now runs.

        Args:
            strays: What this queue will start.
        """
        if self._mark is not None:
            left = Strays(self._mark, MARK)
            if left.processes():
                say(
                    "The runs of a queue that was killed still save; waiting for up to "
                    f"{SAVE_S:g} s until they end."
                )
                left.end(SAVE_S)
        (self._mark,) = strays.mark.values()
        whole_file.remove_unfinished(self._path)
        self._write()

    def _write(self):
        content = {
            "mark": self._mark,
            "finished": self._finished,
            "pruned": self._pruned,
        }
        whole_file.write_json(self._path, content)


@contextlib.contextmanager
def alone(queue_dir: str) -> Iterator[None]:
    """Inside, no other queue uses the folder, which is made.

    Raises:
        ValueError: Another one does.
    """
    os.makedirs(queue_dir, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.taken(os.path.join(queue_dir, requests.LOCK)))
        except BlockingIOError as error:
            raise ValueError(
                f"Another queue runs in {queue_dir}; expected one at a time, so wait "
                "for its end, or choose another --queue_dir."
            ) from error
        yield
