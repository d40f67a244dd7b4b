"""Ends a process whose engine waits in vain for other hosts to connect.

TensorFlow and MPI keep Python's lock while they connect hosts, so no thread of the
process can do this. `bounded` runs this file, which needs nothing but Python. With
TensorFlow, each host listens from when it has met the others: a host at whose port
nobody listens has ended.

    python -I -S connecting.py PID SECONDS [[NAME, HOST, PORT], ...]
"""

import contextlib
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

# A host that TensorFlow is about to connect does not listen for a moment.
GONE_S = 10.0
_PROBE_S, _PAUSE_S = 3.0, 0.2


@contextlib.contextmanager
def bounded(seconds: float, hosts: Sequence[Sequence] = ()) -> Iterator[None]:
    """Inside, this process ends if hosts have not connected in time, or by a signal.

    Args:
        seconds: Maximum time to connect.
        hosts: Name, host and port of each of the other hosts that listen.
    """
    command = sys.executable, "-I", "-S", __file__, str(os.getpid()), str(seconds)
    with (
        # Signals of the terminal are for this process.
        subprocess.Popen(
            [*command, json.dumps(hosts)], stdin=subprocess.PIPE, process_group=0
        ) as process,
        _ended_by_signals(),
    ):
        yield
        process.stdin.close()


@contextlib.contextmanager
def _ended_by_signals():
    """Inside, signals end this process at once, as no handler in Python can run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = signal.SIGINT, signal.SIGTERM
    handlers = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            if handler is not None:
                signal.signal(number, handler)


def main(pid: int, seconds: float, hosts: list[list]) -> None:
    """Waits for the end of standard input; ends the process if that cannot come.

    Args:
        pid: The process.
        seconds: Maximum time to wait.
        hosts: Name, host and port of each of the other hosts.
    """
    events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=[events], daemon=True).start()
    for host in hosts:
        threading.Thread(target=_follow, args=[*host, events], daemon=True).start()
    try:
        if (gone := events.get(timeout=seconds)) is None:
            return
        said = f"{gone} has ended, or cannot be reached at its port"
    except queue.Empty:
        said = f"Not all hosts have connected within {seconds:.0f} s"
    if hosts:
        said += ", after the hosts had met, so this host ends; see the output of the "
        said += "others, and open their ports to all hosts."
    else:
        said += ", so this host ends; see the output of the others."
    print(f"towers: {said}", file=sys.stderr, flush=True)
    os.kill(pid, signal.SIGKILL)


def _read(events):
    sys.stdin.read()
    events.put(None)


def _follow(name, host, port, events):
    """Stays connected to a host; tells its name once nobody listens there any more."""
    heard_s = math.inf
    while time.monotonic() - heard_s < GONE_S:
        with contextlib.suppress(OSError):
            with socket.create_connection((host, port), _PROBE_S) as connection:
                heard_s = math.inf
                _notice_silence(connection)
                while connection.recv(4096):
                    pass
        heard_s = min(heard_s, time.monotonic())
        time.sleep(_PAUSE_S)
    events.put(name)


def _notice_silence(connection):
    """Has reads wait, and fail if the other machine is gone, or cut off, for 9 s."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has other names for some.
    for name, value in (("KEEPIDLE", 3), ("KEEPINTVL", 2), ("KEEPCNT", 3)):
        if (option := getattr(socket, f"TCP_{name}", None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3]))
