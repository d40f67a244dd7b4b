"""Says what a run is bound by, and which stage of its input the towers wait for."""

import sys
import time
import weakref
from collections.abc import Callable, Mapping

from towers.model import fit_call
from towers.monitoring.bottleneck import tfdata_stats, uneven
from towers.monitoring.bottleneck.verdict import News, SpeedVerdict, bound_by, verdict
from towers.monitoring.step_time import StepTime
from towers.monitoring.steps import Interval
from towers.program import words
from towers.program.features import feature

# To look at tf.data's counters takes a millisecond or two.
_LOOK_EVERY_S = 1.0


@fit_call.changes_no_variable
class Starvation(StepTime):
    """Says what limits the speed of training, when that changes and at the end.

    The verdict on an interval describes the steps since the last one. It can name the
    slowest stage of the input if the data are a `tf.data.Dataset` with autotuning. It
    is said if it is news: see `News`.

    Attributes:
        verdict: The last verdict. After `fit`, it describes the whole run. `None`
            before the first one.
    """

    def __init__(
        self,
        log_steps: int = 100,
        *,
        advice: Mapping[str, str] | None = None,
        warmup_steps: int = 10,
        terminal: bool | None = None,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Initializes the callback.

        Args:
            log_steps: Steps of the optimizer between two verdicts.
            advice: What to do about a slow stage of the input, by its name. By default
                the advice of the data's own pipeline.
            warmup_steps: Steps at the beginning of the run that are not counted.
            terminal: Whether verdicts wait for the end of the epoch, so that they do
                not break a progress bar. By default if standard output is a terminal.
            say: Prints a line.
            clock: Returns seconds.
        """
        super().__init__(warmup_steps, clock)
        self._interval, self._advice = Interval(log_steps), advice
        self._terminal = sys.stdout.isatty() if terminal is None else terminal
        self._say = say

    @property
    def waiting(self) -> float | None:
        """Share of a step in which towers wait; `None` during the warm-up."""
        parts = self.split and self.split.parts_ms
        step_ms = sum(parts.values()) if parts else 0.0
        return parts["input"] / step_ms if step_ms else None

    # Called by Keras.

    def on_train_begin(self, logs=None):
        """Begins a run.

        Raises:
            ValueError: The model has no towers.
        """
        super().on_train_begin(logs)
        self._interval.begin(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        """Says on a terminal what was found in the last epoch."""
        # Its progress bar ends only after all callbacks have heard of its end.
        self._say_held()

    def on_train_batch_end(self, batch, logs=None):
        """Stops the clock, and gives a verdict if the interval is over."""
        super().on_train_batch_end(batch, logs)
        over = self._interval.is_over(self.model)
        now = self._clock()
        if over or now - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now
            self._look()
        if over:
            self._judge_interval()

    def on_train_end(self, logs=None):
        """Gives the verdict of the whole run."""
        self._say_held()
        self._look()
        judged = self._judge(self.split, self._stages)
        if judged is not None:
            self.verdict = judged
            self._say_line(f"{self._part}: {self._news.sentence(judged)}")
        # They keep the data alive.
        self._reading = self._first = self._since = None

    # Measuring.

    def _forget(self):
        super()._forget()
        self._iterator = self._reading = None
        self._first = self._since = None
        self._news, self._held = News(), []
        self._forget_verdicts()

    def _forget_verdicts(self):
        self._judged, self._bound = None, ()
        self.verdict: SpeedVerdict | None = None
        # Of the whole run, and of the interval.
        self._stages, self._lately = [], []
        self._looked_s = float("-inf")

    def _start(self, timers):
        super()._start(timers)
        self._forget_verdicts()
        self._first = self._since = self._read()

    def _look(self):
        """Looks at the stages of the input."""
        reading = self._read()
        if reading is not None:
            self._stages = _better(self._stages, reading.stages(self._first))
            self._lately = _better(self._lately, reading.stages(self._since))

    def _read(self):
        """Reads the counters of the input, if there are any."""
        iterator = self._timers.iterator if self._timers else None
        if iterator is None:
            return None
        if self._iterator is None or self._iterator() is not iterator:
            self._iterator = weakref.ref(iterator)
            self._first = self._since = None
        reading = tfdata_stats.read(iterator, self._reading)
        self._reading = reading or self._reading
        return reading

    # Judging.

    def _judge_interval(self):
        split = self.split
        lately = split.since(self._judged) if self._judged else split
        found = self._lately if _is_whole(self._lately) else self._stages
        judged = self._judge(lately, found, self._bound)
        self._judged = split
        self._since, self._lately = self._reading, []
        if judged is None:
            return
        self.verdict = judged
        if (said := self._news.of_interval(judged)) is not None:
            self._held.append(f"step {self._interval.step}: {said}")
        if not self._terminal:
            self._say_held()

    def _say_held(self):
        """Says what was held back for the end of a progress bar."""
        held, self._held = self._held, []
        for line in held:
            self._say_line(line)

    def _say_line(self, line):
        self._say(words.wrapped(line))

    def _judge(self, split, found, before=()):
        """Returns the verdict on some steps; `None` if there were none."""
        parts = split.parts_ms if split else {}
        if not any(parts.values()):
            return None
        self._bound = bound_by(parts, before)
        judged = verdict(parts, self._bound, found, self._words())
        times = self._timers.hosts
        if times is not None:
            hosts = feature("monitoring.bottleneck.hosts")
            judged = judged.plus(hosts.finding(times, split.hosts))
        if split.stages_busy and "compute" in self._bound:
            pipeline = self.model.builder.plan.pipeline
            stages = feature("monitoring.bottleneck.stages")
            judged = judged.plus(stages.finding(split.stages_busy, pipeline))
        if times is None and "compute" in self._bound:
            judged = judged.plus(self._uneven(split))
        return judged

    def _uneven(self, split):
        """Says which tower is slow; hosts say it of hosts."""
        plan = self.model.builder.plan
        towers = plan.replicas
        if not uneven.comparable(len(towers), plan.on_gpus):
            return None
        return uneven.finding(split.towers_ms, [each.ratio for each in towers])

    def _words(self):
        """Returns a pipeline's own advice on its stages, if it has any."""
        dataset = self._reading and self._reading.dataset
        pipeline = getattr(dataset, "pipeline", None)
        return self._advice or getattr(pipeline, "advice", None)


def _better(before, now):
    """The later one, but at the end of the data, when stages go that are done."""
    return max(now, before, key=lambda found: (_is_whole(found), len(found)))


def _is_whole(found):
    """Tells whether stages begin where data come from."""
    return any(stage.label == "read" or "cache" in stage.kind for stage in found)
