"""Faults at random instants on two hosts that train together: what becomes of the run?

    python -m scripts.bench_faults --faults=10

Two processes of two towers each train a small model, deterministically. One is killed,
stopped or asked to end, finds a bad record, is cut off from the network, or (the first)
cannot write any more. It is measured when the other one has ended; both are started
again, and it is measured when they train. The end has to have the bits of a run that
nobody disturbed.
"""

import functools
import hashlib
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time

from scripts.faults.run import at_random, saved_arrays
from tests import network

ROOT = pathlib.Path(__file__).resolve().parents[1]
HOSTS, LIMIT_S = 2, 240
FLAGS = (
    *("--deterministic", "--num_gpus=2", "--log_steps=1", "--seed=1"),
    *("--variable_update=parameter_server", "--train_epochs=3", "--save_steps=7"),
)
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
CUT = "cut network"
KINDS = *SIGNALS, "bad data", "full disk", CUT

# What --model names where data are to become bad, and what makes them so.
MODEL = """
import os
import keras
import numpy as np


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        if os.path.exists(os.environ["FAULT"]):
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
        processes: One for each host.
    """

    def __init__(self, model_dir: pathlib.Path, number: int, kind: str = KINDS[0]):
        """Starts them; `number` counts generations, and `kind` is of the fault."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.network, host = None, "127.0.0.1"
        if kind == CUT:
            self.network = network.Network(HOSTS).__enter__()
            host = self.network.addresses[0]
        self._start_s = time.monotonic()
        self._logs = [
            model_dir.with_name(f"{model_dir.name}.{number}.{k}") for k in range(HOSTS)
        ]
        environ = {
            "CUDA_VISIBLE_DEVICES": "-1",
            "PYTHONUNBUFFERED": "1",
            "TOWERS_COORDINATOR": f"{host}:{port}",
            "TOWERS_GENERATION": str(number),
            "TOWERS_HOST_COUNT": str(HOSTS),
            "TOWERS_JOIN_SECONDS": "20",
            "TOWERS_TOKEN": "fault",
        }
        model = "mlp"
        if kind == "bad data":
            model = model_dir.with_name("model.py")
            model.write_text(MODEL)
        command = sys.executable, "-m", "towers.train", *FLAGS, f"--model={model}"
        self.processes, self.faults = [], []
        for rank, log in enumerate(self._logs):
            self.faults.append(log.with_suffix(f".fault{rank}"))
            environ["FAULT"] = str(self.faults[rank])
            with open(log, "wb") as file:
                start = subprocess.Popen
                if self.network:
                    start = functools.partial(self.network.start, rank)
                process = start(
                    [*command, f"--model_dir={model_dir}"],
                    cwd=ROOT,
                    env=os.environ | environ | {"TOWERS_HOST_RANK": str(rank)},
                    stdout=file,
                    stderr=file,
                )
            self.processes.append(process)

    def first_step_s(self) -> float:
        """Waits for the first step; returns the seconds since the start."""
        while not any(
            line.startswith("epoch ") for line in self._logs[0].read_text().splitlines()
        ):
            if all(process.poll() is not None for process in self.processes):
                break
            time.sleep(0.02)
        return time.monotonic() - self._start_s

    def end(self, *ranks: int) -> list[int | str]:
        """Waits for hosts; returns their exit codes, "hangs" for one that does not."""
        codes, end_s = [], time.monotonic() + LIMIT_S
        for process in [self.processes[rank] for rank in ranks]:
            try:
                codes.append(process.wait(max(0.1, end_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append("hangs")
        return codes

    def leave(self) -> None:
        """Takes the network down, if there is one."""
        if self.network:
            self.network.__exit__()

    def said(self, rank: int) -> str:
        """Returns the last sentence of a host."""
        lines = self._logs[rank].read_text().splitlines()
        return next((each for each in lines[::-1] if each.startswith("towers")), "-")


def main():
    """Makes the faults, and prints a line for each."""
    with at_random(__doc__, "faults", 10) as (count, rng, folder):
        alone = {}
        print("| fault | host | at | others' end | codes | next step | codes | bits |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        good = 0
        for number in range(count):
            kind = KINDS[number % len(KINDS)]
            own = kind == "bad data"
            if own not in alone:
                alone[own] = run_alone(folder / f"alone{own}", kind)
            whole_s, wanted = alone[own]
            rank = 0 if kind == "full disk" else rng.randrange(HOSTS)
            at_s = rng.uniform(0.2, 0.95) * whole_s
            good += try_one(folder / f"run{number}", kind, rank, at_s, wanted)
        print(f"\n{good} of {count} end with the bits of the undisturbed run.")


def run_alone(model_dir, kind) -> tuple[float, str | None]:
    """Returns how long an undisturbed run takes, and its digest."""
    start_s = time.monotonic()
    hosts = Generation(model_dir, 0, kind)
    first_s = hosts.first_step_s()
    codes = hosts.end(*range(HOSTS))
    hosts.leave()
    whole_s, found = time.monotonic() - start_s, digest(model_dir)
    print(
        f"undisturbed: codes {codes}, {first_s:.1f} s to the first step, "
        f"{whole_s:.1f} s in all, {found}",
        flush=True,
    )
    return whole_s, found


def try_one(model_dir, kind, rank, at_s, wanted) -> bool:
    """Makes one fault; tells whether the run ends as if it had not been."""
    hosts = Generation(model_dir, 0, kind)
    time.sleep(at_s)
    victim, harmed_s = hosts.processes[rank], time.monotonic()
    if kind in SIGNALS:
        victim.send_signal(SIGNALS[kind])
    elif kind == "full disk":
        _, most = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (0, most))
    elif kind == CUT:
        hosts.network.cut(rank)
    else:
        hosts.faults[rank].touch()
    others = [k for k in range(HOSTS) if k != rank]
    codes = hosts.end(*others)
    seconds = time.monotonic() - harmed_s
    if kind == "stop":
        victim.send_signal(signal.SIGCONT)
    codes += hosts.end(rank)
    hosts.leave()
    said = hosts.said(others[0])
    next_s, again, number = 0.0, [], 0
    while not (model_dir / "model.keras").exists() and number < 3:
        number += 1
        hosts = Generation(model_dir, number, kind)
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
