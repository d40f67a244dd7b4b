"""Orders the turns that the stages of a tower take at its micro-batches.

A simulation of a step gives the order: each stage takes one of the turns that could
begin next. Turns that nothing else waits for fill the time in which a stage would wait
(Qi et al. 2024, "Zero Bubble Pipeline Parallelism").
"""

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple


class Turn(NamedTuple):
    """The phases that a stage runs at once for a micro-batch.

    Attributes:
        stage: The stage.
        backward: Whether the turn is part of the backward pass.
        deferred: Whether other stages never wait for the turn.
        after: The turns of the same micro-batch that the turn takes something from.
        duration: The time it takes, in any unit.
    """

    stage: int
    backward: bool = False
    deferred: bool = False
    after: tuple[int, ...] = ()
    duration: float = 1.0


class Slot(NamedTuple):
    """A turn of a micro-batch, and the time at which it begins.

    Attributes:
        begins: The time, in the unit of durations.
        micro_batch: The number of the micro-batch.
        turn: The index of the turn.
    """

    begins: float
    micro_batch: int
    turn: int


def order(turns: Sequence[Turn], micro_batches: int, schedule: str) -> list[Slot]:
    """Returns the turns of all micro-batches, in an order in which each may begin.

    Args:
        turns: The turns of each micro-batch, each after those that it takes from.
        micro_batches: The number of micro-batches.
        schedule: "gpipe" or "1f1b"; see `layers.pipeline.Pipeline`.

    Returns:
        The turns. Each stage must take its turns in this order.
    """
    return [*_acted_out(tuple(turns), micro_batches, schedule)]


# All towers of a step take the same turns.
@functools.lru_cache(maxsize=16)
def _acted_out(turns, micro_batches, schedule):
    return tuple(_Step(turns, micro_batches, schedule).act_out())


class _Step:
    """The simulation of a step."""

    def __init__(self, turns, micro_batches, schedule):
        self._turns, self._gpipe = turns, schedule == "gpipe"
        self._idle = dict.fromkeys((turn.stage for turn in turns), 0.0)
        # For each micro-batch, the end of each turn that has been simulated.
        self._ends = [{} for _ in range(micro_batches)]
        uses = [*map(self._uses, range(len(turns)))]
        # For each turn, the last turn of its stage that needs its results.
        self._released = [max(users, default=k) for k, users in enumerate(uses)]
        # Turns that leave work for a later turn, which the next one does.
        self._leaving = {
            k
            for k in range(len(turns) - 1)
            if turns[k + 1].deferred and k + 1 in uses[k]
        }
        forward = [
            k for k, turn in enumerate(turns) if not turn.backward | turn.deferred
        ]
        self._forward = {*forward}
        # At most as many micro-batches hold activations as turns remain until backward.
        self._at_most = {k: len(forward) - i for i, k in enumerate(forward)}

    def act_out(self):
        slots, waiting = [], [[*range(len(self._turns))] for _ in self._ends]
        while any(waiting):
            possible = [
                self._slot(m, k)
                for m, of_micro_batch in enumerate(waiting)
                for k in of_micro_batch
                if self._may(m, k)
            ]
            slot = min(possible, key=self._urgency)
            _, m, k = slot
            turn = self._turns[k]
            ends = slot.begins + turn.duration
            self._ends[m][k] = self._idle[turn.stage] = ends
            waiting[m].remove(k)
            slots.append(slot)
        return sorted(slots, key=operator.attrgetter("begins"))

    def _slot(self, micro_batch, k):
        turn, ends = self._turns[k], self._ends[micro_batch]
        ready = max((ends[j] for j in turn.after), default=0.0)
        return Slot(max(ready, self._idle[turn.stage]), micro_batch, k)

    def _urgency(self, slot):
        turn = self._turns[slot.turn]
        wanted_last = turn.backward == self._gpipe
        return slot.begins, turn.deferred, wanted_last, slot.micro_batch, slot.turn

    def _may(self, micro_batch, k):
        turn, ends = self._turns[k], self._ends
        if any(j not in ends[micro_batch] for j in turn.after):
            return False
        if k in self._leaving and self._holding(k, k + 1):
            # Deferred work of another micro-batch has to be done first.
            return False
        if self._gpipe:
            return not turn.backward or all(self._forward <= e.keys() for e in ends)
        if k not in self._at_most:
            return True
        return self._holding(k, self._released[k]) < self._at_most[k]

    def _holding(self, k, last):
        """Returns how many micro-batches have had turn `k`, and not yet turn `last`."""
        return sum(k in ends and last not in ends for ends in self._ends)

    def _uses(self, k):
        """Returns the turns of the same stage that depend on turn `k`'s results."""
        users = {k}
        for j, turn in enumerate(self._turns):
            if turn.stage == self._turns[k].stage and users & {*turn.after}:
                users.add(j)
        return users - {k}
