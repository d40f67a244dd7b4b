"""The hosts that this process trains with: one generation, or one after another."""

import contextlib
import functools
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping

from towers.cluster import environment, rendezvous
from towers.cluster.communicator import Communicator
from towers.cluster.elastic import Member
from towers.cluster.heartbeat import SILENT_S, Heartbeat, HostFailedError
from towers.cluster.links import LinkError, Links
from towers.cluster.membership import Membership
from towers.program import forks

# From when a connection has ended to when the heartbeat knows why.
_PATIENCE_S = SILENT_S + 3
# How long a program that is at its end waits for those of the other hosts.
_FINISH_S = 60.0
# How long a host that leaves waits for the others to do so, too.
_LEAVE_S = 5.0

_member: Member | None = None
_joined: tuple[Membership, Heartbeat, Communicator] | None = None
# Which generation has ended, and why, before this host may have joined it.
_ended: tuple[int, str] | None = None
# What connects to hosts just now, with their generation.
_joining: tuple[int, Links] | None = None
# What the first random numbers of all hosts have come from.
_seed: int | None = None
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
    if member(environ) is not None:
        return None  # until it trains
    place = environment.find(environ)
    if place is None:
        return None
    membership = rendezvous.meet(place)
    join(membership)
    return membership


def member(environ: Mapping[str, str] = os.environ) -> Member | None:
    """Returns what connects this process to the coordinator of elastic hosts.

    It is the same at each call; `None` if this process was not started as such a host.

    Args:
        environ: The environment.

    Raises:
        ValueError: The environment contradicts itself.
    """
    global _member
    if _member is None and (place := environment.find_elastic(environ)) is not None:
        _member = Member(
            *(place.coordinator, place.token),
            slot=place.slot,
            join_seconds=place.join_seconds,
            interface=place.interface,
            lost=abort,
            ends=_connect_no_more,
        )
    return _member


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
        membership = member().next(steps)
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
    global _joined, _joining
    if _joined is not None:
        raise RuntimeError("This process has joined other hosts already.")
    links = Links(membership)
    _joining = membership.generation, links
    try:
        with contextlib.ExitStack() as opened:
            opened.callback(links.close)
            heartbeat, communicator, seed = _connected(membership, links, opened)
            opened.pop_all()
        _joined = membership, heartbeat, communicator
    finally:
        _joining = None
    if _depth > 0:
        heartbeat.enter()
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
    heartbeat.describe = functools.partial(_does, links)
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
    if _joined is not None:
        _joined[1].finish(_FINISH_S)


def leave(seconds: float = _LEAVE_S) -> None:
    """Leaves the hosts that this process has joined, if any; it may join others then.

    They may be in any state. What waits for them, in any thread, ends by a `LinkError`.
    Hosts that leave together wait for one another, so that none has another's end for
    a failure.

    Args:
        seconds: How long to wait for the others to leave, while none has failed.
    """
    global _joined
    if _joined is None:
        return
    (membership, heartbeat, communicator), _joined = _joined, None
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
    now, soon = _joined, _joining
    if soon is not None and soon[0] == generation:
        soon[1].abort(why)
    elif now is not None and now[0].generation == generation:
        now[2].links.abort(why)


def _connect_no_more(generation: int, why: str) -> None:
    """Ends connecting to hosts of a generation that is to end before it has begun.

    A host that leaves may have gone without it, and would be waited for. Hosts that
    have connected go on until they have agreed on a step.
    """
    if _joined is None or _joined[0].generation != generation:
        abort(generation, why)


def change() -> str | None:
    """Returns why the present generation of elastic hosts is to end, if it is."""
    return None if _member is None or _joined is None else _member.change


def restarted() -> bool:
    """Tells whether this process goes on with a run that its launcher began before.

    It then leaves alone what is there of the run.
    """
    return environment.restarted()


def joined() -> Membership | None:
    """Returns what this process knows of its hosts; `None` if it trains alone."""
    return None if (now := _joined) is None else now[0]


def communicator() -> Communicator:
    """Returns the collectives of the hosts that this process has joined."""
    assert _joined is not None
    return _joined[2]


def collective() -> str | None:
    """Returns the collective that this host is in, by its purpose, if it is in one."""
    doing = None if (now := _joined) is None else now[2].links.doing
    return doing and doing[0]


def does_meanwhile(say: Callable[[], str] | None) -> None:
    """Registers what describes this host outside of collectives."""
    global _meanwhile
    _meanwhile = say


def ask_all(seconds: float) -> dict[str, tuple[str | None, str] | None]:
    """Asks all hosts what they do.

    Returns:
        By the name of each, in which collective it is, if in any, and what it does
        else, as in "computes"; `None` if it does not answer within so many seconds.
    """
    if (now := _joined) is None:
        return {}
    membership, heartbeat, _ = now
    told = heartbeat.ask(seconds)
    return {
        name: tuple(told[rank]) if rank in told else None
        for rank, name in enumerate(membership.names)
    }


def _does(links):
    doing, say = links.doing, _meanwhile
    return [doing and doing[0], say() if say else "is in no collective"]


def is_broken() -> bool:
    """Tells whether the hosts that this process has joined cannot go on together."""
    if (now := _joined) is None:
        return False
    return now[1].failure is not None or now[2].links.broken is not None


def failure() -> str | None:
    """Returns what has failed among the hosts, as a sentence, if anything has."""
    return None if (now := _joined) is None else now[1].failure


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
    if (now := _joined) is None or isinstance(error, HostFailedError):
        return error
    _, heartbeat, communicator = now
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
    elastic = (now := joined()) is not None and now.elastic
    does = "parts from the others" if elastic else "ends"
    return HostFailedError(f"{failure}, so this host {does}.")
