"""Says whether the towers wait for input, and for which stage of it."""

import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

import keras

from towers import stages
from towers.callbacks.step_time import check_towers
from towers.verdict import verdict

# To look at tf.data's counters takes a millisecond or two.
_LOOK_EVERY_S = 1.0


class _Sums(NamedTuple):
    """Since the warm-up.

    Attributes:
        steps: Steps.
        train_s: Time inside the calls of training.
        waited_s: Time in which the towers waited for input.
        copy_s: Time in which shares were copied to them.
        compute_s: Time in which they computed.
        reduce_s: Time in which gradients were added, and variables updated.
    """

    steps: int = 0
    train_s: float = 0.0
    waited_s: float = 0.0
    copy_s: float = 0.0
    compute_s: float = 0.0
    reduce_s: float = 0.0

    def since(self, before: "_Sums") -> "_Sums":
        return _Sums(*(a - b for a, b in zip(self, before, strict=True)))

    @property
    def waiting(self) -> float | None:
        if not (self.steps and self.train_s):
            return None
        return min(max(self.waited_s / self.train_s, 0.0), 1.0)

    @property
    def parts_ms(self) -> dict[str, float]:
        """What a step takes without waiting, by part."""
        seconds = {
            "compute": self.compute_s,
            "copy": self.copy_s,
            "reduce": self.reduce_s,
        }
        seconds["Python"] = self.train_s - self.waited_s - sum(seconds.values())
        return {
            name: 1000 * max(each, 0.0) / self.steps for name, each in seconds.items()
        }


class Starvation(keras.callbacks.Callback):
    """Says every interval, and at the end, whether and why the towers wait for input.

    The share of waiting is that of the time inside the calls of training: not of
    validation, saving, other callbacks, or the warm-up. The stages are known of data
    of tf.data, with its autotuning left on.

    Attributes:
        verdict: The last sentence, after `fit` that of the whole run; `None` before.
    """

    def __init__(
        self,
        every_steps: int = 100,
        *,
        advice: Mapping[str, str] | None = None,
        warmup_steps: int = 10,
        terminal: bool | None = None,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Initializes the callback.

        Args:
            every_steps: Steps of the optimizer between two verdicts.
            advice: See `verdict.verdict`.
            warmup_steps: Steps at the beginning of the run that are not counted.
            terminal: Whether verdicts wait for the end of the epoch, so as not to break
                a progress bar; by default, if standard output is a terminal.
            say: Prints a line.
            clock: Returns seconds.
        """
        super().__init__()
        if every_steps < 1:
            raise ValueError(
                f"Received every_steps={every_steps}; expected at least 1."
            )
        self._every_steps, self._advice = every_steps, advice
        self._warmup_steps = warmup_steps
        self._terminal = sys.stdout.isatty() if terminal is None else terminal
        self._say, self._clock = say, clock
        self._begin()

    @property
    def waiting(self) -> float | None:
        """Share of the run's time in which towers waited; `None` during warm-up."""
        return self._sums().waiting

    def measured(self) -> dict[str, float]:
        """Returns the share of waiting since the last call, if there was a step."""
        sums = self._sums()
        waiting = sums.since(self._measured).waiting
        self._measured = sums
        return {} if waiting is None else {"waiting": waiting}

    # Called by Keras.

    def on_train_begin(self, logs=None):
        """Begins a run.

        Raises:
            ValueError: The model has no towers.
        """
        check_towers(self.model)
        self._begin()
        self._iterator = self._reading = None
        self._step = int(self.model.optimizer.iterations)
        self._trained = 0

    def on_epoch_begin(self, epoch, logs=None):
        """Says on a terminal what was found in the last epoch."""
        # Its progress bar ends only after all callbacks have heard of its end.
        if self._unsaid:
            self._say(self._unsaid)
            self._unsaid = None

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock; `batch` is the first of the call's batches."""
        self._next_batch = batch
        self._begun_s = self._clock()

    def on_train_batch_end(self, batch, logs=None):
        """Stops the clock, and gives a verdict if the interval is over."""
        now = self._clock()
        warm = self._trained >= self._warmup_steps
        self._trained += batch + 1 - self._next_batch
        if self.model.builder is not self._builder or not warm:
            # With `auto`, the first calls choose one.
            self._begin(self.model.builder)
            self._first = self._since = self._read()
        else:
            self._train_s += now - self._begun_s
        before, self._step = self._step, int(self.model.optimizer.iterations)
        over = before // self._every_steps != self._step // self._every_steps
        if over or now - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now
            self._look()
        if over:
            self._judge_interval()

    def on_train_end(self, logs=None):
        """Gives the verdict of the whole run."""
        self._unsaid = None
        self._look()
        if sentence := self._judge(self._sums(), self._stages):
            self._say(f"whole run: {sentence}")
        # They keep the data alive.
        self._reading = self._first = self._since = None

    # Measuring.

    def _begin(self, builder=None):
        """Starts anew, with a builder whose steps are measured from now on."""
        self._builder, self._train_s = builder, 0.0
        self._start = builder.phases.totals() if builder is not None else None
        self._measured = self._judged = _Sums()
        self._looked_s = float("-inf")
        self._first = self._since = None
        # Of the whole run, and of the interval.
        self._stages, self._lately = [], []
        self.verdict = self._unsaid = None

    def _sums(self):
        if self._builder is None:
            return _Sums()
        steps, *seconds, _ = self._builder.phases.totals().since(self._start)
        return _Sums(steps, self._train_s, *seconds)

    def _look(self):
        """Looks at the stages of the input."""
        reading = self._read()
        if reading is not None:
            self._stages = _better(self._stages, reading.stages(self._first))
            self._lately = _better(self._lately, reading.stages(self._since))

    def _read(self):
        """Reads the counters of the input, if there are any."""
        iterator = self._builder.phases.iterator if self._builder else None
        if iterator is None:
            return None
        if self._iterator is None or self._iterator() is not iterator:
            self._iterator = weakref.ref(iterator)
            self._first = self._since = None
        reading = stages.read(iterator, self._reading)
        self._reading = reading or self._reading
        return reading

    # Judging.

    def _judge_interval(self):
        sums = self._sums()
        found = self._lately if _is_whole(self._lately) else self._stages
        sentence = self._judge(sums.since(self._judged), found)
        self._judged = sums
        self._since, self._lately = self._reading, []
        if sentence is None:
            return
        line = f"step {self._step}: {sentence}"
        if self._terminal:
            self._unsaid = line
        else:
            self._say(line)

    def _judge(self, sums, found):
        if sums.waiting is None:
            return None
        self.verdict = verdict(sums.waiting, sums.parts_ms, found, self._advice)
        return self.verdict


def _better(before, now):
    """The later one, but at the end of the data, when stages go that are done."""
    return max(now, before, key=lambda found: (_is_whole(found), len(found)))


def _is_whole(found):
    """Whether stages begin where data come from."""
    return any(stage.label == "read" or "cache" in stage.kind for stage in found)
