"""Connects this process to other hosts.

`hosts/group.py` has those that it has joined, and answers who asks about them.
"""

import contextlib
import functools
import json
import os
import secrets
from collections.abc import Mapping

from towers.cluster import environment, mpi, rendezvous
from towers.cluster.communicator import Communicator
from towers.cluster.heartbeat import Heartbeat
from towers.cluster.links import Links
from towers.hosts import group
from towers.hosts.group import Membership
from towers.program import forks

# How long a program that is at its end waits for those of the other hosts.
_FINISH_S = 60.0


def join_as_started(environ: Mapping[str, str] = os.environ) -> Membership | None:
    """Meets the hosts that the environment tells, and joins them.

    Args:
        environ: The environment.

    Returns:
        Which hosts there are; `None` if this process was started alone.

    Raises:
        ValueError: The environment contradicts itself.
        HostsMissingError: Not all hosts have come.
    """
    place = environment.find(environ)
    if place is None:
        return None
    if place.mpi is not None:
        joined, seed = mpi.connect(place)
        _begin(joined, seed)
        return joined.membership
    membership = rendezvous.meet(place)
    join(membership)
    return membership


def join(membership: Membership) -> None:
    """Connects this host to the others, so that all draw the same random numbers.

    It listens at its own address only. Where it fails, this process has joined nobody.

    Args:
        membership: Which hosts there are.

    Raises:
        RuntimeError: It is connected to other hosts already.
        LinkError: A host cannot be reached.
    """
    if group.current is not None:
        raise RuntimeError("This process has joined other hosts already.")
    links = Links(membership)
    with contextlib.ExitStack() as opened:
        opened.callback(links.close)
        heartbeat, communicator, seed = _connected(membership, links, opened)
        opened.pop_all()
    _begin(group.Joined(membership, heartbeat, communicator), seed)


def _begin(joined: group.Joined, seed: int) -> None:
    """Makes connected hosts those of this process."""
    group.current = joined
    if group.is_together():
        joined.heartbeat.enter()
    _draw_from(seed)
    _tell_of_the_end()


def _connected(membership, links, opened) -> tuple[Heartbeat, Communicator, int]:
    """Connects to the others; returns also the first host's seed."""
    communicator = Communicator(links)
    heartbeat = Heartbeat(
        *(membership.rank, membership.names, links.abort),
    )
    opened.callback(heartbeat.close)
    heartbeat.describe = functools.partial(group.describe, communicator)
    first = membership.rank == 0
    told = b""
    if first:
        seed = secrets.randbelow(2**32)
        told = json.dumps([heartbeat.listen(links.own_address), seed]).encode()
    listens_at, seed = json.loads(bytes(communicator.all_gather(told, "addresses")[0]))
    if not first:
        heartbeat.connect(listens_at)
    return heartbeat, communicator, seed


def _draw_from(seed):
    """Has all hosts draw the same random numbers, unless the user sets a seed."""
    # They take seconds to import.
    import keras

    from towers.keras_adapter import runtime

    if runtime.random_seed() is None:
        keras.utils.set_random_seed(seed)


@functools.cache
def _tell_of_the_end():
    """Has the others told once this host's program is at its end."""
    forks.at_exit(_finish)


def _finish():
    if group.current is not None:
        group.current.heartbeat.finish(_FINISH_S)
