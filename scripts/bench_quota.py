"""Training in a container of 1 CPU and 2 GB: threads of the machine, or of the quota.

    python -m scripts.bench_quota

Before, threads were as many as `os.cpu_count()` says. Both ways train in turn, each in
a process in a real control group (scripts/control_group.py; it takes root). The flags
are those of towers.train.
"""

import argparse
import contextlib
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from scripts.control_group import quota

_FLAGS = (
    *("--dataset=synthetic:64x64x3:10", "--model=cnn", "--batch_size=64"),
    *("--recipe=imagenet", "--train_epochs=1", "--cache=none"),
    *("--variable_update=parameter_server", "--enable_xla=false"),
)
_LOOK_S = 0.1
# What stands for a process that looks at the whole machine.
_BEFORE = """
import os
from towers.machine import limits
whole = limits.Processors(os.cpu_count(), os.cpu_count())
limits.processors = lambda: whole
limits.memory = lambda before=limits.memory: before()._replace(limited=False)
"""


def main() -> None:
    """Trains in turn, and says how fast and with how many threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpus", type=float, default=1.0)
    parser.add_argument("--memory_mb", type=int, default=2048)
    options, flags = parser.parse_known_args()
    found = {"before": [], "now": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for name, runs in found.items():
                with quota(options.cpus, options.memory_mb) as inside:
                    runs.append(_train(inside, name, folder, flags or _FLAGS))
                print(name, runs[-1], flush=True)
    rates = {name: _rates(runs) for name, runs in found.items()}
    for name, each in rates.items():
        threads = {run["threads"] for run in found[name] if run}
        print(f"{name}: {statistics.median(each):,.1f} examples/s, threads {threads}")
    ratios = [b / a for a, b in zip(*rates.values(), strict=False)]
    print(f"now over before, median of pairs: {statistics.median(ratios):.3f}")


def _rates(runs):
    return [run["examples_per_sec"] for run in runs if run.get("examples_per_sec")]


def _train(inside, name, folder, flags):
    """Trains in a process; returns what it says, and its exit code if it fails."""
    model_dir = os.path.join(folder, name)
    script = "from scripts.bench_quota import measure_here; measure_here()"
    script = (_BEFORE if name == "before" else "") + script
    where = [f"--model_dir={model_dir}", f"--data_dir={folder}/data", "--clean"]
    command = [*inside, sys.executable, "-c", script, *flags, *where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return {"exit_code": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def measure_here() -> None:
    """Trains by the flags of this process, and prints JSON last.

    It has the most threads at once, by /proc, and what summary.json says of the speed.
    """
    most, ended = [0], threading.Event()

    def look():
        while not ended.wait(_LOOK_S):
            status = Path("/proc/self/status").read_text()
            most[0] = max(
                most[0], int(re.search(r"^Threads:\s+(\d+)", status, re.M)[1])
            )

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with contextlib.suppress(SystemExit):
            sys.argv[0] = "towers.train"
            runpy.run_module("towers.train", run_name="__main__", alter_sys=True)
    finally:
        ended.set()
        thread.join()
    (folder,) = (
        each.partition("=")[2] for each in sys.argv if each.startswith("--model_dir=")
    )
    summary = json.loads(Path(folder, "summary.json").read_text())
    found = {"threads": most[0], "examples_per_sec": summary["examples_per_sec"]}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
