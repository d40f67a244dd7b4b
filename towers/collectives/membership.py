"""This process's place among the hosts that it trains with at present."""

from towers.collectives.world import ALONE, World
from towers.hosts import group
from towers.program.features import feature


def this_host() -> World:
    """Returns the hosts that train together, `ALONE` if this one trains by itself."""
    membership = group.joined()
    if membership is None or membership.count == 1:
        return ALONE
    return feature("cluster.hosts").this_host()
