"""Runs many training steps in one call of the graph.

Keras's `fit` calls a train function with an iterator, once for each call of an epoch;
this module makes that function. The builder defines a step, and the devices of local
batches. Keras handles epochs, callbacks and the end of the data.
"""

import collections
import contextlib
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers.collectives import batch
from towers.devices.names import HOST
from towers.loop.timers import timestamp_after

# The time to wait for a batch on its way after an error: a program that ends while a
# thread is inside TensorFlow may crash. If the input hangs, no batch arrives.
_PATIENCE_S = 5.0


class Placing(NamedTuple):
    """How a batch reaches the towers.

    Attributes:
        cut: Splits a batch into local batches, on the batch's device.
        copy: Copies the local batches to the devices that need them.
    """

    cut: Callable[[Any], Any]
    copy: Callable[[Any], Any]

    def place(self, data: Any) -> Any:
        """Splits a batch, and copies the local batches."""
        return self.copy(self.cut(data))


def train_function(
    create: Callable[[Any], None],
    placing: Placing,
    step: Callable[[Any, Any, tf.Tensor], Any],
    steps: int,
    eager: bool,
    prefetch: int,
) -> Callable[[Iterator], Any]:
    """Makes the function that Keras calls with an iterator over batches.

    While a step computes, the next batch of the call is fetched and placed, in parallel
    within the graph. With one step in a call, a thread fetches and places batches for
    later calls instead.

    Args:
        create: Takes a batch or its `tf.TypeSpec`s, and creates the variables that do
            not exist yet: a graph that creates variables is traced twice.
        placing: Splits a batch and copies the local batches to the devices that need
            them.
        step: Takes a batch, its placed local batches, and the times at which batches
            were fetched since the last step (see `StepTimers.step`); trains on the
            batch and returns its logs.
        steps: Steps in a call; at the end of the data there may be fewer.
        eager: Whether steps run op by op, outside of any graph.
        prefetch: With one step in a call, the number of batches to place ahead.

    Returns:
        A function of an iterator that returns the last step's logs. It raises
        `StopIteration` or `tf.errors.OutOfRangeError` if no batch is left.
    """

    def one(data, fetched):
        data = without_optionals(data)
        return step(data, placing.place(data), fetched)

    create_once = _once(lambda data: create(without_optionals(data)))
    if not eager:
        many = _of_tf_data(one, placing, step, steps, prefetch)
        one = tf.function(one, autograph=False, reduce_retracing=True)

    def function(iterator):
        if not eager and isinstance(iterator, tf.data.Iterator):
            create_once(iterator.element_spec)
            return many(iterator)
        logs, fetches = None, _Fetches()
        for _, data in zip(range(steps), fetches.read(iterator), strict=False):
            create_once(data)
            logs = one(data, fetches.times())
        if logs is None:
            raise StopIteration
        return logs

    return function


def create_for(create: Callable[[Any], None], iterator: Iterator) -> None:
    """Creates variables for the batches of an iterator, if their specs are known."""
    if (spec := getattr(iterator, "element_spec", None)) is not None:
        create(without_optionals(spec))


def _once(function):
    """Returns a function that calls `function` the first time only."""
    done = False

    def call(data):
        nonlocal done
        if not done:
            function(data)
            done = True

    return call


def _of_tf_data(one, placing, step, steps, prefetch):
    """Makes the function for an iterator of tf.data, which is read in the graph."""
    if prefetch and steps == 1:
        return _one_ahead(placing, step, prefetch)

    def many(iterator):
        if steps > 1:
            return _loop(placing.place, step, steps, iterator)
        data, *fetched = _get_next(iterator)
        # At the end of the data no operation runs, not even one without the batch.
        with tf.control_dependencies(flat(data)):
            return one(data, _not_placed(*fetched))

    return tf.function(many, autograph=False, reduce_retracing=True)


def _get_next(iterator):
    """Returns the next batch, and the times of its request and arrival."""
    asked = timestamp_after()
    with tf.control_dependencies([asked]):
        data = without_optionals(iterator.get_next())
    return data, asked, timestamp_after(flat(data))


def _not_placed(asked, came):
    """Returns the times of one batch, which the step itself splits and copies."""
    return tf.stack([[asked, came, came]])


class _Fetches:
    """The times in Python when batches were requested, arrived, and were placed."""

    def __init__(self):
        self._times = []

    @contextlib.contextmanager
    def timed(self) -> Iterator[Callable[[Any], None]]:
        """Times the fetch of a batch in the context; yields a function for its times.

        If the function is not called, the batch counts as not placed yet.
        """
        times, asked_s = [], time.time()
        try:
            yield times.extend
        finally:
            came_s = time.time()
            self._times.append(times or [asked_s, came_s, came_s])

    def read(self, iterator: Iterator) -> Iterator:
        """Yields the batches of an iterator, and stores their times."""
        while True:
            with self.timed():
                try:
                    data = next(iterator)
                except StopIteration:
                    return
            yield data

    def times(self) -> tf.Tensor:
        """Returns the times of all batches since the last call: float64 [n, 3]."""
        times, self._times = self._times, []
        return tf.constant(np.reshape(times, [-1, 3]), tf.float64)


def _one_ahead(placing, step, count):
    """Makes a function that runs one step, and places batches for later ones."""

    # Copies are made outside the graph: a function's results pass through the device
    # that calls the function, so each copy would come back to the host.
    def fetch(iterator):
        data, asked, came = _get_next(iterator)
        return data, placing.cut(data), tf.stack([asked, came])

    fetch = tf.function(fetch, autograph=False)
    step = tf.function(step, autograph=False)
    traced, fetches = weakref.WeakKeyDictionary(), _Fetches()

    def trace(iterator):
        fetch_one = fetch.get_concrete_function(iterator)
        # The step is traced for any batch of the iterator: one batch has known sizes.
        *specs, _ = batch.specs(fetch_one.structured_outputs)
        times = tf.TensorSpec([None, 3], tf.float64)
        return fetch_one, step.get_concrete_function(*specs, times)

    def traced_for(iterator):
        if iterator not in traced:
            traced[iterator] = trace(iterator)
        return traced[iterator]

    def fetch_next(iterator):
        fetch_one, step_one = traced_for(iterator)
        with fetches.timed() as note:
            data, local_batches, times = fetch_one(iterator)
            local_batches = placing.copy(local_batches)
            note([*times.numpy(), time.time()])
        return Fetched(data, (step_one, [data, local_batches]))

    def prepare(iterator, data):
        _, step_one = traced_for(iterator)
        with fetches.timed():
            return step_one, [data, placing.place(data)]

    ahead = Ahead(count, fetch_next, prepare)

    def function(iterator):
        step_one, fetched = ahead.take(iterator)
        times = fetches.times()
        with ahead.filling(iterator):
            logs = step_one(*fetched, times)
            del fetched  # frees memory
        return logs

    return function


def _loop(place, step, steps, iterator):
    """Runs up to `steps` steps in a loop of the graph."""
    first, *fetched = _get_next(iterator)
    placed, fetched = place(first), _not_placed(*fetched)
    traced = tf.function(step, autograph=False)
    traced = traced.get_concrete_function(first, placed, fetched)
    logs_spec = batch.specs(traced.structured_outputs)

    def body(count, _, data, local_batches, fetched, logs):
        data_now, local_batches_now = pack(first, data), pack(placed, local_batches)
        asked = timestamp_after()
        with tf.control_dependencies([asked]):
            following = tf.cond(
                count + 1 < steps,
                iterator.get_next_as_optional,
                lambda: tf.experimental.Optional.empty(iterator.element_spec),
            )
        more = following.has_value()
        fetched_next = _not_placed(asked, timestamp_after(more))
        # The condition runs on the host: results of branches pass through host memory.
        data_next = tf.cond(
            more, lambda: flat(without_optionals(following.get_value())), lambda: data
        )
        local_batches_next = flat(place(pack(first, data_next)))
        logs = traced(data_now, local_batches_now, fetched)
        logs = tf.experimental.Optional.from_value(logs)
        return count + 1, more, data_next, local_batches_next, fetched_next, logs

    variables = (
        tf.zeros([], tf.int32),
        tf.constant(True),
        flat(first),
        flat(placed),
        fetched,
        tf.experimental.Optional.empty(logs_spec),
    )
    with tf.compat.v1.device(_where_its_input_is):
        *_, logs = tf.while_loop(lambda _, more, *__: more, body, variables)
    return logs.get_value()


def _where_its_input_is(operation: tf.Operation) -> str:
    """Returns the device of an operation being made: for `tf.compat.v1.device`.

    The results of a function or of a loop's body go through an identity that TensorFlow
    places on the calling device, or nowhere, which is the first device. A tensor on
    another device would make a detour.
    """
    if operation.type == "Identity" and not operation.device:
        return operation.inputs[0].device
    return operation.device


def without_optionals(data: Any) -> Any:
    """Returns a batch, or its specs, with `None` for each Optional that Keras made."""

    def is_none(part):
        spec_of_none = isinstance(part, tf.TypeSpec) and not hasattr(part, "shape")
        return spec_of_none or isinstance(part, tf.experimental.Optional)

    return tf.nest.map_structure(lambda part: None if is_none(part) else part, data)


def flat(nest: Any) -> list[tf.Tensor]:
    """Returns the tensors of a batch, without `None`."""
    components = tf.nest.flatten(nest, expand_composites=True)
    return [tensor for tensor in components if tensor is not None]


def pack(like: Any, tensors: Iterable[tf.Tensor]) -> Any:
    """Packs tensors, in the order of `flat`, into a nest like `like`."""
    tensors = iter(tensors)
    components = tf.nest.flatten(like, expand_composites=True)
    components = [None if tensor is None else next(tensors) for tensor in components]
    return tf.nest.pack_sequence_as(like, components, expand_composites=True)


# Batches that a thread fetches ahead of their use, while a step runs.
#
# They belong to their iterator: the next training on the iterator, as after a resize,
# gets them.
#
# The thread fetches while a step runs, as a step returns only when the GPU is idle. A
# call returns when step and fetch are done, so each call takes as many batches from the
# data set as without the thread. A batch is split in a graph, and copied outside: the
# results of a function pass through the device that calls it.


class Fetched(NamedTuple):
    """A batch that was taken from an iterator.

    Attributes:
        data: The whole batch.
        ready: The prepared batch.
    """

    data: Any
    ready: Any


class _Waiting:
    """The batches of one iterator that were fetched and not yet used.

    Attributes:
        entries: Each batch, or the error in its place, and the `Ahead` that fetched it.
        coming: An event that is set when a thread has fetched the next batches, if one
            does.
    """

    def __init__(self):
        self.entries = collections.deque()
        self.coming: threading.Event | None = None

    def wait(self) -> None:
        """Waits for a thread that still fetches, as after an error."""
        if self.coming is not None:
            self.coming.wait()
            self.coming = None


_WAITING: MutableMapping[Iterator, _Waiting] = weakref.WeakKeyDictionary()


class Ahead:
    """Fetches batches of iterators of tf.data ahead of their use."""

    def __init__(
        self,
        count: int,
        fetch: Callable[[Iterator], Fetched],
        prepare: Callable[[Iterator, Any], Any],
    ):
        """Starts without batches.

        Args:
            count: The number of batches to fetch ahead.
            fetch: Takes the next batch from an iterator, and prepares it.
            prepare: Takes an iterator and a whole batch that another `Ahead` has taken
                from the iterator; returns the prepared batch, as `fetch` does.
        """
        self._count, self._fetch, self._prepare = count, fetch, prepare
        self._worker = None

    def take(self, iterator: Iterator) -> Any:
        """Returns the next prepared batch, or raises the error in its place.

        Batches that another `Ahead` has fetched come first.
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
        """Fetches missing batches; an error, or the end, is stored in its place."""
        waiting = self._of(iterator)
        by = weakref.ref(self)
        while self._lacks(waiting):
            try:
                waiting.entries.append((self._fetch(iterator), None, by))
            except Exception as error:
                # The frames of the traceback would keep the iterator alive.
                error.__cause__ = error.__context__ = None
                waiting.entries.append((None, error.with_traceback(None), by))

    @contextlib.contextmanager
    def filling(self, iterator: Iterator) -> Iterator[None]:
        """Calls `fill` in a thread while the context runs, which must fetch no batch.

        The context waits for the thread on leaving, so no fetch runs between two calls.
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
                # The worker may hang forever.
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
    """Takes batches that were fetched from an iterator and not yet used, in order.

    Args:
        iterator: The iterator.
        most: The largest number of batches to take.

    Returns:
        The whole batches; none if no batch of the iterator was fetched.
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
    """A thread that runs tasks one after another on the host, while this object lives.

    Unlike the threads of an executor, it does not keep the process from ending.
    """

    def __init__(self):
        self._tasks = queue.SimpleQueue()
        threading.Thread(
            target=self._work, args=(self._tasks,), name="towers-ahead", daemon=True
        ).start()
        weakref.finalize(self, self._tasks.put, None)

    def begin(self, task: Callable[[], None]) -> threading.Event:
        """Runs a task in the thread; returns an event that is set at its end."""
        done = threading.Event()
        self._tasks.put((task, done))
        return done

    @staticmethod
    def _work(tasks):
        # A thread does not inherit the device scope of its creator.
        with tf.device(HOST):
            while (entry := tasks.get()) is not None:
                task, done = entry
                try:
                    task()
                finally:
                    # The task may hold an iterator, which must be released before
                    # `done` is set.
                    del task, entry
                    done.set()
