"""Says what a step's time goes to."""

import time
from collections.abc import Callable

import keras

from towers.phases import Phases, Totals

_PHASES = "input", "copy", "compute", "reduce"


class StepTime(keras.callbacks.Callback):
    """Reads the phases of a model on towers; the builder has measured them.

    They are means over steps. What is left of the time inside training calls is
    Python's, which calls the graph.
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
        self._steps = self._begun = 0
        self._begun_s = self._calls_s = 0.0
        self._phases: Phases | None = None

    def on_train_begin(self, logs=None):
        """Begins a run.

        Raises:
            ValueError: The model has no towers.
        """
        check_towers(self.model)

    def on_train_batch_begin(self, batch, logs=None):
        """Notes where the call begins."""
        self._begun, self._begun_s = batch, self._clock()

    def on_train_batch_end(self, batch, logs=None):
        """Starts to count after the warm-up, or as another builder is chosen."""
        phases = self.model.builder.phases
        self._calls_s += self._clock() - self._begun_s
        if self._steps < self._warmup_steps or phases is not self._phases:
            self._phases = phases
            self._start = self._told = phases.totals()
            self._calls_s = 0.0
        self._steps += batch + 1 - self._begun

    def measured(self) -> dict[str, float]:
        """Returns milliseconds of a step since it was last called, by phase."""
        if self._phases is None:
            return {}
        now = self._phases.totals()
        found, self._told = now.since(self._told), now
        return {f"step_ms/{name}": ms for name, ms in _by_phase(found).items()}

    def busy(self) -> list[float]:
        """Returns the share of the time in which each tower computes."""
        found = self._found()
        if not (found and self._calls_s):
            return []
        return [min(each / self._calls_s, 1.0) for each in found.towers_s]

    def text(self) -> str:
        """Says what a step of the run takes, and how long each tower computes."""
        found = self._found()
        if not (found and found.steps):
            return "not measured"
        ms = _by_phase(found)
        step_ms = 1000 * self._calls_s / found.steps
        left_ms = max(step_ms - sum(ms[name] for name in _PHASES), 0.0)
        towers = [f"{ms[f'tower_{k}']:,.1f}" for k in range(len(found.towers_s))]
        return (
            f"{step_ms:,.1f} ms: {ms['input']:,.1f} waiting for input, "
            f"{ms['copy']:,.1f} copying to towers, {ms['compute']:,.1f} computing (by "
            f"tower: {', '.join(towers)}), {ms['reduce']:,.1f} reducing and applying, "
            f"{left_ms:,.1f} in Python"
        )

    def _found(self) -> Totals | None:
        """What was measured of the run so far."""
        return self._phases and self._phases.totals().since(self._start)


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


def _by_phase(found: Totals) -> dict[str, float]:
    if not found.steps:
        return {}
    seconds = {
        **dict(zip(_PHASES, found[1:5], strict=True)),
        **{f"tower_{k}": each for k, each in enumerate(found.towers_s)},
    }
    return {name: 1000 * each / found.steps for name, each in seconds.items()}
