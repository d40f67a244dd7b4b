"""Shows the progress of slow operations: the amount done, and the time left.

On a terminal, progress is a bar that is redrawn; elsewhere, a line from time to time.
Operations that end within seconds show nothing.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from towers.program import voice, words

SILENT_S = 5.0
"""Seconds during which no progress is shown."""

EARLY_S = 1.0
"""The same before the first line of a program, for which the user waits."""

SWITCH = "TOWERS_PROGRESS"
"""The environment variable that turns progress off if it is 0."""

_LINE_PAUSE_S = 10.0
_BAR_PAUSE_S = 0.5
_BAR_WIDTH = 20

T = TypeVar("T")


# Operations in progress, the latest last; only the latest is shown.
_active: list["Progress"] = []


class Progress:
    """Shows the progress of an operation that takes longer than some seconds.

    A context manager. A separate thread shows the progress, so that a single slow call
    is shown as well, and `add` is cheap. Any thread may call `add`. An operation that
    begins inside another one is shown instead.

    Attributes:
        what: Name of the operation.
        done: Amount done.
        total: Total amount; `None` if unknown.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "rows",
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ):
        """Describes the operation; time starts as the context is entered.

        Args:
            what: Name of the operation, such as "Reading labels".
            total: Total amount; `None` if unknown.
            unit: Unit of the amount, in the plural.
            silent_s: Seconds during which nothing is shown.
            clock: Returns seconds.
            wait: Waits for an event, at most some seconds; returns whether it is set.
        """
        self.done = 0
        self.what, self.total, self._unit = what, total, unit
        self._silent_s, self._clock, self._wait = silent_s, clock, wait
        self._began_s = 0.0
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> "Progress":
        """Starts the clock and the thread."""
        self._began_s = self._clock()
        _active.append(self)
        if os.environ.get(SWITCH) != "0":
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Stops the thread, which draws the last state of a bar."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        _active.remove(self)

    def add(self, count: int = 1) -> None:
        """Adds to the amount done."""
        with self._lock:
            self.done += count

    def _show(self) -> None:
        """Shows the progress until the operation ends; runs in a thread."""
        if self._wait(self._ended, self._silent_s):
            return
        is_terminal = sys.stderr.isatty()
        pause_s = _BAR_PAUSE_S if is_terminal else _LINE_PAUSE_S
        self._show_now(is_terminal)
        while not self._wait(self._ended, pause_s):
            self._show_now(is_terminal)
        if is_terminal:
            self._show_now(is_terminal)
            voice.end_drawn()

    def _show_now(self, is_terminal: bool) -> None:
        if _active[-1] is not self:
            return
        if is_terminal:
            voice.draw(self.bar())
        else:
            voice.say(self.line())

    def line(self) -> str:
        """Returns a sentence on the progress."""
        counted = self._counted()
        return f"{self.what}: {counted}." if counted else f"{self.what} ..."

    def bar(self) -> str:
        """Returns a line for a terminal, with a bar if the total is known."""
        if not self.total:
            return f"{self.what}: {self._counted() or words.duration(self._seconds())}"
        filled = min(_BAR_WIDTH * self.done // self.total, _BAR_WIDTH)
        drawn = "=" * filled + "." * (_BAR_WIDTH - filled)
        return f"{self.what} [{drawn}] {self._counted()}"

    def _counted(self) -> str:
        """Returns the amount done, the rate, and the time left, in words."""
        done = self.done
        if not done and self.total is None:
            return ""
        of = "" if self.total is None else f" of {self.total:,}"
        text = f"{done:,}{of} {self._unit}"
        if not done:
            return text
        a_second = done / max(self._seconds(), 1e-9)
        text += f", {a_second:,.{0 if a_second >= 10 else 1}f} a second"
        if self.total is not None and done < self.total:
            text += f", {words.duration((self.total - done) / a_second)} left"
        return text

    def _seconds(self) -> float:
        return self._clock() - self._began_s


def over(
    iterable: Iterable[T],
    what: str,
    total: int | None = None,
    unit: str = "rows",
    silent_s: float = SILENT_S,
) -> Iterator[T]:
    """Yields the items of an iterable, and shows the progress.

    Args:
        iterable: Each item counts as one.
        what: See `Progress`.
        total: See `Progress`.
        unit: See `Progress`.
        silent_s: See `Progress`.
    """
    with Progress(what, total, unit, silent_s) as progress:
        for item in iterable:
            yield item
            progress.add()
