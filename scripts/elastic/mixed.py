"""One run whose towers and hosts change by turns, in processes one after another."""

import contextlib
import pathlib
import random
import signal
import tempfile
import time
from typing import Any

import psutil

from scripts.elastic.on_hosts import LIMIT_S, Run, apart, until
from towers.elastic import requests
from towers.elastic.requests import Request, RunError

# Changes before the run is stopped, and goes on in the other way.
_EVENTS_OF_A_PROCESS = 4


def measure(events: int, seed: int) -> dict[str, Any]:
    """Returns what became of a run with so many events, beside runs without."""
    epochs, chance = 15 * events, random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        alone = Run(folder / "alone", epochs)
        alone.end()
        steady = Run(folder / "steady", epochs, flags=("--num_gpus=3",))
        steady.end()
        losses: dict[int, set[str]] = {}
        happened: list[str] = []
        while True:
            in_process = (len(happened) // _EVENTS_OF_A_PROCESS) % 2 == 0
            left = min(_EVENTS_OF_A_PROCESS, events - len(happened))
            kind = _in_process if in_process else _on_hosts
            run = kind(folder / "run", epochs, left, chance, happened)
            if left > 0 and not run.has_ended:
                run.process.send_signal(signal.SIGTERM)
                happened.append("stop")
                run.end(143)
            else:
                run.end()
            for step, said in run.losses.items():
                losses.setdefault(step, set()).update(said)
            if run.process.returncode == 0:
                break
        told = {step: max(map(float, said)) for step, said in alone.losses.items()}
        worst = max(
            abs(float(loss) - told[step])
            for step in told
            for loss in losses.get(step, ["inf"])
        )
        return {
            "events": happened,
            "steps": [len(told), len(losses)],
            "loss of each step, largest difference": worst,
            "weights, largest difference": apart(alone.model_dir, folder / "run"),
            "weights, of 3 towers that stay": apart(alone.model_dir, steady.model_dir),
        }


def _in_process(model_dir, epochs, count, chance, happened):
    """Has somebody ask for other towers."""
    flags = "--max_gpus=4", f"--num_gpus={chance.randint(1, 4)}"
    run = Run(model_dir, epochs, flags=flags)
    until(lambda: run.has_ended or run.losses)
    for _ in range(count):
        time.sleep(chance.uniform(0.2, 2))
        asked = chance.randint(1, 4)
        with contextlib.suppress(RunError):  # it has ended
            requests.ask(str(model_dir), Request.new(num_gpus=asked), LIMIT_S)
            happened.append(f"{asked} towers")
    return run


def _on_hosts(model_dir, epochs, count, chance, happened):
    """Has hosts die, leave and arrive."""
    wanted = model_dir.parent / "wanted"
    wanted.write_text("2")
    run = Run(model_dir, epochs, "--hosts=1:3", f"--host_file={wanted}")
    until(lambda: run.has_ended or run.losses)
    for _ in range(count):
        time.sleep(chance.uniform(0.2, 2))
        before, hosts = len(run.changes), run.hosts()
        if run.has_ended or not hosts:
            break
        event = chance.choice(["SIGKILL", "SIGTERM", "other hosts"])
        if event == "other hosts":
            number = chance.choice(
                [n for n in (1, 2, 3) if n != int(wanted.read_text())]
            )
            wanted.write_text(str(number))
            event = f"{number} hosts"
        elif len(hosts) == 1:
            continue  # it would be the end of the run
        else:
            with contextlib.suppress(psutil.Error):
                chance.choice(hosts).send_signal(getattr(signal, event))
        happened.append(event)
        until(lambda n=before: len(run.changes) > n or run.has_ended)
    return run
