"""The hosts that this process trains with, which it joins once."""

import atexit
import contextlib
import functools
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping

import keras

from towers.cluster import environment, rendezvous
from towers.cluster.communicator import Communicator
from towers.cluster.heartbeat import SILENT_S, Heartbeat, HostFailedError
from towers.cluster.links import Links
from towers.cluster.membership import Membership
from towers.keras_adapter import runtime

# From when a connection has ended to when the heartbeat knows why.
_PATIENCE_S = SILENT_S + 3
# How long a program that is at its end waits for those of the other hosts.
_LEAVE_S = 60.0

_joined: tuple[Membership, Heartbeat, Communicator] | None = None
# How many `together` this process is in, one inside the other.
_depth = 0
_meanwhile: Callable[[], str] | None = None


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
    place = environment.find(environ)
    if place is None:
        return None
    membership = rendezvous.meet(place)
    join(membership)
    return membership


def join(membership: Membership) -> None:
    """Connects this host to the others.

    It listens at its own address only.

    Raises:
        RuntimeError: It is connected to other hosts already.
        LinkError: A host cannot be reached.
    """
    global _joined
    if _joined is not None:
        raise RuntimeError("This process has joined other hosts already.")
    links = Links(membership)
    communicator = Communicator(links)
    heartbeat = Heartbeat(membership.rank, membership.names, links.abort)
    heartbeat.describe = functools.partial(_does, links)
    first = membership.rank == 0
    told = b""
    if first:
        seed = secrets.randbelow(2**32)
        told = json.dumps([heartbeat.listen(links.own_address), seed]).encode()
    listens_at, seed = json.loads(bytes(communicator.all_gather(told, "addresses")[0]))
    if not first:
        heartbeat.connect(listens_at)
    _joined = membership, heartbeat, communicator
    if _depth > 0:
        heartbeat.enter()
    # All hosts draw the same random numbers, unless the user sets a seed.
    if runtime.random_seed() is None:
        keras.utils.set_random_seed(seed)
    atexit.register(heartbeat.finish, _LEAVE_S)
    # The end of a process that this one has forked is not that of the host.
    os.register_at_fork(after_in_child=lambda: atexit.unregister(heartbeat.finish))


def joined() -> Membership | None:
    """Returns what this process knows of its hosts; `None` if it trains alone."""
    return None if _joined is None else _joined[0]


def communicator() -> Communicator:
    """Returns the collectives of the hosts that this process has joined."""
    assert _joined is not None
    return _joined[2]


def collective() -> str | None:
    """Returns the collective that this host is in, by its purpose, if it is in one."""
    doing = None if _joined is None else _joined[2].links.doing
    return doing and doing[0]


def does_meanwhile(say: Callable[[], str] | None) -> None:
    """Is told what says what this host does where it is in no collective."""
    global _meanwhile
    _meanwhile = say


def ask_all(seconds: float) -> dict[str, tuple[str | None, str] | None]:
    """Asks all hosts what they do.

    Returns:
        By the name of each, in which collective it is, if in any, and what it does
        else, as in "computes"; `None` if it does not answer within so many seconds.
    """
    membership, heartbeat, _ = _joined
    told = heartbeat.ask(seconds)
    return {
        name: tuple(told[rank]) if rank in told else None
        for rank, name in enumerate(membership.names)
    }


def _does(links):
    doing, say = links.doing, _meanwhile
    return [doing and doing[0], say() if say else "is in no collective"]


def failure() -> str | None:
    """Returns what has failed among the hosts, as a sentence, if anything has."""
    return None if _joined is None else _joined[1].failure


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
            if _depth == 1 and _joined is not None:
                _joined[1].enter()
                check()
            yield
    except BaseException as error:
        _leave(error)
        raise
    _leave(None)


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
        if (told := _cause(error)) is not error:
            raise told from None
        raise


def _cause(error):
    """What has ended a collective, in the place of what TensorFlow makes of it."""
    if _joined is None or isinstance(error, HostFailedError):
        return error
    _, heartbeat, communicator = _joined
    broken = communicator.links.broken
    if broken is not None and not isinstance(broken, OSError):
        return broken
    if broken is not None:
        heartbeat.wait_for_failure(_PATIENCE_S)
    if heartbeat.failure is not None:
        return _failed(heartbeat.failure)
    return error


def _leave(error):
    global _depth
    _depth -= 1
    if _depth == 0 and _joined is not None:
        _joined[1].leave(error)


def check() -> None:
    """Raises a `HostFailedError` if a host has failed."""
    if (failed := failure()) is not None:
        raise _failed(failed)


def _failed(failure):
    return HostFailedError(f"{failure}, so this host ends.")
