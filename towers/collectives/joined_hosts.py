"""The hosts that this process trains with, as a `World`."""

from towers.collectives.world import ALONE, World
from towers.hosts import group


def this_host() -> World:
    """Returns the hosts that train together; `ALONE` if this host trains by itself."""
    membership = group.joined()
    if membership is None or membership.count == 1:
        return ALONE
    return group.world()
