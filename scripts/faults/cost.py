"""What saving every 100 steps costs resnet20: blocks with and without it, in turn.

python -m scripts.faults.cost
"""

import functools
import statistics
import tempfile
import time

import keras

import towers
from scripts.faults.training import on_two_towers

STEPS, ROUNDS = 100, 5


class Blocks(keras.callbacks.Callback):
    """Has every other block of steps saved at its beginning, and times them all."""

    def __init__(self, checkpoint: towers.callbacks.Checkpoint):
        super().__init__()
        self._checkpoint = checkpoint
        self._step, self._begun_s = 0, 0.0
        self.seconds = {True: [], False: []}
        self._saves = True

    def on_train_batch_begin(self, batch, logs=None):
        """Ends a block, and begins the next."""
        if self._step % STEPS == 0:
            now_s = time.perf_counter()
            if self._step > STEPS:  # the first warms up
                self.seconds[self._saves].append(now_s - self._begun_s)
            self._begun_s = now_s
            self._saves = not self._saves
            steps = STEPS if self._saves else None
            self._checkpoint.run.save_points.steps = steps
        self._step += 1


def main() -> None:
    """Trains, and says what was found."""
    parallel, data = on_two_towers(
        "resnet20",
        (32, 32, 3),
        640,
        64,
        functools.partial(keras.optimizers.SGD, 0.1, 0.9),
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = towers.callbacks.Checkpoint(folder)
        blocks = Blocks(checkpoint)
        steps = STEPS * (2 * ROUNDS + 1) + 1
        parallel.fit(
            *(data, None),
            steps_per_epoch=steps,
            callbacks=[blocks, checkpoint],
            verbose=0,
        )
    with_s, without_s = blocks.seconds[True], blocks.seconds[False]
    for name, seconds in (("saving", with_s), ("not saving", without_s)):
        milliseconds = [1000 * s / STEPS for s in seconds]
        print(f"{name}: {statistics.median(milliseconds):.2f} ms a step, of", end=" ")
        print(", ".join(f"{ms:.2f}" for ms in milliseconds))
    ratios = [a / b for a, b in zip(with_s, without_s, strict=False)]
    print(f"with over without, median of pairs: {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    main()
