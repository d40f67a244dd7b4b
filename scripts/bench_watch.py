"""What watching costs resnet20: a run that is watched and one that is not, in turn.

    python -m scripts.bench_watch

Both train in one process, epoch by epoch. Watched means all that towers.train does by
default: the phases of a step, the check for numbers that are not finite, the callbacks
that measure, and TensorBoard.
"""

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
from unittest import mock

import keras
import tensorflow as tf

import towers
from towers import devices, models
from towers.loop import loop
from towers.loop.timers import StepTimers
from towers.monitoring.bottleneck.starvation import Starvation
from towers.monitoring.device_report import DeviceReport
from towers.monitoring.tensorboard.callback import TensorBoard
from towers.monitoring.throughput import Throughput
from towers.train.callbacks import Watch

TOWERS, BATCH, STEPS = 2, 64, 100


class Turns:
    """Lets one of several threads go on at a time, in turn."""

    def __init__(self, count: int):
        self._ahead = [threading.Semaphore(k == 0) for k in range(count)]

    def take(self, k: int) -> None:
        """Waits for its turn."""
        self._ahead[k].acquire()

    def give(self, k: int) -> None:
        """Ends its turn."""
        self._ahead[(k + 1) % len(self._ahead)].release()


class Epochs(keras.callbacks.Callback):
    """Has epochs run in turn, and times them."""

    def __init__(self, turns: Turns, k: int):
        super().__init__()
        self._turns, self._k = turns, k
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        """Waits for its turn."""
        self._turns.take(self._k)
        self._begun_s = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        """Ends its turn."""
        self.seconds.append(time.perf_counter() - self._begun_s)
        self._turns.give(self._k)


def main() -> None:
    """Trains, and says what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    placed = devices.configure(TOWERS)
    turns = Turns(2)
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            (build(False), [], unwatched()),
            (build(True), callbacks(folder, placed), contextlib.nullcontext()),
        ]
        for parallel, _, how in runs:
            with how:  # traces
                parallel.fit(data(), steps_per_epoch=2, verbose=0)
        epochs = [Epochs(turns, k) for k in range(2)]
        threads = [
            threading.Thread(
                target=parallel.fit,
                args=(data(),),
                kwargs={
                    "steps_per_epoch": STEPS,
                    "epochs": rounds + 1,
                    "callbacks": [*watching, each],
                    "verbose": 0,
                },
            )
            for each, (parallel, watching, _) in zip(epochs, runs, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # The first of each warms up.
    plain, watched = (each.seconds[1:] for each in epochs)
    for name, seconds in (("plain", plain), ("watched", watched)):
        ms = [1000 * each / STEPS for each in seconds]
        found = ", ".join(f"{each:.2f}" for each in ms)
        print(f"{name}: {statistics.median(ms):.2f} ms a step, of {found}")
    ratios = [b / a for a, b in zip(plain, watched, strict=True)]
    print(f"watched over plain, median of pairs: {statistics.median(ratios):.4f}")


def build(watched: bool) -> towers.TowerModel:
    """The network on two towers."""
    keras.utils.set_random_seed(0)
    model = models.build("resnet20", input_shape=(32, 32, 3), num_classes=10, seed=0)
    parallel = towers.multi_gpu_model(model, gpus=TOWERS, check_numerics=watched)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parallel.compile(keras.optimizers.SGD(0.1, 0.9), loss, metrics=["accuracy"])
    return parallel


def data() -> tf.data.Dataset:
    """Batches that are there at once."""
    x = tf.random.stateless_uniform([BATCH, 32, 32, 3], (0, 0), -1.0, 1.0)
    y = tf.range(BATCH, dtype=tf.int64) % 10
    return tf.data.Dataset.from_tensors((x, y)).cache().repeat().prefetch(2)


def callbacks(folder: str, placed: devices.Devices) -> list[keras.callbacks.Callback]:
    """What towers.train watches with."""
    fractions = [1 / TOWERS] * TOWERS
    watch = Watch(
        Throughput(BATCH, fractions=fractions),
        Starvation(STEPS, say=lambda line: None),
        DeviceReport(placed),
    )
    tensorboard = TensorBoard(folder, STEPS, measures=watch.measures)
    return [*watch.callbacks, tensorboard]


@contextlib.contextmanager
def unwatched():
    """Inside, steps are traced that do not look at the clock."""
    no_step = mock.patch.object(
        StepTimers,
        "step",
        lambda _, data, local_batches, *__: contextlib.nullcontext(local_batches),
    )
    no_time = mock.patch.object(
        loop, "timestamp_after", lambda *_: tf.zeros([], tf.float64)
    )
    with no_step, no_time:
        yield


if __name__ == "__main__":
    main()
