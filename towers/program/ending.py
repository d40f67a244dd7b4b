"""Ends a program with an exit code, and a sentence that says why if it is not 0."""

import gc
import signal
from collections.abc import Callable

from towers.program import forks, startup
from towers.program.commands import fail, quieten

ANOTHER_FAILED = 75
"""Exit code of a host that ends because another one has failed: EX_TEMPFAIL."""

STOPPED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit codes of a run that was asked to end, and has saved."""


class Terminated(KeyboardInterrupt):
    """The program has received SIGTERM."""


def run(program: str, body: Callable[[], int | None]) -> int:
    """Runs the body of a program, after `startup.begin` has read the flags.

    Args:
        program: Name of the program.
        body: Returns an exit code, or `None` for 0.

    Returns:
        The exit code.
    """
    quieten()
    try:
        startup.end()
        return body() or 0
    except KeyboardInterrupt as stop:
        cause, code = cause_of(stop)
        fail(f"Stopped by {cause}.", program)
        return code
    except (ValueError, OSError) as error:
        return fail(error, program)
    finally:
        # Frees the iterator of a half-read epoch: TensorFlow warns after Python's end.
        gc.collect()


def stop_at_sigterm() -> None:
    """Makes SIGTERM end the program with an exception, as Ctrl-C does."""
    forks.handle(signal.SIGTERM, _terminate)


def _terminate(number, frame):
    raise Terminated


def cause_of(stop: KeyboardInterrupt) -> tuple[str, int]:
    """Returns the signal that has stopped a program, and its exit code."""
    return ("SIGTERM", 143) if isinstance(stop, Terminated) else ("Ctrl-C", 130)
