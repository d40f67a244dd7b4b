"""Many training steps in one call of the graph.

Keras's `fit` calls a train function with an iterator, as often as there are calls in an
epoch; this is that function. What a step is, and where local batches go, is the
builder's business; epochs, callbacks and the end of the data are Keras's.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers.collectives import batch
from towers.collectives.placing import where_its_input_is
from towers.loop.ahead import Ahead, Fetched
from towers.loop.timers import timestamp_after


class Placing(NamedTuple):
    """How a batch comes to the towers.

    Attributes:
        cut: Cuts a batch, where it is, into local batches.
        copy: Copies the local batches to where they are needed.
    """

    cut: Callable[[Any], Any]
    copy: Callable[[Any], Any]

    def place(self, data: Any) -> Any:
        """Cuts a batch and copies the local batches."""
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

    While a step computes, the next batch of the call is fetched and placed: nothing in
    the graph makes one wait for the other. With one step in a call, a thread fetches
    and places batches for later calls instead.

    Args:
        create: Takes the `tf.TypeSpec`s of a batch, or one, and creates the variables
            that do not exist yet: a graph that has to create some is traced twice.
        placing: Cuts a batch and copies the local batches to where they are needed.
        step: Takes a batch, its placed local batches and when batches were fetched
            since the last step (see `StepTimers.step`), trains on it and returns its
            logs.
        steps: Steps in a call; at the end of the data there may be fewer.
        eager: Whether steps run op by op, outside of any graph.
        prefetch: With one step in a call, how many batches are placed ahead of it.

    Returns:
        A function of an iterator that returns the last step's logs. It raises
        `StopIteration` or `tf.errors.OutOfRangeError` if there is no batch left.
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
    """Creates variables for the batches of an iterator, if it tells what they are."""
    if (spec := getattr(iterator, "element_spec", None)) is not None:
        create(without_optionals(spec))


def _once(function):
    """Makes a function that does nothing but the first time."""
    done = False

    def call(data):
        nonlocal done
        if not done:
            function(data)
            done = True

    return call


def _of_tf_data(one, placing, step, steps, prefetch):
    """Makes the function of an iterator of tf.data, which is read in the graph."""
    if prefetch and steps == 1:
        return _one_ahead(placing, step, prefetch)

    def many(iterator):
        if steps > 1:
            return _loop(placing.place, step, steps, iterator)
        data, *fetched = _get_next(iterator)
        # At the end of the data nothing happens, also to what does not look at it.
        with tf.control_dependencies(flat(data)):
            return one(data, _not_placed(*fetched))

    return tf.function(many, autograph=False, reduce_retracing=True)


def _get_next(iterator):
    """The next batch, when it was asked for, and when it came."""
    asked = timestamp_after()
    with tf.control_dependencies([asked]):
        data = without_optionals(iterator.get_next())
    return data, asked, timestamp_after(flat(data))


def _not_placed(asked, came):
    """The times of one batch, which a step cuts and copies itself."""
    return tf.stack([[asked, came, came]])


class _Fetches:
    """When batches were asked for, came and were placed, where Python takes them."""

    def __init__(self):
        self._times = []

    @contextlib.contextmanager
    def timed(self) -> Iterator[Callable[[Any], None]]:
        """A context that fetches a batch; yields what to call with its times, if known.

        By default it is placed later.
        """
        times, asked_s = [], time.time()
        try:
            yield times.extend
        finally:
            came_s = time.time()
            self._times.append(times or [asked_s, came_s, came_s])

    def read(self, iterator: Iterator) -> Iterator:
        """Yields what an iterator does."""
        while True:
            with self.timed():
                try:
                    data = next(iterator)
                except StopIteration:
                    return
            yield data

    def times(self) -> tf.Tensor:
        """The times of all batches since this was last asked: float64 [n, 3]."""
        times, self._times = self._times, []
        return tf.constant(np.reshape(times, [-1, 3]), tf.float64)


def _one_ahead(placing, step, count):
    """Makes a function that takes one step, and places batches for later ones."""

    # Copies are made outside of the graph: TensorFlow takes what a function returns
    # through the device that calls it, so each copy would come back to the host.
    def fetch(iterator):
        data, asked, came = _get_next(iterator)
        return data, placing.cut(data), tf.stack([asked, came])

    fetch = tf.function(fetch, autograph=False)
    step = tf.function(step, autograph=False)
    traced, fetches = weakref.WeakKeyDictionary(), _Fetches()

    def trace(iterator):
        fetch_one = fetch.get_concrete_function(iterator)
        # For whatever can be fetched: of one batch, all sizes are known.
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
            del fetched  # to make room
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
        # The choice is made on the host: what a branch returns passes through there.
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
    with tf.compat.v1.device(where_its_input_is):
        *_, logs = tf.while_loop(lambda _, more, *__: more, body, variables)
    return logs.get_value()


def without_optionals(data: Any) -> Any:
    """Returns a batch, or its specs, with `None` for what Keras made an Optional."""

    def is_none(part):
        spec_of_none = isinstance(part, tf.TypeSpec) and not hasattr(part, "shape")
        return spec_of_none or isinstance(part, tf.experimental.Optional)

    return tf.nest.map_structure(lambda part: None if is_none(part) else part, data)


def flat(nest: Any) -> list[tf.Tensor]:
    """Returns the tensors of a batch, without what is `None`."""
    components = tf.nest.flatten(nest, expand_composites=True)
    return [tensor for tensor in components if tensor is not None]


def pack(like: Any, tensors: Iterable[tf.Tensor]) -> Any:
    """Returns a batch of the tensors that `flat` has made of it."""
    tensors = iter(tensors)
    every = tf.nest.flatten(like, expand_composites=True)
    every = [None if tensor is None else next(tensors) for tensor in every]
    return tf.nest.pack_sequence_as(like, every, expand_composites=True)
