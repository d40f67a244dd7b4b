"""Records a trace of some training steps, for TensorBoard's profile plugin."""

import contextlib
import glob
import os
import re

import keras
import tensorflow as tf

from towers.keras_adapter.runtime import XSpace
from towers.layers.variables import steps_done
from towers.lifecycle.checkpoints.store import reason
from towers.model import fit_call
from towers.model.fit_call import FitCall, if_broken_off
from towers.program import whole_file
from towers.program.voice import say

# A trace is kept in memory until it is written, and the plugin reads it as a whole.
MOST_STEPS = 200
# Planes of such names are shown besides those of the devices.
_PLANE = "/device:CUSTOM:towers"
# The name of an operation, of its type behind the colon.
_OPERATION = re.compile(r"(?:preprocess/)?(tower_\d+)(?:_\d+)*/(.*):")
# Left behind where TensorFlow copied a function into the graph.
_CALLS = re.compile(r"(?<![^/])(?:(?:Stateful)?PartitionedCall|cond|then|_\d+)/")


@fit_call.changes_no_variable
class Profile(keras.callbacks.Callback):
    """Records a profile of some steps, for TensorBoard's profile plugin.

    Operations have the names that they have in the graph, and each tower's operations
    are also in rows of their own. The trace is in `plugins/profile` of the log
    directory. After the last recorded step, the callback costs nothing. If recording
    fails, it says so, and `fit` goes on.

    Put it first in the list of callbacks, because the work of callbacks after a batch
    is not part of the step.
    """

    def __init__(self, log_dir: str, first_step: int, last_step: int):
        """Initializes the callback. It records nothing yet.

        Args:
            log_dir: Folder of a run of TensorBoard, such as `MODEL_DIR/train`.
            first_step: The first step to record, counting from 1.
            last_step: The last step to record. A call of several steps is recorded as a
                whole.

        Raises:
            ValueError: If these are not 2 to `MOST_STEPS` steps.
        """
        super().__init__()
        if not 1 <= first_step < last_step < first_step + MOST_STEPS:
            raise ValueError(
                f"Received first_step={first_step} and last_step={last_step}; expected "
                f"the first and the last of 2 to {MOST_STEPS} steps to record."
            )
        self._log_dir = log_dir
        self._first_step, self._last_step = first_step, last_step
        self._state, self._step, self._written = "waiting", None, set()
        self._done = self._calls = 0

    def on_train_begin(self, logs=None):
        """Waits for the first step, if it is still to come."""
        self._look()
        self._state = "over" if self._done >= self._last_step else "waiting"

    def on_train_batch_begin(self, batch, logs=None):
        """Begins to record, if the first step is next."""
        if self._state == "waiting" and self._may_be_next():
            self._look()
            if self._done + 1 >= self._first_step:
                self._start()
        if self._state == "recording":
            # With this mark, the plugin tells steps apart.
            self._step = tf.profiler.experimental.Trace(
                "train", step_num=self._done + 1, _r=1
            )
            self._step.__enter__()
        self._calls += 1

    def on_train_batch_end(self, batch, logs=None):
        """Ends the trace, if it was the last step."""
        if self._state != "recording":
            return
        self._end_step()
        self._look()
        if self._done >= self._last_step:
            self._stop()

    def on_train_end(self, logs=None):
        """Ends the trace, if training ends before its last step."""
        if self._state == "recording":
            self._stop()
        elif self._state == "waiting":
            self._look()
            say(
                f"Nothing was profiled: training ended after step {self._done}, "
                f"before step {self._first_step}."
            )

    def around_fit(self, call: FitCall) -> contextlib.AbstractContextManager[None]:
        """A context that ends the trace if an exception ends `fit`."""
        return if_broken_off(self._break_off)

    def _break_off(self):
        if self._state != "recording":
            return
        self._end_step()
        if self._stop():
            say(
                f"Profiled until training was broken off after step {self._done}; the "
                f"trace is in {self._folder()}."
            )

    def _look(self):
        self._done, self._calls = steps_done(self.model), 0

    def _may_be_next(self):
        """Tells whether the first step may be next: knowing it waits for the device."""
        builder = getattr(self.model, "builder", None)
        # Asynchronous towers make a step each.
        towers = len(builder.plan.towers) if builder else 1
        most = self.model.steps_per_execution * towers
        return self._done + self._calls * most + 1 >= self._first_step

    def _start(self):
        self._written = self._traces()
        try:
            tf.profiler.experimental.start(self._log_dir)
        except tf.errors.OpError as error:
            self._state = "over"
            say(f"Nothing is profiled: {reason(error).rstrip('.')}.")
        else:
            self._state = "recording"

    def _end_step(self):
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _stop(self):
        """Ends the trace, and returns whether it is written."""
        self._state = "over"
        try:
            tf.profiler.experimental.stop()
            new = self._traces() - self._written
            if not new:
                raise OSError("the profiler wrote nothing")
        except (OSError, tf.errors.OpError) as error:
            say(f"The trace could not be written: {reason(error).rstrip('.')}.")
            return False
        # A whole trace without rows for towers is worth more than an exception.
        try:
            for path, _ in new:
                add_towers(path)
        except Exception as error:
            say(f"The trace has no rows for the towers: {reason(error).rstrip('.')}.")
        return True

    def _traces(self):
        # With their times, as two traces within a second have the same name.
        paths = glob.glob(os.path.join(glob.escape(self._folder()), "*/*.pb"))
        return {(path, os.path.getmtime(path)) for path in paths}

    def _folder(self):
        return os.path.join(self._log_dir, "plugins/profile")


# Gives each tower rows of its own in a trace that TensorFlow's profiler has written.
#
# TensorFlow sorts what it records by thread, and each thread works for all towers.


def add_towers(path: str) -> None:
    """Adds rows for the towers: for each a row for each thread that worked for it.

    Args:
        path: An `xplane.pb` file.
    """
    with open(path, "rb") as file:
        space = XSpace.FromString(file.read())
    found = {}
    for plane in space.planes:
        names = {
            key: _OPERATION.match(each.name)
            for key, each in plane.event_metadata.items()
        }
        for line in plane.lines:
            for event in line.events:
                if (name := names[event.metadata_id]) is not None:
                    row = found.setdefault((name[1], line.id), (line, []))
                    row[1].append((_CALLS.sub("", name[2]), event))
    _add_plane(space, found)
    # Beside it, so that what the profiler has written outlives a full disk.
    with whole_file.opened(path, "wb") as file:
        file.write(space.SerializeToString())


def _add_plane(space, rows):
    plane = space.planes.add(name=_PLANE, id=1 + max(p.id for p in space.planes))
    keys = {}
    for number, ((tower, _), (line, events)) in enumerate(
        sorted(rows.items(), key=lambda item: item[0]), start=1
    ):
        row = plane.lines.add(
            id=number, name=tower, display_name=tower, timestamp_ns=line.timestamp_ns
        )
        for name, event in events:
            key = keys.setdefault(name, 1 + len(keys))
            row.events.add(
                metadata_id=key,
                offset_ps=event.offset_ps,
                duration_ps=event.duration_ps,
            )
    for name, key in keys.items():
        plane.event_metadata[key].id = key
        plane.event_metadata[key].name = name
