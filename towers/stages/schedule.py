"""In which order the stages of a tower take their turns at its micro-batches.

The order is made by acting out a step: each stage takes one of the turns that could
begin next. A turn counts one on the way forward, and two on the way back, which
computes about twice as much.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Turn(NamedTuple):
    """What a stage computes at once of a micro-batch.

    Attributes:
        stage: The stage.
        backward: Whether it is on the way back.
    """

    stage: int
    backward: bool = False

    @property
    def duration(self) -> int:
        """How long it takes, in turns on the way forward."""
        return 2 if self.backward else 1


class Slot(NamedTuple):
    """A turn of a micro-batch, and when it comes.

    Attributes:
        begins: When, in turns on the way forward.
        micro_batch: Number of the micro-batch.
        turn: Index of the turn.
    """

    begins: float
    micro_batch: int
    turn: int


def order(turns: Sequence[Turn], micro_batches: int, schedule: str) -> list[Slot]:
    """Returns the turns of all micro-batches, in an order in which each may begin.

    Args:
        turns: Those of each micro-batch, in order.
        micro_batches: How many there are.
        schedule: "gpipe" or "1f1b"; see `layers.pipeline.Pipeline`.

    Returns:
        The turns. Those of one stage are to be taken in this order.
    """
    return _Step(turns, micro_batches, schedule).act_out()


def held(turns: Sequence[Turn], micro_batches: int, schedule: str) -> list[int]:
    """Returns how many micro-batches' activations each turn's are kept of, at most."""
    step, most = _Step(turns, micro_batches, schedule), [0] * len(turns)
    now = [0] * len(turns)
    for slot in step.act_out():
        if slot.turn < step.forward:
            now[slot.turn] += 1
            most[slot.turn] = max(most[slot.turn], now[slot.turn])
        for k in range(step.forward):
            now[k] -= step.released[k] == slot.turn
    return most


class _Step:
    """A step that is acted out.

    Attributes:
        forward: How many turns are on the way forward.
        released: For each of these, the turn that is the last to need what it makes.
    """

    def __init__(self, turns, micro_batches, schedule):
        self._turns, self._gpipe = turns, schedule == "gpipe"
        self._next = [0] * micro_batches
        self._ready = [0.0] * micro_batches
        self._idle = dict.fromkeys((turn.stage for turn in turns), 0.0)
        self.forward = [turn.backward for turn in [*turns, Turn(0, True)]].index(True)
        self.released = [self._last_use(k) for k in range(self.forward)]

    def act_out(self):
        slots = []
        while waiting := [m for m, k in enumerate(self._next) if k < len(self._turns)]:
            possible = [self._slot(m) for m in waiting if self._may(self._next[m])]
            slot = min(possible, key=self._urgency)
            turn = self._turns[slot.turn]
            ends = slot.begins + turn.duration
            self._ready[slot.micro_batch] = self._idle[turn.stage] = ends
            self._next[slot.micro_batch] += 1
            slots.append(slot)
        return sorted(slots)

    def _slot(self, micro_batch):
        k = self._next[micro_batch]
        idle = self._idle[self._turns[k].stage]
        return Slot(max(self._ready[micro_batch], idle), micro_batch, k)

    def _urgency(self, slot):
        wanted_last = self._turns[slot.turn].backward == self._gpipe
        return slot.begins, wanted_last, slot.micro_batch

    def _may(self, k):
        if self._gpipe:
            return k < self.forward or min(self._next) >= self.forward
        if k >= self.forward or self.forward == len(self._turns):
            return True
        # As many hold activations as there are turns from here to the way back.
        held = sum(k < each <= self.released[k] for each in self._next)
        return held < self.forward - k

    def _last_use(self, k):
        """The turn that is the last to need what a turn on the way forward has made."""
        stage, mirrored = self._turns[k].stage, len(self._turns) - 1 - k
        uses = [
            j
            for j, turn in enumerate(self._turns)
            if turn == (stage, True) and j >= mirrored
        ]
        return uses[0] if uses else len(self._turns) - 1
