"""Measures how each of several hosts spends the time of its steps.

With each batch, each host sends the times of its last step to the others, as part of
the all-reduce of the gradients, which costs no further message.
"""

import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers.collectives.world import World
from towers.devices.names import HOST


class HostTotals(NamedTuple):
    """How a host has spent the time of its steps.

    Attributes:
        steps: Number of measured steps.
        input_s: Its towers waited for a batch.
        copy_s: Batches were split and copied, and parameters sent.
        compute_s: Its towers computed.
        sum_s: From its own gradients to the sum of all hosts' gradients.
        reduce_s: It added its gradients before `sum_s`, and updated variables after it.
        between_s: Between steps: in Python, and in callbacks.
        share: Its fraction of the batches, times `steps`.
        late_s: How much later than the others it had its gradients, when it was last.
        network_s: From the gradients of the last host to their sum; the same on all
            hosts.
    """

    steps: float
    input_s: float
    copy_s: float
    compute_s: float
    sum_s: float
    reduce_s: float
    between_s: float
    share: float
    late_s: float
    network_s: float

    def since(self, before: "HostTotals") -> "HostTotals":
        """Returns the difference to earlier totals."""
        return HostTotals(*(a - b for a, b in zip(self, before, strict=True)))


# A host sends the fields before this one; the others follow from all hosts' fields.
TOLD = HostTotals._fields.index("late_s")
_SUM = HostTotals._fields.index("sum_s")
_latencies: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class HostTimes:
    """Sums the times that hosts send.

    Attributes:
        bytes: The size of the gradients that hosts add in a step, as far as known.
    """

    def __init__(self, hosts: World, share: float):
        """Takes all hosts, and this host's fraction of a batch."""
        self._hosts, self._share, self.bytes = hosts, share, 0
        with tf.init_scope(), tf.device(HOST):
            self._latest = tf.Variable(tf.zeros([TOLD], tf.float64), trainable=False)
            wide = [hosts.count, len(HostTotals._fields)]
            self._totals = tf.Variable(tf.zeros(wide, tf.float64), trainable=False)

    @property
    def names(self) -> Sequence[str]:
        """The name of each host."""
        return self._hosts.names

    @property
    def index(self) -> int:
        """The index of this host."""
        return self._hosts.index

    @property
    def latency_s(self) -> float:
        """Seconds that hosts take to add 16 bytes; 0 if not measured."""
        return _latencies.get(self._hosts.communicator, 0.0)

    def totals(self) -> list[HostTotals]:
        """Returns the sums over all steps so far, for each host."""
        return [HostTotals(*map(float, row)) for row in self._totals.numpy()]

    def note(self, parts: Sequence[tf.Tensor]) -> None:
        """Stores the times of this host's step: `HostTotals` up to `between_s`."""
        share = tf.constant(self._share, tf.float64)
        self._latest.assign(tf.stack([*parts, share]))

    def latest(self) -> tf.Tensor:
        """Returns the times to send to the other hosts."""
        return tf.cast(self._latest.read_value(), tf.float32)

    def hear(self, times: tf.Tensor) -> None:
        """Adds the times of all hosts' last step."""
        rows = tf.cast(times, tf.float64)
        sums = rows[:, _SUM]
        network, count = tf.reduce_min(sums), rows.shape[0]
        others = (tf.reduce_sum(sums) - network) / (count - 1)
        last = tf.one_hot(tf.argmin(sums), count, dtype=tf.float64)
        derived = [(others - network) * last, tf.fill([count], network)]
        self._totals.assign_add(tf.concat([rows, tf.stack(derived, axis=1)], axis=1))

    def note_size(self, gradients: Sequence[Any]) -> None:
        """Stores the size of the gradients that hosts add in a step."""
        dense = [gradient for gradient in gradients if isinstance(gradient, tf.Tensor)]
        sizes = [
            (gradient.shape.num_elements() or 0) * gradient.dtype.size
            for gradient in dense
        ]
        self.bytes = sum(sizes)


def measure_latency(hosts: World) -> None:
    """Measures, once for these hosts, how long an all-reduce of 16 bytes takes.

    All hosts call this together.
    """
    if hosts.communicator in _latencies:
        return
    seconds = []
    for _ in range(5):
        begun_s = time.perf_counter()
        (total,) = hosts.all_reduce([tf.zeros([4])], "latency")
        np.asarray(total)
        seconds.append(time.perf_counter() - begun_s)
    _latencies[hosts.communicator] = min(seconds)
