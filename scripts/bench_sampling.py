"""What a sample of the devices' utilization costs, in microseconds.

    python -m scripts.bench_sampling

`towers.train` takes five a second, in a thread. Without a GPU, it is the CPU's load and
the counters of a step; with GPUs, NVIDIA's driver is asked for each.
"""

import argparse
import statistics
import time

import keras
import numpy as np

import towers
from towers import devices
from towers.monitoring.device_report import DeviceReport


def main() -> None:
    """Trains for a moment, so that there are steps, and takes samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=500)
    count = parser.parse_args().samples
    report = DeviceReport(devices.configure(2))
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    parallel = towers.multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "mse")
    x = np.zeros((64, 8), "float32")
    parallel.fit(x, x[:, :1], 8, verbose=0, callbacks=[report])
    # As in the middle of a run.
    report._timers = parallel.builder.timers
    took_us = []
    for _ in range(count):
        begun_s = time.perf_counter()
        report._sampler.sample()
        took_us.append(1e6 * (time.perf_counter() - begun_s))
    median, slowest = statistics.median(took_us), max(took_us)
    print(f"a sample: {median:.0f} us (median), {slowest:.0f} us (slowest)")


if __name__ == "__main__":
    main()
