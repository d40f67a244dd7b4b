"""The hosts of a run meet: each learns who all are, or all learn what is wrong.

The first host listens, the others connect to it. This comes before TensorFlow's own
cluster, which would wait for a missing host without end.
"""

import asyncio
import threading
from typing import Any

from towers.cluster.rendezvous import meeting
from towers.cluster.rendezvous.guest import Guest
from towers.cluster.rendezvous.host import HostsMissingError, RendezvousError
from towers.hosts.group import Membership, ProcessPlace

__all__ = ["HostsMissingError", "RendezvousError", "meet"]


def meet(place: ProcessPlace) -> Membership:
    """Meets the other hosts, for at most `place.join_seconds` from now.

    All hosts that came return at nearly the same time, or raise the same sentence.

    Raises:
        HostsMissingError: Not all came, or one has gone meanwhile.
        RendezvousError: The hosts differ in what has to be the same.
        ValueError: The interface is none of this machine's.
    """
    # In a notebook, a loop runs in this thread already.
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_meet(place))
    met: list[Any] = []
    thread = threading.Thread(target=_meet_beside, args=(place, met), daemon=True)
    thread.start()
    thread.join()
    if isinstance(met[0], BaseException):
        raise met[0]
    return met[0]


def _meet_beside(place, met):
    try:
        met.append(asyncio.run(_meet(place)))
    except BaseException as error:
        met.append(error)


async def _meet(place: ProcessPlace) -> Membership:
    return await (Guest(place).join() if place.rank else meeting.hold(place))
