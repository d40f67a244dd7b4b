"""Is a queue of runs faster than the same runs one after another?

    python -m scripts.bench_queue --runs=8 --devices=2 --rounds=3

Each round trains the same runs twice, each time in new folders: by towers.queue, and by
towers.train, one after another, with all cores for each. Every second round begins with
the latter. Examples per second are those of all runs, in the time from the first start
to the last end: it includes importing TensorFlow, building graphs and saving. Nothing
else may run.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from scripts.race import alternate, ratio

EXAMPLES = 6400


def main() -> None:
    """Measures, and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--model", default="mlp")
    options = parser.parse_args()
    flags = [
        f"--dataset=synthetic:8x8x1:10:{EXAMPLES}",
        f"--model={options.model}",
        f"--train_epochs={options.epochs}",
        "--variable_update=parameter_server",
    ]
    ways = {"queue": in_a_queue, "one_by_one": one_by_one}

    def timed(name):
        with tempfile.TemporaryDirectory() as folder:
            begun_s = time.perf_counter()
            ways[name](flags, options.runs, options.devices, folder)
            seconds = time.perf_counter() - begun_s
        print(f"{name}: {seconds:.1f} s", file=sys.stderr)
        return seconds

    found = alternate(timed, ways, options.rounds)
    examples = options.runs * options.epochs * EXAMPLES
    rates = {
        f"{name}_examples_per_sec": examples / statistics.median(seconds)
        for name, seconds in found.items()
    }
    print(
        json.dumps(
            {
                "cores": len(os.sched_getaffinity(0)),
                "seconds": found,
                **rates,
                "ratio": ratio(found["one_by_one"], found["queue"]),
            },
            indent=2,
        )
    )


def in_a_queue(flags: Sequence[str], runs: int, devices: int, folder: str) -> None:
    """Trains the runs by towers.queue."""
    sweep = f"--sweep=seed={','.join(map(str, range(runs)))}"
    _run("towers.queue", *flags, sweep, f"--devices={devices}", f"--queue_dir={folder}")


def one_by_one(flags: Sequence[str], runs: int, devices: int, folder: str) -> None:
    """Trains the runs one after another, each on one device."""
    del devices
    for seed in range(runs):
        where = pathlib.Path(folder) / str(seed)
        _run(
            *("towers.train", *flags, f"--seed={seed}"),
            *("--num_gpus=1", f"--model_dir={where}"),
        )


def _run(module, *flags):
    done = subprocess.run(
        [sys.executable, "-m", module, *flags], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{module} failed: {done.stderr}")


if __name__ == "__main__":
    main()
