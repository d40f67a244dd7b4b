"""The engine for hosts that MPI has started, by mpirun or by srun with PMIx.

MPI carries the bytes, over shared memory, InfiniBand or another network. Its launcher
watches the processes: if one is killed, the launcher ends the others.

Before each collective, hosts compare its purpose and size in a small sum that does not
block. A host that waits there leaves the processor to hosts that still compute, which
MPI's own waiting does not. Hosts in different collectives get an error. So does a host
that would wait for another whose program has ended. MPI alone would mix up their bytes,
or hang.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from towers.cluster import connecting
from towers.cluster.mpi_watch import MpiWatch
from towers.cluster.mpi_world import MpiWorld
from towers.cluster.rendezvous.host import (
    HostDescription,
    RendezvousError,
    difference,
)
from towers.hosts import group
from towers.hosts.group import HostFailedError, HostsDifferError, ProcessPlace
from towers.program import ending, startup, voice, words
from towers.program.extras import install_command

# A host asks without a pause for this time whether all have come. Then pauses grow with
# the wait. A longer time would keep the processor from a host that shares it.
_LOOK_S, _PAUSE, _LONGEST_PAUSE_S = 1e-4, 0.05, 1e-3
# Seconds that a failing host waits for others to receive its message, and then to end.
_HEAR_S, _END_S = 5.0, 10.0
_END = "the end of its program"
_WITHOUT_FAILURE = 0, ending.ANOTHER_FAILED, *ending.STOPPED


class LinkError(ConnectionError):
    """Another host has failed, or the hosts cannot be reached any more."""


def join(place: ProcessPlace) -> group.Joined:
    """Connects this process to the others that MPI has started.

    Args:
        place: Rank and number of processes, from the launcher's environment.

    Returns:
        The connected hosts.

    Raises:
        ValueError: mpi4py is missing, or is of another MPI than the launcher.
        RendezvousError: The hosts have different versions.
    """
    with connecting.bounded(place.join_seconds):
        mpi = _imported(place)
        comm = mpi.COMM_WORLD.Dup()
        own = HostDescription.here(
            dataclasses.replace(place, rank=comm.rank), f"{socket.gethostname()}:0"
        )
        hosts, of_watch = comm.allgather(own), comm.Dup()
    if text := difference(hosts):
        raise RendezvousError(text)
    membership = group.Membership(
        comm.rank,
        tuple(host.address for host in hosts),
        tuple(host.name for host in hosts),
    )
    communicator = MpiCommunicator(mpi, comm, membership.names)
    watch = None
    if mpi.Query_thread() == mpi.THREAD_MULTIPLE:
        watch = MpiWatch(mpi, of_watch, membership.names, communicator.kill)
    elif comm.rank == 0:
        voice.warn(
            "MPI allows one thread at a time, so nobody notices a host that is stopped "
            'or cut off; mpi4py\'s default is thread_level="multiple".'
        )
    world = functools.partial(MpiWorld, membership.names, membership.rank, communicator)
    return group.Joined(membership, Ends(communicator, watch), communicator, world)


def _imported(place):
    """Imports mpi4py, which initialises MPI, and checks that it fits the launcher."""
    # With this, Open MPI leaves the processor to others while it waits: on a busy
    # machine, a sum of 1 MB took 0.5 ms instead of 20. Other MPIs ignore the variable.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    received = f"Received {place.mpi}={place.rank} of {place.count} processes of MPI"
    try:
        import mpi4py

        # `Ends` finalizes MPI. Children that this process forks must not.
        mpi4py.rc.finalize = False
        from mpi4py import MPI as mpi
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"{received}, but mpi4py cannot be imported "
            f"({' '.join(str(error).split())}); run: {install_command('mpi')}, with "
            "the launcher's MPI."
        ) from error
    if not mpi.Is_initialized() or mpi.Is_finalized():
        raise ValueError(
            f"{received}, but MPI is not initialised or already finalised in this "
            "process; expected mpi4py's default, initialize=True, and no "
            "MPI.Finalize() before the end."
        )
    if mpi.COMM_WORLD.size != place.count:
        library = mpi.Get_library_version().partition(",")[0].split("\n")[0]
        raise ValueError(
            f"{received}, but mpi4py, with {library}, sees {mpi.COMM_WORLD.size}; "
            "expected the same MPI for both: start with the mpirun of that library, or "
            "build mpi4py for the launcher's. Under Slurm, srun --mpi=pmix fits Open "
            "MPI, and --mpi=none does without MPI."
        )
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise ValueError(
            f"{received}, but MPI was initialised for one thread; expected mpi4py's "
            'default, thread_level="multiple".'
        )
    return mpi


class MpiCommunicator:
    """How a host meets the others in each collective of MPI's.

    Attributes:
        comm: The communicator of mpi4py's, for use inside `collective`.
        doing: The purpose of the present collective, and its start by
            `time.monotonic`; `None` between collectives.
        broken: The error that has ended the collectives, if any.
    """

    def __init__(self, mpi: Any, comm: Any, names: Sequence[str]):
        """Takes mpi4py's module MPI, and a communicator of its own."""
        self.doing: tuple[str, float] | None = None
        self.broken: Exception | None = None
        self._mpi, self.comm, self._names = mpi, comm, names
        self._rank, self._count = comm.rank, comm.size
        self._lock = threading.Lock()
        self._head, self._least = np.empty(2, np.int64), np.empty(2, np.int64)

    @contextlib.contextmanager
    def collective(self, purpose: str, size: int) -> Iterator[None]:
        """Enters a collective with all hosts; an error breaks all later ones, too.

        Inside, `comm` may be used.

        Args:
            purpose: Name of what is sent, the same on all hosts.
            size: Bytes, the same on all hosts.

        Raises:
            HostsDifferError: Another host is in another collective.
            LinkError: Another host has failed, or hosts have left one another.
        """
        with self._lock:
            if self.broken is not None:
                raise self.broken
            if self.doing is not None:
                # To MPI, the next collective would be the rest of that one.
                raise LinkError(
                    f"An error has taken this host out of '{self.doing[0]}', so it "
                    f"cannot meet others in '{purpose}'; expected a program that ends "
                    "with that error."
                )
            try:
                self._meet(purpose, size)
                yield
            except self._mpi.Exception as error:
                self.broken = LinkError(f"MPI failed in '{purpose}': {error}")
                raise self.broken from None
            self.doing = None

    def end(self, failure: str | None, seconds: float) -> bool:
        """Meets other hosts at the end of this host's program.

        Hosts that are in a collective get an error.

        Args:
            failure: The failure that ends the program, if any.
            seconds: Maximum time to wait for others.

        Returns:
            Whether all hosts know that a program has ended.
        """
        if not self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            return False
        try:
            if self.doing is not None:
                return False  # an error has left it, and others are still there
            if self.broken is None:
                self._meet(_END, int(failure is not None), seconds, failure)
        except (LinkError, HostsDifferError):
            pass  # the others raise it
        except (TimeoutError, self._mpi.Exception):
            return False
        finally:
            self._lock.release()
        return True

    def meet_ends(self, seconds: float) -> bool:
        """Returns whether all hosts end within some seconds."""
        try:
            self._wait(self.comm.Ibarrier(), seconds)
        except (TimeoutError, LinkError, self._mpi.Exception):
            return False
        return True

    @property
    def is_finalized(self) -> bool:
        """Whether the user's program has ended MPI."""
        return self._mpi.Is_finalized()

    def finalize(self) -> None:
        """Ends MPI in this process; waits for all others."""
        self._mpi.Finalize()

    def kill(self, code: int) -> None:
        """Ends all processes of all hosts by an exit code."""
        self._mpi.COMM_WORLD.Abort(code)

    def _meet(self, purpose, size, seconds=math.inf, failure=None):
        """Waits until all hosts come to the same collective; raises if they differ."""
        self.doing = purpose, time.monotonic()
        number = _number(purpose, size)
        self._head[:] = number, -number
        request = self.comm.Iallreduce(self._head, self._least, self._mpi.MIN)
        self._wait(request, seconds)
        # The least and the greatest of all hosts.
        if self._least[0] != -self._least[1]:
            self._raise_difference(f"{purpose} ({words.count(size, 'byte')})", failure)

    def _wait(self, request, seconds):
        begun_s = time.monotonic()
        while not request.Test():
            waited_s = time.monotonic() - begun_s
            if waited_s < _LOOK_S:
                continue
            if waited_s > seconds:
                raise TimeoutError
            time.sleep(min(_PAUSE * waited_s, _LONGEST_PAUSE_S))

    def _raise_difference(self, here, failure):
        """Raises an error that names the collectives in which hosts are."""
        is_end = self.doing[0] == _END
        hosts = self.comm.allgather((here, is_end, failure))
        self.doing = None
        # A host that has failed comes before hosts that ended without a failure.
        for rank, (_, ended, why) in sorted(
            enumerate(hosts), key=lambda item: item[1][2] is None
        ):
            if ended:
                why = f"has ended: {why}" if why else "has ended its program"
                self.broken = LinkError(f"{self._names[rank]} {why}")
                raise self.broken
        rank = next(k for k, (there, *_) in enumerate(hosts) if there != here)
        names = self._names[self._rank], self._names[rank]
        self.broken = HostsDifferError.between(names[0], here, names[1], hosts[rank][0])
        raise self.broken


class Ends:
    """Ends this host together with the others, as `HostWatch` does with TensorFlow.

    MPI's launcher ends all hosts if one is killed, and `MpiWatch` if one is silent. A
    host whose program fails sends its error to hosts that are in a collective, which
    then end. It then ends all others.
    """

    def __init__(self, communicator: MpiCommunicator, watch: MpiWatch | None):
        """Takes the connection to the others, and the thread that hears them."""
        self._communicator, self._watch = communicator, watch
        self._error: Exception | None = None

    @property
    def failure(self) -> str | None:
        """A sentence about the failure that has ended the collectives, if any."""
        broken = self._communicator.broken
        return str(broken) if isinstance(broken, LinkError) else None

    def enter(self) -> None:
        """Records that this host begins a call in which hosts meet, such as `fit`."""
        self._error = None

    def leave(self, error: BaseException | None) -> None:
        """Records the error, if any, that has ended the call."""
        self._error = error if isinstance(error, Exception) else None

    def begin(self, purpose: str) -> None:
        """Does nothing: the communicator knows in which collective this host is."""

    def end(self, outer: Any = None) -> None:
        """Does nothing; see `begin`."""

    def explain(self, error: BaseException) -> str | None:
        """Returns `failure`, which is known at once."""
        return self.failure

    def ask(self, seconds: float) -> None:
        """Returns `None`: with MPI, hosts cannot be asked during a collective."""

    def finish(self, seconds: float) -> None:
        """Ends MPI on this host, as its program ends.

        A program that has failed ends the programs of all hosts, after these had the
        time to print their error. Programs without a failure wait for one another, as
        MPI requires.
        """
        code = startup.exit_code() or 0
        # Python keeps the error that ends a program there.
        uncaught = getattr(sys, "last_value", None)
        error = self._error if uncaught is None else uncaught
        fails = code not in _WITHOUT_FAILURE or isinstance(uncaught, Exception)
        # These errors are raised on all hosts, or follow another host's failure.
        fails = fails and not isinstance(error, HostFailedError | HostsDifferError)
        why = f"exit code {code}" if fails else None
        if error is not None:
            why = group.in_a_line(error)
        communicator, watch = self._communicator, self._watch
        if communicator.is_finalized:
            return
        if fails:
            # Early: MPI may lose lines that are printed just before it ends all.
            self._say(f"has failed: {why}")
        know = communicator.end(why, _HEAR_S if fails else math.inf)
        if watch is not None:
            watch.stop()
        know = know and communicator.meet_ends(_END_S)
        if know and watch is not None:
            # None comes after all have met, and MPI wants each to be received.
            watch.receive_all()
        if not know and not fails:
            left = (
                communicator.doing
                and f"ends in the middle of '{communicator.doing[0]}'"
            )
            self._say(left or "has ended, and not all others have")
        if (fails and communicator.broken is not None) or not know:
            communicator.kill(code or 1)
        communicator.finalize()

    def _say(self, text):
        """Prints why this host ends all hosts."""
        name = group.joined().names[group.joined().rank]
        print(f"towers: {name} {text}; all hosts end.", file=sys.stderr, flush=True)


@functools.lru_cache(4096)
def _number(purpose, size):
    """Returns a hash of a collective's purpose and size."""
    text = f"{size} {purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
