"""Runs a program that may hang, even when it is killed."""

import atexit
import subprocess
from collections.abc import Mapping, Sequence


def run(
    command: Sequence[str],
    limit_s: float,
    environ: Mapping[str, str] | None = None,
) -> tuple[str, str, int | None]:
    """Runs a program to its end, or until the limit.

    Args:
        command: The program and its arguments.
        limit_s: How long it may take.
        environ: Its environment; this process's by default.

    Returns:
        What it has written to stdout and stderr, and its exit code; None if it was
        killed at the limit.

    Raises:
        OSError: If it cannot be started.
    """
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    # This thread may wait as Ctrl-C ends the program.
    atexit.register(process.kill)
    try:
        out, err = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired as error:
        out, err, code = error.output or b"", error.stderr or b"", None
    finally:
        # Unlike `subprocess.run`, without waiting for the end: what waits for a broken
        # driver cannot even be killed.
        process.kill()
        atexit.unregister(process.kill)
    return out.decode(errors="replace"), err.decode(errors="replace"), code
