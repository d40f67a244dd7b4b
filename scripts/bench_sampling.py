"""What a sample of the devices' utilization costs, in microseconds.

    python -m scripts.bench_sampling

`towers.train` takes five a second, in a thread. Without a GPU, it is the CPU's load and
the counters of a step; with GPUs, NVIDIA's driver is asked for each.
"""

import argparse
import statistics
import time
from unittest import mock

import keras
import numpy as np

import towers
from towers import devices
from towers.monitoring import device_report
from towers.monitoring.bottleneck.sampling import Sampler


class Clock(keras.callbacks.Callback):
    """Takes a sample behind each step, and notes how long that took."""

    def __init__(self, take):
        super().__init__()
        self._take = take
        self.took_us = []

    def on_train_batch_end(self, batch, logs=None):
        """Takes one."""
        begun_s = time.perf_counter()
        self._take()
        self.took_us.append(1e6 * (time.perf_counter() - begun_s))


def main() -> None:
    """Trains for a moment, and takes samples meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=500)
    count = parser.parse_args().samples
    takes = []

    def sampler(take):
        takes.append(take)
        return Sampler(take)

    with mock.patch.object(device_report, "Sampler", sampler):
        report = device_report.DeviceReport(devices.configure(2))
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    parallel = towers.multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "mse")
    x, clock = np.zeros((8 * count, 8), "float32"), Clock(*takes)
    parallel.fit(x, x[:, :1], 8, verbose=0, callbacks=[report, clock])
    median, slowest = statistics.median(clock.took_us), max(clock.took_us)
    print(f"a sample: {median:.0f} us (median), {slowest:.0f} us (slowest)")


if __name__ == "__main__":
    main()
