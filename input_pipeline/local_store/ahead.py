"""Fetches items ahead of use, many at once, within a bound of memory."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

# tf.data begins the next two epochs while one is read.
EPOCHS_AT_ONCE = 3


class Group(NamedTuple):
    """Items that are used in turn: those of an epoch.

    Attributes:
        name: of the groups that share memory, such as those of a split.
        epoch: tells the epochs apart; the one that begins first comes first.
    """

    name: str
    epoch: Hashable = None


# What is needed before all others.
_FIRST = Group("")


@dataclasses.dataclass
class _Items:
    """The items of a group.

    Attributes:
        waiting: those to fetch, in order.
        started: those that are at hand or being fetched.
        sizes: bytes of those at hand, the oldest first.
        running: how many are being fetched.
    """

    waiting: dict[Hashable, None] = dataclasses.field(default_factory=dict)
    started: dict[Hashable, Future] = dataclasses.field(default_factory=dict)
    sizes: dict[Hashable, int] = dataclasses.field(default_factory=dict)
    bytes: int = 0
    running: int = 0

    def drop(self, item: Hashable) -> None:
        """Forgets an item that is at hand."""
        del self.started[item]
        self.bytes -= self.sizes.pop(item)


class Ahead:
    """Items that are fetched by threads, in the order in which they were announced.

    Epochs overlap, so an item may be announced by several: each has its own copy, and
    those of an earlier epoch are fetched first. What was announced and is not asked
    for, as by an iterator that was left, makes room when another item of its group is
    asked for that is not at hand, or when some epochs more have begun.

    Args:
        fetch: fetches the bytes of an item; called by several threads.
        most_bytes: of items that are at hand or being fetched, of an epoch. Later ones
            take what it leaves, and a third of this at least.
        threads: how many items are fetched at once.
    """

    def __init__(self, fetch: Callable[..., bytes], most_bytes: int, threads: int):
        self._fetch, self._most_bytes, self._most = fetch, most_bytes, threads
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, "local_store")
        self._groups: dict[Group, _Items] = {_FIRST: _Items()}
        self._closed = self._threads_ended = False
        # Of all that were fetched, for what one may take.
        self._sum = self._count = 0

    def announce(self, item: Hashable, group: Group | None) -> None:
        """Says that an item will be asked for, after those of its group before it.

        Args:
            item: which one.
            group: of items that are used in turn; None for what is needed first.
        """
        with self._lock:
            if self._closed:
                return
            items = self._items_of(group or _FIRST)
            if item not in items.started:
                items.waiting[item] = None
            self._start_more()

    def get(self, item: Hashable) -> bytes:
        """Returns an item, which stays at hand.

        It is fetched at once, by the caller, unless that has begun.

        Raises:
            ValueError: it is closed.
            Exception: what `fetch` raises.
        """
        with self._lock:
            self._check_open()
            items = self._with(item, "started")
            mine = items is None
            if mine:
                items = self._with(item, "waiting") or self._groups[_FIRST]
                self._make_room(items)
                self._start(item, items, Future())
            future = items.started[item]
        if mine:
            self._run(item, future, items)
        return future.result()

    def drop(self, item: Hashable) -> None:
        """Says that an item is not needed any more, by the first that had it."""
        with self._lock:
            if items := self._with(item, "sizes"):
                items.drop(item)
            self._start_more()

    def close(self) -> None:
        """Fetches no more; waits for what is being fetched."""
        with self._lock:
            self._closed = True
            for items in self._groups.values():
                items.waiting.clear()
        # What is in their queue fails, as somebody may wait for it.
        self._threads.shutdown()
        with self._lock:
            self._groups = {_FIRST: _Items()}

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the local store is closed: expected it to stay open")

    def _items_of(self, group: Group) -> _Items:
        if group not in self._groups:
            same = [each for each in self._groups if each.name == group.name]
            for old in same[: max(len(same) + 1 - EPOCHS_AT_ONCE, 0)]:
                self._forget(old)
            self._groups[group] = _Items()
        return self._groups[group]

    def _forget(self, group: Group) -> None:
        items = self._groups[group]
        items.waiting.clear()
        for item in [*items.sizes]:
            items.drop(item)
        # What is being fetched takes a thread until it is there.
        if not items.running:
            del self._groups[group]

    def _with(self, item: Hashable, where: str) -> _Items | None:
        """The first group that has an item there."""
        found = (each for each in self._groups.values() if item in getattr(each, where))
        return next(found, None)

    def _start(self, item: Hashable, items: _Items, future: Future) -> None:
        items.waiting.pop(item, None)
        items.started[item] = future
        items.running += 1

    def _run(self, item: Hashable, future: Future, items: _Items) -> None:
        try:
            self._check_open()
            data = self._fetch(item)
        except BaseException as error:
            with self._lock:
                items.running -= 1
                # Whoever asks next tries again.
                del items.started[item]
                self._start_more()
            future.set_exception(error)
            return
        with self._lock:
            items.running -= 1
            items.sizes[item] = len(data)
            items.bytes += len(data)
            self._sum, self._count = self._sum + len(data), self._count + 1
            self._start_more()
        future.set_result(data)

    def _start_more(self) -> None:
        likely = self._sum / self._count if self._count else 0
        running = sum(items.running for items in self._groups.values())
        # By the groups before, of one name.
        taken: dict[str, float] = collections.defaultdict(float)
        for group, items in self._groups.items():
            while items.waiting and running < self._most and not self._threads_ended:
                own = items.bytes + (items.running + 1) * likely
                # A part of it is each epoch's: an earlier one may have been left.
                most = self._most_bytes - taken[group.name]
                if own > max(most, self._most_bytes / EPOCHS_AT_ONCE):
                    break
                item = next(iter(items.waiting))
                future = Future()
                try:
                    self._threads.submit(self._run, item, future, items)
                except RuntimeError:  # Python ends: whoever needs it fetches it
                    self._threads_ended = True
                    break
                self._start(item, items, future)
                running += 1
            taken[group.name] += items.bytes + items.running * likely

    def _make_room(self, items: _Items) -> None:
        """Forgets the oldest items if what waits cannot be fetched, or all is full."""
        most = self._most_bytes / 2 if items.waiting else self._most_bytes
        for item in [*items.sizes]:
            if items.bytes <= most:
                return
            items.drop(item)
