"""Ends training after a number of steps."""

import keras

from towers.layers.variables import steps_done
from towers.loop import listeners


@listeners.changes_no_variable
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
