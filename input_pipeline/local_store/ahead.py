"""Fetches items ahead of use, many at once, in bounded memory."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

# tf.data begins the next two epochs while one is read.
EPOCHS_AT_ONCE = 3


class Group(NamedTuple):
    """The items of an epoch, which are used in turn.

    Attributes:
        name: the name of groups that share memory, such as those of a split.
        epoch: distinguishes epochs; the one that begins first comes first.
    """

    name: str
    epoch: Hashable = None


# The group of items that are needed before all others.
_FIRST = Group("")


@dataclasses.dataclass
class _Items:
    """The items of a group.

    Attributes:
        waiting: the items to fetch, in order.
        started: the items that are at hand or being fetched.
        sizes: the bytes of items at hand, the oldest first.
        running: the number of items being fetched.
    """

    waiting: dict[Hashable, None] = dataclasses.field(default_factory=dict)
    started: dict[Hashable, Future] = dataclasses.field(default_factory=dict)
    sizes: dict[Hashable, int] = dataclasses.field(default_factory=dict)
    bytes: int = 0
    running: int = 0

    def drop(self, item: Hashable) -> None:
        """Drops an item that is at hand."""
        del self.started[item]
        self.bytes -= self.sizes.pop(item)


class Ahead:
    """Fetches items in threads, in the order in which they were announced.

    Epochs overlap, so several may announce an item: each has its own copy, and an
    earlier epoch's items are fetched first. An announced item that is never requested,
    as by an iterator that was left, makes room when another item of its group is
    requested that is not at hand, or when some more epochs have begun.

    Args:
        fetch: fetches the bytes of an item; several threads call it.
        most_bytes: the most bytes of an epoch's items at hand or being fetched. Later
            epochs get the rest, and at least a third of this.
        threads: the number of items to fetch at once.
    """

    def __init__(self, fetch: Callable[..., bytes], most_bytes: int, threads: int):
        self._fetch, self._most_bytes, self._most = fetch, most_bytes, threads
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, "local_store")
        self._groups: dict[Group, _Items] = {_FIRST: _Items()}
        self._closed = self._threads_ended = False
        # The bytes and the number of all fetched items, to estimate the size of the
        # next.
        self._sum = self._count = 0

    def announce(self, item: Hashable, group: Group | None) -> None:
        """Announces that an item will be requested, after earlier items of its group.

        Args:
            item: the item.
            group: the group of the item; None for items that are needed first.
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

        The caller fetches it at once, unless a thread has begun.

        Raises:
            ValueError: the store is closed.
            Exception: any error of `fetch`.
        """
        with self._lock:
            self._check_open()
            items = self._with(item, "started")
            fetches_here = items is None
            if fetches_here:
                items = self._with(item, "waiting") or self._groups[_FIRST]
                self._make_room(items)
                self._start(item, items, Future())
            future = items.started[item]
        if fetches_here:
            self._run(item, future, items)
        return future.result()

    def drop(self, item: Hashable) -> None:
        """Releases an item, from the first group that has it."""
        with self._lock:
            if items := self._with(item, "sizes"):
                items.drop(item)
            self._start_more()

    def close(self) -> None:
        """Fetches no more; waits for items that are being fetched."""
        with self._lock:
            self._closed = True
            for items in self._groups.values():
                items.waiting.clear()
        # Queued items fail, as a caller may wait for them.
        self._threads.shutdown()
        with self._lock:
            self._groups = {_FIRST: _Items()}

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the local store is closed: expected it to stay open")

    def _items_of(self, group: Group) -> _Items:
        if group not in self._groups:
            same = [other for other in self._groups if other.name == group.name]
            for old in same[: max(len(same) + 1 - EPOCHS_AT_ONCE, 0)]:
                self._forget(old)
            self._groups[group] = _Items()
        return self._groups[group]

    def _forget(self, group: Group) -> None:
        items = self._groups[group]
        items.waiting.clear()
        for item in [*items.sizes]:
            items.drop(item)
        # An item that is being fetched takes a thread until it is there.
        if not items.running:
            del self._groups[group]

    def _with(self, item: Hashable, where: str) -> _Items | None:
        """Returns the first group that has an item there."""
        groups = (
            items for items in self._groups.values() if item in getattr(items, where)
        )
        return next(groups, None)

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
                # The next request tries again.
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
        # The bytes taken by earlier groups of the same name.
        taken: dict[str, float] = collections.defaultdict(float)
        for group, items in self._groups.items():
            while items.waiting and running < self._most and not self._threads_ended:
                own = items.bytes + (items.running + 1) * likely
                # Each epoch has a part of the bytes: an earlier epoch may have been
                # left.
                most = self._most_bytes - taken[group.name]
                if own > max(most, self._most_bytes / EPOCHS_AT_ONCE):
                    break
                item = next(iter(items.waiting))
                future = Future()
                try:
                    self._threads.submit(self._run, item, future, items)
                except RuntimeError:  # Python ends: the caller that needs it fetches it
                    self._threads_ended = True
                    break
                self._start(item, items, future)
                running += 1
            taken[group.name] += items.bytes + items.running * likely

    def _make_room(self, items: _Items) -> None:
        """Drops the oldest items if waiting ones cannot be fetched, or all is full."""
        most = self._most_bytes / 2 if items.waiting else self._most_bytes
        for item in [*items.sizes]:
            if items.bytes <= most:
                return
            items.drop(item)
