"""Shows how far a run is: a progress bar on a terminal, plain lines in a file."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

import keras

from towers.keras_adapter.models import batches_done
from towers.model import fit_call
from towers.monitoring.steps import Interval, TimeLeft
from towers.program import words
from towers.program.progress import Progress

# The most seconds between two lines.
_PAUSE_S = 60.0

# The most columns to use, and what Keras's bar takes of them: the bar itself, the time
# with " 59:59 999ms/step", and a value with " - ", ": " and ten characters.
_COLUMNS = 80
_BAR, _SHORTEST_BAR, _TIME, _VALUE = 20, 6, 18, 15
# What stands for a number of steps that is not known.
_MANY = 10**5


@fit_call.changes_no_variable
class Lines(keras.callbacks.Callback):
    """Writes a line every `log_steps` steps, every minute, and after each epoch.

    It prints Keras's logs and the time, and measures nothing else.
    """

    def __init__(
        self,
        log_steps: int = 100,
        stream: TextIO | None = None,
        last_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Initializes the callback.

        Args:
            log_steps: Steps between lines.
            stream: The stream to write to; standard output by default.
            last_step: The step at which the run ends, if not after its epochs.
            clock: Returns seconds.

        Raises:
            ValueError: If the number of steps is not positive.
        """
        super().__init__()
        self._interval = Interval(log_steps)
        self._stream = stream
        self._last_step = last_step
        self._clock = clock
        self._epoch = self._batches = 0
        self._is_stopped = False
        self._epoch_steps: int | None = None
        self._time, self._printed_s = TimeLeft(clock), clock()

    def on_train_begin(self, logs=None):
        """Continues the count of a resumed run."""
        self._interval.begin(self.model)
        self._time = TimeLeft(self._clock)
        self._printed_s = self._clock()

    def on_epoch_begin(self, epoch, logs=None):
        """Takes the number of the epoch."""
        self._epoch = epoch
        self._epoch_steps = self.params.get("steps") or self._epoch_steps

    def on_train_batch_end(self, batch, logs=None):
        """Prints a line if its time has come, but for the last step of an epoch."""
        batches = batches_done(self.model, batch)
        # The last call of an epoch may have fewer batches than are reported.
        self._batches = min(batches, self.params.get("steps") or batches)
        is_due = self._interval.is_over(self.model)
        self._time.count(self._interval.step)
        is_due = is_due or self._clock() - self._printed_s >= _PAUSE_S
        self._is_stopped = self.model.stop_training
        ends = self._batches == self._epoch_steps or self._is_stopped
        if is_due and not ends:
            self._print(self._step(), logs)

    def on_epoch_end(self, epoch, logs=None):
        """Prints the epoch's line."""
        steps = self.params.get("steps")
        whole = self._batches >= steps if steps else not self._is_stopped
        if whole:
            # Without a number of steps, the next epochs are as long as this one.
            self._epoch_steps = self._batches
        end = "done" if whole else "stopped"
        head = f"epoch {epoch + 1}/{self.params['epochs']} {end}"
        self._print(f"{head}, {self._step()}", logs)

    def _step(self):
        step, left = self._interval.step, self._steps_left()
        return f"step {step}" if left is None else f"step {step}/{step + left}"

    def _steps_left(self):
        """Returns the number of steps until the end of the run, if it is known."""
        left = None
        # Without a number of steps, an epoch may be longer than the one before.
        if self._epoch_steps is not None and self._batches <= self._epoch_steps:
            epochs = self.params["epochs"] - self._epoch
            left = epochs * self._epoch_steps - self._batches
        if self._last_step is not None:
            of_run = max(self._last_step - self._interval.step, 0)
            left = of_run if left is None else min(left, of_run)
        return left

    def _print(self, head, logs):
        parts = _figures(logs)
        parts.append(f"after {words.duration(self._time.elapsed_s)}")
        left = 0 if self.model.stop_training else self._steps_left()
        left_s = self._time.left_s(left) if left else None
        if left_s is not None:
            parts.append(f"{words.duration(max(left_s, 1))} left")
        line = words.wrapped(f"{head}: {', '.join(parts)}")
        print(line, file=self._stream or sys.stdout, flush=True)
        self._printed_s = self._clock()


def _figures(logs: Mapping[str, float]) -> list[str]:
    """Formats logs: the loss, the metrics, those of validation, and the speed."""
    values = {name: logs[name] for name in in_order(logs)}
    rate = values.pop("examples_per_sec", None)
    parts = [f"{name} {words.figure(value)}" for name, value in values.items()]
    return parts if rate is None else [*parts, words.rate(rate)]


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts names of logs: loss, metrics, val_loss, metrics of validation."""

    def place(name):
        return name.startswith("val_"), name.removeprefix("val_") != "loss"

    return sorted(names, key=place)


@fit_call.changes_no_variable
class ProgressBar(keras.callbacks.ProgbarLogger):
    """Keras's progress bar, in 80 columns, or those of a narrower terminal.

    It shows the loss, and those metrics for which there is room. As an epoch ends, the
    rest follows in a line of its own: other metrics, validation and speed.
    """

    def on_train_batch_end(self, batch, logs=None):
        """Draws the bar with the values for which there is room."""
        super().on_train_batch_end(batch, self._fitted(logs))

    def on_epoch_end(self, epoch, logs=None):
        """Draws the bar for the last time, and prints what had no room in it."""
        shown = self._fitted(logs)
        super().on_epoch_end(epoch, shown)
        rest = _figures({name: logs[name] for name in logs if name not in shown})
        if rest:
            print(words.wrapped(f"  {', '.join(rest)}", _columns()), flush=True)

    def _fitted(self, logs):
        """Returns the values for which there is room, and fits the bar to the rest."""
        counter = 2 * len(str(self.target or _MANY)) + 2
        room = _columns() - counter - _TIME - _SHORTEST_BAR
        shown = {}
        of_training = [
            name
            for name in in_order(logs)
            if name != "examples_per_sec" and not name.startswith("val_")
        ]
        for name in of_training:
            if (width := len(name) + _VALUE) > room:
                break
            shown[name] = logs[name]
            room -= width
        self.progbar.width = max(min(_BAR, _SHORTEST_BAR + room), 0)
        return shown


def _columns():
    return min(words.line_width(), _COLUMNS)


# Shows how far an evaluation is, in `fit` and elsewhere, if it takes long.


@fit_call.changes_no_variable
class EvaluationProgress(keras.callbacks.Callback):
    """Counts the batches of each evaluation; see `Progress`."""

    def __init__(self, data: Any):
        """Initializes it.

        Args:
            data: What is evaluated on: a `tf.data.Dataset`, or a `PyDataset`.
        """
        super().__init__()
        self._batches = _count(data)
        self._shown: Progress | None = None
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def around_fit(self, call: Any = None) -> Iterator[None]:
        """Ends what is shown, whatever ends the evaluation."""
        with self._open:
            yield

    def on_test_begin(self, logs=None):
        """Begins to count the batches of an evaluation."""
        progress = Progress("Evaluating", self._batches, "batches")
        self._shown = self._open.enter_context(progress)

    # Not as a batch ends: Keras would fetch its logs from the device for that.
    def on_test_batch_begin(self, batch, logs=None):
        """Counts the batches before this one."""
        self._shown.add(batch - self._shown.done)

    def on_test_end(self, logs=None):
        """Shows the last batch, and ends the line."""
        if self._batches is not None:
            self._shown.add(self._batches - self._shown.done)
        self._open.close()


def _count(data: Any) -> int | None:
    """Returns how many batches there are, if that is known."""
    if isinstance(data, keras.utils.PyDataset):
        return data.num_batches
    count = int(data.cardinality())
    return count if count >= 0 else None
