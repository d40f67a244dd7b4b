"""What hosts tell one another with each batch: whether it is the same, whether to end.

It is added in the sum of the gradients, so that it costs nothing, and nobody changes
anything before all have heard it.
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
from towers.hosts import group
from towers.hosts.membership import HostsChange, HostsDifferError, SignalReceived
from towers.keras_adapter.optimizers import learning_rate_variable
from towers.loop import alike
from towers.loop.host_times import HostTimes, measure_latency

# What a host says of a batch: its rows, a digest of its first example, a wish to stop,
# and the learning rate, which a callback may have changed: 64 bits, 16 in a number.
_ROWS, _DIGEST, _STOP = range(3)
_RATE = slice(3, 7)
_NUMBERS = 7
# Numbers up to here are added as floats without rounding.
_MOST, _PRIME = 2**16, 65521


# What a host may wish, beside the number of a signal that stops: a checkpoint, nothing,
# the end of `fit`, or other hosts, a number that no signal has.
_SAVE, _GO_ON, _STOP_TRAINING, CHANGE = -1, 0, 1, 100
# Of the sums for each batch of an evaluation, and at its end.
_EVALUATED = "evaluated batch"


class Agreement:
    """Keeps hosts at the same batch.

    Attributes:
        left_a_batch: Whether `fit` has stopped at a batch that it has begun.
    """

    def __init__(self, hosts: World, model: keras.Model):
        """Takes the hosts that train a model together."""
        self._hosts, self._model = hosts, model
        self._heard: np.ndarray | None = None
        self.left_a_batch = False
        with tf.init_scope(), tf.device(HOST):
            self._wish = tf.Variable(0.0, trainable=False, name="wish_to_stop")
            self._saves = tf.Variable(False, trainable=False, name="wished_to_save")

    @property
    def wish(self) -> int:
        """What this host wishes: 0 for nothing, 1 to stop, or a signal's number.

        All will stop, before the next batch. -1 is for a checkpoint.
        """
        return int(self._wish.numpy())

    @wish.setter
    def wish(self, value: int) -> None:
        self._wish.assign(float(value))

    def of_batch(self, data: Any, times: HostTimes | None = None) -> tf.Tensor:
        """Returns what this host says of a batch, to be added up over hosts.

        Args:
            data: The batch.
            times: What it has measured of the last step, if anything.

        Returns:
            A tensor of shape (hosts, numbers), zeros but for this host's row.
        """
        with tf.device(HOST), tf.name_scope("agreement"):
            rows = tf.cast(batch.batch_size(data) % _MOST, tf.float32)
            rate = self._learning_rate()
            bits = tf.zeros([4]) if rate is None else _to_numbers(rate.value)
            said = tf.stack([rows, digest(data), self._wish.value()])
            said = tf.concat([said, bits], axis=0)
            if times is not None:
                said = tf.concat([said, times.latest()], axis=0)
            return self._placed(said)

    @contextlib.contextmanager
    def before(self, told: tf.Tensor) -> Iterator[None]:
        """Inside, nothing happens unless all hosts go on with the same batch.

        What computes the step raises a `tf.errors.OutOfRangeError` then.

        Args:
            told: The sum of what `of_batch` returned on each host.
        """
        with tf.device(HOST), tf.name_scope("agreement"):
            same = tf.reduce_all(told[:, :_STOP] == told[0, :_STOP])
            goes_on = same & tf.reduce_all(told[:, _STOP] <= _GO_ON)
            checked = tf.cond(
                goes_on, lambda: tf.constant(True), lambda: self._end(told)
            )
        with tf.control_dependencies([checked]):
            yield

    def hear(self, told: tf.Tensor, times: HostTimes | None = None) -> None:
        """Does what the hosts that go on with a batch have said.

        The optimizer gets the first host's learning rate, if it is a variable.

        Args:
            told: As for `before`.
            times: What `of_batch` was given.
        """
        rate = self._learning_rate()
        if rate is not None:
            rate.assign(tf.cast(_from_numbers(told[0, _RATE]), rate.dtype))
        saves = tf.reduce_any(told[:, _STOP] == _SAVE)
        self._saves.assign(self._saves.value() | saves)
        if times is not None:
            times.hear(told[:, _NUMBERS:])

    def _learning_rate(self):
        """The variable, which a schedule has not."""
        optimizer = self._model.optimizer
        rate = None if optimizer is None else learning_rate_variable(optimizer)
        return rate if isinstance(rate, keras.Variable) else None

    @contextlib.contextmanager
    def evaluates(self, data: Any) -> Iterator[None]:
        """Inside, all hosts evaluate, or predict for, the same batch, as `before`."""
        with tf.device(HOST), tf.name_scope("agreement"):
            # No host stops within an evaluation, which would be of fewer examples.
            same = [1.0] * _STOP + [0.0] * (_NUMBERS - _STOP)
            told = self.of_batch(data) * tf.constant(same)
        (told,) = self._hosts.all_reduce([told], _EVALUATED)
        with self.before(told):
            yield

    def end_evaluation(self) -> None:
        """Is told that there are no more batches; there must be none on any host.

        Raises:
            HostsDifferError: A host has one.
        """
        none = self._placed(tf.zeros([_NUMBERS]))
        (told,) = self._hosts.all_reduce([none], _EVALUATED)
        self._check_batches(told.numpy())

    @contextlib.contextmanager
    def stops(self, model: keras.Model) -> Iterator[None]:
        """Inside, a call of training in which a host stops ends as the data's end does.

        Raises:
            HostsDifferError: The hosts have different batches.
            SignalReceived: A host stops because of a signal.
            HostsChange: Hosts come or go.
        """
        self._heard = None
        try:
            yield
        except tf.errors.OutOfRangeError:
            if self._heard is None:
                raise
            number = int(self._heard[:, _STOP].max())
            if number == CHANGE:
                raise HostsChange from None
            self._check_batches(self._heard)
            self.left_a_batch = model.stop_training = True
            # Keras takes it for the end of the data. `fit` puts an end to this.
            warnings.filterwarnings("ignore", "Your input ran out of data")
            if number > _STOP_TRAINING:
                raise SignalReceived(number) from None
            raise

    def check_alike(self, value: Mapping[str, Any]) -> None:
        """Refuses hosts that were given different values; see `alike.check`."""
        alike.check(self._hosts, value)

    def agrees_to_save(self, wished: bool) -> bool:
        """Tells whether all hosts are to save here, as one has wished a batch ago.

        `wished` is what this host wishes now.
        """
        if self._saves.numpy():
            self.forget_to_save()
            return True
        if wished and self.wish == _GO_ON:
            self.wish = _SAVE
        return False

    def forget_to_save(self) -> None:
        """Forgets what hosts have wished."""
        self._saves.assign(False)
        if self.wish == _SAVE:
            self.wish = _GO_ON

    def measure_latency(self) -> None:
        """Measures it once, as all hosts do; see `HostTimes`."""
        measure_latency(self._hosts)

    def any(self, value: bool) -> bool:
        """Tells whether something holds on any host."""
        return any(self._hosts.exchange(bool(value)))

    def meet(self, wish: int = _GO_ON) -> bool:
        """Tells whether any host wishes to stop, as all find out together.

        Raises:
            SignalReceived: A host stops because of a signal.
        """
        wish = float(max(wish, self.wish))
        told = self._placed(wish * tf.one_hot(_STOP, _NUMBERS))
        (told,) = self._hosts.all_reduce([told], "end of an epoch")
        found = told.numpy()[:, _STOP]
        # Of other hosts, all hear with the next batch, if there is one.
        found = int(found[found < CHANGE].max(initial=_GO_ON))
        if found > _STOP_TRAINING:
            raise SignalReceived(found)
        return found == _STOP_TRAINING

    def _placed(self, mine):
        return tf.scatter_nd(
            [[self._hosts.index]], [mine], [self._hosts.count, mine.shape[0]]
        )

    def _end(self, told):
        ended = tf.py_function(self._hear, [told], tf.bool)
        return tf.ensure_shape(ended, [])

    def _hear(self, told):
        self._heard = told.numpy()
        # The one error that TensorFlow takes for an end, and does not warn of.
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


class FollowHosts(keras.callbacks.Callback):
    """Has all hosts stop where one of them does; the last of the callbacks."""

    def __init__(self, agreement: Agreement):
        """Takes what tells the other hosts."""
        super().__init__()
        self._agreement = agreement

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets an earlier wish."""
        self._agreement.wish, self._agreement.left_a_batch = _GO_ON, False
        self._agreement.forget_to_save()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Puts a stop off until all hosts have heard of it, in the next batch."""
        if self.model.stop_training:
            self.model.stop_training = False
            self._agreement.wish = _STOP_TRAINING
        elif group.change() is not None and self._agreement.wish <= _GO_ON:
            self._agreement.wish = CHANGE

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stops if any host does."""
        wish = _STOP_TRAINING if self.model.stop_training else _GO_ON
        self.model.stop_training = self._agreement.meet(wish)


def digest(data: Any) -> tf.Tensor:
    """Returns a number that tells nearly all batches apart, by their first examples."""
    if (part := batch.part_of(data)) is not None:
        # Hosts are given other rows of it.
        return tf.cast(part.mark, tf.float32)
    total = tf.zeros([], tf.int64)
    # Keras gives arrays to eager steps.
    data = tf.nest.map_structure(batch.as_tensor, data)
    for tensor in tf.nest.flatten(data, expand_composites=True):
        if tensor is None or tensor.shape.rank is None:
            continue
        # Rows are cheap to take; all of a batch may be large.
        flat = tf.reshape(tensor[:2] if tensor.shape.rank else tensor, [-1])[:256]
        if flat.dtype == tf.string:
            numbers = tf.strings.to_hash_bucket_fast(flat, _MOST)
        elif flat.dtype.size in _INTEGERS and flat.dtype.is_floating:
            numbers = tf.bitcast(flat, _INTEGERS[flat.dtype.size])
        else:
            numbers = flat
        numbers = tf.cast(numbers, tf.int64)
        places = tf.range(1, tf.size(numbers, tf.int64) + 1, dtype=tf.int64)
        total = total * 31 + tf.reduce_sum(numbers * places)
    # A prime: of whole numbers as floats, the last 16 bits are all zero.
    return tf.cast(tf.math.floormod(total, _PRIME), tf.float32)


_INTEGERS = {2: tf.int16, 4: tf.int32, 8: tf.int64}


def _batch_of(said):
    rows = int(said[_ROWS])
    return f"a batch of {rows} examples" if rows else "none"


def _to_numbers(value):
    """Returns the bits of a float of up to 64 as four numbers, which add up exactly."""
    bits = tf.bitcast(tf.cast(value, tf.float64), tf.uint16)
    return tf.cast(bits, tf.float32)


def _from_numbers(numbers):
    return tf.bitcast(tf.cast(numbers, tf.uint16), tf.float64)
