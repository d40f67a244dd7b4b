"""Measures what the time of steps goes to on each of several hosts.

Each host tells the others, with each batch, what it has measured of its last step. That
rides along in the sum of the gradients, so it costs no message, and all know it.
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
    """What the time of a host's steps has gone to.

    Attributes:
        steps: Steps measured.
        input_s: Its towers waited for a batch.
        copy_s: Batches were cut and copied, and parameters sent.
        compute_s: Its towers computed.
        sum_s: From when its gradients were there to when those of all were added.
        reduce_s: Its gradients were added before that, and variables updated after it.
        between_s: Between steps: in Python, and in callbacks.
        share: Its part of the batches, times `steps`.
        late_s: It was the last to have its gradients, so much later than the others.
        network_s: All had their gradients, until they were added; the same on all.
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
        """Returns what has come in addition to earlier totals."""
        return HostTotals(*(a - b for a, b in zip(self, before, strict=True)))


# What a host tells; the others follow from what all tell.
TOLD = HostTotals._fields.index("late_s")
_SUM = HostTotals._fields.index("sum_s")
_latencies: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class HostTimes:
    """Adds up what hosts tell of their steps.

    Attributes:
        bytes: How much of gradients hosts add in a step, as far as that is known.
    """

    def __init__(self, hosts: World, share: float):
        """Takes all hosts, and the part of a batch that this one gets."""
        self._hosts, self._share, self.bytes = hosts, share, 0
        with tf.init_scope(), tf.device(HOST):
            self._latest = tf.Variable(tf.zeros([TOLD], tf.float64), trainable=False)
            wide = [hosts.count, len(HostTotals._fields)]
            self._totals = tf.Variable(tf.zeros(wide, tf.float64), trainable=False)

    @property
    def names(self) -> Sequence[str]:
        """What to call each host."""
        return self._hosts.names

    @property
    def index(self) -> int:
        """Which of the hosts this one is."""
        return self._hosts.index

    @property
    def latency_s(self) -> float:
        """How long hosts take to add 16 bytes; 0 if it was not measured."""
        return _latencies.get(self._hosts.communicator, 0.0)

    def totals(self) -> list[HostTotals]:
        """Returns the sums over all steps so far, of each host."""
        return [HostTotals(*map(float, row)) for row in self._totals.numpy()]

    def note(self, parts: Sequence[tf.Tensor]) -> None:
        """Is told of a step of this host: what `HostTotals` has up to `between_s`."""
        share = tf.constant(self._share, tf.float64)
        self._latest.assign(tf.stack([*parts, share]))

    def latest(self) -> tf.Tensor:
        """Returns what to tell the others."""
        return tf.cast(self._latest.read_value(), tf.float32)

    def hear(self, told: tf.Tensor) -> None:
        """Is told what all hosts tell of their last step."""
        rows = tf.cast(told, tf.float64)
        sums = rows[:, _SUM]
        network, count = tf.reduce_min(sums), rows.shape[0]
        others = (tf.reduce_sum(sums) - network) / (count - 1)
        last = tf.one_hot(tf.argmin(sums), count, dtype=tf.float64)
        found = [(others - network) * last, tf.fill([count], network)]
        self._totals.assign_add(tf.concat([rows, tf.stack(found, axis=1)], axis=1))

    def note_size(self, gradients: Sequence[Any]) -> None:
        """Is told what hosts add in a step."""
        dense = [each for each in gradients if isinstance(each, tf.Tensor)]
        sizes = [(each.shape.num_elements() or 0) * each.dtype.size for each in dense]
        self.bytes = sum(sizes)


def measure_latency(hosts: World) -> None:
    """Measures, once for these hosts, how long they take to add 16 bytes.

    All call it together.
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
