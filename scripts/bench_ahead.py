"""What a step takes whose batches are copied beside it, where copies take time.

    python -m scripts.bench_ahead --copy_ms=50 --step_ms=60

Both are made to last, as between logical CPUs nothing is copied. A step takes the
larger of the two, and not their sum, and what towers wait for is said to be copying.
"""

import argparse
import os
import time
from unittest import mock

import keras
import tensorflow as tf

import towers
from towers.builders.pieces.batches import LocalBatches
from towers.monitoring.step_time import StepTime

BATCHES, WARM_UP = 60, 10


def late(tensor: tf.Tensor, seconds: float) -> tf.Tensor:
    """Returns a tensor some time after it is there."""

    def sleep(value):
        time.sleep(seconds)
        return value

    slept = tf.numpy_function(sleep, [tensor], tensor.dtype, stateful=False)
    return tf.ensure_shape(slept, tensor.shape)


def measure(copy_s: float, step_s: float, prefetch: int, steps: int) -> str:
    """Trains, and says what a step takes.

    Args:
        copy_s: What it takes to place a batch.
        step_s: What a tower takes to compute.
        prefetch: Batches that are placed ahead.
        steps: Steps in a call.
    """
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

    def preprocess(x, y, training):
        # On the first tower alone.
        return tf.cond(x[0, 0] < 0, lambda: late(x, step_s), lambda: x), y

    parallel = towers.multi_gpu_model(
        model, gpus=2, prefetch=prefetch, preprocess=preprocess
    )
    parallel.compile("sgd", "mse", steps_per_execution=steps)
    x = tf.repeat([[-1.0], [1.0]], 3, axis=0) * tf.ones([1, 4])
    data = tf.data.Dataset.from_tensors((x, tf.zeros([6, 2]))).repeat(BATCHES)
    cut, step_time = LocalBatches.cut, StepTime(WARM_UP)

    def slow(batches, data):
        return cut(batches, (late(data[0], copy_s), data[1]))

    with mock.patch.object(LocalBatches, "cut", slow):
        parallel.fit(data, verbose=0, shuffle=False, callbacks=[step_time])
    return step_time.text()


def main() -> None:
    """Prints a line for each way to have batches copied."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--copy_ms", type=float, default=50)
    parser.add_argument("--step_ms", type=float, default=60)
    flags = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # What sleeps keeps a thread, as copies to GPUs do not.
    tf.config.threading.set_inter_op_parallelism_threads(8)
    towers.configure(num_gpus=2)
    print(f"copies {flags.copy_ms:g} ms, steps {flags.step_ms:g} ms")
    for prefetch, steps in ((0, 1), (1, 1), (2, 1), (0, 10)):
        found = measure(flags.copy_ms / 1e3, flags.step_ms / 1e3, prefetch, steps)
        print(f"prefetch={prefetch}, {steps} steps a call: {found}")


if __name__ == "__main__":
    main()
