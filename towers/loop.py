"""Many training steps in one call of the graph, batches copied to towers ahead of use.

Keras's `fit` calls a train function with an iterator, as often as there are calls in an
epoch; this is that function. What a step is, and where shares go, is the builder's
business; epochs, callbacks and the end of the data are Keras's.
"""

import collections
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towers.phases import moment


class Ahead:
    """Batches that are fetched before they are asked for.

    They belong to their iterator, one of tf.data, and are dropped with it. Of others
    nothing is fetched ahead.
    """

    def __init__(self, count: int, fetch: Callable[[Iterator], Any]):
        """Starts with none.

        Args:
            count: How many to have, 0 or more.
            fetch: Takes the next batch out of an iterator, and prepares it.
        """
        self._count, self._fetch = count, fetch
        self._waiting = weakref.WeakKeyDictionary()

    def take(self, iterator: Iterator) -> Any:
        """Returns the next batch, or raises what was raised instead of one."""
        waiting = self._of(iterator)
        if not waiting:
            return self._fetch(iterator)
        batch, error = waiting.popleft()
        if error is not None:
            raise error
        return batch

    def fill(self, iterator: Iterator) -> None:
        """Fetches what is missing; an error, or the end, waits for its turn."""
        waiting = self._of(iterator)
        if waiting is None:
            return
        while len(waiting) < self._count and not (waiting and waiting[-1][1]):
            try:
                waiting.append((self._fetch(iterator), None))
            except Exception as error:
                # Its frames would keep the iterator alive.
                error.__cause__ = error.__context__ = None
                waiting.append((None, error.with_traceback(None)))

    def _of(self, iterator):
        if not self._count or not isinstance(iterator, tf.data.Iterator):
            return None
        return self._waiting.setdefault(iterator, collections.deque())


def train_function(
    prepare: Callable[[Any], None],
    place: Callable[[Any], Any],
    step: Callable[[Any, Any, tf.Tensor], Any],
    steps: int,
    eager: bool,
    prefetch: int,
) -> Callable[[Iterator], Any]:
    """Makes the function that Keras calls with an iterator over batches.

    While a step computes, the next batch of the call is fetched and placed: nothing in
    the graph makes one wait for the other. With one step in a call, batches are fetched
    and placed for later calls instead: on a GPU, the step's kernels are still running.

    Args:
        prepare: Takes the `tf.TypeSpec`s of a batch, or one, and creates the variables
            that do not exist yet: a graph that has to create some is traced twice.
        place: Cuts a batch and copies the shares to where they are needed.
        step: Takes a batch, its placed shares and when a batch was last asked for and
            came (float64 [2], in seconds), trains on it and returns its logs.
        steps: Steps in a call; at the end of the data there may be fewer.
        eager: Whether steps run op by op, outside of any graph.
        prefetch: With one step in a call, how many batches are placed ahead of it.

    Returns:
        A function of an iterator that returns the last step's logs. It raises
        `StopIteration` or `tf.errors.OutOfRangeError` if there is no batch left.
    """

    def one(data, fetched):
        data = without_optionals(data)
        return step(data, place(data), fetched)

    def many(iterator):
        if steps == 1:
            data, fetched = _get_next(iterator)
            # At the end of the data nothing happens, also to what does not look at it.
            with tf.control_dependencies(flat(data)):
                return one(data, fetched)
        return _loop(place, step, steps, iterator)

    if not eager:
        one_in_graph = tf.function(one, autograph=False, reduce_retracing=True)
        many = tf.function(many, autograph=False, reduce_retracing=True)
        if prefetch and steps == 1:
            many = _one_ahead(place, step, prefetch)

    prepared = False

    def prepare_once(data):
        nonlocal prepared
        if not prepared:
            prepare(without_optionals(data))
            prepared = True

    def function(iterator):
        if not eager and isinstance(iterator, tf.data.Iterator):
            prepare_once(iterator.element_spec)
            return many(iterator)
        logs, fetches = None, _Fetches()
        for _, data in zip(range(steps), fetches.timed(iterator), strict=False):
            prepare_once(data)
            logs = (one if eager else one_in_graph)(data, fetches.interval())
        if logs is None:
            raise StopIteration
        return logs

    return function


def _get_next(iterator):
    """The next batch, and when it was asked for and came."""
    asked = moment()
    with tf.control_dependencies([asked]):
        data = without_optionals(iterator.get_next())
    return data, tf.stack([asked, moment(flat(data))])


class _Fetches:
    """When batches were asked for and came, where Python takes them."""

    def __init__(self):
        self._asked_s = self._came_s = 0.0

    def call(self, fetch: Callable[..., Any], *args: Any) -> Any:
        """Calls what fetches a batch."""
        asked_s = time.time()
        try:
            return fetch(*args)
        finally:
            self._asked_s = self._asked_s or asked_s
            self._came_s = time.time()

    def timed(self, iterator: Iterator) -> Iterator:
        """Yields what an iterator does."""
        while True:
            try:
                yield self.call(next, iterator)
            except StopIteration:
                return

    def interval(self) -> tf.Tensor:
        """From the first to the last fetch since this was last asked: float64 [2]."""
        interval = tf.constant([self._asked_s, self._came_s], tf.float64)
        self._asked_s = 0.0
        return interval


def _one_ahead(place, step, count):
    """Makes a function that takes one step, and places batches for later ones."""

    def fetch(iterator):
        data = without_optionals(iterator.get_next())
        return data, place(data)

    fetch = tf.function(fetch, autograph=False)
    step = tf.function(step, autograph=False)
    traced, fetching = weakref.WeakKeyDictionary(), _Fetches()

    def trace(iterator):
        fetches = fetch.get_concrete_function(iterator)
        # For whatever can be fetched: of one batch, all sizes are known.
        specs = tf.nest.map_structure(
            lambda t: None if t is None else tf.type_spec_from_value(t),
            fetches.structured_outputs,
        )
        interval = tf.TensorSpec([2], tf.float64)
        return fetches, step.get_concrete_function(*specs, interval)

    def fetch_next(iterator):
        if iterator not in traced:
            traced[iterator] = trace(iterator)
        fetches, steps = traced[iterator]
        return steps, fetching.call(fetches, iterator)

    ahead = Ahead(count, fetch_next)

    def function(iterator):
        step, fetched = ahead.take(iterator)
        logs = step(*fetched, fetching.interval())
        del fetched  # to make room
        ahead.fill(iterator)
        return logs

    return function


def _loop(place, step, steps, iterator):
    """Runs up to `steps` steps in a loop of the graph."""
    first, fetched = _get_next(iterator)
    placed = place(first)
    traced = tf.function(step, autograph=False)
    traced = traced.get_concrete_function(first, placed, fetched)
    logs_spec = tf.nest.map_structure(
        tf.type_spec_from_value, traced.structured_outputs
    )

    def body(count, _, data, shares, fetched, logs):
        data_now, shares_now = _pack(first, data), _pack(placed, shares)
        asked = moment()
        with tf.control_dependencies([asked]):
            following = tf.cond(
                count + 1 < steps,
                iterator.get_next_as_optional,
                lambda: tf.experimental.Optional.empty(iterator.element_spec),
            )
        more = following.has_value()
        fetched_next = tf.stack([asked, moment(more)])
        # The choice is made on the host: what a branch returns passes through there.
        data_next = tf.cond(
            more, lambda: flat(without_optionals(following.get_value())), lambda: data
        )
        shares_next = flat(place(_pack(first, data_next)))
        logs = traced(data_now, shares_now, fetched)
        logs = tf.experimental.Optional.from_value(logs)
        return count + 1, more, data_next, shares_next, fetched_next, logs

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


def _where_its_input_is(operation):
    # The loop's body returns each value by an operation that waits for the whole step,
    # which TensorFlow places nowhere. On the first device, it would send a share on to
    # its tower only then.
    if operation.type == "Identity" and not operation.device:
        return operation.inputs[0].device
    return operation.device


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


def _pack(like, tensors):
    tensors = iter(tensors)
    every = tf.nest.flatten(like, expand_composites=True)
    every = [None if tensor is None else next(tensors) for tensor in every]
    return tf.nest.pack_sequence_as(like, every, expand_composites=True)
