"""Commands of ours in processes that have TensorFlow imported already: 2 s less each.

A server imports it once, before it has any device or thread of its own, and forks from
there, for all workers of pytest-xdist. What a test does to a process (signals, a
terminal) needs a real one.

    python -m tests.warm FOLDER PID     serves in this folder, while process PID runs
"""

import contextlib
import fcntl
import functools
import gc
import importlib
import multiprocessing
import os
import runpy
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.limits import HANG_S

ROOT = Path(__file__).parents[1]
# All workers of a run have one server.
_WORKERS_OF = os.environ.get("PYTEST_XDIST_TESTRUNUID")
_NAME = f"towers-warm-{_WORKERS_OF or secrets.token_hex(8)}"
_ENVIRON = {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
# A host waits so long for the programs of the others.
_FINISH_S = 60.0
# How often the server looks whether the tests still run.
_LOOK_S = 2


def run(
    module: str,
    *flags: object,
    changed: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """Does what `python -m module flags` does, without GPUs, nor functions at exit.

    `changed` holds what is set before, such as {"module.NAME": 1}; `environ` is added
    to the environment.
    """
    args = [module, *map(str, flags)]
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("out", "err")]
        with socket.socket(socket.AF_UNIX) as connected:
            connected.connect(_server()[0])
            server = Connection(connected.detach())
        with server:
            added = {**os.environ, **_ENVIRON, **(environ or {})}
            server.send((args, changed or {}, added, *files))
            pid = server.recv()
            if not server.poll(HANG_S):
                os.kill(pid, signal.SIGKILL)
            code = server.recv()
        out, err = (Path(file).read_text() for file in files)
    return subprocess.CompletedProcess(args, code, out, err)


@functools.cache
def _server():
    """Returns the server's address, and its process if this one has started it."""
    folder = os.path.join(tempfile.gettempdir(), _NAME)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    address, started = os.path.join(folder, "server"), None
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(address):
            # Whoever has started the workers sees the tests to their end.
            tests = os.getppid() if _WORKERS_OF else os.getpid()
            started = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", folder, str(tests)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env={**os.environ, **_ENVIRON},
            )
            with started.stdout as said:
                assert said.readline() == b"ready\n", started.wait()
    return address, started


def _serve(folder, tests):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module("keras")
    gc.freeze()  # TensorFlow and Keras stay
    running = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(folder, "server"))
        listener.listen()
        os.write(1, b"ready\n")
        os.dup2(0, 1)  # nobody reads any more
        while _runs(tests):
            for ready in wait([listener, *running], _LOOK_S):
                if ready is listener:
                    process, asking = _start(listener)
                    running[process.sentinel] = process, asking
                    continue
                process, asking = running.pop(ready)
                process.join()
                with asking, contextlib.suppress(OSError):  # it has gone
                    asking.send(process.exitcode)
    shutil.rmtree(folder)


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _start(listener):
    connected, _ = listener.accept()
    asking = Connection(connected.detach())
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_be, args=asking.recv())
    process.start()
    asking.send(process.pid)
    return process, asking


def _be(args, changed, environ, out, err):
    os.environ.clear()
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, file in ((sys.stdout, out), (sys.stderr, err)):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, stream.fileno())
    sys.argv[:] = args
    for name, value in changed.items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)
    try:
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    finally:
        group = sys.modules.get("towers.hosts.group")
        if group is not None and group.current is not None:
            # Other hosts may still need what this one has sent them.
            group.current.watch.finish(_FINISH_S)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
