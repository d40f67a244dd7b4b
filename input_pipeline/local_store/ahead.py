"""Fetches items ahead of use, many at once, within a bound of memory."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor


@dataclasses.dataclass
class _Group:
    """Items that are used in turn, such as those of a split.

    Attributes:
        waiting: those to fetch, in order.
        sizes: bytes of those at hand, the oldest first.
        running: how many are being fetched.
    """

    waiting: dict[Hashable, None] = dataclasses.field(default_factory=dict)
    sizes: dict[Hashable, int] = dataclasses.field(default_factory=dict)
    bytes: int = 0
    running: int = 0


class Ahead:
    """Items that are fetched by threads, in the order in which they were announced.

    What was announced and is not asked for, as by an iterator that was left, makes room
    when another item of its group is asked for that is not at hand.

    Args:
        fetch: fetches the bytes of an item; called by several threads.
        most_bytes: of items of a group that are at hand or being fetched.
        threads: how many items are fetched at once.
    """

    def __init__(self, fetch: Callable[..., bytes], most_bytes: int, threads: int):
        self._fetch, self._most_bytes, self._most = fetch, most_bytes, threads
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, "local_store")
        self._groups: dict[Hashable, _Group] = collections.defaultdict(_Group)
        _ = self._groups[None]  # comes first
        self._started: dict[Hashable, tuple[Future, _Group]] = {}
        # Of all that were fetched, for what one may take.
        self._sum = self._count = 0

    def announce(self, item: Hashable, group: Hashable) -> None:
        """Says that an item will be asked for, after those of its group before it.

        Args:
            item: which one.
            group: of items that are used in turn; None for what is needed first.
        """
        with self._lock:
            if item not in self._started:
                self._groups[group].waiting[item] = None
            self._start_more()

    def get(self, item: Hashable) -> bytes:
        """Returns an item, which stays at hand.

        It is fetched at once, by the caller, unless that has begun.

        Raises:
            Exception: what `fetch` raises.
        """
        with self._lock:
            mine = item not in self._started
            if mine:
                group = self._take(item)
                self._make_room(group)
                self._started[item] = Future(), group
                group.running += 1
            future, group = self._started[item]
        if mine:
            self._run(item, future, group)
        return future.result()

    def drop(self, item: Hashable) -> None:
        """Says that an item is not needed any more."""
        with self._lock:
            self._drop(item)
            self._start_more()

    def close(self) -> None:
        """Fetches no more; waits for what is being fetched."""
        with self._lock:
            self._groups.clear()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, item: Hashable, future: Future, group: _Group) -> None:
        try:
            data = self._fetch(item)
        except BaseException as error:
            with self._lock:
                group.running -= 1
                # Whoever asks next tries again.
                del self._started[item]
                self._start_more()
            future.set_exception(error)
            return
        with self._lock:
            group.running -= 1
            group.sizes[item] = len(data)
            group.bytes += len(data)
            self._sum, self._count = self._sum + len(data), self._count + 1
            self._start_more()
        future.set_result(data)

    def _take(self, item: Hashable) -> _Group:
        """The group of an item, in which it does not wait any more."""
        for group in self._groups.values():
            if item in group.waiting:
                del group.waiting[item]
                return group
        return self._groups[None]

    def _start_more(self) -> None:
        likely = self._sum / self._count if self._count else 0
        running = sum(group.running for group in self._groups.values())
        for group in self._groups.values():
            while group.waiting and running < self._most:
                if group.bytes + (group.running + 1) * likely > self._most_bytes:
                    break
                item = next(iter(group.waiting))
                del group.waiting[item]
                if item in self._started:
                    continue
                self._started[item] = future, _ = Future(), group
                group.running += 1
                running += 1
                self._threads.submit(self._run, item, future, group)

    def _make_room(self, group: _Group) -> None:
        """Forgets the oldest items if what waits cannot be fetched, or all is full."""
        most = self._most_bytes / 2 if group.waiting else self._most_bytes
        for item in [*group.sizes]:
            if group.bytes <= most:
                return
            self._drop(item)

    def _drop(self, item: Hashable) -> None:
        _, group = self._started.get(item, (None, None))
        if group is not None and item in group.sizes:
            del self._started[item]
            group.bytes -= group.sizes.pop(item)
