"""Reads what a run has written to its model_dir."""

import collections
import dataclasses
import glob
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.util import tensor_util

from towers.elastic import requests
from towers.monitoring.tensorboard import AFTER_TRAINING
from towers.program import small_file
from towers.program.voice import warn

RUNS = ("train", "validation")
# Of what summary.json holds.
_TYPES = {
    "epochs": int,
    "steps": int,
    "towers": list,
    "examples_per_sec": float | int | None,
    "tokens_per_sec": float | int | None,
    "waiting": float | int | None,
    "step_ms": dict | None,
    "utilization": dict | None,
    "parameters": int | None,
    "class_names": list | None,
    "verdict": str | None,
    "measured": str | None,
    "bad_records": int | None,
    "best": dict | None,
}
_BEST = {"monitor": str, "value": float | int, "epoch": int}


@dataclasses.dataclass(frozen=True)
class Series:
    """A number as it went.

    Attributes:
        steps: Where it was measured, [N], rising.
        values: What it was, [N].
    """

    steps: np.ndarray
    values: np.ndarray

    @property
    def last(self) -> float:
        """The latest value."""
        return float(self.values[-1])


@dataclasses.dataclass
class Events:
    """What the event files of a folder hold.

    Attributes:
        scalars: By tag.
        texts: The latest, in Markdown, by tag.
        images: The latest, as PNG files, by tag.
        sessions: When the file of each training was begun, and last written to, in
            seconds since 1970.
    """

    scalars: dict[str, Series] = dataclasses.field(default_factory=dict)
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    images: dict[str, list[bytes]] = dataclasses.field(default_factory=dict)
    sessions: list[tuple[float, float]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class RunRecord:
    """A run, as far as it has come.

    Attributes:
        model_dir: Where it was found.
        train: What was written while it trained.
        validation: What was written while it was validated.
        flags: The resolved flags, one in a line; empty if there are none.
        summary: What summary.json says; empty if the run has not ended, or has gone on
            since.
        ended_at: The step that an earlier summary.json tells of, if the run went on.
        running: Whether a process trains it now.
    """

    model_dir: str
    train: Events
    validation: Events
    flags: str
    summary: Mapping[str, Any]
    ended_at: int | None
    running: bool

    @property
    def step(self) -> int:
        """The last step of which anything is known."""
        return max(
            self.summary.get("steps", 0), _last_step(self.train, self.validation)
        )


def read(model_dir: str) -> RunRecord:
    """Reads a run, whether it has ended or not.

    Args:
        model_dir: The folder that was given to `towers.train`.

    Raises:
        ValueError: There is no run.
        OSError: A file cannot be read.
    """
    if not os.path.isdir(model_dir):
        raise ValueError(
            f"Received {model_dir}, which is no directory; expected the --model_dir of "
            "a run, so check its name."
        )
    train, validation = (_read_events(os.path.join(model_dir, run)) for run in RUNS)
    summary = _read_summary(model_dir)
    if not (summary or train.sessions):
        raise ValueError(
            f"There is no run in {model_dir}: no summary.json, and nothing in train/; "
            "expected the --model_dir that was given to towers.train."
        )
    went_on = summary and _last_step(train, validation) > summary["steps"]
    return RunRecord(
        model_dir,
        train,
        validation,
        _read_flags(model_dir),
        {} if went_on else summary,
        summary["steps"] if went_on else None,
        requests.is_running(model_dir),
    )


def _read_summary(model_dir):
    path = os.path.join(model_dir, "summary.json")
    try:
        summary = small_file.read_json(path, dict)
        _check(summary)
        return summary
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(
            f"{path} is not as towers.train writes it ({error}); remove it, and there "
            "is a report without it."
        ) from error


def _check(summary):
    """Checks what is used of summary.json; it may be empty."""
    missing = [name for name in ("epochs", "steps") if name not in summary]
    if summary and missing:
        raise ValueError(f'"{missing[0]}" is missing')
    for name, value in summary.items():
        expected = _TYPES.get(name, object)
        if name.startswith(("val_", "train_")):
            expected = float | int
        if not isinstance(value, expected):
            raise ValueError(f'"{name}" is {json.dumps(value)}')
    best = summary.get("best")
    if best and not all(isinstance(best.get(k), kind) for k, kind in _BEST.items()):
        raise ValueError(f'"best" is {json.dumps(best)}')


def _read_flags(model_dir):
    path = os.path.join(model_dir, "flags.txt")
    try:
        # A path among them need not be UTF-8.
        return small_file.read_text(path, errors="replace")
    except FileNotFoundError:
        return ""
    except small_file.FileError as error:
        warn(f"{path} cannot be read ({error}), so the report has no flags.")
        return ""


def _read_events(folder):
    events, points = Events(), collections.defaultdict(list)
    pattern = os.path.join(glob.escape(folder), "events.out.tfevents.*")
    for path in sorted(filter(os.path.isfile, glob.glob(pattern)), key=_made):
        _read_file(path, events, points)
    events.scalars = {tag: _join(found) for tag, found in points.items()}
    return events


def _made(path):
    """The numbers in a file's name: the second of its making, and last its own."""
    return [int(number) for number in re.findall(r"\d+", os.path.basename(path))]


def _read_file(path, events, points):
    # All scalars, and the last of everything else. It passes over half a record at the
    # end of a file, which is what a killed run may leave.
    file = plugin_event_accumulator.EventAccumulator(
        path,
        size_guidance={plugin_event_accumulator.TENSORS: 1},
        tensor_size_guidance={"scalars": 0},
    ).Reload()
    times = []
    for tag, metadata in file.AllSummaryMetadata().items():
        found = file.Tensors(tag)
        times += [event.wall_time for event in found]
        value = tensor_util.make_ndarray(found[-1].tensor_proto)
        match metadata.plugin_data.plugin_name:
            case "scalars":
                points[tag] += [
                    (event.step, float(tensor_util.make_ndarray(event.tensor_proto)))
                    for event in found
                ]
            case "text":
                events.texts[tag] = b"".join(value.flat).decode(errors="replace")
            case "images":
                # Width and height come first.
                events.images[tag] = list(value[2:])
    if times and not path.endswith(AFTER_TRAINING):
        events.sessions.append((min(times), max(times)))


def _join(points: Iterable[tuple[int, float]]) -> Series:
    """Joins what several sessions have measured; what was done again counts once."""
    kept = []
    for step, value in points:
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((step, value))
    steps, values = zip(*kept, strict=True)
    return Series(np.array(steps), np.array(values))


def _last_step(*parts):
    # Epochs are counted in epochs.
    return max(
        (
            int(series.steps[-1])
            for events in parts
            for tag, series in events.scalars.items()
            if not tag.startswith("epoch_")
        ),
        default=0,
    )
