"""Starts a host on this machine for a launcher on another one, whose ssh runs this.

    ssh MACHINE python -m towers.launch.elastic.ssh

Reads a line of JSON from the standard input: the number of the host, its command, the
folder to run it in and what to add to its environment. Each further line is the number
of a signal for the host. Where the input ends, the launcher has gone, and the host is
asked to end. The exit code is the host's, but
1 for 255.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import IO

from towers.launch.host import Host
from towers.processes.strays import Strays

# In which a host may save and end by itself once its launcher has gone.
_END_S = 30.0
_LAST_WORDS_S = 1.0
_SSH_FAILED = 255


def main(lines: IO[str]) -> int:
    """Runs a host to its end, and returns its exit code."""
    asked = json.loads(lines.readline())
    if os.path.isdir(asked["folder"]):
        os.chdir(asked["folder"])
    strays, ended = Strays(), queue.SimpleQueue()
    strays.watch(0)
    environ = {**os.environ, **asked["environ"], **strays.mark}
    try:
        # The input is the launcher's.
        quiet = {"stdin": subprocess.DEVNULL}
        host = Host(
            *(asked["number"], asked["command"], environ, None, ended.put), **quiet
        )
    except ValueError as error:
        print(f"towers.launch.elastic.ssh: {error}", file=sys.stderr)
        return 1
    threading.Thread(target=_pass_on, args=(lines, host), daemon=True).start()
    ended.get()
    strays.end(_LAST_WORDS_S)
    strays.stop_watching()
    # With that, ssh tells that it has failed itself.
    return 1 if host.exit_code == _SSH_FAILED else host.exit_code


def _pass_on(lines, host):
    for line in lines:
        host.signal(int(line))
    host.signal(signal.SIGTERM)
    timer = threading.Timer(_END_S, host.signal, [signal.SIGKILL])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main(sys.stdin))
