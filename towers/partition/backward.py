"""Finds the operations of a graph that a gradient of some tensors flows through.

A gradient of a sum of kinds is that of its terms. A masked mean is each tower's part of
a quotient, a norm of weights the same on each: so the tape is asked for the terms, each
with its own factor.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers.analysis.kinds import MEAN, NONE, SUM, Dependence, Edge, Total
from towers.analysis.layer_calls import key
from towers.analysis.operations import BLOCK_PRODUCTS
from towers.keras_adapter.graphs import gradient_module, nodes_of
from towers.layers import sharded

# Their gradients do not take what they have taken.
_PASS_ON = set(
    "AddN AddV2 Cast ExpandDims Identity Neg Pack Reshape Shape Squeeze Sub".split()
)
# Tells whether an operation takes the whole batch's value of an input.
IsTotal = Callable[[tf.Operation, int], bool]


def operations_behind(tensors: Sequence[tf.Tensor]) -> Iterator[tf.Operation]:
    """Yields the operations through which a gradient of some tensors flows."""
    waiting, seen = [tensor.op for tensor in tensors], set()
    while waiting:
        op = waiting.pop()
        if op.name not in seen and op.type != "StopGradient":
            seen.add(op.name)
            yield op
            waiting += [t.op for t in op.inputs if not t.dtype.is_integer]


def flows_to(tensors: Sequence[tf.Tensor], keys: Collection[Any]) -> bool:
    """Tells whether a gradient of some tensors flows to a tensor of those keys."""
    return any(
        key(tensor) in keys
        for op in operations_behind(tensors)
        for tensor in (*op.inputs, *op.outputs)
    )


def source_keys(graph: tf.Graph, sources: Any) -> set[Any]:
    """Returns the keys of what stands for variables and tensors in a graph."""
    sources = [*sharded.sources_of(tf.nest.flatten(sources))]
    handles = {id(each.handle) for each in sources if hasattr(each, "handle")}
    symbolic = {key(each) for each in sources if tf.is_symbolic_tensor(each)}
    return symbolic | {
        key(inside) for outside, inside in graph.captures if id(outside) in handles
    }


def totals_taken(
    tensors: Sequence[tf.Tensor], is_total: IsTotal
) -> dict[Any, tf.Tensor]:
    """Returns the totals that operations behind some tensors take, by their keys."""
    return {
        key(tensor): tensor
        for op in operations_behind(tensors)
        for i, tensor in enumerate(op.inputs)
        if is_total(op, i)
    }


def totals(
    targets: Sequence[tf.Tensor], is_total: IsTotal, known: Mapping[Edge, Total]
) -> dict[Any, Total] | None:
    """Returns the totals behind some tensors, whose gradients take them as well.

    Returns `None` where another operation, whose gradient takes it, too, takes a
    tower's part of one. `known` has those that are more than sums.
    """
    behind, parts = {}, set()
    for op in operations_behind(targets):
        for i, tensor in enumerate(op.inputs):
            if is_total(op, i):
                edge, total = Edge(op.name, i), Total(tensor, SUM)
                behind[key(tensor)] = known.get(edge, total)
            elif op.type not in _PASS_ON:
                parts.add(key(tensor))
    return None if parts & behind.keys() else behind


def hindering(
    targets: Sequence[tf.Tensor],
    is_total: IsTotal,
    known: Mapping[Edge, Total],
    begin: Collection[Any],
) -> set[Any]:
    """Returns the keys of totals without which a gradient is one of towers' parts.

    They are those that depend on its sources, whose keys are `begin`; or all, where
    `totals` knows none.
    """
    every = totals_taken(targets, is_total)
    if totals(targets, is_total, known) is None:
        return {*every}
    return {name for name, tensor in every.items() if flows_to([tensor], begin)}


def joined_parts(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns what a tensor was joined from, in order; itself if from nothing."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    if tensor.op.type != "ConcatV2":
        return [tensor]
    inputs = tensor.op.inputs[:-1]
    return [part for each in inputs for part in joined_parts(each)]


def is_custom(op: tf.Operation) -> bool:
    """Tells whether a user has defined the gradient of an operation.

    It may be in a branch or in a loop.
    """
    return any(
        node.op == "IdentityN"
        and "_gradient_op_type" in node.attr
        and not _is_known(gradient_module(node))
        for node in nodes_of(op)
    )


def _is_known(module):
    return module in BLOCK_PRODUCTS or module.startswith(("keras.", "tensorflow."))


def terms(
    targets: Sequence[tf.Tensor],
    given: Sequence[tf.Tensor | None],
    source_keys: Collection[Any],
    kind: Callable[[tf.Tensor], Dependence],
) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
    """Returns what a gradient may be taken of instead of some targets.

    A scalar that is a sum of several kinds, such as of a quotient of totals, a mean and
    a norm of weights, is no tower's part of anything. Its terms are.

    Args:
        targets: What to differentiate.
        given: The gradient given for each; `None` for one.
        source_keys: The keys of what to differentiate for.
        kind: Tells how a tensor depends on the examples.

    Returns:
        The terms, and the gradients given for them.
    """
    pairs = []
    for target, factor in zip(targets, given, strict=True):
        leaves = [*_leaves(target, factor, source_keys, kind)]
        if kind(target) is MEAN and all(
            kind(leaf) is MEAN or not flows_to([leaf], source_keys)
            for leaf, _ in leaves
        ):
            leaves = [(target, factor)]
        pairs += leaves
    return [term for term, _ in pairs], [factor for _, factor in pairs]


def _leaves(target, given, source_keys, kind):
    waiting = [(target, given)]
    while waiting:
        term, factor = waiting.pop()
        before = None
        # A mean that is a quotient of parts has no part of a mean to be divided.
        linear = kind(term) is NONE or (
            kind(term) is MEAN and {*map(kind, term.op.inputs)} <= {MEAN, NONE}
        )
        # What it is differentiated for is no sum of others.
        if term.shape.rank == 0 and linear and key(term) not in source_keys:
            before = _terms_of(term.op, factor, source_keys)
        if before is None:
            yield term, factor
        else:
            waiting += before


def _terms_of(op, factor, source_keys):
    """Returns the terms of a sum or of a multiple, each with its factor; or `None`."""
    if op.type in ("AddN", "AddV2"):
        return [(term, factor) for term in op.inputs]
    if op.type == "Identity":
        return [(op.inputs[0], factor)]
    if op.type == "Sub":
        minus = tf.cast(-1, op.inputs[1].dtype) if factor is None else -factor
        return [(op.inputs[0], factor), (op.inputs[1], minus)]
    if op.type not in ("Mul", "RealDiv"):
        return None
    left, right = op.inputs
    if op.type == "Mul" and not flows_to([left], source_keys):
        left, right = right, left
    if flows_to([right], source_keys):
        return None
    if op.type == "RealDiv":
        return [(left, (1 if factor is None else factor) / right)]
    return [(left, right if factor is None else right * factor)]
