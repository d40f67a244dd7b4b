"""Says what a run waits for, if it stands still.

Nothing is measured while it does not: what is waited for is found by asking. The stack
of `fit`'s thread tells callbacks and tracing. Below that is TensorFlow, so each device
is given something to compute, and the input is read once more, stage by stage.
"""

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.hosts import group
from towers.keras_adapter.models import batches_done, builds_graph, called_callback
from towers.lifecycle.checkpoint import Checkpoint
from towers.lifecycle.run_state import SaveFirst
from towers.model import fit_call
from towers.model.fit_call import FitCall
from towers.program.features import feature
from towers.program.voice import say, warn

STALLED = 4
"""The exit code of a process that a stall has ended."""


@fit_call.changes_no_variable
class Stall(keras.callbacks.Callback):
    """Says on stderr what the run waits for, if no batch ends for a while.

    It speaks once per stall: for how long, since which batch, and what the run waits
    for. This may be a save, another callback, the building of a graph, a device, or a
    stage of the input. The stack of each Python thread follows. Another line says when
    the run goes on.

    The input can be examined if it comes from `towers.input_pipeline.make_dataset`.
    Other data are left alone, because reading from a generator could change what it
    yields.

    Put it first in the list of callbacks, so that it also notices when another callback
    is slow. Apart from a thread that looks at the clock once a second, it costs
    nothing.
    """

    def __init__(
        self,
        stall_seconds: float,
        on_stall: str = "wait",
        *,
        devices: Sequence[str] = (),
        data: Any = None,
        validation_data: Any = None,
        checkpoint: Any = None,
        patience_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], Any] = os._exit,
    ):
        """Initializes the callback. It watches nothing before `fit`.

        Args:
            stall_seconds: Time without the beginning or end of a batch that counts as a
                stall. It has to exceed the time of a call of `steps_per_execution`
                steps, including the first one, which compiles.
            on_stall: What to do then: "wait", or "stop" the process with exit code 4.
                `fit` cannot be stopped in another way while it waits for TensorFlow.
            devices: Devices to ask for a sign of life.
            data: The training data of `fit`.
            validation_data: The validation data of `fit`.
            checkpoint: The `Checkpoint` callback, whose `latest` is named if the
                process is stopped.
            patience_s: Time that a device or a stage of the input has for an answer.
            clock: Returns seconds.
            leave: Ends the process with an exit code, whatever its threads do.
        """
        super().__init__()
        if not stall_seconds > 0:
            raise ValueError(
                f"Received stall_seconds={stall_seconds}; expected more than 0."
            )
        if on_stall not in ("wait", "stop"):
            raise ValueError(
                f"Received on_stall={on_stall!r}; expected 'wait' or 'stop'."
            )
        self._seconds, self._on_stall = stall_seconds, on_stall
        self._devices = tuple(dict.fromkeys(devices))
        self._data, self._validation_data = data, validation_data
        self._checkpoint, self._patience_s = checkpoint, patience_s
        self._clock, self._leave = clock, leave
        self._lock = threading.Lock()
        self._fit = self._heard = self._told = self._stalled = None
        self._call: FitCall | None = None
        self._epoch, self._batches, self._skipped = 0, None, 0

    @contextlib.contextmanager
    def around_fit(self, call: FitCall) -> Iterator[None]:
        """Hears of the end of a `fit` of a tower model, also of an exception."""
        self._call, self._skipped = call, 0
        try:
            yield
        finally:
            self._call = None
            if self._fit is not None:
                self._fit.over.set()

    # Called by Keras.

    def on_train_begin(self, logs=None):
        """Begins to watch."""
        if self._fit is not None:
            self._fit.over.set()
        self._epoch, self._batches, self._stalled = 0, None, None
        self._hear(None)
        self._checked = self._heard.time_s
        self._fit = _Fit()
        threading.Thread(
            target=self._watch, args=(self._fit.over,), name="towers-stall", daemon=True
        ).start()

    def on_epoch_begin(self, epoch, logs=None):
        """Hears of it."""
        self._epoch = epoch
        if self._batches is not None:
            self._batches = 0
        self._hear(self._batches)

    def on_train_batch_begin(self, batch, logs=None):
        """Hears of it."""
        self._batches = batch
        self._hear(batch)

    def on_train_batch_end(self, batch, logs=None):
        """Hears of it."""
        self._batches = batches_done(self.model, batch)
        self._hear(self._batches)

    def on_test_begin(self, logs=None):
        """Hears of it."""
        self._hear(0, testing=True)

    def on_test_batch_begin(self, batch, logs=None):
        """Hears of it."""
        self._hear(batch, testing=True)

    def on_test_batch_end(self, batch, logs=None):
        """Hears of it."""
        self._hear(batches_done(self.model, batch), testing=True)

    def on_test_end(self, logs=None):
        """Hears of it."""
        self._hear(self._batches)

    def on_train_end(self, logs=None):
        """Watches only the callbacks that still have to end."""
        self._hear(self._batches)
        if self._fit is not None:
            self._fit.ending = True

    def _hear(self, batches, testing=False):
        now = self._clock()
        stalled, self._stalled = self._stalled, None
        if stalled is not None:
            _say_it_goes_on(now - stalled.time_s)
        self._heard = _Moment(now, self._epoch, batches, testing)

    # Watching.

    def _watch(self, over):
        group.does_meanwhile(self._does)
        while not over.wait(min(1.0, self._seconds / 4)):
            self.check()
        group.does_meanwhile(None)

    def _does(self):
        """What to tell another host that waits."""
        frames = self._fit.frames()
        if frames is None:
            return "has ended its training"
        if reason := _reason(frames):
            return f"waits for {reason}"
        return "computes, or waits for its input"

    def check(self) -> None:
        """Looks at the clock, and says so if there is a stall.

        A thread calls it, more often than twice in `stall_seconds`.
        """
        with self._lock:
            self._check()
            self._checked = self._clock()

    def _check(self):
        now, heard, fit = self._clock(), self._heard, self._fit
        if fit is None or fit.over.is_set() or heard is self._told:
            return
        if now - self._checked > self._seconds / 2:
            # The whole process was stopped, by SIGSTOP say, and has waited for nothing.
            self._heard = heard._replace(time_s=now)
            return
        if now - heard.time_s < self._seconds:
            return
        if (frames := fit.frames()) is None:
            fit.over.set()
            return
        skipped = 0 if self._call is None else self._call.skipped
        if heard.batches is None and skipped != self._skipped:
            # Nobody is told of batches that are skipped, in a run that goes on.
            self._skipped, self._heard = skipped, heard._replace(time_s=now)
            return
        self._told = heard
        # Stacks first: they are to show the stall, and not the asking.
        stacks = _stacks(fit.thread)
        reason = _reason(frames) or self._ask(heard.testing)
        where = _where(heard, (self.params or {}).get("epochs", "?"))
        warn(
            f"No batch has ended for {now - heard.time_s:.0f} s, {where}; "
            f"waiting for {reason}. The stacks:\n{stacks}"
        )
        if self._heard is not heard:
            _say_it_goes_on(self._heard.time_s - heard.time_s)
        elif self._on_stall == "stop" and fit.frames() is not None:
            self._stop()
        else:
            self._stalled = heard

    def _ask(self, testing):
        """Asks hosts, devices and input; returns what is waited for."""
        if group.collective() is not None:
            hosts = feature("monitoring.stall.hosts")
            if found := hosts.waited_for(self._patience_s):
                return found
        computes = {each: functools.partial(compute, each) for each in self._devices}
        faults = ask(computes, self._patience_s)
        if faults:
            return " and ".join(
                f"the device {name}, which {fault}" for name, fault in faults.items()
            )
        answers = ["the devices answer"] if self._devices else []
        data = self._validation_data if testing else self._data
        pipeline = getattr(data, "pipeline", None)
        if pipeline is None:
            reason = "the input or the computation"
        elif fault := ask_input(pipeline, self._patience_s):
            return f"the input, whose {fault}"
        else:
            reason = "a record further on in the input, or the computation itself"
            answers.append("the input, read once more, gives a batch")
        if group.collective() is not None:
            reason = f"another host, the network, {reason}"
        return f"{reason} ({', and '.join(answers)})" if answers else reason

    def _stop(self):
        again = ""
        if self._checkpoint is not None:
            latest = self._checkpoint.latest
            again = ": nothing was saved yet"
            if latest:
                again = f": the last checkpoint is {latest}; run again to continue"
        say(f"Stopped by the stall{again}.")
        # In a thread: it may be this that the run waits for. On a terminal, the
        # progress bar's line is ended.
        end = "\n" if sys.stdout.isatty() else ""
        flush = functools.partial(print, end=end, flush=True)
        ask({"stdout": flush}, self._patience_s)
        self._leave(STALLED)


class _Moment(NamedTuple):
    """When something was heard, and how far the run was.

    Attributes:
        time_s: When.
        epoch: The epoch.
        batches: Of the epoch, or of its validation, that are done. None: this `fit` has
            not begun any.
        testing: Whether it was validating.
    """

    time_s: float
    epoch: int
    batches: int | None
    testing: bool


class _Fit:
    """A call of `fit`, seen from another thread; nothing of it is kept alive.

    Attributes:
        thread: Its thread.
        ending: Whether the end of training was heard of.
        over: Whether it is known to have ended, by returning or raising.
    """

    def __init__(self):
        """To be called in `on_train_begin`."""
        self.thread, self.ending = threading.get_ident(), False
        self.over = threading.Event()
        # `fit`, or a loop of the user's, calls a list of callbacks.
        frame = sys._getframe(1)
        while _is_of(frame, keras.callbacks.Callback):
            frame = frame.f_back
        self._code = frame.f_code

    def frames(self) -> list[types.FrameType] | None:
        """Returns what runs in it, the innermost first; `None` if it is over."""
        if self.over.is_set():
            return None
        top, frames = sys._current_frames().get(self.thread), []
        for frame, _ in traceback.walk_stack(top) if top else ():
            if frame.f_code is self._code:
                break
            frames.append(frame)
        else:
            return None
        # After the end of training, only callbacks are left to be called.
        calls = any(_is_of(frame, keras.callbacks.CallbackList) for frame in frames)
        return frames if calls or not self.ending else None


def _is_of(frame, kind):
    return isinstance(frame.f_locals.get("self"), kind)


def _reason(frames: Sequence[types.FrameType]) -> str | None:
    """What is waited for, as frames tell, the innermost first."""
    for frame in reversed(frames):
        callback = called_callback(frame)
        if isinstance(callback, Checkpoint | SaveFirst):
            return "the save of a checkpoint"
        if callback is not None:
            return f"the callback {type(callback).__name__}"
        if builds_graph(frame):
            return "the graph that is being built"
    return None


def _stacks(first: int) -> str:
    """The stacks of all Python threads but this one, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    lines = []
    for ident in sorted(frames, key=lambda ident: ident != first):
        lines.append(f"Thread {names.get(ident, ident)}:")
        # Without lines of source, which may lie where the run waits for.
        lines += [
            f"  {frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"
            for frame, line in reversed([*traceback.walk_stack(frames[ident])])
        ]
    return "\n".join(lines)


def _where(moment: _Moment, epochs: int | str) -> str:
    if moment.batches is None:
        return "before the first one"
    part = "the validation of epoch" if moment.testing else "epoch"
    batch = f"after batch {moment.batches}" if moment.batches else "before its first"
    return f"in {part} {moment.epoch + 1}/{epochs} {batch}"


def _say_it_goes_on(seconds: float) -> None:
    say(f"It goes on after {seconds:.0f} s.")


# Asks devices, and the stages of the input, for a sign of life.


def ask(questions: Mapping[str, Callable[[], Any]], limit_s: float) -> dict[str, str]:
    """Asks all at once, each in a thread of its own, which waits on if need be.

    Args:
        questions: By name; each returns as soon as there is an answer.
        limit_s: How many seconds they have.

    Returns:
        What is wrong with those that do not answer, a phrase each.
    """
    faults = dict.fromkeys(questions, f"gives nothing within {limit_s:g} s")

    def answer(name):
        try:
            questions[name]()
        except Exception as error:
            first, *_ = str(error).splitlines() or [""]
            faults[name] = f"fails: {type(error).__name__}: {first}"
        else:
            del faults[name]

    threads = [
        threading.Thread(
            target=answer, args=(name,), name=f"towers-ask {name}", daemon=True
        )
        for name in questions
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(faults)


def compute(device: str) -> None:
    """Waits until a device has computed something."""
    with tf.device(device):
        # Whatever the device has to do comes first.
        (tf.ones([]) + 1).numpy()


def ask_input(pipeline: Any, limit_s: float) -> str | None:
    """Reads the first of each stage; returns what is wrong with one of them.

    Args:
        pipeline: A `towers.input_pipeline.Pipeline`.
        limit_s: How many seconds each stage has.
    """
    stages = []
    # In a thread, too: a data service is called already.
    opens = {"opening": lambda: stages.extend(_stages(pipeline))}
    for name, fault in ask(opens, limit_s).items():
        return f"{name} {fault}"
    for stage, dataset in stages:
        reads = {f"stage {stage!r}": functools.partial(_read, dataset)}
        for name, fault in ask(reads, limit_s).items():
            return f"{name} {fault}"
    return None


def _read(dataset: tf.data.Dataset) -> None:
    next(iter(dataset), None)


def _stages(pipeline: Any) -> list[tuple[str, tf.data.Dataset]]:
    """The stages of an `towers.input_pipeline.Pipeline`, from the beginning."""
    # To fill a buffer takes time, and is no fault.
    pipeline = dataclasses.replace(pipeline, start_record=0, repeat=False, shuffle_mb=0)
    if pipeline.data_service is not None:
        return [("data service", pipeline.dataset())]
    # With threads of their own, as others may be busy for ever.
    options = pipeline.options()
    return [(name, data.with_options(options)) for name, data in pipeline.stages()]
