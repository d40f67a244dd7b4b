"""Divides places among runs: how many each run should hold, and which.

The division is a pure function of the runs, so all runs compute the same one. Runs may
list different places, or see different ones filled. Only if both happen may a waiting
run be passed over, until the runs agree on the filled places.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class SharingRun:
    """A run that takes part in sharing.

    Attributes:
        token: A unique name of the run.
        pid: Its process.
        started: When its process began, in seconds since the machine booted.
        name: The name in messages, such as its model_dir.
        minimum: The number of places that the run is sure of.
        limit: The number of places that it takes at most.
        places: The places that it can use, in its order.
        held: The places that no other run may take, in the order in which it got them.
        filled: The places that it sees filled by other programs.
        waits: Whether it is still waiting for its minimum, and so holds nothing.
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
    """Computes which places each run should hold once all have moved.

    First each run gets its minimum, in order of arrival. The rest goes one by one to
    the run that has fewest places, the earlier one of two, until all runs are at their
    limits or nothing is left. A run keeps its places as far as it may. Its new places
    are free ones, in its order, then ones that others give up. It gets a filled place
    only if it would not reach its minimum otherwise.

    Args:
        runs: All runs, in order of arrival.

    Returns:
        The places of each run, in its order.
    """
    counts = _counts(runs)
    holders = {place: run.token for run in reversed(runs) for place in run.held}
    matching = _Matching(len(runs))
    # First without filled places, then with them.
    for allowed in (_unfilled(runs), [run.places for run in runs]):
        for index, run in enumerate(runs):
            for place in run.held:
                if place in allowed[index] and matching.counts[index] < counts[index]:
                    matching.keep(index, place)
        nearest = [
            sorted(
                candidates, key=lambda place: holders.get(place, run.token) != run.token
            )
            for run, candidates in zip(runs, allowed, strict=True)
        ]
        for index, count in enumerate(counts):
            matching.grow(index, count, nearest)
    return [
        _ordered(run, [p for p, owner in matching.owners.items() if owner == index])
        for index, run in enumerate(runs)
    ]


def fits(runs: Sequence[SharingRun]) -> bool:
    """Tells whether the places suffice for the minimum of all runs at the same time."""
    counts = _counts(runs)
    return all(n >= run.minimum for n, run in zip(counts, runs, strict=True))


def _counts(runs: Sequence[SharingRun]) -> list[int]:
    """Computes the number of places that each run should hold."""
    unfilled, every = _unfilled(runs), [run.places for run in runs]
    matching = _Matching(len(runs))
    for index, run in enumerate(runs):
        matching.grow(index, run.minimum, unfilled)
        matching.grow(index, run.minimum, every)
    growing = {*range(len(runs))}
    while growing:
        index = min(growing, key=lambda index: (matching.counts[index], index))
        count = matching.counts[index] + 1
        # A run that cannot grow now cannot grow later, when others have more.
        if count > runs[index].limit or not matching.grow(index, count, unfilled):
            growing.remove(index)
    return matching.counts


def _unfilled(runs):
    return [tuple(p for p in run.places if p not in run.filled) for run in runs]


def _ordered(run: SharingRun, places: Iterable[str]) -> tuple[str, ...]:
    """Sorts places in the order of a run, and drops filled ones above its minimum."""
    kept = [place for place in run.places if place in places]
    for place in reversed(run.places):
        if len(kept) > run.minimum and place in kept and place in run.filled:
            kept.remove(place)
    return tuple(kept)


class _Matching:
    """An assignment of places to runs, which are numbers here.

    Attributes:
        owners: The run that has a place.
        counts: The number of places of each run.
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
        """Gives a run places until it has `count`, or none is left for it.

        Other runs keep their number of places, but their places may change.

        Args:
            run: The run that grows.
            count: The number of places to reach.
            allowed: For each run, the places that it may get, the best first.

        Returns:
            Whether the run has `count` places now.
        """
        while self.counts[run] < count:
            if not self._grow_by_one(run, allowed):
                return False
            self.counts[run] += 1
        return True

    def _grow_by_one(self, run, allowed):
        """Finds the shortest chain of runs in which each takes a place of the next."""
        # For each place reached: the run that would take it, and the place it would
        # leave.
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
            # The run's own places lead nowhere, but do no harm either.
            queue.extend((self.owners[place], place) for place in new)
        return False

    def _move(self, place, reached):
        while place is not None:
            self.owners[place], place = reached[place]
