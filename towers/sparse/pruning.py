"""Pruning by magnitude: blocks are dropped while a model trains."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from towers.collectives.joined_hosts import this_host
from towers.program.voice import say
from towers.sparse.changing import (
    begin_anew,
    dynamic_layers,
    intervals,
    squares_of_blocks,
)


class PruneBlocks(keras.callbacks.Callback):
    """Drops the blocks with the smallest weights, as a schedule has it.

    This is gradual pruning (Zhu and Gupta 2017, https://arxiv.org/abs/1710.01878). A
    block that was dropped is zero, and stays so. It takes its time and memory until the
    end; then `towers.sparsify(model, sparsity=...)` makes a model that is as small and
    as fast as it is sparse. If several hosts train, all do as the first one.

    Examples:
        >>> model = towers.sparsify(model, sparsity=0.0, dynamic=True)
        >>> schedule = keras.optimizers.schedules.PolynomialDecay(0.0, 5000, 0.9, 3)
        >>> model.fit(x, y, callbacks=[towers.PruneBlocks(schedule, every=100)])
        >>> small = towers.sparsify(model, sparsity=0.9)
    """

    def __init__(self, sparsity: Callable[[Any], Any], every: int):
        """Drops nothing yet.

        Args:
            sparsity: Takes a step and returns the share of each kernel that is to be
                zero, such as a schedule of `keras.optimizers.schedules`.
            every: Steps between two times that blocks are dropped.

        Raises:
            ValueError: A number is none of these, or `sparsity` is no function.
        """
        super().__init__()
        if not callable(sparsity):
            raise ValueError(
                f"Received sparsity={sparsity!r}; expected a function of the step, "
                "such as keras.optimizers.schedules.PolynomialDecay(0.0, 5000, 0.9, 3)."
            )
        self._sparsity, self._interval = sparsity, intervals(every)

    def on_train_begin(self, logs=None):
        """Looks for layers whose blocks can be dropped."""
        self._layers = dynamic_layers(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        """Looks how many steps there have been."""
        self._interval.begin(self.model)

    def on_train_batch_end(self, batch, logs=None):
        """Drops blocks, if it is time."""
        if not self._interval.is_over(self.model):
            return
        step = self._interval.step
        # Keras's schedules are float32; so 0.9 is the 0.9 that `sparsify` takes.
        sparsity = round(float(self._sparsity(step)), 6)
        if not 0 <= sparsity < 1:
            raise ValueError(
                f"Received a sparsity of {sparsity} for step {step}; expected a "
                "schedule of at least 0 and less than 1."
            )
        number = sum(
            self._prune(layer, sparsity) for layer in self._layers if layer.built
        )
        if number:
            say(
                f"{number} blocks were dropped after step {step}, for a sparsity of "
                f"{sparsity:.2f}."
            )

    def _prune(self, layer, sparsity):
        """Drops blocks of a layer; returns how many."""
        present = keras.ops.convert_to_numpy(layer.present) > 0
        squares = squares_of_blocks(layer)
        wanted = max(1, round((1 - sparsity) * layer.layouts[0].mask.size))
        # Those that were dropped come last.
        order = np.argsort(np.where(present, -squares, np.inf), kind="stable")
        stay = np.zeros(len(present), bool)
        stay[order[:wanted]] = True
        stay = np.array(this_host().broadcast_value((stay & present).tolist()))
        layer.present.assign(stay.astype("float32"))
        begin_anew(self.model.optimizer, layer, ~stay)
        return int(present.sum() - stay.sum())
