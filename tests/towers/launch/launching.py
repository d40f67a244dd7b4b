"""Launchers as users start them, for tests: a process each."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.limits import HANG_S

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def launch(*words, hangup=signal.SIG_DFL, environ=None, **options):
    """Starts the launcher as users do; `hangup` is what SIGHUP is to it at first."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # These tests may run by nohup, whose children ignore SIGHUP.
    of_tests = signal.signal(signal.SIGHUP, hangup)
    own = {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "towers.launch", *words],
            env={**os.environ, **own, **(environ or {})},
            **{**pipes, **options},
        )
    finally:
        signal.signal(signal.SIGHUP, of_tests)
    # It says then what each of its threads does.
    limit = threading.Timer(HANG_S, process.send_signal, [signal.SIGABRT])
    limit.start()
    with process:
        yield process
    limit.cancel()
