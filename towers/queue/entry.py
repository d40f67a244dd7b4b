"""A run in the queue, and how far it is."""

import dataclasses
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from towers.program import small_file
from towers.queue.runs import Run
from towers.queue.slots import Device

WAITING, RUNNING, STOPPED = "waiting", "running", "stopped"
FINISHED, FAILED, PRUNED = "finished", "failed", "pruned"
# How runs end that are asked to: saved, before there was anything to save, or killed.
_ASKED = tuple(128 + n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL))


@dataclasses.dataclass(eq=False)
class Entry:
    """A run in the queue.

    Attributes:
        run: What it is.
        state: How far it is: one of the names above.
        devices: Where it runs, or has run.
        progress: Its last report: its step, loss, metrics and speed.
        metrics: What it has reported at the end of its last epoch.
        reason: Why it has failed.
    """

    run: Run
    state: str = WAITING
    devices: Sequence[Device | str] = ()
    progress: Mapping[str, float] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reason: str = ""

    def hear(self, report: Mapping[str, Any]) -> None:
        """Notes what the run reports while it trains."""
        self.progress = report.get("progress", self.progress)
        self.metrics = report.get("metrics", self.metrics)

    def end(self, code: int, reason: str, is_stopping: bool) -> None:
        """Notes how the run has ended.

        Args:
            code: Its exit code, as a shell has it.
            reason: Its last words.
            is_stopping: Whether all runs were asked to end.
        """
        if code == 0:
            self.state = FINISHED
        elif is_stopping and code in _ASKED:
            self.state = STOPPED
        else:
            self.state, self.reason = FAILED, reason

    def summary(self) -> dict[str, Any]:
        """Returns what the run has summed up; nothing if that cannot be read."""
        path = os.path.join(self.run.model_dir, "summary.json")
        try:
            return small_file.read_json(path, dict)
        except (FileNotFoundError, small_file.FileError):
            return {}
