"""Joins the hosts that this process was started with, once in a process."""

import atexit
import contextlib
import os
import secrets
import socket
from collections.abc import Iterator, Mapping

import keras

from towers.cluster import binding, environment, rendezvous
from towers.cluster.heartbeat import SILENT_S, Heartbeat, HostFailedError
from towers.cluster.membership import Membership
from towers.keras_adapter import runtime

# TensorFlow's own watch over the hosts, which frees whoever waits for a silent one.
_TENSORFLOW_S = 10.0
# From when a collective has failed to when the heartbeat knows why.
_PATIENCE_S = SILENT_S + 3
# How long a program that is at its end waits for those of the other hosts.
_LEAVE_S = 60.0

_joined: tuple[Membership, Heartbeat] | None = None
# How many `together` this process is in, one inside the other.
_depth = 0


def join_as_started(
    hosts: str, environ: Mapping[str, str] = os.environ
) -> Membership | None:
    """Meets the hosts that this process was started with, and joins their cluster.

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
    """Starts TensorFlow's server, and waits until those of all hosts run.

    TensorFlow is initialised then. A server cannot be stopped, so a process joins only
    one cluster. The server listens at this host's address only.

    Raises:
        RuntimeError: TensorFlow is initialised already.
        NotConfinedError: The server would listen, or listens, elsewhere, too.
    """
    global _joined
    if _joined is not None or runtime.is_initialized():
        raise RuntimeError(
            "TensorFlow is initialised already, so this process can join no cluster; "
            "call towers.configure(hosts=...) before anything else uses TensorFlow."
        )
    rank, addresses = membership.rank, membership.addresses
    address, _, port = addresses[rank].rpartition(":")
    address = socket.gethostbyname(address.strip("[]"))
    with binding.confined(address):
        runtime.join_cluster(addresses, rank, _TENSORFLOW_S)
    binding.check(int(port), address)
    heartbeat = Heartbeat(rank, membership.names, runtime.abort_collectives)
    if rank == 0:
        runtime.write_key("heartbeat", heartbeat.listen(address))
    else:
        heartbeat.connect(runtime.read_key("heartbeat", SILENT_S))
    _joined = membership, heartbeat
    if _depth > 0:
        heartbeat.enter()
    _share_seed()
    atexit.register(heartbeat.finish, _LEAVE_S)


def _share_seed():
    """Has all hosts draw the same random numbers, unless the user sets a seed."""
    if _joined[0].rank == 0:
        runtime.write_key("seed", str(secrets.randbelow(2**32)))
    if runtime.random_seed() is None:
        keras.utils.set_random_seed(int(runtime.read_key("seed", SILENT_S)))


def joined() -> Membership | None:
    """Returns what this process knows of its cluster; `None` if it trains alone."""
    return None if _joined is None else _joined[0]


def failure() -> str | None:
    """Returns what has failed among the hosts, as a sentence, if anything has."""
    return None if _joined is None else _joined[1].failure


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Inside, hosts meet: what ends one of them ends all.

    Raises:
        HostFailedError: Another host has failed.
    """
    global _depth
    _depth += 1
    try:
        if _depth == 1 and _joined is not None:
            _joined[1].enter()
            check()
        yield
    except BaseException as error:
        # Of what TensorFlow raises where a collective ends.
        if _joined is not None and runtime.is_collective_error(error):
            _joined[1].wait_for_failure(_PATIENCE_S)
        _leave(error)
        if not isinstance(error, HostFailedError):
            check()
        raise
    _leave(None)


def _leave(error):
    global _depth
    _depth -= 1
    if _depth == 0 and _joined is not None:
        _joined[1].leave(error)


def check(wait: bool = False) -> None:
    """Raises a `HostFailedError` if a host has failed.

    `wait` tells that one has, of which it may take seconds to hear more.
    """
    if wait and _joined is not None:
        _joined[1].wait_for_failure(_PATIENCE_S)
    if (failed := failure()) is not None:
        raise HostFailedError(f"{failed}, so this host ends.") from None
