"""Shows how far the runs of a queue are."""

import collections
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from towers.program import words
from towers.queue import entry as states
from towers.queue.entry import Entry

# Of what changes all the time, a terminal shows so much.
_EVERY_S = 0.2
_STATES = (
    *(states.FINISHED, states.PRUNED, states.FAILED, states.STOPPED),
    *(states.RUNNING, states.WAITING),
)
# In a terminal that is too low, what happens now comes first.
_FIRST = (
    *(states.RUNNING, states.FAILED, states.STOPPED, states.WAITING),
    *(states.PRUNED, states.FINISHED),
)


class QueueLines:
    """Says a line for each change, for log files."""

    def __init__(self, stream: TextIO):
        """Takes where to write."""
        self._stream, self._said, self._note = stream, {}, ""

    def __call__(self, entries: Sequence[Entry], note: str) -> None:
        """Says what has changed since the last call."""
        if note != self._note:
            self._note = note
            print(note, file=self._stream, flush=True)
        for entry in entries:
            if self._said.get(entry, states.WAITING) != entry.state:
                self._said[entry] = entry.state
                said = f"{entry.run.name}: {_described(entry)}"
                print(said, file=self._stream, flush=True)

    def end(self) -> None:
        """Does nothing, as all is said."""


class Screen:
    """A table that is drawn again where it stands, for terminals."""

    def __init__(
        self,
        stream: TextIO,
        size: Callable[[], os.terminal_size] = shutil.get_terminal_size,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Takes where to draw, and how large that is."""
        self._stream, self._size, self._clock = stream, size, clock
        self._height, self._drawn_s, self._states = 0, 0.0, None

    def __call__(self, entries: Sequence[Entry], note: str) -> None:
        """Draws it, if a state has changed or some time has passed."""
        now, found = self._clock(), [note, *(entry.state for entry in entries)]
        if found == self._states and now - self._drawn_s < _EVERY_S:
            return
        self._states, self._drawn_s = found, now
        width, height = self._size()
        lines = [*live(entries, height - 3), *filter(None, [note])]
        self._write([line[: width - 1] for line in lines])

    def end(self) -> None:
        """Removes it."""
        self._write([])

    def _write(self, lines):
        up = f"\x1b[{self._height}F" if self._height else ""
        self._stream.write(f"{up}\x1b[J" + "".join(f"{line}\n" for line in lines))
        self._stream.flush()
        self._height = len(lines)


def to(stream: TextIO) -> QueueLines | Screen:
    """Returns what shows runs on a stream."""
    return Screen(stream) if stream.isatty() else QueueLines(stream)


def live(entries: Sequence[Entry], most: int = sys.maxsize) -> list[str]:
    """Returns the table of runs that train, in at most so many lines."""
    shown = [*entries]
    if (room := max(most - 2, 1)) < len(shown):
        by_need = sorted(shown, key=lambda entry: _FIRST.index(entry.state))
        shown = [entry for entry in shown if entry in by_need[:room]]
    rows = [_live_row(entry) for entry in shown]
    head = ("run", "state", "step", "loss", "examples/sec", "log, or why it failed")
    return [*_columns([head, *rows], left=(0, 1, 5)), counts(entries)]


def counts(entries: Sequence[Entry]) -> str:
    """Says how many runs there are in each state."""
    found = collections.Counter(entry.state for entry in entries)
    parts = [f"{found[state]} {state}" for state in _STATES if found[state]]
    return f"{words.count(len(entries), 'run')}: {', '.join(parts)}."


def final(entries: Sequence[Entry]) -> list[str]:
    """Returns the table of what has come of the runs, with their evaluation."""
    summaries = [_summary(entry) for entry in entries]
    metrics = dict.fromkeys(
        name
        for summary in summaries
        for name, value in summary.items()
        if name.startswith(("val_", "train_")) and isinstance(value, int | float)
    )
    head = ("run", "state", "steps", *metrics, "examples/sec", "model_dir, or why")
    rows = [
        (
            *(entry.run.name, entry.state),
            _number(summary.get("steps", entry.progress.get("step")), ","),
            *(_number(summary.get(name), ",.4f") for name in metrics),
            _number(summary.get("examples_per_sec"), ",.1f"),
            _where(entry, entry.run.model_dir),
        )
        for entry, summary in zip(entries, summaries, strict=True)
    ]
    return _columns([head, *rows], left=(0, 1, len(head) - 1))


def _summary(entry):
    """What has come of a run; of one that is pruned, the metrics of its last epoch."""
    if entry.state == states.FINISHED:
        return entry.summary()
    return entry.metrics if entry.state == states.PRUNED else {}


def _live_row(entry):
    progress = entry.progress
    return (
        *(entry.run.name, entry.state, _number(progress.get("step"), ",")),
        _number(progress.get("loss"), ".4f"),
        _number(progress.get("examples_per_sec"), ",.1f"),
        _where(entry, entry.run.log),
    )


def _described(entry):
    where = ", ".join(map(str, entry.devices))
    if entry.state == states.RUNNING:
        return f"running on {where}, log {shown_path(entry.run.log)}"
    if entry.state == states.FAILED:
        return f"failed: {_where(entry, entry.run.log)}"
    if entry.state in (states.FINISHED, states.PRUNED):
        if not entry.devices:
            return f"{entry.state} before"
        values = [
            f"{name} {value:.4f}"
            for name, value in _summary(entry).items()
            if name.startswith(("val_", "train_")) and isinstance(value, int | float)
        ]
        return ", ".join([entry.state, *values])
    return entry.state


def _where(entry, path):
    if entry.state != states.FAILED:
        return shown_path(path)
    return f"{entry.reason.removesuffix('.')} (see {shown_path(entry.run.log)})"


def shown_path(path: str) -> str:
    """Returns a path as it is shown: from the current folder, if it is below."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _number(value, form):
    return f"{value:{form}}" if isinstance(value, int | float) else ""


def _columns(rows, left):
    """Sets rows out in columns: some to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if place in left else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
