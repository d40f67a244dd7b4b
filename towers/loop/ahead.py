"""Batches that a thread fetches while a step runs, ahead of their use.

They belong to their iterator: whoever trains on it next, as after a resize, gets them.

A thread fetches while a step runs, as a step returns only when the GPU is idle. A call
returns when both are done, so the data have given as many batches as without it. A
batch is cut in a graph, and copied outside of it: what a function returns comes through
the device that calls it.
"""

import collections
import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import tensorflow as tf

from towers.devices.names import HOST

# After an error, so long is waited for a batch on its way: a program that ends while a
# thread is inside TensorFlow may crash. Of an input that hangs, none will come.
_PATIENCE_S = 5.0


class Fetched(NamedTuple):
    """A batch that was taken out of an iterator.

    Attributes:
        data: The whole batch.
        ready: What was made of it.
    """

    data: Any
    ready: Any


class _Waiting:
    """The batches of one iterator that were fetched and not yet used.

    Attributes:
        entries: Each batch, or the error that came instead, and whose `Ahead` it was.
        coming: Tells when a thread has fetched the next ones, if one does.
    """

    def __init__(self):
        self.entries = collections.deque()
        self.coming: threading.Event | None = None

    def wait(self) -> None:
        """Waits for what an error has left coming; else it is there."""
        if self.coming is not None:
            self.coming.wait()
            self.coming = None


_WAITING: MutableMapping[Iterator, _Waiting] = weakref.WeakKeyDictionary()


class Ahead:
    """Fetches batches before they are asked for, of iterators of tf.data only."""

    def __init__(
        self,
        count: int,
        fetch: Callable[[Iterator], Fetched],
        prepare: Callable[[Iterator, Any], Any],
    ):
        """Starts with none of `count`.

        Args:
            count: How many are to be there.
            fetch: Takes the next batch out of an iterator, and prepares it.
            prepare: Takes an iterator and a whole batch that another `Ahead` has taken
                out of it; returns what `fetch` would have made ready.
        """
        self._count, self._fetch, self._prepare = count, fetch, prepare
        self._worker = None

    def take(self, iterator: Iterator) -> Any:
        """Returns what is ready of the next batch, or raises what was raised instead.

        What another `Ahead` has fetched comes first.
        """
        waiting = self._of(iterator)
        if waiting is None:
            return self._fetch(iterator).ready
        waiting.wait()
        if not waiting.entries:
            return self._fetch(iterator).ready
        batch, error, by = waiting.entries[0]
        if error is not None:
            waiting.entries.popleft()
            raise error
        # A batch that cannot be prepared stays, as its graph may be traced later.
        if by() is self:
            ready = batch.ready
        else:
            ready = self._prepare(iterator, batch.data)
        waiting.entries.popleft()
        return ready

    def fill(self, iterator: Iterator) -> None:
        """Fetches what is missing; an error, or the end, waits for its turn."""
        waiting = self._of(iterator)
        by = weakref.ref(self)
        while self._lacks(waiting):
            try:
                waiting.entries.append((self._fetch(iterator), None, by))
            except Exception as error:
                # Its frames would keep the iterator alive.
                error.__cause__ = error.__context__ = None
                waiting.entries.append((None, error.with_traceback(None), by))

    @contextlib.contextmanager
    def filling(self, iterator: Iterator) -> Iterator[None]:
        """Does so in a thread while what is inside runs, which is to fetch nothing.

        On leaving, all is there: what comes between two calls finds nothing running.
        """
        waiting = self._of(iterator)
        if not self._lacks(waiting):
            yield
            return
        if self._worker is None:
            self._worker = _Worker()
        done = self._worker.begin(functools.partial(self.fill, iterator))
        waiting.coming = done
        try:
            yield
            done.wait()
        except BaseException:
            if not done.wait(_PATIENCE_S):
                # It may never be free again.
                self._worker = None
            raise

    def _lacks(self, waiting):
        if waiting is None or (waiting.entries and waiting.entries[-1][1]):
            return False
        return len(waiting.entries) < self._count

    def _of(self, iterator):
        if not self._count or not isinstance(iterator, tf.data.Iterator):
            return None
        return _WAITING.setdefault(iterator, _Waiting())


def taken(iterator: Iterator, most: int) -> list[Any]:
    """Takes batches that were fetched of an iterator and not yet used, in order.

    Args:
        iterator: The iterator.
        most: How many to take at most.

    Returns:
        The whole batches; none for an iterator that nothing was fetched of.
    """
    batches = []
    if not isinstance(iterator, tf.data.Iterator) or iterator not in _WAITING:
        return batches
    waiting = _WAITING[iterator]
    waiting.wait()
    while waiting.entries and len(batches) < most:
        batch, error, _ = waiting.entries[0]
        if error is not None:
            if batches:
                break
            waiting.entries.popleft()
            raise error
        waiting.entries.popleft()
        batches.append(batch.data)
    return batches


class _Worker:
    """A thread that does one thing after another on the host, while this object lives.

    Unlike an executor's, it keeps no process from ending.
    """

    def __init__(self):
        self._tasks = queue.SimpleQueue()
        threading.Thread(
            target=self._work, args=(self._tasks,), name="towers-ahead", daemon=True
        ).start()
        weakref.finalize(self, self._tasks.put, None)

    def begin(self, task: Callable[[], None]) -> threading.Event:
        """Has something done; returns what tells when it is."""
        done = threading.Event()
        self._tasks.put((task, done))
        return done

    @staticmethod
    def _work(tasks):
        # A thread has no device of its creator's.
        with tf.device(HOST):
            while (given := tasks.get()) is not None:
                task, done = given
                try:
                    task()
                finally:
                    # It may hold an iterator, and is over when it does no longer.
                    del task, given
                    done.set()
