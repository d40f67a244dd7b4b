"""Records a trace of some training steps, for TensorBoard's profile plugin."""

import glob
import os

import keras
import tensorflow as tf

from towers.callbacks.trace import add_towers
from towers.resume import say


class Profile(keras.callbacks.Callback):
    """Records what host and devices do from one step of the optimizer to another.

    Operations have the names that they have in the graph, and each tower's are also in
    rows of its own. The trace is in `plugins/profile` of the log directory. Before and
    after it, the callback costs nothing.

    Place it first among the callbacks: what they do after a batch is not its step.
    """

    def __init__(self, log_dir: str, first_step: int, last_step: int):
        """Initializes the callback; records nothing.

        Args:
            log_dir: Directory of a run of TensorBoard, such as `MODEL_DIR/train`.
            first_step: The first step to record, counting from 1.
            last_step: The last one. A call of several steps is recorded as a whole.
        """
        super().__init__()
        self._log_dir = log_dir
        self._first_step, self._last_step = first_step, last_step
        self._state, self._step = "waiting", None

    def on_train_begin(self, logs=None):
        """Waits for the first step, if it is still to come."""
        if self._done() >= self._last_step:
            self._state = "over"

    def on_train_batch_begin(self, batch, logs=None):
        """Begins to record, if the first step is next."""
        if self._state == "over":
            return
        step = self._done() + 1
        if self._state == "waiting" and step >= self._first_step:
            tf.profiler.experimental.start(self._log_dir)
            self._state = "recording"
        if self._state == "recording":
            # By this mark, the plugin knows steps from one another.
            self._step = tf.profiler.experimental.Trace("train", step_num=step, _r=1)
            self._step.__enter__()

    def on_train_batch_end(self, batch, logs=None):
        """Ends the trace, if it was the last step."""
        if self._state != "recording":
            return
        self._step.__exit__(None, None, None)
        if self._done() >= self._last_step:
            self._stop()

    def on_train_end(self, logs=None):
        """Ends the trace, if training ends before its last step."""
        if self._state == "recording":
            self._stop()
        elif self._state == "waiting":
            say(
                f"Nothing was profiled: training ended after step {self._done()}, "
                f"before step {self._first_step}."
            )

    def _stop(self):
        tf.profiler.experimental.stop()
        written = os.path.join(glob.escape(self._log_dir), "plugins/profile/*/*.pb")
        add_towers(max(glob.glob(written), key=os.path.getmtime))
        self._state = "over"

    def _done(self):
        return int(self.model.optimizer.iterations)
