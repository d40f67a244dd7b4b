"""Connects this process to other hosts: one generation, or one after another.

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
from towers.cluster.elastic import Member
from towers.cluster.heartbeat import Heartbeat
from towers.cluster.links import LinkError, Links
from towers.hosts import group
from towers.hosts.group import Membership
from towers.program import forks

# How long a program that is at its end waits for those of the other hosts.
_FINISH_S = 60.0
# How long a host that leaves waits for the others to do so, too.
_LEAVE_S = 5.0

# Which generation has ended, and why, before this host may have joined it.
_ended: tuple[int, str] | None = None
# What connects to hosts just now, with their generation.
_joining: tuple[int, Links] | None = None
# What the first random numbers of all hosts have come from.
_seed: int | None = None


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
        _begin(joined, seed, seeds=True)
        return joined.membership
    membership = rendezvous.meet(place)
    join(membership)
    return membership


def new_member(environ: Mapping[str, str]) -> Member:
    """Connects this process to the coordinator of elastic hosts.

    Args:
        environ: An environment that tells of one.

    Raises:
        ValueError: The environment contradicts itself.
    """
    place = environment.find_elastic(environ)
    return Member(
        *(place.coordinator, place.token),
        slot=place.slot,
        join_seconds=place.join_seconds,
        interface=place.interface,
        lost=abort,
        ends=_connect_no_more,
    )


def join_next(steps: int, seeds: bool = True) -> Membership:
    """Leaves the present generation of elastic hosts, if any, and joins the next one.

    If one is lost before they have connected, it is the one after that.

    Args:
        steps: How many this host has done.
        seeds: As for `join`.

    Returns:
        Who is in it.

    Raises:
        HostsMissingError: No other generation begins, or not with this host.
        RendezvousError: It has another token or other versions than the others.
    """
    leave()
    while True:
        membership = group.member().next(steps)
        try:
            join(membership, seeds)
        except LinkError:
            continue
        return membership


def join(membership: Membership, seeds: bool = True) -> None:
    """Connects this host to the others.

    It listens at its own address only. Where it fails, this process has joined nobody.

    Args:
        membership: Which hosts there are. A process that has left others may join them.
        seeds: Whether all hosts draw the same random numbers, unless the user sets a
            seed, as they join for the first time. It imports Keras.

    Raises:
        RuntimeError: It is connected to other hosts already.
        LinkError: A host cannot be reached.
    """
    global _joining
    if group.current is not None:
        raise RuntimeError("This process has joined other hosts already.")
    links = Links(membership)
    _joining = membership.generation, links
    try:
        with contextlib.ExitStack() as opened:
            opened.callback(links.close)
            heartbeat, communicator, seed = _connected(membership, links, opened)
            opened.pop_all()
    finally:
        _joining = None
    _begin(group.Joined(membership, heartbeat, communicator), seed, seeds)


def _begin(joined: group.Joined, seed: int, seeds: bool) -> None:
    """Makes connected hosts those of this process."""
    group.current = joined
    if group.is_together():
        joined.heartbeat.enter()
    _draw_from(seed, seeds)
    _tell_of_the_end()


def _connected(membership, links, opened) -> tuple[Heartbeat, Communicator, int]:
    """Connects to the others; returns also the first host's seed."""
    if _ended is not None and _ended[0] == membership.generation:
        raise LinkError(_ended[1])
    communicator = Communicator(links)
    heartbeat = Heartbeat(
        *(membership.rank, membership.names, links.abort),
        ends=not membership.elastic,
    )
    opened.callback(heartbeat.close)
    heartbeat.describe = functools.partial(group.describe, communicator)
    first = membership.rank == 0
    told = b""
    if first:
        seed = secrets.randbelow(2**32) if _seed is None else _seed
        told = json.dumps([heartbeat.listen(links.own_address), seed]).encode()
    listens_at, seed = json.loads(bytes(communicator.all_gather(told, "addresses")[0]))
    if not first:
        heartbeat.connect(listens_at)
    return heartbeat, communicator, seed


def _draw_from(seed, seeds):
    """Has all hosts draw the same random numbers, unless the user sets a seed."""
    global _seed
    if _seed is not None:
        return
    _seed = seed
    if seeds:
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


def leave(seconds: float = _LEAVE_S) -> None:
    """Leaves the hosts that this process has joined, if any; it may join others then.

    They may be in any state. What waits for them, in any thread, ends by a `LinkError`.
    Hosts that leave together wait for one another, so that none has another's end for
    a failure.

    Args:
        seconds: How long to wait for the others to leave, while none has failed.
    """
    if group.current is None:
        return
    (membership, heartbeat, communicator), group.current = group.current, None
    # Others hear of that from where this host has.
    is_over = _ended is not None and _ended[0] == membership.generation
    heartbeat.part(0 if is_over else seconds)
    communicator.close()
    heartbeat.close()


def abort(generation: int, why: str) -> None:
    """Ends what waits for hosts of a generation, in any thread, by a `LinkError`.

    It may come before this host has joined them, and after it has left them.

    Args:
        generation: Of which hosts.
        why: What has ended it, in a sentence.
    """
    global _ended
    _ended = generation, why
    now, soon = group.current, _joining
    if soon is not None and soon[0] == generation:
        soon[1].abort(why)
    elif now is not None and now.membership.generation == generation:
        now.communicator.abort(why)


def _connect_no_more(generation: int, why: str) -> None:
    """Ends connecting to hosts of a generation that is to end before it has begun.

    A host that leaves may have gone without it, and would be waited for. Hosts that
    have connected go on until they have agreed on a step.
    """
    now = group.joined()
    if now is None or now.generation != generation:
        abort(generation, why)
