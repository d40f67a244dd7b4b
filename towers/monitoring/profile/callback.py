"""Records a trace of some training steps, for TensorBoard's profile plugin."""

import contextlib
import glob
import os

import keras
import tensorflow as tf

from towers.layers.variables import steps_done
from towers.lifecycle.checkpoints.store import reason
from towers.loop import listeners
from towers.model.fit_call import FitCall, if_broken_off
from towers.monitoring.profile.trace import add_towers
from towers.program.voice import say

# A trace is kept in memory until it is written, and read by the plugin as a whole.
MOST_STEPS = 200


@listeners.changes_no_variable
class Profile(keras.callbacks.Callback):
    """Records a profile of some steps, for TensorBoard's profile plugin.

    Operations have the names that they have in the graph, and each tower's operations
    are also in rows of their own. The trace is in `plugins/profile` of the log
    directory. After the last recorded step, the callback costs nothing. If recording
    fails, it says so, and `fit` goes on.

    Put it first in the list of callbacks, because what they do after a batch is not
    part of the step.
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
            # By this mark, the plugin knows steps from one another.
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
        """Also ends the trace where an exception ends `fit`."""
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
        """Tells whether it is time to look: a look waits for the device."""
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
        # A whole trace without such rows is worth more than an exception.
        try:
            for path, _ in new:
                add_towers(path)
        except Exception as error:
            say(f"The trace has no rows for the towers: {reason(error).rstrip('.')}.")
        return True

    def _traces(self):
        # With their times, as two within a second have the same name.
        found = glob.glob(os.path.join(glob.escape(self._folder()), "*/*.pb"))
        return {(path, os.path.getmtime(path)) for path in found}

    def _folder(self):
        return os.path.join(self._log_dir, "plugins/profile")
