"""Ends a process whose TensorFlow waits too long for other hosts.

TensorFlow keeps Python's lock while it connects hosts, so no thread of the process can
do this. `tensorflow_engine` runs this file, which needs nothing but Python.

    python -I -S connecting.py PID SECONDS [[NAME, HOST, PORT], ...]
"""

import json
import os
import select
import signal
import socket
import sys

_PROBE_S = 3.0


def main(pid: int, seconds: float, hosts: list[list]) -> None:
    """Waits for the end of standard input; ends the process if that does not come.

    Args:
        pid: The process.
        seconds: Maximum time to wait.
        hosts: Name, host and port of each of the hosts.
    """
    if select.select([sys.stdin], [], [], seconds)[0]:
        return
    missing = [name for name, *address in hosts if not _listens(*address)]
    print(
        f"towers: {' and '.join(missing) or 'A host'} has not connected within "
        f"{seconds:.0f} s after the hosts had met, so this host ends; see the output "
        "of that host, and open its port to all others.",
        file=sys.stderr,
        flush=True,
    )
    os.kill(pid, signal.SIGKILL)


def _listens(host, port):
    try:
        with socket.create_connection((host, port), timeout=_PROBE_S):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3]))
