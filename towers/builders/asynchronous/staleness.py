"""Measures and bounds the staleness of updates in asynchronous training."""

import contextlib
import itertools
import threading
from collections.abc import Iterator


class Staleness:
    """Measures and bounds the staleness of updates, and serializes access to variables.

    The staleness of an update is the number of updates that other towers made after
    its tower had read the variables. Let `version` be the number of updates so far, and
    v_0 <= v_1 <= ... the versions that the towers in flight have read, oldest first.
    All towers in flight could update in this order within the bound if
    version + p - v_p <= bound for every position p. A tower may read, or update, only
    if this condition still holds afterwards.

    Then no update exceeds the bound, as version - v_p <= bound for every tower that may
    update. And some tower can always continue: the oldest in flight may update, since
    for all others version grows by one as their position falls by one. If no tower is
    in flight, any may read.

    A tower whose step continues after an update, or a read, reads again and becomes
    the newest. The other towers then move up, and the number in flight is unchanged, so
    the condition still holds. The staleness of an update is counted from the last read
    before it.

    With a bound of 0, steps are serialized. The rule is related to the Stale
    Synchronous Parallel one (Ho et al. 2013, NIPS), which instead bounds how many steps
    the fastest worker is ahead of the slowest.

    Attributes:
        bound: The largest staleness allowed, `None` for any.
        updates: Number of updates since the last `reset`.
        mean: Mean staleness of these updates, 0 if there are none.
        maximum: Largest staleness of these updates, 0 if there are none.
    """

    def __init__(self, bound: int | None = None):
        self.bound = bound
        self._changed = threading.Condition()
        self._version = 0
        # Maps each tower in flight to the version it has read, oldest first.
        self._read: dict[int, int] = {}
        self.reset()

    def reset(self) -> None:
        """Resets all measurements."""
        self.updates, self.maximum, self._total = 0, 0, 0

    @property
    def mean(self) -> float:
        """The mean staleness of the updates since the last `reset`."""
        return self._total / self.updates if self.updates else 0.0

    def measured(self) -> dict[str, float]:
        """Returns the measurements since the last call or `reset`, by tag; resets."""
        if not self.updates:
            return {}
        measures = {"mean": self.mean, "max": self.maximum}
        self.reset()
        return {f"towers/staleness_{name}": value for name, value in measures.items()}

    @contextlib.contextmanager
    def reading(self, tower: int) -> Iterator[None]:
        """Waits until a tower may read the variables; it reads them inside the context.

        From then on, the tower is in flight. A tower in flight reads again at once.
        """
        with self._changed:
            if self._read.pop(tower, None) is None:
                self._changed.wait_for(self._may_read)
            self._read[tower] = self._version
            yield
            self._changed.notify_all()

    @contextlib.contextmanager
    def updating(self, tower: int, goes_on: bool = False) -> Iterator[None]:
        """Waits until a tower may update; it updates inside the context.

        A tower that is not in flight waits for its turn to read first.

        Args:
            tower: Index of the tower.
            goes_on: Whether the tower's step continues, so that the tower reads again.
        """
        with self._changed:
            if tower not in self._read:
                self._changed.wait_for(self._may_read)
                self._read[tower] = self._version
            self._changed.wait_for(lambda: self._may_update(tower))
            yield
            staleness = self._version - self._read.pop(tower)
            self._version += 1
            if goes_on:
                self._read[tower] = self._version
            self.updates += 1
            self.maximum = max(self.maximum, staleness)
            self._total += staleness
            self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Holds the lock: no tower reads or updates inside; nothing is counted."""
        with self._changed:
            yield

    def drop(self, tower: int) -> None:
        """Removes a tower that will not update from those in flight."""
        with self._changed:
            if self._read.pop(tower, None) is not None:
                self._changed.notify_all()

    def _may_read(self):
        # The tower would become the newest, behind all others.
        return self.bound is None or len(self._read) <= self.bound

    def _may_update(self, tower):
        # Newer towers move up when this one leaves.
        older = itertools.takewhile(lambda other: other != tower, self._read)
        return self.bound is None or all(
            self._version + 1 + position - self._read[other] <= self.bound
            for position, other in enumerate(older)
        )
