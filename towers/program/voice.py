"""One voice for lines to the user.

They go to standard error, as they are no part of a run's results, and through Python's
logger "towers", so that an application may filter them or add a handler of its own.
"""

import logging
import shutil
import sys
import threading

_LOGGER = logging.getLogger("towers")
# Signs that have a terminal forget the line it is on.
_TO_ITS_BEGINNING = "\r\x1b[K"


def say(line: str) -> None:
    """Tells the user something."""
    _LOGGER.info(line, stacklevel=2)


def warn(line: str) -> None:
    """Tells the user that something is wrong, while the run goes on."""
    _LOGGER.warning(line, stacklevel=2)


def end_progress_bar() -> None:
    """Ends the progress bar's line on a terminal, before something else is said."""
    if sys.stdout.isatty():
        print()


class _Drawn:
    """A line on the terminal that is drawn again and again, such as a progress bar."""

    def __init__(self):
        self._lock = threading.Lock()
        self._is_there = False

    def draw(self, line: str) -> None:
        """Draws it anew, as much of it as fits."""
        width = shutil.get_terminal_size().columns - 1
        with self._lock:
            print(
                f"{_TO_ITS_BEGINNING}{line[:width]}",
                end="",
                file=sys.stderr,
                flush=True,
            )
            self._is_there = True

    def end(self, end: str = "\n") -> None:
        """Leaves it, if there is one, and goes on below or over it."""
        with self._lock:
            if self._is_there:
                print(end=end, file=sys.stderr, flush=True)
            self._is_there = False


_drawn = _Drawn()


def draw(line: str) -> None:
    """Draws a line on the terminal over the one drawn before.

    Lines that are said meanwhile take its place, and it is drawn anew below them.
    """
    _drawn.draw(line)


def end_drawn() -> None:
    """Leaves the line that is drawn as it is."""
    _drawn.end()


class _OnStderr(logging.Handler):
    """Prints on what is standard error at the time."""

    def emit(self, record):
        _drawn.end(_TO_ITS_BEGINNING)
        kind = "Warning: " if record.levelno >= logging.WARNING else ""
        print(f"towers: {kind}{record.getMessage()}", file=sys.stderr, flush=True)


_LOGGER.setLevel(logging.INFO)
_LOGGER.propagate = False
_LOGGER.addHandler(_OnStderr())
