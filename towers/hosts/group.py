"""The group of hosts that this process trains with.

`towers.cluster` connects hosts. It is a feature, and is imported only if a launcher has
started this process as one of several. It sets `current` here, so that other modules
can ask about the hosts without importing any networking code.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from towers.program import words
from towers.program.features import feature

# As torchrun's `join_timeout`.
JOIN_SECONDS = 600.0


class HostFailedError(RuntimeError):
    """Another host has failed, so that this host cannot continue."""


class HostsDifferError(ValueError):
    """Hosts that train together differ in their arguments, data or collectives."""

    @classmethod
    def between(
        cls, name: str, here: str, other: str, there: str
    ) -> "HostsDifferError":
        """Returns the error for two hosts that are in different collectives.

        Args:
            name: Name of this host.
            here: Its collective.
            other: Name of the other host.
            there: The other host's collective.
        """
        return cls(
            f"{name} exchanges {here} where {other} exchanges {there}; hosts that "
            "train together have to run the same program with the same arguments, on "
            "the same batches."
        )


class SignalReceived(Exception):
    """A host has received a signal to stop; all hosts stop at the same batch.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int):
        super().__init__(f"A host has received signal {number}.")
        self.number = number


@dataclasses.dataclass(frozen=True)
class ProcessPlace:
    """The rank and addresses of a process that has not met other hosts yet.

    Attributes:
        rank: Rank of this host, from 0.
        count: Number of hosts.
        coordinator: Address at which the first host listens, as "host:port".
        token: Secret that all hosts share; `None` if any process may join.
        join_seconds: Maximum time to wait for other hosts.
        interface: Network interface or address for traffic between hosts; `None` for
            the one that reaches the coordinator.
        addresses: Address "host:port" at which each host listens, if known before hosts
            meet, as from TF_CONFIG.
        generation: Number of times that all hosts have restarted.
        mpi: The environment variable with the rank, if MPI has started the hosts. They
            meet in MPI, and have no coordinator.
    """

    rank: int
    count: int
    coordinator: str
    token: str | None = dataclasses.field(repr=False)
    join_seconds: float = JOIN_SECONDS
    interface: str | None = None
    addresses: tuple[str, ...] | None = None
    generation: int = 0
    mpi: str | None = None


@dataclasses.dataclass(frozen=True)
class Membership:
    """The group of hosts, once they have met.

    Attributes:
        rank: Rank of this host, from 0.
        addresses: Address "host:port" at which each host listens.
        names: Name of each host in messages, such as "host 1 (nodeB, pid 4711)".
        generation: Number of times that all hosts have restarted.
    """

    rank: int
    addresses: tuple[str, ...]
    names: tuple[str, ...]
    generation: int = 0

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(self.addresses)

    @property
    def count_here(self) -> int:
        """Number of hosts on this machine, by their addresses."""
        machines = [address.rpartition(":")[0] for address in self.addresses]
        return machines.count(machines[self.rank])


# The environment variables in which MPI gives a process its rank, and the number of
# processes: Open MPI; MPICH, Intel MPI and Cray; MVAPICH; and `srun --mpi=pmix`, where
# Slurm gives the number.
MPI = {
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",
    "PMIX_RANK": "SLURM_STEP_NUM_TASKS",
}
# A launcher of several processes sets at least one of these; `cluster/environment.py`
# reads them. Slurm also sets SLURM_NTASKS without srun, and SLURM_RESTART_COUNT also
# for one process. PyTorch's launchers set WORLD_SIZE for processes, and PET_NNODES for
# pods.
STARTED = (
    *("TOWERS_HOST_RANK", "TOWERS_HOST_COUNT", "TOWERS_COORDINATOR"),
    *("TOWERS_GENERATION", "TF_CONFIG", "SLURM_STEP_ID", "SLURM_NTASKS", *MPI),
    *("WORLD_SIZE", "PET_NNODES", "SLURM_RESTART_COUNT"),
)


class Joined(NamedTuple):
    """Connected hosts.

    Attributes:
        membership: The group of hosts.
        watch: Notices hosts that fail: a `HostWatch`, or with MPI, `Ends`.
        communicator: Knows the collective in which this host is, and the error that has
            ended the collectives: a `HostWatch`, or with MPI, an `MpiCommunicator`.
        connect: Connects the hosts, and returns their `World`.
    """

    membership: Membership
    watch: Any
    communicator: Any
    connect: Callable[[], Any]


current: Joined | None = None
"""The hosts that this process has joined; set by `towers.cluster`."""
_connected: tuple[Joined, Any] | None = None
# The nesting depth of `together` in this process.
_depth = 0
_meanwhile: Callable[[], str] | None = None


def is_started(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a launcher may have started this process as one of several.

    Args:
        environ: The environment.
    """
    # Workers of Ray Train get their ranks from it, not from the environment.
    return any(map(environ.get, STARTED)) or "ray.train" in sys.modules


def join_as_started(
    hosts: str, environ: Mapping[str, str] = os.environ
) -> Membership | None:
    """Meets the hosts that this process was started with, and joins them.

    Args:
        hosts: "auto", to read the environment.
        environ: The environment.

    Returns:
        The group of hosts; `None` if this process was started alone.

    Raises:
        ValueError: `hosts` has another value, or the environment contradicts itself.
        HostsMissingError: Some hosts have not joined in time.
    """
    if hosts != "auto":
        raise ValueError(
            f"Received hosts={hosts!r}; expected 'auto', to train with the processes "
            "that a launcher has started, or None."
        )
    if (already := joined()) is not None:
        return already
    if not is_started(environ):
        return None
    return feature("cluster.process_group").join_as_started(environ)


def restarted() -> bool:
    """Returns whether this process resumes a run that its launcher began before.

    A resumed process keeps the existing files of the run.
    """
    return is_started() and feature("cluster.environment").restarted()


def joined() -> Membership | None:
    """Returns the group that this process has joined; `None` if it trains alone."""
    return None if (now := current) is None else now.membership


def world() -> Any:
    """Returns the `World` of the hosts that this process has joined.

    The first call connects them; all hosts have to come to it.
    """
    global _connected
    if _connected is None or _connected[0] is not current:
        _connected = current, feature("cluster.process_group").connect()
    return _connected[1]


@contextlib.contextmanager
def calling(purpose: str) -> Iterator[None]:
    """Inside, this host calls a function that may have collectives.

    Args:
        purpose: Name of the function for messages, the same on all hosts.
    """
    if current is None:
        yield
        return
    outer = current.watch.begin(purpose)
    try:
        yield
    finally:
        current.watch.end(outer)


def collective() -> str | None:
    """Returns the purpose of the collective that this host is in, if any."""
    doing = None if (now := current) is None else now.communicator.doing
    return doing and doing[0]


def does_meanwhile(say: Callable[[], str] | None) -> None:
    """Registers a function that describes this host outside of collectives."""
    global _meanwhile
    _meanwhile = say


def describe(communicator: Any) -> list[str | None]:
    """Describes this host: its collective, if any, and its activity."""
    doing, say = communicator.doing, _meanwhile
    return [doing and doing[0], say() if say else "is in no collective"]


def ask_all(seconds: float) -> dict[str, tuple[str | None, str] | None]:
    """Asks all hosts for their current activity.

    Args:
        seconds: Maximum time to wait for answers.

    Returns:
        Maps the name of each host to its collective, if any, and its activity, such as
        "computes"; or to `None` if the host does not answer in time. Empty if hosts
        cannot be asked, as with MPI.
    """
    answers = None if (now := current) is None else now.watch.ask(seconds)
    if answers is None:
        return {}
    return {
        name: tuple(answers[rank]) if rank in answers else None
        for rank, name in enumerate(now.membership.names)
    }


def is_broken() -> bool:
    """Returns whether the joined hosts can no longer train together."""
    if (now := current) is None:
        return False
    return now.watch.failure is not None or now.communicator.broken is not None


def failure() -> str | None:
    """Returns a sentence on the failure of a host, if one has failed."""
    return None if (now := current) is None else now.watch.failure


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Inside, hosts use collectives: an error that ends one host ends all.

    Raises:
        HostFailedError: Another host has failed.
        HostsDifferError: The hosts are in different collectives.
    """
    global _depth
    _depth += 1
    try:
        with explained():
            if _depth == 1 and current is not None:
                current.watch.enter()
                check()
            yield
    except BaseException as error:
        _leave(error)
        raise
    _leave(None)


def is_together() -> bool:
    """Returns whether this process is inside `together`."""
    return _depth > 0


def _leave(error):
    global _depth
    _depth -= 1
    if _depth == 0 and current is not None:
        current.watch.leave(error)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Inside, an error of a collective names the host that failed, and why.

    Raises:
        HostFailedError: Another host has failed.
        HostsDifferError: The hosts are in different collectives.
    """
    try:
        yield
    except BaseException as error:
        if (cause := _cause(error)) is not error:
            raise cause from None
        raise


def _cause(error):
    """Returns the cause of a collective's error, instead of TensorFlow's error."""
    if (now := current) is None or isinstance(error, HostFailedError):
        return error
    if isinstance(now.communicator.broken, HostsDifferError):
        return now.communicator.broken
    failure = now.watch.explain(error)
    return error if failure is None else _failed(failure)


def in_a_line(error: BaseException) -> str:
    """Returns what other hosts are told of an error: its type and message."""
    line = words.error_line(error, [type(error).__name__, "Error:"])
    return (line if "Error" in line else f"{type(error).__name__}: {line}")[:300]


def check() -> None:
    """Raises a `HostFailedError` if a host has failed."""
    if (failed := failure()) is not None:
        raise _failed(failed)


def _failed(failure):
    return HostFailedError(f"{failure}, so this host ends.")
