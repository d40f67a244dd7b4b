"""Measures how stale the updates of towers are that do not wait, and bounds it."""

import contextlib
import itertools
import threading
from collections.abc import Iterator


class Staleness:
    """Measures how stale updates are, bounds it, and lets one tower in at a time.

    The staleness of an update is the number of updates that other towers made after
    this one had read the variables. Let `version` be the number of updates so far, and
    v_0 <= v_1 <= ... the versions that the towers in flight have read, oldest first.
    They could all update in this order within the bound if version + p - v_p <= bound
    for every position p. A tower may read, or update, only if that still holds
    afterwards.

    Then no update exceeds the bound, as version - v_p <= bound for every tower that may
    update. And some tower can always go on: the oldest in flight may update, since for
    all others version grows by one as their position falls by one; and if none is in
    flight, any may read.

    A tower whose step goes on after an update, or a reading, reads again: it becomes
    the newest. Others then move up, and as many are in flight as before. So all this
    still holds, and an update's staleness is counted from the last reading before it.

    With a bound of 0 steps are serialised. The rule is related to the Stale
    Synchronous Parallel one (Ho et al. 2013, NIPS), which bounds how many steps the
    fastest worker is ahead of the slowest instead.

    Attributes:
        bound: The largest staleness allowed, `None` for any.
        updates: Number of updates since the last `reset`.
        mean: Their mean staleness, 0 if there are none.
        maximum: Their largest staleness, 0 if there are none.
    """

    def __init__(self, bound: int | None = None):
        self.bound = bound
        self._changed = threading.Condition()
        self._version = 0
        # By tower in flight, oldest first, the version that it has read.
        self._read: dict[int, int] = {}
        self.reset()

    def reset(self) -> None:
        """Starts to measure anew."""
        self.updates, self.maximum, self._total = 0, 0, 0

    @property
    def mean(self) -> float:
        """The mean staleness of the updates since the last `reset`."""
        return self._total / self.updates if self.updates else 0.0

    def measured(self) -> dict[str, float]:
        """Returns what was measured since it was last called, or `reset`, by tag."""
        if not self.updates:
            return {}
        measures = {"mean": self.mean, "max": self.maximum}
        self.reset()
        return {f"towers/staleness_{name}": value for name, value in measures.items()}

    @contextlib.contextmanager
    def reading(self, tower: int) -> Iterator[None]:
        """Makes the context in which a tower reads the variables, once it may.

        From then on, the tower is in flight. One that is reads again, at once.
        """
        with self._changed:
            if self._read.pop(tower, None) is None:
                self._changed.wait_for(self._may_read)
            self._read[tower] = self._version
            yield
            self._changed.notify_all()

    @contextlib.contextmanager
    def updating(self, tower: int, goes_on: bool = False) -> Iterator[None]:
        """Makes the context in which a tower updates, once it may.

        One that has not read yet does so before. If its step goes on, it reads again.
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
        """Makes a context in which nobody reads or updates, and nothing is counted."""
        with self._changed:
            yield

    def drop(self, tower: int) -> None:
        """Lets the others go on if a tower that has read will not update."""
        with self._changed:
            if self._read.pop(tower, None) is not None:
                self._changed.notify_all()

    def _may_read(self):
        # As the newest, it comes behind all others.
        return self.bound is None or len(self._read) <= self.bound

    def _may_update(self, tower):
        # Those that are newer move up.
        older = itertools.takewhile(lambda other: other != tower, self._read)
        return self.bound is None or all(
            self._version + 1 + position - self._read[other] <= self.bound
            for position, other in enumerate(older)
        )
