"""Notices a host that is stopped or cut off, for which MPI itself would wait for ever.

The first host and each other host send one another an empty message every second. A
host that hears nothing for `SILENT_S` names the silent host, and ends all.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from towers.program.ending import ANOTHER_FAILED

SILENT_S = 20.0
_LOOK_S = 1.0


class MpiWatch:
    """A thread that hears the other hosts, until `stop`."""

    def __init__(
        self, mpi: Any, comm: Any, names: Sequence[str], kill: Callable[[int], None]
    ):
        """Starts the thread.

        Args:
            mpi: mpi4py's module MPI.
            comm: A communicator of mpi4py's that nothing else uses.
            names: Name of each host.
            kill: Ends all processes of all hosts, by an exit code.
        """
        self._comm, self._names, self._kill = comm, names, kill
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        # MPI deletes the attributes of COMM_SELF first, as it ends in this process.
        at_end = mpi.Comm.Create_keyval(delete_fn=lambda *_: self.stop())
        mpi.COMM_SELF.Set_attr(at_end, self)

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._thread.join()

    def receive_all(self) -> set[int]:
        """Receives the messages that have come; returns the ranks of their senders."""
        senders = set()
        while self._comm.Iprobe():
            senders.add(self._comm.recv())
        return senders

    def _listen(self):
        rank, count = self._comm.rank, self._comm.size
        others = [*range(1, count)] if rank == 0 else [0]
        heard = dict.fromkeys(others, time.monotonic())
        sent = []
        while not self._stopped.wait(_LOOK_S):
            sent = [request for request in sent if not request.Test()]
            sent += [self._comm.isend(rank, other) for other in others]
            # A host that was itself stopped finds the messages of all others here.
            now = time.monotonic()
            heard |= dict.fromkeys(self.receive_all(), now)
            silent = next((k for k, at in heard.items() if now - at > SILENT_S), None)
            if silent is not None:
                self._end_all(silent)

    def _end_all(self, silent):
        print(
            f"towers: {self._names[silent]} has not been heard for {SILENT_S:.0f} s: "
            "it is stopped, or is cut off from this host; all hosts end.",
            file=sys.stderr,
            flush=True,
        )
        # MPI may lose lines that are printed just before it ends all.
        self._stopped.wait(_LOOK_S)
        self._kill(ANOTHER_FAILED)
