"""The hosts that this process trains with, as far as all else asks about them.

`towers.cluster` connects hosts. It is a feature, which is imported where a launcher has
started this process as one of several. What it connects is `current` here, so that
whoever asks imports no socket.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from towers.program.features import feature

# As torchrun's `join_timeout`.
JOIN_SECONDS = 600.0


class HostFailedError(RuntimeError):
    """Another host of those that train together has failed; this one cannot go on."""


class HostsDifferError(ValueError):
    """Hosts that train together were not given the same."""


class SignalReceived(Exception):
    """A host has received a signal to stop, for which all stop at the same batch.

    Attributes:
        number: That of the signal.
    """

    def __init__(self, number: int):
        super().__init__(f"A host has received signal {number}.")
        self.number = number


class HostsChange(Exception):
    """Hosts come or go, for which all stop at the same batch."""


@dataclasses.dataclass(frozen=True)
class ProcessPlace:
    """What a process knows of its place before it has met the others.

    Attributes:
        rank: Its number among the hosts, from 0.
        count: How many hosts there are.
        coordinator: Where the first host listens for the others, as "host:port".
        token: What all hosts know and strangers do not; `None` if anybody may join.
        join_seconds: How long to wait for the others.
        interface: The network interface or address for what hosts send one another;
            `None` for the one that reaches the coordinator.
        addresses: Of each host, "host:port" where it listens for the others, if that
            is known before they meet, as by TF_CONFIG.
        generation: How often all hosts have started anew.
    """

    rank: int
    count: int
    coordinator: str
    token: str | None = dataclasses.field(repr=False)
    join_seconds: float = JOIN_SECONDS
    interface: str | None = None
    addresses: tuple[str, ...] | None = None
    generation: int = 0


@dataclasses.dataclass(frozen=True)
class ElasticPlace:
    """What a process knows that is to train with hosts which come and go.

    Attributes:
        coordinator: Where the coordinator listens, as "host:port".
        token: What all hosts know and strangers do not.
        slot: What the launcher calls this process; hosts begin in this order.
        join_seconds: How long to try to reach the coordinator.
        interface: As of `ProcessPlace`.
        restarted: Whether others have begun before this process was started, as where
            it takes the place of one that has failed.
    """

    coordinator: str
    token: str = dataclasses.field(repr=False)
    slot: int
    join_seconds: float = JOIN_SECONDS
    interface: str | None = None
    restarted: bool = False


@dataclasses.dataclass(frozen=True)
class Membership:
    """What all hosts know once they have met.

    Attributes:
        rank: The number of this host among the hosts, from 0.
        addresses: Of each host, "host:port" where it listens for the others.
        names: What to call each in sentences, such as "host 1 (nodeB, pid 4711)".
        generation: How often all hosts have started anew, or other hosts have met.
        token: As of `ProcessPlace`.
        elastic: Whether a host that loses others may leave them and go on with those
            that remain, instead of to end.
    """

    rank: int
    addresses: tuple[str, ...]
    names: tuple[str, ...]
    generation: int = 0
    token: str | None = dataclasses.field(default=None, repr=False)
    elastic: bool = False

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return len(self.addresses)

    @property
    def processes(self) -> frozenset[str]:
        """The names of its hosts without their ranks, which change."""
        named = (f"host {rank} " for rank in range(len(self.names)))
        return frozenset(map(str.removeprefix, self.names, named))

    @property
    def count_here(self) -> int:
        """How many of them are on this machine, by their addresses."""
        machines = [address.rpartition(":")[0] for address in self.addresses]
        return machines.count(machines[self.rank])


# Set for a process that is to train with hosts that come and go.
ELASTIC = "TOWERS_ELASTIC"
# One of them is set where a launcher has started several processes, or may have;
# `cluster/environment.py` reads them. Slurm's second is there without srun, too.
STARTED = (
    *(ELASTIC, "TOWERS_HOST_RANK", "TOWERS_HOST_COUNT", "TOWERS_COORDINATOR"),
    *("TOWERS_GENERATION", "TF_CONFIG", "SLURM_STEP_ID", "SLURM_NTASKS"),
)


class Joined(NamedTuple):
    """Hosts that are connected.

    Attributes:
        membership: Which hosts.
        heartbeat: Knows which of them has failed, a `Heartbeat`.
        communicator: Their collectives, a `Communicator`.
    """

    membership: Membership
    heartbeat: Any
    communicator: Any


current: Joined | None = None
"""The hosts that this process has joined; whoever connects them sets it."""
_member: Any = None
# How many `together` this process is in, one inside the other.
_depth = 0
_meanwhile: Callable[[], str] | None = None


def is_started(environ: Mapping[str, str] = os.environ) -> bool:
    """Tells whether a launcher may have started this process as one of several.

    Args:
        environ: The environment.
    """
    # Ray Train answers its workers instead.
    return any(map(environ.get, STARTED)) or "ray.train" in sys.modules


def join_as_started(
    hosts: str, environ: Mapping[str, str] = os.environ
) -> Membership | None:
    """Meets the hosts that this process was started with, and joins them.

    Args:
        hosts: "auto", for what the environment says.
        environ: The environment.

    Returns:
        Which hosts there are; `None` if this process was started alone.

    Raises:
        ValueError: `hosts` is something else, or the environment contradicts itself.
        HostsMissingError: Not all hosts have come.
    """
    if hosts != "auto":
        raise ValueError(
            f"Received hosts={hosts!r}; expected 'auto', to train with the processes "
            "that a launcher has started, or None."
        )
    if (already := joined()) is not None:
        return already
    if not is_started(environ) or member(environ) is not None:
        return None  # until it trains
    return feature("cluster.process_group").join_as_started(environ)


def restarted() -> bool:
    """Tells whether this process goes on with a run that its launcher began before.

    It then leaves alone what is there of the run.
    """
    return is_started() and feature("cluster.environment").restarted()


def member(environ: Mapping[str, str] = os.environ) -> Any:
    """Returns what connects this process to the coordinator of elastic hosts.

    It is the same `Member` at each call; `None` if this process was not started as such
    a host.

    Args:
        environ: The environment.

    Raises:
        ValueError: The environment contradicts itself.
    """
    global _member
    if _member is None and environ.get(ELASTIC):
        _member = feature("cluster.process_group").new_member(environ)
    return _member


def change() -> str | None:
    """Returns why the present generation of elastic hosts is to end, if it is."""
    return None if _member is None or current is None else _member.change


def joined() -> Membership | None:
    """Returns what this process knows of its hosts; `None` if it trains alone."""
    return None if (now := current) is None else now.membership


def communicator() -> Any:
    """Returns the collectives of the hosts that this process has joined."""
    assert current is not None
    return current.communicator


def collective() -> str | None:
    """Returns the collective that this host is in, by its purpose, if it is in one."""
    doing = None if (now := current) is None else now.communicator.links.doing
    return doing and doing[0]


def does_meanwhile(say: Callable[[], str] | None) -> None:
    """Registers what describes this host outside of collectives."""
    global _meanwhile
    _meanwhile = say


def describe(links: Any) -> list[str | None]:
    """Says in which collective of some links this host is, and what it does else."""
    doing, say = links.doing, _meanwhile
    return [doing and doing[0], say() if say else "is in no collective"]


def ask_all(seconds: float) -> dict[str, tuple[str | None, str] | None]:
    """Asks all hosts what they do.

    Returns:
        By the name of each, in which collective it is, if in any, and what it does
        else, as in "computes"; `None` if it does not answer within so many seconds.
    """
    if (now := current) is None:
        return {}
    answers = now.heartbeat.ask(seconds)
    return {
        name: tuple(answers[rank]) if rank in answers else None
        for rank, name in enumerate(now.membership.names)
    }


def is_broken() -> bool:
    """Tells whether the hosts that this process has joined cannot go on together."""
    if (now := current) is None:
        return False
    return (
        now.heartbeat.failure is not None or now.communicator.links.broken is not None
    )


def failure() -> str | None:
    """Returns what has failed among the hosts, as a sentence, if anything has."""
    return None if (now := current) is None else now.heartbeat.failure


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Inside, hosts meet: what ends one of them ends all.

    Raises:
        HostFailedError: Another host has failed.
        HostsDifferError: The hosts are in different collectives.
    """
    global _depth
    _depth += 1
    try:
        with explained():
            if _depth == 1 and current is not None:
                current.heartbeat.enter()
                check()
            yield
    except BaseException as error:
        _leave(error)
        raise
    _leave(None)


def is_together() -> bool:
    """Tells whether this process is inside of `together`."""
    return _depth > 0


def _leave(error):
    global _depth
    _depth -= 1
    if _depth == 0 and current is not None:
        current.heartbeat.leave(error)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Inside, an error of a collective tells which host has failed, and why.

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
    """What has ended a collective, in the place of what TensorFlow makes of it."""
    if (now := current) is None or isinstance(error, HostFailedError):
        return error
    broken = now.communicator.links.broken
    if broken is not None and not isinstance(broken, OSError):
        return broken
    if broken is not None:
        now.heartbeat.wait_for_failure()
    if now.heartbeat.failure is not None:
        return _failed(now.heartbeat.failure)
    return error


def check() -> None:
    """Raises a `HostFailedError` if a host has failed."""
    if (failed := failure()) is not None:
        raise _failed(failed)


def _failed(failure):
    elastic = (now := joined()) is not None and now.elastic
    does = "parts from the others" if elastic else "ends"
    return HostFailedError(f"{failure}, so this host {does}.")
