"""A run in the queue, and how far it is."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from towers.queue.runs import Run
from towers.queue.slots import Device

WAITING, RUNNING, STOPPED = "waiting", "running", "stopped"
FINISHED, FAILED = "finished", "failed"


@dataclasses.dataclass(eq=False)
class Entry:
    """A run in the queue.

    Attributes:
        run: What it is.
        state: How far it is: one of the names above.
        devices: Where it runs, or has run.
        progress: What it has told last: its step, loss, metrics and speed.
        reason: Why it has failed.
    """

    run: Run
    state: str = WAITING
    devices: Sequence[Device] = ()
    progress: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reason: str = ""

    def summary(self) -> dict[str, Any]:
        """Returns what the run has summed up; nothing if that cannot be read."""
        path = os.path.join(self.run.model_dir, "summary.json")
        try:
            with open(path) as file:
                return json.load(file)
        except (OSError, ValueError):
            return {}
