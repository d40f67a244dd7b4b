"""Many small processes on one machine: what does each cost, and how far does it scale?

    python -m scripts.bench_processes --hosts=2,4,8,16,32

For each number of hosts, `towers.launch` starts that many processes, which train a
small Keras model together. Printed are the seconds until all have trained a step, the
median of the steps after that, and the memory of a process: USS (its own, which ends
with it) and PSS (with its part of what it shares).
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import psutil

ROOT = pathlib.Path(__file__).resolve().parents[1]
_START, _FOLDER, _STEPS = "BENCH_START", "BENCH_FOLDER", "BENCH_STEPS"
_FIRST_STEPS = 5  # are not counted
_MB = 2**20


def main() -> None:
    """Measures each number of hosts, and prints a line for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", default="2,4,8,16,32")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--limit_s", type=int, default=420)
    args = parser.parse_args()
    print("hosts | start s | step ms | USS MB | PSS MB | all PSS MB", flush=True)
    for count in map(int, args.hosts.split(",")):
        print(_measured(count, args.steps, args.limit_s), flush=True)


def _measured(count, steps, limit_s):
    with tempfile.TemporaryDirectory() as folder:
        environ = {_START: time.time(), _FOLDER: folder, _STEPS: steps}
        done = subprocess.run(
            [
                *(sys.executable, "-m", "towers.launch", f"--hosts={count}"),
                *(f"--log_dir={folder}", "--", "-m", "scripts.bench_processes"),
            ],
            cwd=ROOT,
            env=os.environ | {name: str(value) for name, value in environ.items()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=limit_s,
        )
        if done.returncode:
            return f"{count} | failed: {done.stderr}"
        found = [
            json.loads(each.read_text()) for each in pathlib.Path(folder).glob("*.json")
        ]
    assert len(found) == count
    starts, times, owns, parts = zip(*found, strict=True)
    return (
        f"{count} | {max(starts):.1f} | {statistics.median(times) * 1e3:.1f} | "
        f"{max(owns) / _MB:.0f} | {max(parts) / _MB:.0f} | {sum(parts) / _MB:.0f}"
    )


def _host() -> None:
    """Trains on one host, and writes down what that took."""
    import keras
    import numpy as np

    import towers
    from towers.model import fit_call

    towers.configure(hosts="auto")
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    model = towers.multi_gpu_model(keras.Sequential([keras.Input((32,)), *layers]))
    model.compile("adam", "mse")
    times = []

    @fit_call.changes_no_variable
    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            times.append(time.time())

    steps = int(os.environ[_STEPS]) + _FIRST_STEPS
    rows = np.random.default_rng(0).normal(size=(64 * steps, 42)).astype("float32")
    x, y = rows[:, :32], rows[:, 32:]
    model.fit(x, y, batch_size=64, shuffle=False, verbose=0, callbacks=[Ends()])
    later = times[_FIRST_STEPS:]
    memory = psutil.Process().memory_full_info()
    found = (
        times[0] - float(os.environ[_START]),
        statistics.median(b - a for a, b in itertools.pairwise(later)),
        *(memory.uss, memory.pss),
    )
    # All measure before the first one ends.
    model.evaluate(x[:64], y[:64], verbose=0)
    name = f"{os.environ['TOWERS_HOST_RANK']}.json"
    pathlib.Path(os.environ[_FOLDER], name).write_text(json.dumps(found))


if __name__ == "__main__":
    _host() if "TOWERS_HOST_RANK" in os.environ else main()
