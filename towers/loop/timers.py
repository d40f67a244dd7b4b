"""Measures how training steps spend their time.

The graph reads the clock whenever a phase has ended on all towers: when the batch, the
local batches on their devices, the gradients, and the updated variables are available.
These times divide the interval from the end of a step to that of the next, so the parts
add up to it. Overlapped work, such as fetching a batch while the towers compute, counts
no time. A reading takes some microseconds a step, so all steps are measured. On a GPU,
a copy of an empty tensor signals the host that the work before it is done.

On the CPUs, a clock is an operation that needs one of TensorFlow's threads, and towers
can keep all of them. So a tower on a CPU begins after its clock, and what waits for a
thread from then on waits for towers that compute.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers.collectives import packing
from towers.devices.names import HOST, is_gpu
from towers.keras_adapter.graphs import is_stateful, makers, run_independently
from towers.keras_adapter.runtime import now

_SCOPE = "phases"


class Totals(NamedTuple):
    """How steps have spent their time.

    Attributes:
        steps: Number of measured steps.
        input_s: Towers waited for a batch.
        copy_s: Local batches were split and copied to the towers, and parameters sent
            to them from another memory. Towers on CPUs share the memory of the host:
            what is copied to others once one computes is part of `compute_s`.
        compute_s: Towers computed, until the last had its gradients.
        reduce_s: Gradients were added; variables and metrics were updated.
        towers_s: Each tower computed.
        stages_s: Each stage was busy, if a tower has several; the mean over towers.
    """

    steps: int
    input_s: float
    copy_s: float
    compute_s: float
    reduce_s: float
    towers_s: tuple[float, ...]
    stages_s: tuple[float, ...] = ()

    def since(self, before: "Totals") -> "Totals":
        """Returns the difference to earlier totals."""
        parts = zip(self[:5], before[:5], strict=True)
        towers = zip(self.towers_s, before.towers_s, strict=True)
        stages = zip(self.stages_s, before.stages_s, strict=True)
        return Totals(
            *(a - b for a, b in parts),
            tuple(a - b for a, b in towers),
            tuple(a - b for a, b in stages),
        )


class TurnsTaken(NamedTuple):
    """The times of the turns that a tower's stages take in a step.

    Attributes:
        ends: When each turn ended: float64 scalars, in seconds.
        stages: The stage of each turn.
        after: The turns that each turn had to wait for, besides the start of the step.
    """

    ends: list[tf.Tensor]
    stages: list[int]
    after: list[Sequence[int]]

    def note(
        self,
        stage: int,
        after: Sequence[int],
        made: Sequence[tf.Tensor],
        end: tf.Tensor | None = None,
    ) -> None:
        """Adds a turn after the turns noted so far.

        Args:
            stage: The stage that took the turn.
            after: The turns that the turn had to wait for.
            made: The tensors that the turn made.
            end: The time at which the turn ended, if known.
        """
        self.ends.append(timestamp_after(made) if end is None else end)
        self.stages.append(stage)
        self.after.append(after)

    def at_work(self, placed: tf.Tensor, count: int) -> tf.Tensor:
        """Returns the seconds for which each of `count` stages was busy.

        `placed` is the time at which the batch was on the towers.
        """
        # A backward pass has no turns if the loss takes no outputs of the model.
        if not self.ends:
            return tf.zeros([count], tf.float64)
        ends = tf.stack([*self.ends, placed])
        start, width = len(self.ends), max(map(len, self.after))
        before = [[*turns] + [start] * (1 + width - len(turns)) for turns in self.after]
        before = tf.gather(ends, before)
        spans = _positive(ends[:-1] - tf.reduce_max(before, axis=1))
        return tf.math.unsorted_segment_sum(spans, [*self.stages], count)


class StepTimers:
    """Sums the phases of a builder's steps.

    Attributes:
        hosts: The `HostTimes`, if there are several hosts.
    """

    def __init__(self, towers: int, hosts: Any = None, stages: int = 1):
        self.hosts = hosts
        self._towers, self._stages = towers, stages if stages > 1 else 0
        with tf.init_scope(), tf.device(HOST):
            zeros = tf.zeros([5 + towers + self._stages], tf.float64)
            self._totals = tf.Variable(zeros, trainable=False)
            # The time at which the last step ended.
            self._last = tf.Variable(tf.zeros([], tf.float64), trainable=False)
        self._added, self._lock = np.zeros(zeros.shape), threading.Lock()
        self._times: dict[str, Any] | None = None
        self._iterator = None

    def totals(self) -> Totals:
        """Returns the sums over all steps so far."""
        steps, *phases = self._totals.numpy() + self._added
        towers, stages = np.split(phases[4:], [self._towers])
        seconds = map(float, phases[:4])
        return Totals(round(steps), *seconds, tuple(towers), tuple(stages))

    @property
    def iterator(self) -> tf.data.Iterator | None:
        """The tf.data iterator that gave the last batch, while it lives."""
        return self._iterator and self._iterator()

    def reads(self, iterator: Any) -> None:
        """Stores a weak reference to the iterator that yields the batches."""
        if isinstance(iterator, tf.data.Iterator):
            self._iterator = weakref.ref(iterator)

    @contextlib.contextmanager
    def step(
        self,
        data: Any,
        local_batches: Sequence[Any],
        devices: Sequence[str],
        fetched: tf.Tensor,
    ) -> Iterator[Sequence[Any]]:
        """Measures the step whose operations are made in the context.

        Args:
            data: The batch.
            local_batches: The towers' local batches.
            devices: The device of each local batch.
            fetched: Times, float64 [n, 3], in seconds, of each batch fetched since the
                last step, for this step or a later one: when it was requested, arrived,
                and was placed. The last two are equal if it is not placed yet.

        Yields:
            The local batches, from which the towers have to compute.
        """
        graph, before = None, 0
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
        begun = timestamp_after(data)
        if graph is None or any(map(is_gpu, devices)):
            placed = timestamp_after(local_batches)
        else:
            placed, local_batches = _begin(local_batches, devices)
        self._times = {"begun": begun, "placed": placed}
        try:
            yield local_batches
            if "computed" in self._times:
                created = graph.get_operations()[before:] if graph else ()
                done = timestamp_after([op for op in created if is_stateful(op)])
                self._add(fetched, done=done, **self._times)
        finally:
            self._times = None

    def received(self, towers: Sequence[Any]) -> None:
        """Records when towers have the variables, if sent between memories."""
        if self._times is not None and towers:
            self._times["received"] = timestamp_after(towers)

    def computed(self, towers: Sequence[Any]) -> None:
        """Records when each tower with a local batch has computed its gradients."""
        if self._times is not None:
            self._times["computed"] = [timestamp_after(tensors) for tensors in towers]

    def turns_of_tower(self) -> TurnsTaken | None:
        """Returns an object that records the turns of a tower's stages.

        Returns `None` if no step is measured.
        """
        if self._times is None or not self._stages:
            return None
        turns = TurnsTaken([], [], [])
        self._times.setdefault("turns", []).append(turns)
        return turns

    def begin_sum(
        self, gradients: Sequence[Any], parts: Sequence[Any] = ()
    ) -> tf.Tensor | None:
        """Begins to measure how long hosts take to add the gradients of a step.

        Args:
            gradients: The gradients of this host, or of one of its towers.
            parts: The gradients of all its towers, if these are added together with
                those of other hosts.

        Returns:
            The time at which the gradients were available, for `end_sum`; `None` if no
            step is measured.
        """
        if self._times is None or self.hosts is None:
            return None
        self.hosts.note_size(gradients)
        return timestamp_after([*parts] or gradients)

    @property
    def has_sum(self) -> bool:
        """Whether a sum of this step is measured already."""
        return self._times is not None and "summed" in self._times

    def end_sum(self, begun: tf.Tensor | None, sums: Sequence[Any]) -> None:
        """Records when the sums over hosts are there; `begun` is from `begin_sum`."""
        if begun is not None:
            self._times["summed"] = begun, timestamp_after(sums)

    def add(self, parts: Sequence[float]) -> None:
        """Adds a thread's measurements, in the order of `Totals`."""
        with self._lock:
            self._added += parts

    def _add(
        self,
        fetched,
        begun,
        placed,
        computed,
        done,
        received=None,
        summed=None,
        turns=(),
    ):
        with tf.name_scope(_SCOPE), tf.device(HOST):
            last = self._last.read_value()
            # If all threads are busy, the clock may be read late, but never early.
            begun = tf.minimum(begun, placed)
            # The part of the time since the last step in which batches were fetched.
            ends = tf.minimum(fetched[:, 1:], begun)
            spans = _positive(ends - tf.maximum(fetched[:, :-1], last))
            waited, copied = tf.unstack(tf.reduce_sum(spans, axis=0))
            between = begun - last - waited - copied
            begun = tf.maximum(begun, last)
            if received is not None:
                placed = tf.maximum(placed, received)
            computed = [tf.minimum(end, done) for end in computed]
            placed = tf.minimum(placed, tf.reduce_min(computed))
            placed, all_computed = tf.maximum(placed, begun), tf.reduce_max(computed)
            idle = [tf.zeros([], tf.float64)] * (self._towers - len(computed))
            stages = tf.zeros([self._stages], tf.float64)
            if turns:
                work = [tower.at_work(placed, self._stages) for tower in turns]
                stages = tf.add_n(work) / len(work)
            parts = [
                tf.ones([], tf.float64),
                waited,
                copied + placed - begun,
                all_computed - placed,
                done - all_computed,
                *(end - placed for end in computed),
                *idle,
                *tf.unstack(stages),
            ]
            parts = [_positive(part) for part in parts]
            self._totals.assign_add(tf.stack(parts))
            if self.hosts is not None and summed is not None:
                steps, *spent, reduced = parts[:5]
                added = _positive(summed[1] - summed[0])
                between = tf.where(last > 0, _positive(between), 0.0)
                others = [added, _positive(reduced - added), between]
                self.hosts.note([steps, *spent, *others])
            self._last.assign(done)


def timestamp_after(after: Any = (), device: str = HOST) -> tf.Tensor:
    """Returns the time at which all tensors and operations of a nest are available.

    The time is in seconds, a float64 scalar on a CPU, by default the host's first.
    `None` in the nest is skipped.
    """
    parts = tf.nest.flatten(after, expand_composites=True)
    with tf.name_scope(_SCOPE):
        parts = [part for part in parts if part is not None]
        if not tf.executing_eagerly():
            operations = [part for part in parts if not tf.is_tensor(part)]
            parts = [*operations, *makers(filter(tf.is_tensor, parts))]
        parts = [*map(_itself, parts)]
        with tf.control_dependencies(parts), tf.device(device):
            timestamp = now()
    if not tf.executing_eagerly():
        # By default, TensorFlow would make it wait for random operations.
        run_independently([timestamp.op])
    return timestamp


def _begin(local_batches, devices):
    """Returns the time at which the first tower begins, and all local batches.

    Each tower is on a CPU, where its clock is read before it has its local batch.
    """
    begun, ready = [], []
    for local, device in zip(local_batches, devices, strict=True):
        begun.append(timestamp_after(local, device))
        with tf.name_scope(_SCOPE), tf.control_dependencies(begun[-1:]):
            with tf.device(device):
                ready.append(packing.copy(local))
    with tf.device(HOST):
        return tf.reduce_min(begun), ready


def _itself(part):
    """Returns an operation that waits for one tensor, not for a whole function call."""
    if not tf.is_tensor(part) or tf.executing_eagerly():
        return part
    with tf.device(None), tf.device(part.device):
        return tf.identity(part)


def _positive(seconds):
    return tf.maximum(seconds, tf.zeros([], tf.float64))
