"""Hosts that are killed, leave and arrive at random instants, under the launcher."""

import collections
import contextlib
import itertools
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil

from towers.launch.elastic import slot

FLAGS = (
    *("--dataset=synthetic:8x8x1:10:1600", "--deterministic"),
    f"--model={pathlib.Path(__file__).with_name('smooth.py')}",
    *("--variable_update=parameter_server", "--optimizer=sgd"),
    *("--log_steps=1", "--stall_seconds=0", "--num_gpus=1"),
)
LIMIT_S = 900
_STEP = re.compile(r"^epoch \d+/\d+, step (\d+): .*?loss ([\d.]+)")
_CHANGE = re.compile(r"towers: Step ([\d,]+): .*? by (.*); ([\d.]+) s from step")
_KINDS = "arrive", "leave", "has ended"


class Run:
    """A run under the launcher, and what its hosts say.

    Attributes:
        model_dir: Its folder.
        lines: What it has said.
        losses: The running loss after each step, as each host has told it.
        changes: By the step that was done before, why hosts changed, and how long that
            took.
    """

    def __init__(self, model_dir: pathlib.Path, epochs: int, *launch: str):
        """Starts it, under the launcher if that has arguments."""
        self.model_dir = model_dir
        self.lines: list[str] = []
        self.losses: dict[int, set[str]] = {}
        self.changes: dict[int, tuple[str, float]] = {}
        program = ["towers.launch", *launch, "--"] if launch else ["towers.train"]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", *program, *FLAGS),
                *(f"--train_epochs={epochs}", f"--model_dir={model_dir}"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"},
        )
        self.ended_s: dict[int, float] = {}
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def _hear(self):
        for line in self.process.stdout:
            self.lines.append(line)
            self.note(line)

    def note(self, line: str) -> None:
        """Notes what a host has said."""
        if found := _STEP.match(line):
            self.losses.setdefault(int(found[1]), set()).add(found[2])
            self.ended_s.setdefault(int(found[1]), time.monotonic())
        elif found := _CHANGE.search(line):
            step, why, seconds = found.groups()
            kind = next((kind for kind in _KINDS if kind in why), "other")
            self.changes[int(step.replace(",", ""))] = kind, float(seconds)

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has."""
        return self.process.poll() is not None

    def hosts(self) -> list[psutil.Process]:
        """Returns the processes that train."""
        found = []
        with contextlib.suppress(psutil.Error):  # it has ended
            for each in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "towers.train" in each.cmdline():
                        found.append(each)
        return found

    def end(self) -> None:
        """Waits for the end; notes what the other hosts have said."""
        code = self.process.wait(LIMIT_S)
        self._thread.join(LIMIT_S)
        if code:
            said = "".join(self.lines[-100:])
            raise RuntimeError(f"The run ended with {code}; it said:\n{said}")
        for log in self.model_dir.glob("host*.log"):
            for line in log.read_text().splitlines():
                self.note(line)


def measure(events: int, seed: int) -> dict[str, Any]:
    """Returns what became of a run of so many changes, and of one started anew."""
    epochs = 15 * events
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        alone = Run(folder / "alone", epochs)
        alone.end()
        wanted = folder / "wanted"
        wanted.write_text("3")
        run = Run(folder / "run", epochs, "--hosts=1:3", f"--host_file={wanted}")
        done = [*_events(run, events, random.Random(seed), wanted)]
        run.end()
        again = _started_anew(folder / "again")
        steps = sorted(alone.losses)
        told = {step: max(map(float, each)) for step, each in alone.losses.items()}
        worst = max(
            abs(float(loss) - told[step])
            for step in steps
            for loss in run.losses.get(step, ["inf"])
        )
        return {
            "events": done,
            "steps": [len(steps), len(run.losses)],
            "loss of each step, largest difference": worst,
            "weights, largest difference": apart(alone.model_dir, run.model_dir),
            "changes, s from step to step": {
                why: _of([s for kind, s in run.changes.values() if kind == why])
                for why in sorted({why for why, _ in run.changes.values()})
            },
            "plain restart, s from step to step": again,
        }


def _of(seconds):
    every = sorted(seconds)
    found = {"count": len(every), "median": statistics.median(every)}
    return found | {"worst": every[-1]}


def _events(
    run: Run, events: int, chance: random.Random, wanted: pathlib.Path
) -> Iterator[str]:
    """Has something happen to a host whenever there are several.

    A host that does not train yet may be hit as well: that changes nothing.
    A slot whose hosts fail too often would be left out.
    """
    kills: collections.Counter[str] = collections.Counter()
    while (before := len(run.changes)) < events:
        until(lambda: run.has_ended or (len(run.hosts()) >= 2 and run.losses))
        time.sleep(chance.uniform(1, 4))
        if run.has_ended:
            return
        host = chance.choice(run.hosts())
        kind = chance.choice(["SIGKILL", "SIGTERM", "SIGKILL"])
        with contextlib.suppress(psutil.Error):
            place = host.environ()["TOWERS_SLOT"]
            kind = kind if kills[place] < slot.TIMES - 1 else "SIGTERM"
            host.send_signal(getattr(signal, kind))
            kills[place] += kind == "SIGKILL"
            yield kind
        # Of one that was told to leave, another one takes the place.
        wanted.write_text("3")
        # Sometimes it arrives before the next one is hit.
        enough = min(before + chance.choice([1, 2]), events)
        until(lambda n=enough: len(run.changes) >= n or run.has_ended)


def until(true: Callable[[], Any]) -> None:
    """Waits until something holds, or for long enough."""
    end = time.monotonic() + LIMIT_S
    while not true() and time.monotonic() < end:
        time.sleep(0.05)


def apart(one: pathlib.Path, other: pathlib.Path) -> float:
    """Returns the largest difference of weights, relative to the largest of each.

    Args:
        one: The folder of a run.
        other: That of another run.
    """
    import keras

    models = [keras.models.load_model(each / "model.keras") for each in (one, other)]
    return max(
        float(np.abs(a - b).max() / np.abs(b).max())
        for a, b in zip(*(model.get_weights() for model in models), strict=True)
    )


def _started_anew(folder: pathlib.Path) -> float:
    """Kills one of a fixed number of hosts; returns seconds from step to step."""
    run = Run(folder, 24, "--hosts=2", "--max_restarts=1")
    until(lambda: run.has_ended or len(run.losses) > 150)
    run.hosts()[1].kill()
    run.end()
    times = [run.ended_s[step] for step in sorted(run.ended_s)]
    return max(b - a for a, b in itertools.pairwise(times))
