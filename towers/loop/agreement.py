"""Lets hosts agree, with each batch, on its contents and on when to stop.

The messages have a sum of their own. No host changes a variable before it has heard
from all hosts.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.collectives import batch
from towers.collectives.world import World
from towers.devices.names import HOST
from towers.hosts.group import HostsDifferError, SignalReceived
from towers.keras_adapter.optimizers import learning_rate_variable
from towers.loop import alike
from towers.loop.host_times import HostTimes, measure_latency

# A host's message about a batch: its number of rows, a digest of its first example, a
# request to stop, and the learning rate, which a callback may have changed: 64 bits, as
# four numbers of 16 bits.
_ROWS, _DIGEST, _STOP = range(3)
_RATE = slice(3, 7)
_NUMBERS = 7
# Integers up to here are added as floats without rounding.
_MOST, _PRIME = 2**16, 65521


# A host's request, unless it is the number of a stopping signal: a checkpoint, nothing,
# or the end of `fit`. No stopping signal has these numbers.
_SAVE, _GO_ON, _STOP_TRAINING = -1, 0, 1
# The names of all-reduces for each batch, and at the end: of an epoch of training, and
# of an evaluation.
_BATCH, _EVALUATED = "batch", "evaluated batch"


class Agreement:
    """Keeps hosts at the same batch.

    Attributes:
        left_a_batch: Whether `fit` has stopped at a batch that it had begun.
    """

    def __init__(self, hosts: World, model: keras.Model):
        """Takes the hosts that train a model together."""
        self._hosts, self._model = hosts, model
        self._heard: np.ndarray | None = None
        # How many numbers a message about a training batch has.
        self._width = _NUMBERS
        self.left_a_batch = False
        with tf.init_scope(), tf.device(HOST):
            self._wish = tf.Variable(0.0, trainable=False, name="wish_to_stop")
            self._saves = tf.Variable(False, trainable=False, name="wished_to_save")

    @property
    def wish(self) -> int:
        """This host's request: 0 for none, 1 to stop, or a signal's number.

        All hosts stop before the next batch. -1 requests a checkpoint.
        """
        return int(self._wish.numpy())

    @wish.setter
    def wish(self, value: int) -> None:
        self._wish.assign(float(value))

    def of_batch(self, data: Any, times: HostTimes | None = None) -> tf.Tensor:
        """Returns this host's message about a batch, to be summed over hosts.

        Args:
            data: The batch.
            times: This host's times of the last step, if measured.

        Returns:
            A tensor of shape (hosts, numbers), with zeros except in this host's row.
        """
        with tf.device(HOST), tf.name_scope("agreement"):
            rows = tf.cast(batch.batch_size(data) % _MOST, tf.float32)
            rate = self._learning_rate()
            bits = tf.zeros([4]) if rate is None else _to_numbers(rate.value)
            message = tf.stack([rows, digest(data), self._wish.value()])
            message = tf.concat([message, bits], axis=0)
            if times is not None:
                message = tf.concat([message, times.latest()], axis=0)
            return self._placed(message)

    @contextlib.contextmanager
    def before(self, messages: tf.Tensor) -> Iterator[None]:
        """Runs operations of the context only if all hosts go on with the same batch.

        Otherwise, the step raises a `tf.errors.OutOfRangeError`.

        Args:
            messages: The sum of the messages that `of_batch` returned on each host.
        """
        with tf.device(HOST), tf.name_scope("agreement"):
            same = tf.reduce_all(messages[:, :_STOP] == messages[0, :_STOP])
            goes_on = same & tf.reduce_all(messages[:, _STOP] <= _GO_ON)
            checked = tf.cond(
                goes_on, lambda: tf.constant(True), lambda: self._end(messages)
            )
        with tf.control_dependencies([checked]):
            yield

    def hear(self, messages: tf.Tensor, times: HostTimes | None = None) -> None:
        """Applies the messages of hosts that go on with a batch.

        The optimizer gets the first host's learning rate, if it is a variable.

        Args:
            messages: As for `before`.
            times: The argument of `of_batch`.
        """
        self._width = messages.shape[1]
        rate = self._learning_rate()
        if rate is not None:
            rate.assign(tf.cast(_from_numbers(messages[0, _RATE]), rate.dtype))
        saves = tf.reduce_any(messages[:, _STOP] == _SAVE)
        self._saves.assign(self._saves.value() | saves)
        if times is not None:
            times.hear(messages[:, _NUMBERS:])

    def _learning_rate(self):
        """Returns the learning rate if it is a variable, not a schedule."""
        optimizer = self._model.optimizer
        rate = None if optimizer is None else learning_rate_variable(optimizer)
        return rate if isinstance(rate, keras.Variable) else None

    @contextlib.contextmanager
    def trains(self, data: Any, times: HostTimes | None) -> Iterator[None]:
        """Lets all hosts train with the same batch in the context; see `before`.

        Args:
            data: The batch.
            times: See `of_batch`.
        """
        message = self.of_batch(data, times)
        (messages,) = self._hosts.all_reduce([message], _BATCH)
        with self.before(messages):
            self.hear(messages, times)
            yield

    @contextlib.contextmanager
    def evaluates(self, data: Any) -> Iterator[None]:
        """Lets all hosts evaluate, or predict, the same batch in the context.

        If a host has another batch, the step raises an error, as in `before`.
        """
        with tf.device(HOST), tf.name_scope("agreement"):
            # No host stops within an evaluation, as the result would miss examples.
            same = [1.0] * _STOP + [0.0] * (_NUMBERS - _STOP)
            messages = self.of_batch(data) * tf.constant(same)
        (messages,) = self._hosts.all_reduce([messages], _EVALUATED)
        with self.before(messages):
            yield

    def end_evaluation(self) -> None:
        """Checks that no host has another batch of the evaluation.

        Raises:
            HostsDifferError: A host has another batch.
        """
        none = self._placed(tf.zeros([_NUMBERS]))
        (messages,) = self._hosts.all_reduce([none], _EVALUATED)
        self._check_batches(messages.numpy())

    @contextlib.contextmanager
    def stops(self, model: keras.Model) -> Iterator[None]:
        """Ends a call of training within the context when a host stops.

        Raises:
            HostsDifferError: The hosts have different batches.
            SignalReceived: A host stops because of a signal.
        """
        self._heard = None
        try:
            yield
        except tf.errors.OutOfRangeError:
            if self._heard is None:
                raise
            number = int(self._heard[:, _STOP].max())
            self._check_batches(self._heard)
            self.left_a_batch = model.stop_training = True
            # Keras takes this for the end of the data; `fit` removes the filter again.
            warnings.filterwarnings("ignore", "Your input ran out of data")
            if number > _STOP_TRAINING:
                raise SignalReceived(number) from None
            raise

    def check_alike(self, value: Mapping[str, Any]) -> None:
        """Raises an error if hosts were given different values; see `alike.check`."""
        alike.check(self._hosts, value)

    def agrees_to_save(self, wished: bool) -> bool:
        """Checks whether all hosts save now, as a host requested one batch ago.

        `wished` is whether this host requests a checkpoint now.
        """
        if self._saves.numpy():
            self.forget_to_save()
            return True
        if wished and self.wish == _GO_ON:
            self.wish = _SAVE
        return False

    def forget_to_save(self) -> None:
        """Drops all requests for a checkpoint."""
        self._saves.assign(False)
        if self.wish == _SAVE:
            self.wish = _GO_ON

    def measure_latency(self) -> None:
        """Measures the latency of an all-reduce once, on all hosts; see `HostTimes`."""
        measure_latency(self._hosts)

    def any(self, value: bool) -> bool:
        """Checks whether the value is true on any host."""
        return any(self._hosts.exchange(bool(value)))

    def end_data(self, wish: float = _GO_ON) -> np.ndarray:
        """Tells all hosts that this one has no more batches; all call it together.

        Returns:
            The messages of all hosts.

        Raises:
            HostsDifferError: Another host has more batches.
        """
        # A host that has another batch gets this in the place of a message about it.
        message = self._placed(wish * tf.one_hot(_STOP, self._width))
        (messages,) = self._hosts.all_reduce([message], _BATCH)
        self._check_batches(messages.numpy())
        return messages.numpy()

    def meet(self, wish: int = _GO_ON) -> bool:
        """Checks whether any host requests to stop; all hosts call this together.

        Raises:
            HostsDifferError: Another host has more batches.
            SignalReceived: A host stops because of a signal.
        """
        messages = self.end_data(float(max(wish, self.wish)))
        wish_of_all = int(messages[:, _STOP].max(initial=_GO_ON))
        if wish_of_all > _STOP_TRAINING:
            raise SignalReceived(wish_of_all)
        return wish_of_all == _STOP_TRAINING

    def _placed(self, message):
        return tf.scatter_nd(
            [[self._hosts.index]], [message], [self._hosts.count, message.shape[0]]
        )

    def _end(self, messages):
        ended = tf.py_function(self._hear, [messages], tf.bool)
        return tf.ensure_shape(ended, [])

    def _hear(self, messages):
        self._heard = messages.numpy()
        # TensorFlow takes only this error for an end of data, and logs no warning.
        raise StopIteration("A host stops.")

    def _check_batches(self, heard):
        names = self._hosts.names
        for k, row in enumerate(heard):
            if row[_ROWS] != heard[0, _ROWS]:
                raise HostsDifferError(
                    f"{names[0]} has {_batch_of(heard[0])} where "
                    f"{names[k]} has {_batch_of(row)}; give all hosts the same "
                    "global batches, in the same order."
                )
            if row[_DIGEST] != heard[0, _DIGEST]:
                raise HostsDifferError(
                    f"{names[0]} and {names[k]} have different examples in "
                    "a batch; give all hosts the same global batches, in the same "
                    "order: with keras.utils.set_random_seed(...) of the same number, "
                    "say."
                )


class EndEpochs(keras.callbacks.Callback):
    """Checks that all hosts have ended an epoch; the first of the callbacks.

    Without this check, a later callback that exchanges values with other hosts would
    wait for ever for a host that has more batches.
    """

    def __init__(self, agreement: Agreement):
        """Takes the agreement that informs the other hosts."""
        super().__init__()
        self._agreement = agreement

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Raises an error if another host has more batches."""
        self._agreement.end_data()


class FollowHosts(keras.callbacks.Callback):
    """Stops training on all hosts when one of them stops; the last of the callbacks."""

    def __init__(self, agreement: Agreement):
        """Takes the agreement that informs the other hosts."""
        super().__init__()
        self._agreement = agreement

    def on_train_begin(self, logs: Any = None) -> None:
        """Drops earlier requests."""
        self._agreement.wish, self._agreement.left_a_batch = _GO_ON, False
        self._agreement.forget_to_save()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Delays a stop until all hosts learn of it, in the next batch."""
        if self.model.stop_training:
            self.model.stop_training = False
            self._agreement.wish = _STOP_TRAINING

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stops if any host stops."""
        wish = _STOP_TRAINING if self.model.stop_training else _GO_ON
        self.model.stop_training = self._agreement.meet(wish)


def digest(data: Any) -> tf.Tensor:
    """Returns a digest of the first examples, which differs for nearly all batches."""
    if (part := batch.part_of(data)) is not None:
        # Hosts are given different rows of the batch.
        return tf.cast(part.mark, tf.float32)
    total = tf.zeros([], tf.int64)
    # Keras gives arrays to eager steps.
    data = tf.nest.map_structure(batch.as_tensor, data)
    for tensor in tf.nest.flatten(data, expand_composites=True):
        if tensor is None or tensor.shape.rank is None:
            continue
        # Slices of rows are cheap; a full batch may be large.
        flat = tf.reshape(tensor[:2] if tensor.shape.rank else tensor, [-1])[:256]
        if flat.dtype == tf.string:
            numbers = tf.strings.to_hash_bucket_fast(flat, _MOST)
        elif flat.dtype.size in _INTEGERS and flat.dtype.is_floating:
            numbers = tf.bitcast(flat, _INTEGERS[flat.dtype.size])
        else:
            numbers = flat
        numbers = tf.cast(numbers, tf.int64)
        positions = tf.range(1, tf.size(numbers, tf.int64) + 1, dtype=tf.int64)
        total = total * 31 + tf.reduce_sum(numbers * positions)
    # A prime, as the last 16 bits of whole numbers stored as floats are all zero.
    return tf.cast(tf.math.floormod(total, _PRIME), tf.float32)


_INTEGERS = {2: tf.int16, 4: tf.int32, 8: tf.int64}


def _batch_of(message):
    rows = int(message[_ROWS])
    return f"a batch of {rows} examples" if rows else "none"


def _to_numbers(value):
    """Returns the bits of a float of up to 64 as four numbers, which add up exactly."""
    bits = tf.bitcast(tf.cast(value, tf.float64), tf.uint16)
    return tf.cast(bits, tf.float32)


def _from_numbers(numbers):
    return tf.bitcast(tf.cast(numbers, tf.uint16), tf.float64)
