"""One voice for lines to the user.

They go to standard error, as they are no part of a run's results, and through Python's
logger "towers", so that an application may filter them or add a handler of its own.
"""

import logging
import sys

_LOGGER = logging.getLogger("towers")


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


class _OnStderr(logging.Handler):
    """Prints on what is standard error at the time."""

    def emit(self, record):
        kind = "Warning: " if record.levelno >= logging.WARNING else ""
        print(f"towers: {kind}{record.getMessage()}", file=sys.stderr, flush=True)


_LOGGER.setLevel(logging.INFO)
_LOGGER.propagate = False
_LOGGER.addHandler(_OnStderr())
