"""Faults at random instants on two hosts that train together: what becomes of the run?

    python -m scripts.bench_faults --faults=10 --engine=tensorflow
    python -m scripts.bench_faults --faults=10 --engine=mpi

Two processes of two towers each train a small model, deterministically. One is killed,
stopped or asked to end, finds a bad record, is cut off from the network, does not come,
or (the first) cannot write any more. It is measured when the other one has ended; both
are started again, and it is measured when they train. The end has to have the bits of a
run that nobody disturbed. With MPI, mpirun starts both and ends them, so none can be
missing, and no network can be cut.
"""

import argparse
import contextlib
import functools
import hashlib
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

import psutil

from scripts.bench import mpirun
from scripts.faults.run import at_random, saved_arrays
from tests import network
from tests.hosts import free_ports

ROOT = pathlib.Path(__file__).resolve().parents[1]
HOSTS, LIMIT_S = 2, 240
FLAGS = (
    *("--deterministic", "--num_gpus=2", "--log_steps=1", "--seed=1"),
    *("--variable_update=parameter_server", "--train_epochs=3", "--save_every=7"),
)
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
# Open MPI tells a process its rank so.
_RANK = "OMPI_COMM_WORLD_RANK"
CUT, MISSING = "cut network", "missing"
KINDS = {
    "tensorflow": (*SIGNALS, "bad data", "full disk", CUT, MISSING),
    "mpi": (*SIGNALS, "bad data", "full disk"),
}

# What --model names where data are to become bad, and what makes them so.
MODEL = """
import os
import keras
import numpy as np


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        if os.path.exists(f"{os.environ['FAULT']}.{os.getpid()}"):
            raise OSError(f"bad record {index}")
        random = np.random.default_rng(index)
        return random.normal(size=(64, 100)), random.integers(10, size=64)


def train_data():
    return Data()


def build(input_shape):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(10)])


loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""


class Generation:
    """Hosts that train together, from their start to their end.

    Attributes:
        processes: One for each host that was started.
    """

    def __init__(
        self, engine: str, model_dir: pathlib.Path, number: int, kind: str = "kill"
    ):
        """Starts them; `number` counts generations, and `kind` is of the fault."""
        self.network = self._mpirun = None
        self._start_s = time.monotonic()
        self._fault = model_dir.with_name(f"{model_dir.name}.{number}.fault")
        self._logs = [
            model_dir.with_name(f"{model_dir.name}.{number}.{k}") for k in range(HOSTS)
        ]
        environ = {
            "CUDA_VISIBLE_DEVICES": "-1",
            "FAULT": str(self._fault),
            "TOWERS_JOIN_SECONDS": "20",
            "PYTHONUNBUFFERED": "1",
            "TOWERS_GENERATION": str(number),
        }
        model = "mlp"
        if kind == "bad data":
            model = model_dir.with_name("model.py")
            model.write_text(MODEL)
        command = sys.executable, "-m", "towers.train", *FLAGS, f"--model={model}"
        command = *command, f"--model_dir={model_dir}"
        if engine == "mpi":
            self.processes = self._by_mpi(command, os.environ | environ)
        else:
            self.processes = self._each(command, os.environ | environ, kind)

    def _each(self, command, environ, kind):
        """Starts the hosts one by one; a missing one is not started."""
        host = "127.0.0.1"
        if kind == CUT:
            self.network = network.Network(HOSTS).__enter__()
            host = self.network.addresses[0]
        environ |= {
            "TOWERS_COORDINATOR": f"{host}:{free_ports(1)[0]}",
            "TOWERS_HOST_COUNT": str(HOSTS),
            "TOWERS_TOKEN": "fault of a benchmark",
        }
        processes = []
        for rank, log in enumerate(self._logs[:1] if kind == MISSING else self._logs):
            start = subprocess.Popen
            if self.network:
                start = functools.partial(self.network.start, rank)
            with open(log, "wb") as file:
                own = environ | {"TOWERS_HOST_RANK": str(rank)}
                process = start(command, cwd=ROOT, env=own, stdout=file, stderr=file)
            processes.append(process)
        return processes

    def _by_mpi(self, command, environ):
        """Has mpirun start the hosts, which all write to one log."""
        self._logs = [self._logs[0]] * HOSTS
        with open(self._logs[0], "wb") as file:
            self._mpirun = psutil.Popen(
                [mpirun.MPIRUN, "-n", str(HOSTS), *command],
                cwd=ROOT,
                env=environ | mpirun.ALLOWED,
                stdout=file,
                stderr=file,
            )
        hosts = []
        while len(hosts) < HOSTS and self._mpirun.poll() is None:
            time.sleep(0.01)
            below = self._mpirun.children(recursive=True)
            hosts = [child for child in below if _RANK in child.environ()]
        return sorted(hosts, key=lambda host: int(host.environ()[_RANK]))

    def make_data_bad(self, rank: int) -> None:
        """Has a host find a bad record, if it trains on data of `MODEL`."""
        pid = self.processes[rank].pid
        self._fault.with_name(f"{self._fault.name}.{pid}").touch()

    def first_step_s(self) -> float:
        """Waits for the first step; returns the seconds since the start."""
        while not any(
            line.lower().startswith(("epoch ", "step "))
            for line in self._logs[0].read_text().splitlines()
        ):
            if not any(map(runs, self.processes)):
                break
            time.sleep(0.02)
        return time.monotonic() - self._start_s

    def end(self, *ranks: int) -> list[int | str]:
        """Waits for hosts; returns their exit codes, "hangs" for one that does not."""
        codes, end_s = [], time.monotonic() + LIMIT_S
        for process in [self.processes[rank] for rank in ranks]:
            try:
                codes.append(process.wait(max(0.1, end_s - time.monotonic())))
            except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
                process.kill()
                process.wait()
                codes.append("hangs")
        return codes

    def leave(self) -> None:
        """Takes the network down, or waits for mpirun, if there is one."""
        if self.network:
            self.network.__exit__()
        if self._mpirun:
            self._mpirun.wait()

    def said(self, rank: int) -> str:
        """Returns the last sentence of a host."""
        lines = self._logs[rank].read_text().splitlines()
        return next((each for each in lines[::-1] if each.startswith("towers")), "-")


def runs(process: subprocess.Popen | psutil.Process) -> bool:
    """Returns whether a process has not ended."""
    if isinstance(process, subprocess.Popen):
        return process.poll() is None
    return process.is_running()


def main():
    """Makes the faults, and prints a line for each."""
    engine = argparse.ArgumentParser(add_help=False)
    engine.add_argument("--engine", choices=KINDS, default="tensorflow")
    with at_random(__doc__, "faults", 10, engine) as (args, rng, folder):
        kinds, alone, good = KINDS[args.engine], {}, 0
        print("| fault | host | at | others' end | codes | next step | codes | bits |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for number in range(args.faults):
            kind = kinds[number % len(kinds)]
            own = kind == "bad data"
            if own not in alone:
                alone[own] = run_alone(args.engine, folder / f"alone{own}", kind)
            whole_s, wanted = alone[own]
            rank = 0 if kind == "full disk" else rng.randrange(HOSTS)
            at_s = 0.0 if kind == MISSING else rng.uniform(0.1, 0.95) * whole_s
            run = folder / f"run{number}"
            good += try_one(args.engine, run, kind, rank, at_s, wanted)
        print(f"\n{good} of {args.faults} end with the bits of the undisturbed run.")


def run_alone(engine, model_dir, kind) -> tuple[float, str | None]:
    """Returns how long an undisturbed run takes, and its digest."""
    start_s = time.monotonic()
    hosts = Generation(engine, model_dir, 0, "bad data" if kind == "bad data" else "")
    first_s = hosts.first_step_s()
    codes = hosts.end(*range(HOSTS))
    whole_s, found = time.monotonic() - start_s, digest(model_dir)
    print(
        f"undisturbed: codes {codes}, {first_s:.1f} s to the first step, "
        f"{whole_s:.1f} s in all, {found}",
        flush=True,
    )
    return whole_s, found


def try_one(engine, model_dir, kind, rank, at_s, wanted) -> bool:
    """Makes one fault; tells whether the run ends as if it had not been."""
    hosts = Generation(engine, model_dir, 0, kind)
    time.sleep(at_s)
    harmed_s = time.monotonic()
    if kind == MISSING:
        others, rank = [0], 1
    else:
        victim = hosts.processes[rank]
        others = [k for k in range(HOSTS) if k != rank]
    # Under mpirun, a run may have ended that should not yet.
    with contextlib.suppress(psutil.NoSuchProcess):
        if kind in SIGNALS:
            victim.send_signal(SIGNALS[kind])
        elif kind == "full disk":
            _, most = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (0, most))
        elif kind == CUT:
            hosts.network.cut(rank)
        elif kind == "bad data":
            hosts.make_data_bad(rank)
    codes = hosts.end(*others)
    seconds = time.monotonic() - harmed_s
    if kind == "stop":
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGCONT)
    codes += hosts.end(*[] if kind == MISSING else [rank])
    hosts.leave()
    said = hosts.said(others[0])
    next_s, again, number = 0.0, [], 0
    while not (model_dir / "model.keras").exists() and number < 3:
        number += 1
        # The data are good again, and the network is whole.
        hosts = Generation(engine, model_dir, number, "bad data" * (kind == "bad data"))
        next_s = hosts.first_step_s()
        again = hosts.end(*range(HOSTS))
        hosts.leave()
    equal = digest(model_dir) == wanted is not None
    print(
        f"| {kind} | {rank} | {at_s:.1f} s | {seconds:.1f} s | {codes} | "
        f"{next_s:.1f} s | {again} | {'equal' if equal else 'DIFFERENT'} | {said}",
        flush=True,
    )
    return equal


def digest(model_dir: pathlib.Path) -> str | None:
    """Returns a digest of the weights of a run that has ended."""
    if not (model_dir / "model.keras").exists():
        return None
    found = hashlib.sha256()
    for name, array in saved_arrays(model_dir).items():
        found.update(name.encode() + array.tobytes())
    return found.hexdigest()[:12]


if __name__ == "__main__":
    main()
