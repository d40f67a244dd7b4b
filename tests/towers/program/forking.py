"""A process that starts a child in one of several ways, for `test_forks.py`.

    python -m tests.towers.program.forking run|plain HOW FOLDER

A "run" has what a run of ours has: handlers, a lock, a connection, and something to do
at its exit. A "plain" process has nothing. The child prints its state, as JSON, and
waits for a signal.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

STATE = "tests.towers.program.forking"


def state():
    """What a child has: how it takes signals, and what it has open beside standard."""
    status = Path("/proc/self/status").read_text().splitlines()
    signals = dict(line.split(":\t") for line in status if line.startswith("Sig"))
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the folder
            if int(descriptor.name) > 2:
                opened.append(os.readlink(descriptor).partition(":")[0])
    wakes = signal.set_wakeup_fd(-1)
    names = "SigBlk", "SigIgn", "SigCgt"
    # The C library has some for its threads.
    every = sum(1 << number - 1 for number in signal.valid_signals())
    return {
        **{name: int(signals[name], 16) & every for name in names},
        "wakes": wakes,
        "open": sorted({*opened} - {os.devnull}),
        "pid": os.getpid(),
    }


def report():
    """What a child does."""
    print(json.dumps(state()), flush=True)
    signal.pause()


def _fork():
    if os.fork() == 0:
        report()


def _thread():
    thread = threading.Thread(target=_fork)
    thread.start()
    return thread  # the child's part of it never ends by itself


def _process(method):
    multiprocessing.get_context(method).Process(target=report, daemon=True).start()


def _pool():
    pool = multiprocessing.get_context("fork").Pool(1)
    pool.apply_async(report)
    return pool


_COMMAND = sys.executable, "-m", STATE, "report"
STARTS = {
    "fork": _fork,
    "fork in a thread": _thread,
    "multiprocessing, fork": lambda: _process("fork"),
    "multiprocessing, spawn": lambda: _process("spawn"),
    "multiprocessing, forkserver": lambda: _process("forkserver"),
    "pool": _pool,
    "subprocess": lambda: subprocess.Popen(_COMMAND),
    "preexec_fn": lambda: subprocess.Popen(_COMMAND, preexec_fn=lambda: None),
    "system": lambda: os.system(f"{' '.join(_COMMAND)} &"),
}


@contextlib.contextmanager
def run(folder):
    """Has what a run has."""
    from towers.elastic import requests
    from towers.processes import signals
    from towers.processes.signals import Signals
    from towers.program import ending, forks

    signals.refuse_to_save()
    ending.stop_at_sigterm()
    forks.at_exit(os.remove, os.path.join(folder, "removed at exit"))
    ends = [forks.close_in_children(each) for each in socket.socketpair()]
    with Signals() as heard, requests.locked(folder):
        yield heard
    assert all(end.fileno() > 0 for end in ends)


def main(kind, how="", folder="."):
    if kind == "report":
        return report()
    if kind == "plain":
        keeps = STARTS[how]()
        sys.stdin.read()
        return keeps
    with run(folder) as heard:
        keeps = STARTS[how]()
        sys.stdin.readline()  # until the child has ended
        assert heard.stop is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.stop == signal.SIGTERM
        watching = [t for t in threading.enumerate() if "_read" in t.name]
    for thread in watching:
        thread.join()
    print("done", flush=True)
    return keeps


if __name__ == "__main__":
    main(*sys.argv[1:])
