"""The ways that gradients take through a graph."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers.analysis.kinds import SUM, Edge, Total
from towers.analysis.layer_calls import key
from towers.keras_adapter.graphs import gradient_module

# Their gradients do not take what they have taken.
_PASS_ON = set(
    "AddN AddV2 Cast ExpandDims Identity Neg Pack Reshape Shape Squeeze Sub".split()
)
# Tells whether an operation takes the whole batch's value of an input.
IsTotal = Callable[[tf.Operation, int], bool]


def behind(tensors: Sequence[tf.Tensor]) -> Iterator[tf.Operation]:
    """Yields the operations through which a gradient of some tensors flows."""
    waiting, seen = [tensor.op for tensor in tensors], set()
    while waiting:
        op = waiting.pop()
        if op.name not in seen and op.type != "StopGradient":
            seen.add(op.name)
            yield op
            waiting += [each.op for each in op.inputs if not each.dtype.is_integer]


def taken(tensors: Sequence[tf.Tensor], is_total: IsTotal) -> dict[Any, tf.Tensor]:
    """Returns the totals that operations behind some tensors take, by their keys."""
    return {
        key(tensor): tensor
        for op in behind(tensors)
        for i, tensor in enumerate(op.inputs)
        if is_total(op, i)
    }


def totals_behind(
    targets: Sequence[tf.Tensor], is_total: IsTotal, known: Mapping[Edge, Total]
) -> dict[Any, Total] | None:
    """Returns the totals behind some tensors, whose gradients take them as well.

    Returns `None` where another operation, whose gradient takes it, too, takes a
    tower's part of one. `known` has those that are more than sums.
    """
    found, parts = {}, set()
    for op in behind(targets):
        for i, tensor in enumerate(op.inputs):
            if is_total(op, i):
                edge, total = Edge(op.name, i), Total(tensor, SUM)
                found[key(tensor)] = known.get(edge, total)
            elif op.type not in _PASS_ON:
                parts.add(key(tensor))
    return None if parts & found.keys() else found


def starts(graph: tf.Graph, sources: Any) -> set[Any]:
    """Returns the keys of what stands for variables and tensors in a graph."""
    sources = tf.nest.flatten(sources)
    handles = {id(each.handle) for each in sources if hasattr(each, "handle")}
    found = {key(each) for each in sources if tf.is_symbolic_tensor(each)}
    return found | {
        key(inside) for outside, inside in graph.captures if id(outside) in handles
    }


def depends(tensors: Sequence[tf.Tensor], keys: set[Any]) -> bool:
    """Tells whether a gradient of some tensors comes to what has one of the keys."""
    return any(
        key(tensor) in keys
        for op in behind(tensors)
        for tensor in (*op.inputs, *op.outputs)
    )


def is_custom(op: tf.Operation) -> bool:
    """Whether a user has defined the gradient of an operation."""
    if op.type != "IdentityN" or "_gradient_op_type" not in op.node_def.attr:
        return False
    return not gradient_module(op).startswith(("keras.", "tensorflow."))
