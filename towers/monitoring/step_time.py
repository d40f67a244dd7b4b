"""Says what a step's time goes to.

The sentence, the split and the curves all come from here, so that they agree.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from towers.layers.variables import steps_done
from towers.loop.timers import StepTimers, Totals
from towers.model import fit_call
from towers.monitoring.steps import Calls
from towers.program.features import feature

# The parts of a step, in the order in which they come.
_WORDS = {
    "input": "waiting for input",
    "copy": "copying to towers",
    "compute": "computing",
    "reduce": "reducing and applying",
    "python": "in Python",
}
# With several hosts, these as well.
_OF_HOSTS = {
    "hosts": "waiting for other hosts",
    "network": "adding over hosts",
}


class Split(NamedTuple):
    """The time of some steps, in its parts.

    Attributes:
        totals: What the graph has measured of them.
        calls_s: Time inside the calls of training that made them.
        hosts: What all hosts have told, a `HostTotals` of each; empty with one host.
        index: Which of them this one is.
    """

    totals: Totals
    calls_s: float
    hosts: Sequence[Any] = ()
    index: int = 0

    def since(self, before: "Split") -> "Split":
        """Returns what has come in addition to an earlier split."""
        of_hosts = zip(self.hosts, before.hosts, strict=False)
        return Split(
            self.totals.since(before.totals),
            self.calls_s - before.calls_s,
            [now.since(then) for now, then in of_hosts],
            self.index,
        )

    @property
    def parts_ms(self) -> dict[str, float]:
        """Milliseconds of a step by part, which add up to the step; empty without one.

        The parts are "input", "copy", "compute", "reduce" and "python": what is left of
        the calls, in which Python calls the graph. With several hosts, "hosts" and
        "network" are no part of "reduce": waiting for the gradients of others, and
        adding them.
        """
        steps, *seconds = self.totals[:5]
        if not steps:
            return {}
        seconds = [max(each, 0.0) for each in seconds]
        seconds.append(max(self.calls_s - sum(seconds), 0.0))
        parts = {
            name: 1000 * each / steps
            for name, each in zip(_WORDS, seconds, strict=True)
        }
        return parts | self._of_hosts(parts["reduce"])

    def _of_hosts(self, reduce_ms):
        """What of adding and updating hosts take to add."""
        if not self.hosts:
            return {}
        mine, added = self.hosts[self.index], 0.0
        if mine.steps:
            added = min(1000 * mine.sum_s / mine.steps, reduce_ms)
        network = min(1000 * mine.network_s / mine.steps, added) if added else 0.0
        return {
            "reduce": reduce_ms - added,
            "hosts": added - network,
            "network": network,
        }

    @property
    def towers_ms(self) -> list[float]:
        """Milliseconds of a step in which each tower computes; empty without a step."""
        if not self.totals.steps:
            return []
        return [1000 * each / self.totals.steps for each in self.totals.towers_s]

    @property
    def stages_busy(self) -> list[float]:
        """The share of the towers' computing time in which each stage is at work."""
        totals = self.totals
        if not totals.compute_s:
            return []
        return [min(each / totals.compute_s, 1.0) for each in totals.stages_s]


@fit_call.changes_no_variable
class StepTime(keras.callbacks.Callback):
    """Measures the parts of a training step.

    The parts are means over steps. They leave out the warm-up, in which graphs are
    built, and whatever happens between calls: validation, saving and other callbacks.
    """

    def __init__(
        self,
        warmup_steps: int = 10,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Initializes the callback.

        Args:
            warmup_steps: Steps at the beginning of the run that are not counted.
            clock: Returns seconds.
        """
        super().__init__()
        self._warmup_steps = warmup_steps
        self._clock = clock
        self._forget()

    def on_train_begin(self, logs=None):
        """Begins a run.

        Raises:
            ValueError: The model has no towers.
        """
        check_towers(self.model)
        self._forget()

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock; `batch` is the first of the call's batches."""
        self._calls.begin(batch)

    def on_train_batch_end(self, batch, logs=None):
        """Starts to count after the warm-up, or as another builder is chosen."""
        call = self._calls.end(self.model, batch)
        self._calls_s += call.seconds
        timers = self.model.builder.timers
        if self._timers not in (None, timers):
            self._part = f"from step {steps_done(self.model):,} on"
        if not call.warm or timers is not self._timers:
            self._start(timers)

    @property
    def split(self) -> Split | None:
        """The time of the run's steps so far; `None` before the first."""
        if self._timers is None:
            return None
        return self._now().since(self._before)._replace(calls_s=self._calls_s)

    def _now(self):
        times = self._timers.hosts
        if times is None:
            return Split(self._timers.totals(), 0.0)
        return Split(self._timers.totals(), 0.0, times.totals(), times.index)

    def measured(self) -> dict[str, float]:
        """Returns milliseconds per step since the last call, by part and by tower.

        `waiting` is the fraction of that time in which the towers waited for input.
        """
        if self._timers is None:
            return {}
        now = self.split
        found = now.since(self._told) if self._told else now
        self._told = now
        parts, towers = found.parts_ms, found.towers_ms
        step_ms = sum(parts.values())
        return {
            **({"waiting": parts["input"] / step_ms} if step_ms else {}),
            **{f"step_ms/{name}": ms for name, ms in parts.items()},
            **{f"step_ms/tower_{k}": ms for k, ms in enumerate(towers)},
            **{f"stage_{k}/busy": busy for k, busy in enumerate(found.stages_busy)},
            **self._hosts_scalars(found.hosts),
        }

    def _hosts_scalars(self, found):
        if not found:
            return {}
        hosts = feature("monitoring.bottleneck.hosts")
        return hosts.scalars(self._timers.hosts, found)

    def hosts_text(self, rate: float | None) -> list[str]:
        """Says what each of several hosts did, a line each.

        `rate` is the number of examples per second of all, if it is known.
        """
        if not (self.split and self.split.hosts):
            return []
        hosts = feature("monitoring.bottleneck.hosts")
        return hosts.lines(self._timers.hosts, self.split.hosts, rate)

    def busy(self) -> list[float]:
        """Returns the share of the time in which each tower computes."""
        found = self.split
        if not (found and found.parts_ms and found.calls_s):
            return []
        return [min(each / found.calls_s, 1.0) for each in found.totals.towers_s]

    def text(self) -> str | None:
        """Describes the parts of a step and the computing time of each tower.

        Returns:
            A line about all steps after the warm-up, or `None` if there were none.
        """
        parts = self.split and self.split.parts_ms
        if not parts:
            return None
        words = {**_WORDS, **_OF_HOSTS}
        said = {name: f"{ms:,.1f} {words[name]}" for name, ms in parts.items()}
        towers = ", ".join(f"{ms:,.1f}" for ms in self.split.towers_ms)
        if busy := self.split.stages_busy:
            towers += f"; stages at work {', '.join(f'{each:.0%}' for each in busy)}"
        said["compute"] += f" (by tower: {towers})"
        return f"{sum(parts.values()):,.1f} ms: {', '.join(said.values())}"

    def _forget(self):
        self._calls = Calls(self._warmup_steps, self._clock)
        self._calls_s = 0.0
        self._timers: StepTimers | None = None
        self._part = "whole run"
        self._told: Split | None = None

    def _start(self, timers):
        """Counts from here on, by what a builder measures."""
        self._timers = timers
        self._before = self._now()
        self._calls_s, self._told = 0.0, None


def check_towers(model: keras.Model) -> None:
    """Checks that a model's steps are measured.

    Raises:
        ValueError: They are not.
    """
    if not hasattr(model, "builder"):
        raise ValueError(
            f"Received the model '{model.name}' without towers; expected one of "
            "multi_gpu_model, whose steps are measured."
        )
