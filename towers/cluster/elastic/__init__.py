"""Hosts that come and go while a run goes on: a generation of them after another.

The launcher has a `Coordinator`, each process a `Member`. A process that loses others,
or hears that others have come, leaves its generation and waits for the next one, whose
members the coordinator tells. Meanwhile it keeps all that it has in memory.
"""

from towers.cluster.elastic.coordinator import Coordinator, State
from towers.cluster.elastic.events import Event, Formed, Lost, Over, Wanted
from towers.cluster.elastic.member import Member

__all__ = [
    "Coordinator",
    "Event",
    "Formed",
    "Lost",
    "Member",
    "Over",
    "State",
    "Wanted",
]
