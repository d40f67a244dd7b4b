"""In which order the stages of a tower compute the phases of its micro-batches.

The order is made by acting out a step: each stage takes one of the phases that could
begin next. What counts as a phase's duration is one on the way forward, and two on the
way back, which computes about twice as much.
"""

from collections.abc import Sequence
from typing import NamedTuple

from towers.tower.parts.phases import Place


class Turn(NamedTuple):
    """One phase of one micro-batch.

    Attributes:
        begins: When, in durations of a forward phase.
        micro_batch: Number of the micro-batch.
        phase: Index of the phase.
    """

    begins: float
    micro_batch: int
    phase: int


def order(places: Sequence[Place], micro_batches: int, schedule: str) -> list[Turn]:
    """Returns the turns of all stages, in an order in which each may begin.

    Args:
        places: Those of the phases, in the order of each micro-batch.
        micro_batches: How many there are.
        schedule: "gpipe" or "1f1b"; see `Pipeline`.

    Returns:
        The turns. Those of one stage are to run in this order.
    """
    return _Pipeline(places, micro_batches, schedule).run()


class _Pipeline:
    """A step that is acted out."""

    def __init__(self, places, micro_batches, schedule):
        self._places = places
        self._next = [0] * micro_batches
        self._free = [0.0] * micro_batches
        self._idle = dict.fromkeys((place.part for place in places), 0.0)
        self._deepest = max(p.level for p in places if not p.backward)
        self._released = [*map(self._release, places)]
        self._first_back = [*(p.backward for p in places), True].index(True)
        self._limited = schedule == "1f1b" and self._first_back < len(places)
        self._forward_first = schedule == "gpipe"

    def run(self):
        turns = []
        while waiting := [m for m, n in enumerate(self._next) if n < len(self._places)]:
            turn = min((t for m in waiting if (t := self._turn(m))), key=self._urgency)
            place = self._places[turn.phase]
            ends = turn.begins + (2 if place.backward else 1)
            self._free[turn.micro_batch] = self._idle[place.part] = ends
            self._next[turn.micro_batch] += 1
            turns.append(turn)
        return sorted(turns)

    def _turn(self, micro_batch):
        phase = self._next[micro_batch]
        place = self._places[phase]
        if self._limited and not place.backward and self._is_full(phase, place):
            return None
        begins = max(self._free[micro_batch], self._idle[place.part])
        if self._forward_first and place.backward:
            # A stage goes back when it has been through all micro-batches.
            if min(self._next) < self._first_back:
                return None
        return Turn(begins, micro_batch, phase)

    def _urgency(self, turn):
        backward = self._places[turn.phase].backward
        return turn.begins, backward == self._forward_first, turn.micro_batch

    def _release(self, place):
        """The phase that is the last to need what a forward phase has made."""
        back = 2 * self._deepest + 1 - place.level
        of_stage = [
            k
            for k, each in enumerate(self._places)
            if each.backward and each.part == place.part and each.level >= back
        ]
        return of_stage[0] if of_stage else len(self._places) - 1

    def _is_full(self, phase, place):
        """Whether a stage holds activations of as many as there are levels behind."""
        held = sum(phase < n <= self._released[phase] for n in self._next)
        return held >= self._deepest + 1 - place.level
