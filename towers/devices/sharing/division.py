"""Divides places among runs: how many each should hold, and which.

It is a pure function of the runs, so that all of them find the same division. Runs may
list other places each, or find other ones filled. Only where both is so may one that
waits be passed over, until they agree which are filled.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class SharingRun:
    """A run that takes part.

    Attributes:
        token: What no other run has.
        pid: Its process.
        started: When that began, in seconds since the machine did.
        name: What to call it, such as its model_dir.
        minimum: How many places it is sure of.
        limit: How many it takes at most.
        places: Those that it can use, in its order.
        held: Those that nobody else may take, in the order in which it got them.
        filled: Those that somebody else fills, as far as it has seen.
        waits: Whether it has not got its minimum yet, and so holds nothing.
    """

    token: str
    pid: int
    started: float
    name: str
    minimum: int
    limit: int
    places: tuple[str, ...]
    held: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    waits: bool = False

    def __str__(self):
        return f"{self.name or 'a run'} (pid {self.pid})"


def divide(runs: Sequence[SharingRun]) -> list[tuple[str, ...]]:
    """Tells which places each run should hold once all have moved.

    First each gets its minimum, in order of arrival. What is left makes the run that
    has fewest larger by one, the earlier one of two, until all are at their limits or
    nothing is left. A run keeps what it holds as far as it may. What is new to it are
    free places, in its order, then what others give up. It has a filled place only if
    it would not reach its minimum otherwise.

    Args:
        runs: All of them, in order of arrival.

    Returns:
        For each its places, in its order.
    """
    counts = _counts(runs)
    holders = {place: run.token for run in reversed(runs) for place in run.held}
    matching = _Matching(len(runs))
    # Without filled places as far as that goes.
    for allowed in (_unfilled(runs), [run.places for run in runs]):
        for index, run in enumerate(runs):
            for place in run.held:
                if place in allowed[index] and matching.counts[index] < counts[index]:
                    matching.keep(index, place)
        nearest = [
            sorted(places, key=lambda place: holders.get(place, run.token) != run.token)
            for run, places in zip(runs, allowed, strict=True)
        ]
        for index, count in enumerate(counts):
            matching.grow(index, count, nearest)
    return [
        _ordered(run, [p for p, owner in matching.owners.items() if owner == index])
        for index, run in enumerate(runs)
    ]


def fits(runs: Sequence[SharingRun]) -> bool:
    """Tells whether there are places for the minimum of each run at the same time."""
    counts = _counts(runs)
    return all(n >= run.minimum for n, run in zip(counts, runs, strict=True))


def _counts(runs: Sequence[SharingRun]) -> list[int]:
    """Tells how many places each run should hold."""
    unfilled, every = _unfilled(runs), [run.places for run in runs]
    matching = _Matching(len(runs))
    for index, run in enumerate(runs):
        matching.grow(index, run.minimum, unfilled)
        matching.grow(index, run.minimum, every)
    growing = {*range(len(runs))}
    while growing:
        index = min(growing, key=lambda index: (matching.counts[index], index))
        count = matching.counts[index] + 1
        # One that cannot grow now cannot later, when others have more.
        if count > runs[index].limit or not matching.grow(index, count, unfilled):
            growing.remove(index)
    return matching.counts


def _unfilled(runs):
    return [tuple(p for p in run.places if p not in run.filled) for run in runs]


def _ordered(run: SharingRun, places: Iterable[str]) -> tuple[str, ...]:
    """Returns places in the order of a run, without filled ones above its minimum."""
    kept = [place for place in run.places if place in places]
    for place in reversed(run.places):
        if len(kept) > run.minimum and place in kept and place in run.filled:
            kept.remove(place)
    return tuple(kept)


class _Matching:
    """Which run has which place. Runs are numbers here.

    Attributes:
        owners: The run that has a place.
        counts: How many each run has.
    """

    def __init__(self, runs: int):
        self.owners: dict[str, int] = {}
        self.counts = [0] * runs

    def keep(self, run: int, place: str) -> None:
        """Gives a run a place if nobody has it."""
        if place not in self.owners:
            self.owners[place] = run
            self.counts[run] += 1

    def grow(self, run: int, count: int, allowed: Sequence[Sequence[str]]) -> bool:
        """Gives a run places until it has so many, or there is none for it.

        Others keep as many as they have, but may get other ones for them.

        Args:
            run: Which one grows.
            count: Up to how many places.
            allowed: For each run the places that it may get, the best first.

        Returns:
            Whether it has so many now.
        """
        while self.counts[run] < count:
            if not self._grow_by_one(run, allowed):
                return False
            self.counts[run] += 1
        return True

    def _grow_by_one(self, run, allowed):
        """Looks for the shortest chain of runs, each taking a place of the next."""
        # For a place that has been reached: who would take it, and leave which one.
        reached = {}
        queue = collections.deque([(run, None)])
        while queue:
            taker, left = queue.popleft()
            new = [place for place in allowed[taker] if place not in reached]
            reached |= dict.fromkeys(new, (taker, left))
            for place in new:
                if place not in self.owners:
                    self._move(place, reached)
                    return True
            # Its own ones lead nowhere, but do not get in the way either.
            queue.extend((self.owners[place], place) for place in new)
        return False

    def _move(self, place, reached):
        while place is not None:
            self.owners[place], place = reached[place]
