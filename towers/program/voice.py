"""Prints messages to the user.

Messages go to standard error, as they are no results, and through Python's logger
"towers", so that an application may filter them or add its own handler.
"""

import logging
import shutil
import sys
import threading

_LOGGER = logging.getLogger("towers")
# Control characters that clear the current line of a terminal.
_TO_ITS_BEGINNING = "\r\x1b[K"


def say(line: str) -> None:
    """Prints a line for the user."""
    _LOGGER.info(line, stacklevel=2)


def warn(line: str) -> None:
    """Prints a warning for the user; the run continues."""
    _LOGGER.warning(line, stacklevel=2)


def end_progress_bar() -> None:
    """Ends the line of a progress bar on a terminal, before another line."""
    if sys.stdout.isatty():
        print()


class _Drawn:
    """A line on the terminal that is redrawn, such as a progress bar."""

    def __init__(self):
        self._lock = threading.Lock()
        self._is_there = False

    def draw(self, line: str) -> None:
        """Draws the line again, cut to the width of the terminal."""
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
        """Ends the line, if there is one; the next output goes below or over it."""
        with self._lock:
            if self._is_there:
                print(end=end, file=sys.stderr, flush=True)
            self._is_there = False


_drawn = _Drawn()


def draw(line: str) -> None:
    """Draws a line on the terminal over the line drawn before.

    Messages replace the line, which is drawn again below them.
    """
    _drawn.draw(line)


def end_drawn() -> None:
    """Ends the drawn line, which stays."""
    _drawn.end()


class _OnStderr(logging.Handler):
    """Prints to the current standard error."""

    def emit(self, record):
        _drawn.end(_TO_ITS_BEGINNING)
        kind = "Warning: " if record.levelno >= logging.WARNING else ""
        print(f"towers: {kind}{record.getMessage()}", file=sys.stderr, flush=True)


_LOGGER.setLevel(logging.INFO)
_LOGGER.propagate = False
_LOGGER.addHandler(_OnStderr())
