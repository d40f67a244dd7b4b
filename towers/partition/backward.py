"""What a gradient of some tensors flows through, as operations of a graph."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers.analysis.kinds import NONE, Dependence
from towers.analysis.layer_calls import key
from towers.keras_adapter.graphs import gradient_module


def behind(tensors: Sequence[tf.Tensor]) -> Iterator[tf.Operation]:
    """Yields the operations through which a gradient of some tensors flows."""
    waiting, seen = [tensor.op for tensor in tensors], set()
    while waiting:
        op = waiting.pop()
        if op.name not in seen and op.type != "StopGradient":
            seen.add(op.name)
            yield op
            waiting += [each.op for each in op.inputs if not each.dtype.is_integer]


def meets(tensors: Sequence[tf.Tensor], keys: Collection[Any]) -> bool:
    """Tells whether a gradient of some tensors flows to a tensor of those keys."""
    return any(
        key(tensor) in keys
        for op in behind(tensors)
        for tensor in (*op.inputs, *op.outputs)
    )


def is_custom(op: tf.Operation) -> bool:
    """Tells whether a user has defined the gradient of an operation."""
    if op.type != "IdentityN" or "_gradient_op_type" not in op.node_def.attr:
        return False
    return not gradient_module(op).startswith(("keras.", "tensorflow."))


def terms(
    target: tf.Tensor,
    given: tf.Tensor | None,
    starts: Collection[Any],
    kind: Callable[[tf.Tensor], Dependence],
) -> Iterator[tuple[tf.Tensor, tf.Tensor | None]]:
    """Yields what a gradient may be taken of instead of a scalar.

    A sum of several kinds, such as of a quotient of totals, a mean and a norm of
    weights, is no tower's part of anything. Its terms are.

    Args:
        target: What to differentiate.
        given: The gradient given for it; `None` for one.
        starts: The keys of what to differentiate for.
        kind: Tells how a tensor depends on the examples.

    Yields:
        The terms, each with the gradient that is given for it.
    """
    waiting = [(target, given)]
    while waiting:
        term, factor = waiting.pop()
        before = None
        if term.shape.rank == 0 and kind(term) is NONE:
            before = _before(term.op, factor, starts)
        if before is None:
            yield term, factor
        else:
            waiting += before


def _before(op, factor, starts):
    """The terms of a sum or of a multiple, each with its factor; or `None`."""
    if op.type in ("AddN", "AddV2"):
        return [(each, factor) for each in op.inputs]
    if op.type == "Identity":
        return [(op.inputs[0], factor)]
    if op.type == "Sub":
        minus = tf.cast(-1, op.inputs[1].dtype) if factor is None else -factor
        return [(op.inputs[0], factor), (op.inputs[1], minus)]
    if op.type not in ("Mul", "RealDiv"):
        return None
    left, right = op.inputs
    if op.type == "Mul" and not meets([left], starts):
        left, right = right, left
    if meets([right], starts):
        return None
    if op.type == "RealDiv":
        return [(left, (1 if factor is None else factor) / right)]
    return [(left, right if factor is None else right * factor)]
