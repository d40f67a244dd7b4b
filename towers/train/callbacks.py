"""The callbacks of a run: what saves it, watches it and says how far it is."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence

import keras

from towers.elastic.resize import Resize
from towers.layers.variables import steps_done
from towers.lifecycle.checkpoints.best import Monitor
from towers.model import fit_call
from towers.model.fit_call import FitsAgain
from towers.monitoring.bottleneck.starvation import Starvation
from towers.monitoring.device_report import DeviceReport
from towers.monitoring.lines import EvaluationProgress, Lines, ProgressBar
from towers.monitoring.stall.callback import Stall
from towers.monitoring.steps import Interval
from towers.monitoring.tensorboard.callback import TensorBoard
from towers.monitoring.throughput import Throughput
from towers.program import forks, words
from towers.program.features import feature
from towers.program.flags import table
from towers.program.flags.table import About
from towers.train import checks
from towers.train.job import Job
from towers.train.outputs import files, start
from towers.train.parts import model as model_parts
from towers.train.parts.task import better
from towers.train.settings import DIFFERING, NAMES, REPORTS, Settings


@dataclasses.dataclass(frozen=True)
class Watch:
    """What measures a run: each part answers one question.

    Attributes:
        throughput: How fast is it?
        starvation: What does a step's time go to, and what is it bound by?
        devices: What do the devices have to do?
    """

    throughput: Throughput
    starvation: Starvation
    devices: DeviceReport

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """The callbacks, to be placed before those that show what they add to logs."""
        return [self.throughput, self.starvation, self.devices]

    @property
    def measures(self) -> list[Callable[[], dict[str, float]]]:
        """What to write to TensorBoard; see `TensorBoard`."""
        return [part.measured for part in self.callbacks]

    def text(self) -> str:
        """Says what was measured of the whole run, in lines."""
        lines = [self.throughput.text()]
        fractions, busy = self.throughput.fractions, self.starvation.busy()
        if len(fractions) > 1:
            lines += [
                f"  tower {k}: {self.throughput.text(part)}, computing {share:.0%} of "
                "the time"
                for k, (part, share) in enumerate(
                    zip(fractions, busy, strict=False), self.throughput.first_tower
                )
            ]
        rate = self.throughput.examples_per_sec
        lines += [f"  {each}" for each in self.starvation.hosts_text(rate)]
        if step := self.starvation.text():
            lines.append(f"a step: {step}")
        return "\n".join([*lines, self.devices.text()])


def make(job: Job, watch: Watch, lines: bool) -> list[keras.callbacks.Callback]:
    """Makes the callbacks of a run, in order.

    Args:
        job: The run.
        watch: Measures it.
        lines: Whether plain lines show how far it is, rather than a progress bar.
    """
    settings = job.settings
    measures = watch.measures
    if settings.asynchronous:
        measures.append(job.parallel.builder.staleness.measured)
    resize = make_resize(job, watch)
    if resize is not None:
        measures.append(resize.measured)
    # The order matters: what one callback adds to the logs, the later ones see.
    setup = job.setup
    own = [] if setup.mine is None else setup.mine.callbacks(**setup.known)
    callbacks = [
        _Describe(job),
        # Validates the averages.
        *([keras.callbacks.SwapEMAWeights()] if settings.ema is not None else []),
        *watch.callbacks,
        _TaskLogs(job),
        EvaluationProgress(job.data.evaluation),
        make_tensorboard(job, measures, watch, resize),
        *own,
        job.checkpoint,
    ]
    if (steps := checks.read_profile_steps(settings)) is not None:
        folder = os.path.join(job.model_dir, "train")
        profile = feature("monitoring.profile.callback").Profile(folder, *steps)
        callbacks.insert(0, profile)
    if resize is not None:
        # Before those that measure a call.
        callbacks.insert(0, resize)
    if settings.batch_per_tower:
        callbacks.insert(0, _make_batch_per_tower(job))
    if settings.preemption_notice is not None:
        notice = feature("elastic.preemption").PreemptionNotice
        callbacks.insert(0, notice(settings.preemption_notice))
    if settings.stall_seconds:
        # First, to hear of a batch before it is waited for any other.
        callbacks.insert(0, make_stall(job))
    if settings.early_stopping is not None:
        monitor = job.checkpoint.monitor
        callbacks.append(
            keras.callbacks.EarlyStopping(
                monitor.name, patience=settings.early_stopping, mode=monitor.mode
            )
        )
    if settings.log_csv:
        path = os.path.join(job.model_dir, files.LOG)
        callbacks.append(_Log(path, append=True))
    if settings.max_train_steps is not None:
        callbacks.append(StopAtStep(settings.max_train_steps))
    if (descriptor := reports_descriptor()) is not None:
        callbacks.append(
            Reports(descriptor, lambda: job.checkpoint.latest, job.log_steps)
        )
    if lines:
        callbacks.append(Lines(job.log_steps, last_step=settings.max_train_steps))
    else:
        callbacks.append(ProgressBar())
    return callbacks


@fit_call.changes_no_variable
class _Log(keras.callbacks.CSVLogger):
    """Keeps the columns that a log has, where a run goes on."""

    def on_train_begin(self, logs=None):
        """Opens the log."""
        super().on_train_begin(logs)
        self.keys = files.log_columns(self.filename)


@fit_call.changes_no_variable
class _Describe(keras.callbacks.Callback):
    """Writes what describes a run as it begins: what cannot go on changes no file."""

    def __init__(self, job: Job):
        super().__init__()
        self._job = job

    def on_train_begin(self, logs=None):
        """Writes the files that describe the run."""
        files.describe(self._job)


class UnknownMonitorError(ValueError):
    """--monitor names nothing that is logged."""


@fit_call.changes_no_variable
class _TaskLogs(keras.callbacks.Callback):
    """Adds what the task logs to Keras's logs, and looks for the metric to monitor."""

    def __init__(self, job: Job):
        super().__init__()
        self._job, self._monitor = job, job.settings.monitored_log

    def on_train_batch_end(self, batch, logs=None):
        """Looks for the metric, once the names of all logs are known.

        Raises:
            UnknownMonitorError: There is none of that name, or nobody knows whether
                more of it is better.
        """
        if (monitor := self._monitor) is None:
            return
        known = {*logs, *self._job.task_logs(logs)}
        if monitor.removeprefix("val_") not in known:
            raise UnknownMonitorError(
                f"Received --monitor={monitor}, which this run does not log; "
                f"expected one of {', '.join(sorted(known))}, or of these with val_."
            )
        try:
            mode = self._job.settings.monitor_mode
            Monitor(monitor, better(monitor) if mode == "auto" else mode).settle(
                self.model
            )
        except ValueError as error:
            raise UnknownMonitorError(
                f"Received --monitor={monitor}, and it is not known whether more of it "
                f"is better; expected --monitor=min:{monitor} or "
                f"--monitor=max:{monitor}."
            ) from error
        self._monitor = None

    def on_epoch_end(self, epoch, logs=None):
        """Adds it."""
        logs.update(self._job.task_logs(logs))


def _shows_images(job):
    """Tells whether TensorBoard shows examples, each with its class."""
    facts, task = job.setup.facts, job.setup.task
    return facts.has_images and task is not None and task.kind == "class"


def make_watch(job: Job, warmup_steps: int = 10) -> Watch:
    """Makes the callbacks that measure the run, but for its first steps."""
    size, tokens = job.batch_size, job.data.tokens_per_example
    throughput = Throughput(size, job.data.examples, warmup_steps, tokens=tokens)
    _count_towers(job, throughput)
    every, advice = job.log_steps, job.data.advice
    return Watch(
        throughput,
        Starvation(every, advice=advice, warmup_steps=warmup_steps),
        DeviceReport(job.devices.every),
    )


def _count_towers(job, throughput):
    """Tells what measures a run which towers this host has now."""
    throughput.fractions = job.fractions
    throughput.first_tower = job.parallel.builder.plan.towers[0].index


def _make_batch_per_tower(job):
    return BatchPerTower(
        job.settings.batch_size,
        job.batch_size,
        epoch_begins=lambda: not job.checkpoint.position.batch,
    )


def make_resize(job: Job, watch: Watch) -> Resize | None:
    """Makes the callback that changes the towers; `None` if hosts train together."""
    if job.hosts:
        return None

    def changed():
        _count_towers(job, watch.throughput)

    return Resize(
        job.model_dir,
        available=job.devices.every,
        shares=job.shares,
        check=job.check_towers,
        on_change=changed,
        generations=job.generations,
        balance=job.settings.finds_ratios,
    )


def make_tensorboard(
    job: Job,
    measures: Sequence[Callable[[], dict[str, float]]],
    watch: Watch,
    resize: Resize | None = None,
) -> TensorBoard:
    """Makes the callback that writes what the run does, and is.

    Args:
        job: The run.
        measures: What has been measured; see `TensorBoard`.
        watch: Says at the end what was measured.
        resize: Tells of changes of the towers, if there may be some.
    """
    found = "\n".join(f"{name}: {value}" for name, value in start.versions().items())
    texts = {
        "flags": job.settings.as_text(),
        "model": start.summary_text(job.model),
        "devices": job.table(words.WIDTH),
        "versions": found,
    }
    return TensorBoard(
        job.model_dir,
        log_steps=job.log_steps,
        texts={
            **{tag: as_markdown(text) for tag, text in texts.items()},
            "verdict": lambda: (
                f"{watch.starvation.verdict}\n\n{as_markdown(watch.text())}"
            ),
        },
        scalars={
            "bad_records": job.data.bad_records,
            "parameters": job.model.count_params(),
        },
        measures=measures,
        marks={"resize": resize.marks} if resize is not None else {},
        hparams=hyper_parameters(job),
        histograms=job.settings.histograms,
        graph=lambda: job.parallel.builder.graph,
        examples=job.data.samples() if _shows_images(job) else None,
        metrics=model_parts.metric_names(job.setup),
        class_names=job.setup.facts.class_names,
        timeline=watch.devices.timeline,
    )


def hyper_parameters(job: Job) -> dict[str, bool | int | float | str]:
    """Returns the flags that runs are compared by."""
    # TensorBoard shows the first ones at once.
    differing = [n for n in os.environ.get(DIFFERING, "").split(",") if n in NAMES]
    names = dict.fromkeys((*differing, *table.names(Settings, About.COMPARED)))
    values = {name: getattr(job.settings, name) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    towers = {"towers": len(job.towers)}
    return {
        **({} if differing else towers),
        **{n: ",".join(v) if isinstance(v, tuple) else v for n, v in given.items()},
        **towers,
    }


def make_stall(job: Job) -> Stall:
    """Makes the callback that says what is waited for."""
    return Stall(
        job.settings.stall_seconds,
        job.settings.stall_action,
        devices=(*job.devices.towers, job.devices.home),
        data=job.data.training,
        validation_data=job.data.evaluation,
        checkpoint=job.checkpoint,
    )


def as_markdown(lines: str) -> str:
    """Indents lines, which Markdown shows as they are."""
    return "".join(f"    {line}\n" for line in lines.splitlines())


@fit_call.changes_no_variable
class Reports(keras.callbacks.Callback):
    """Writes a line of JSON now and then.

    "progress" has the step and the logs. After an epoch there is a line with "metrics",
    the epoch and its logs, and "checkpoint", the last one.

    Args:
        descriptor: Where to.
        latest: Returns the path of the last checkpoint, if there is one.
        log_steps: Steps between two lines of progress.
    """

    def __init__(
        self, descriptor: int, latest: Callable[[], str | None], log_steps: int
    ):
        super().__init__()
        # Neither forks nor programs that the run starts keep it open.
        os.set_inheritable(descriptor, False)
        pipe = open(descriptor, "wb", buffering=0, closefd=False)
        self._pipe, self._latest = forks.close_in_children(pipe), latest
        self._interval = Interval(log_steps)

    def on_train_begin(self, logs=None):
        """Says at which step the run begins."""
        self._interval.begin(self.model)
        self._write({"progress": {"step": self._interval.step}})

    def on_train_batch_end(self, batch, logs=None):
        """Writes the progress, if its turn has come."""
        if self._interval.is_over(self.model):
            numbers = {name: float(value) for name, value in logs.items()}
            self._write({"progress": {"step": self._interval.step, **numbers}})

    def on_epoch_end(self, epoch, logs=None):
        """Writes the epoch's metrics, and the last checkpoint."""
        numbers = {name: float(value) for name, value in (logs or {}).items()}
        self._interval.begin(self.model)
        self._write({"progress": {"step": self._interval.step, **numbers}})
        self._write(
            {
                "metrics": {"epoch": epoch + 1, **numbers},
                "checkpoint": self._latest(),
            }
        )

    def _write(self, line):
        with contextlib.suppress(OSError):  # the launcher has gone
            self._pipe.write(f"{json.dumps(line)}\n".encode())


def reports_descriptor(environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns the file descriptor to report to; `None` if no launcher asks."""
    text = environ.get(REPORTS, "")
    return int(text) if text.isdecimal() else None


@fit_call.changes_no_variable
class StopAtStep(keras.callbacks.Callback):
    """Stops `fit` once the optimizer has made so many steps, earlier runs included.

    With several steps in one call, the call that reaches the number is finished.
    """

    def __init__(self, max_steps: int):
        """Initializes the callback.

        Args:
            max_steps: Optimizer steps in all.
        """
        super().__init__()
        self._max_steps = max_steps

    def on_train_batch_end(self, batch, logs=None):
        """Stops if this was the last step."""
        if steps_done(self.model) >= self._max_steps:
            self.model.stop_training = True


# The batch grows and shrinks with the number of towers, where that is asked for.
#
# Data, position and learning rate depend on the size of the batch. So an exception ends
# `fit` where an epoch begins with another number of towers, and the run fits again from
# there, as one does that was stopped. An epoch that has begun keeps its batch.


class BatchSizeChange(FitsAgain):
    """The next epoch, or the rest of this one, has batches of another size.

    Attributes:
        size: Examples in a batch of all towers from now on.
    """

    def __init__(self, size: int):
        super().__init__(f"Batches of {size} examples follow.")
        self.size = size


@fit_call.changes_no_variable
class BatchPerTower(keras.callbacks.Callback):
    """Ends `fit` where an epoch begins with another number of towers than the last one.

    Within an epoch, batches keep their size: data are counted in batches. Whoever calls
    `fit` opens data of the other size, scales the learning rate, and calls it again.
    """

    def __init__(self, per_tower: int, size: int, epoch_begins: Callable[[], bool]):
        """Takes the sizes.

        Args:
            per_tower: Examples in the batch of a tower.
            size: Examples in a batch of the data.
            epoch_begins: Tells whether no batch of the epoch is done.
        """
        super().__init__()
        self._per_tower, self._size = per_tower, size
        self._epoch_begins = epoch_begins

    def state_dict(self) -> dict[str, int]:
        """Returns the size, for a run that goes on."""
        return {"size": self._size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Does nothing: whoever opens data reads it; see `Checkpoint.batch_size`."""

    def on_epoch_begin(self, epoch, logs=None):
        """Compares the size with the number of towers.

        Raises:
            BatchSizeChange: They do not fit; on all hosts.
        """
        size = self._per_tower * sum(self.model.builder.plan.replicas_by_host)
        if self._epoch_begins() and size != self._size:
            raise BatchSizeChange(size)
