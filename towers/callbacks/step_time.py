"""Says what a step's time goes to."""

import keras

from towers.phases import Phases, Totals


class StepTime(keras.callbacks.Callback):
    """Reads the phases of a model on towers; the builder has measured them.

    They are means over steps. Keras's own part of a step, and that of other callbacks,
    is not among them.
    """

    def __init__(self, warmup_steps: int = 10):
        """Initializes the callback.

        Args:
            warmup_steps: Steps at the beginning of the run that are not counted.
        """
        super().__init__()
        self._warmup_steps = warmup_steps
        self._steps = self._begun = 0
        self._phases: Phases | None = None

    def on_train_batch_begin(self, batch, logs=None):
        """Notes where the call begins."""
        self._begun = batch

    def on_train_batch_end(self, batch, logs=None):
        """Starts to count after the warm-up, or as another builder is chosen."""
        phases = self.model.builder.phases
        if self._steps < self._warmup_steps or phases is not self._phases:
            self._phases = phases
            self._start = self._told = phases.totals()
        self._steps += batch + 1 - self._begun

    def measured(self) -> dict[str, float]:
        """Returns milliseconds of a step since it was last called, by phase."""
        if self._phases is None:
            return {}
        now = self._phases.totals()
        found, self._told = now.since(self._told), now
        return {f"step_ms/{name}": ms for name, ms in _by_phase(found).items()}

    def text(self) -> str:
        """Says what a step of the run takes, and how long each tower computes."""
        found = self._phases and self._phases.totals().since(self._start)
        if not (found and found.steps):
            return "not measured"
        ms = _by_phase(found)
        towers = [f"{ms[f'tower_{k}']:,.1f}" for k in range(len(found.towers_s))]
        return (
            f"{ms['input']:,.1f} ms waiting for input, {ms['copy']:,.1f} copying to "
            f"towers, {ms['compute']:,.1f} computing (by tower: {', '.join(towers)}), "
            f"{ms['reduce']:,.1f} reducing and applying"
        )


def _by_phase(found: Totals) -> dict[str, float]:
    if not found.steps:
        return {}
    seconds = {
        "input": found.input_s,
        "copy": found.copy_s,
        "compute": found.compute_s,
        "reduce": found.reduce_s,
        **{f"tower_{k}": each for k, each in enumerate(found.towers_s)},
    }
    return {name: 1000 * each / found.steps for name, each in seconds.items()}
