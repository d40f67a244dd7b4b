"""Runs towers side by side, or as replicas where their layers talk to one another."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.collectives import batch
from towers.collectives.hosts import ONE_HOST, OneHost
from towers.keras_adapter.graphs import (
    DEPENDENT_VARIABLES,
    is_stateful,
    run_independently,
)
from towers.keras_adapter.layers import layers_of
from towers.keras_adapter.patching import patched
from towers.keras_adapter.runtime import ReductionOverHosts
from towers.tower.errors import ModelError
from towers.tower.passes import TowerResult
from towers.tower.traced import Sized, Traced


class TowerCall(NamedTuple):
    """What one tower is to compute.

    Attributes:
        index: The tower's number among those of all hosts.
        device: Where, as a string.
        size: Number of its examples: an int where it is known when the graph is built,
            else a scalar tensor.
        fraction: Size over that of the global batch: a float64 scalar.
        arguments: The arguments of the tower function.
    """

    index: int
    device: str
    size: int | tf.Tensor
    fraction: tf.Tensor
    arguments: Sequence[Any]

    @property
    def is_idle(self) -> bool:
        """Tells whether it is known to have no examples, so that it may be left out.

        The first of all towers always has an example, unless there is none at all.
        """
        return self.index > 0 and isinstance(self.size, int) and self.size == 0


@contextlib.contextmanager
def without_auto_control_deps(
    variables: Sequence[tf.Variable] = (),
) -> Iterator[None]:
    """Inside, calls that draw random numbers or check something wait for no other.

    TensorFlow would make towers wait for one another, in the order of the calls.

    Args:
        variables: The variables that the calls read. Whatever changes one of them later
            waits for all calls, also if it needs no gradient, as a weight decay.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    made = [op for op in graph.get_operations()[before:] if is_stateful(op)]
    run_independently(made)
    with tf.control_dependencies(made):
        for variable in variables:
            with tf.device(variable.device):
                # To TensorFlow, this is the read that a change has to wait for.
                tf.raw_ops.VariableShape(input=variable.handle)


def run(
    towers: Sequence[Traced | Sized], calls: Sequence[TowerCall]
) -> list[TowerResult]:
    """Runs one tower on each device, none waiting for another.

    Args:
        towers: The traced towers, or in eager execution plain functions.
        calls: One for each tower.

    Returns:
        The towers' results, in order. Towers known to be idle when the graph is built
        are left out, unless all are; towers that turn out to be idle compute nothing
        and return zeros.
    """
    results = []
    for k, (tower, call) in enumerate(zip(towers, calls, strict=True)):
        known, idle = isinstance(call.size, int), call.is_idle
        if idle and (results or k + 1 < len(calls)):
            continue
        with tf.name_scope(f"tower_{k}"), tf.device(call.device):
            if idle and isinstance(tower, Traced | Sized):
                result = tower.idle(tf.zeros([], tf.int32))
            elif known:
                result = tower(*call.arguments)
            else:
                result = tower.of_size(call.size, call.index > 0, *call.arguments)
        about = {"size": call.size, "fraction": call.fraction, "tower": k}
        results.append(result._replace(**about))
    return results


def without_rows(result: TowerResult) -> TowerResult:
    """Returns what a tower adds to others' results that has no rows: zeros."""

    def nothing(value):
        if isinstance(value, tf.IndexedSlices):
            zeros = tf.zeros_like(value.values)
            return tf.IndexedSlices(zeros, value.indices, value.dense_shape)
        return None if value is None else tf.zeros_like(value)

    filled = {"size": None, "fraction": None, "tower": None}
    zeros = tf.nest.map_structure(nothing, result._replace(**filled))
    outputs, tags = batch.take((zeros.outputs, zeros.tags), 0, 0)
    return zeros._replace(outputs=outputs, tags=tags)


def refuse_stateful(model: keras.Model) -> None:
    """Refuses layers that keep a state for each row of the batch: a `ModelError`."""
    for layer in layers_of(model):
        if getattr(layer, "stateful", False):
            raise ModelError(
                f"The layer '{layer.name}' is stateful: it keeps a value for each row "
                "of the batch, which towers do not carry; use stateful=False."
            )


def is_synchronized(model: keras.Model) -> bool:
    """Tells whether towers have to run together, as layers talk to one another."""
    return any(getattr(layer, "synchronized", False) for layer in layers_of(model))


def run_in_replica_context(
    tower: Callable[..., TowerResult],
    traced: Traced | None,
    calls: Sequence[TowerCall],
    whole: Callable[[], TowerCall],
    smallest: int | tf.Tensor,
    hosts: OneHost = ONE_HOST,
) -> list[TowerResult]:
    """Runs towers whose layers talk to one another, such as synchronized normalisation.

    `tf.distribute.MirroredStrategy` runs them, as replicas, for which Keras has written
    such layers. No variable is mirrored, as towers have none. A batch that would leave
    a tower idle is computed by one alone, as nobody would answer for the idle one.

    Args:
        tower: The plain tower function.
        traced: The same, traced; `None` in eager execution.
        calls: One for each tower.
        whole: Makes one of all of them.
        smallest: The size of the smallest local batch, of all hosts.
        hosts: The hosts whose towers talk to one another.

    Returns:
        The towers' results, in order.
    """

    def together():
        return _replicated(tower, calls, hosts)

    def alone():
        with tf.name_scope("tower_0"), tf.device(calls[0].device):
            everything = whole()
            if hosts.index > 0 and traced is not None:
                return [_idle(traced, smallest) for _ in calls]
            result = (traced or tower)(*everything.arguments)
        if traced is None:
            size, fraction = everything.size, everything.fraction
            if hosts.index > 0:
                # Without a graph, all hosts compute it, and the first one's counts.
                result, size, fraction = (
                    without_rows(result),
                    0,
                    tf.zeros([], batch.FRACTION),
                )
            return [result._replace(size=size, fraction=fraction)]
        size = tf.convert_to_tensor(everything.size)
        result = result._replace(size=size, fraction=everything.fraction)
        return [result, *(_idle(traced, smallest) for _ in calls[1:])]

    if isinstance(smallest, int):
        results = together() if smallest > 0 else alone()
    else:
        results = tf.cond(smallest > 0, together, alone)
    return [result._replace(tower=k) for k, result in enumerate(results)]


def _idle(traced, none):
    none = tf.convert_to_tensor(none)
    return traced.idle(none)._replace(size=none, fraction=tf.zeros([], batch.FRACTION))


def _replicated(tower, calls, hosts):
    results = {}

    @tf.autograph.experimental.do_not_convert
    def replica():
        context = tf.distribute.get_replica_context()
        k = int(tf.get_static_value(context.replica_id_in_sync_group))
        # Keras's all-reduce is a custom gradient. TensorFlow would search the graph
        # behind each for variables, of which towers have none: minutes for a deep
        # network. A replica is a thread, so each patches for itself.
        with (
            tf.name_scope(f"tower_{k}"),
            patched(DEPENDENT_VARIABLES, lambda search, **_: []),
        ):
            results[k] = tower(*calls[k].arguments)

    _strategy(tuple(call.device for call in calls), hosts).run(replica)
    return [
        results[k]._replace(size=call.size, fraction=call.fraction)
        for k, call in enumerate(calls)
    ]


@functools.cache
def _strategy(devices, hosts):
    # NCCL would not take several logical devices of one GPU.
    reduction = tf.distribute.ReductionToOneDevice()
    if hosts.count > 1:

        def add(values):
            return hosts.sum(tf.add_n(values), "synchronized")

        reduction = ReductionOverHosts(hosts.count, add)
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)
