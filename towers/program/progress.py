"""Shows how far something is that takes long: how much of it, and the time left.

On a terminal, that is a bar, drawn again and again; elsewhere, a line now and then.
Nothing is shown of what ends within seconds.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from towers.program import voice

SILENT_S = 5.0
"""Nothing is said of what ends sooner."""

EARLY_S = 1.0
"""The same of what a program does before its first line, which is waited for."""

SWITCH = "TOWERS_PROGRESS"
"""Nothing is shown where the environment has 0 under this name."""

_LINE_PAUSE_S = 10.0
_BAR_PAUSE_S = 0.5
_BAR_WIDTH = 20

T = TypeVar("T")


# What has begun and not ended, the latest last: it alone is shown.
_active: list["Progress"] = []


class Progress:
    """Tells how far something is, if it takes longer than some seconds.

    A context manager. A thread of its own shows it, so that a single call that takes
    long is shown as well, and `add` costs next to nothing. Any thread may call it. One
    that begins inside another one is shown in its place.

    Attributes:
        what: Is done.
        done: How much has been done.
        total: How much there is to do; `None` if nobody knows.
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
        """Describes it; time begins as the context is entered.

        Args:
            what: Is done, such as "Reading labels".
            total: How much there is to do. None if nobody knows.
            unit: What is counted, in the plural.
            silent_s: For how long nothing is shown.
            clock: Returns seconds.
            wait: Waits for an event, at most so many seconds; tells if it is set.
        """
        self.done = 0
        self.what, self.total, self._unit = what, total, unit
        self._silent_s, self._clock, self._wait = silent_s, clock, wait
        self._began_s = 0.0
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> "Progress":
        """Begins to count seconds."""
        self._began_s = self._clock()
        _active.append(self)
        if os.environ.get(SWITCH) != "0":
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Ends a bar with its last state."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        _active.remove(self)

    def add(self, count: int = 1) -> None:
        """Takes note that so much more has been done."""
        with self._lock:
            self.done += count

    def _show(self) -> None:
        """Shows it until it ends, in a thread."""
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
        """Says in a sentence how far it is."""
        counted = self._counted()
        return f"{self.what}: {counted}." if counted else f"{self.what} ..."

    def bar(self) -> str:
        """Returns a line for a terminal, with a bar if the total is known."""
        if not self.total:
            return f"{self.what}: {self._counted() or _duration(self._seconds())}"
        filled = min(_BAR_WIDTH * self.done // self.total, _BAR_WIDTH)
        drawn = "=" * filled + "." * (_BAR_WIDTH - filled)
        return f"{self.what} [{drawn}] {self._counted()}"

    def _counted(self) -> str:
        """Says how much is done, how fast, and how long the rest takes."""
        done = self.done
        if not done and self.total is None:
            return ""
        of = "" if self.total is None else f" of {self.total:,}"
        said = f"{done:,}{of} {self._unit}"
        if not done:
            return said
        a_second = done / max(self._seconds(), 1e-9)
        said += f", {a_second:,.{0 if a_second >= 10 else 1}f} a second"
        if self.total is not None and done < self.total:
            said += f", {_duration((self.total - done) / a_second)} left"
        return said

    def _seconds(self) -> float:
        return self._clock() - self._began_s


def over(
    iterable: Iterable[T],
    what: str,
    total: int | None = None,
    unit: str = "rows",
    silent_s: float = SILENT_S,
) -> Iterator[T]:
    """Yields what an iterable yields, and shows how far it is.

    Args:
        iterable: Each item counts as one.
        what: As of `Progress`.
        total: As of `Progress`.
        unit: As of `Progress`.
        silent_s: As of `Progress`.
    """
    with Progress(what, total, unit, silent_s) as progress:
        for item in iterable:
            yield item
            progress.add()


def _duration(seconds: float) -> str:
    """Says how long that is, such as "48 s" or "1:05:20"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, seconds = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
