"""Batches that a thread fetches while a step runs, ahead of their use."""

import collections
import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towers.devices import HOST

# After an error, so long is waited for a batch on its way: a program that ends while a
# thread is inside TensorFlow may crash. Of an input that hangs, none will come.
_PATIENCE_S = 5.0


class Ahead:
    """Batches that are fetched before they are asked for.

    They belong to their iterator, one of tf.data, and are dropped with it. Of others
    nothing is fetched ahead.
    """

    def __init__(self, count: int, fetch: Callable[[Iterator], Any]):
        """Starts with none of `count`.

        `fetch` takes the next batch out of an iterator, and prepares it.
        """
        self._count, self._fetch = count, fetch
        self._waiting = weakref.WeakKeyDictionary()
        self._coming, self._worker = weakref.WeakKeyDictionary(), None

    def take(self, iterator: Iterator) -> Any:
        """Returns the next batch, or raises what was raised instead of one."""
        waiting = self._of(iterator)
        if waiting is None:
            return self._fetch(iterator)
        if iterator in self._coming:
            # An error had left it behind, or it is there.
            self._coming.pop(iterator).wait()
        if not waiting:
            return self._fetch(iterator)
        batch, error = waiting.popleft()
        if error is not None:
            raise error
        return batch

    def fill(self, iterator: Iterator) -> None:
        """Fetches what is missing; an error, or the end, waits for its turn."""
        waiting = self._of(iterator)
        while self._lacks(waiting):
            try:
                waiting.append((self._fetch(iterator), None))
            except Exception as error:
                # Its frames would keep the iterator alive.
                error.__cause__ = error.__context__ = None
                waiting.append((None, error.with_traceback(None)))

    @contextlib.contextmanager
    def filling(self, iterator: Iterator) -> Iterator[None]:
        """Does so in a thread while what is inside runs, which is to fetch nothing.

        On leaving, all is there: what comes between two calls finds nothing running.
        """
        if not self._lacks(self._of(iterator)):
            yield
            return
        if self._worker is None:
            self._worker = _Worker()
        done = self._worker.begin(functools.partial(self.fill, iterator))
        self._coming[iterator] = done
        try:
            yield
            done.wait()
        except BaseException:
            if not done.wait(_PATIENCE_S):
                # It may never be free again.
                self._worker = None
            raise

    def _lacks(self, waiting):
        if waiting is None or (waiting and waiting[-1][1]):
            return False
        return len(waiting) < self._count

    def _of(self, iterator):
        if not self._count or not isinstance(iterator, tf.data.Iterator):
            return None
        return self._waiting.setdefault(iterator, collections.deque())


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
