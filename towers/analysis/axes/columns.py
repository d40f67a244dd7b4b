"""Rules for operations on tensors whose second axis is the examples'.

Attention puts queries, keys and values first, and a mixture of experts its experts.
Most models undo this soon, so the rules know the ways back to rows.
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

from towers.analysis.axes.position import (
    ELEMENTWISE,
    flipped,
    moves,
    of_factor,
    of_moved,
    rule_for,
    with_examples_at,
)
from towers.analysis.kinds import (
    COLUMNS,
    COUPLED,
    LAST,
    NONE,
    ROWS,
    SUM,
    TURNED,
    UNKNOWN,
    Dependence,
)
from towers.analysis.static_values import integers

_LAST_AXIS = {"LogSoftmax", "Softmax"}
_REDUCTIONS = {"All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum"}
# For each type of operation, a rule that takes (tensor, op, inputs). The first input
# has columns, and no other input depends on the examples.
_RULES = {}
_PRODUCTS = "BatchMatMulV2", "BatchMatMulV3"


def of_columns(
    tensor: tf.Tensor,
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    kinds: Sequence[Dependence],
) -> Dependence:
    """Determines how a result of an operation depends on the examples.

    Args:
        tensor: The result.
        op: The operation.
        inputs: The inputs.
        kinds: COLUMNS, ROWS or NONE for each input; COLUMNS for at least one.
    """
    if op.type == "MatMul" and NONE not in kinds:
        # A sum over the examples; or each example with each.
        flipped = op.get_attr("transpose_a") or op.get_attr("transpose_b")
        kind = {(COLUMNS, ROWS): SUM, (ROWS, COLUMNS): COUPLED}.get(tuple(kinds))
        return UNKNOWN if flipped or kind is None else kind
    if ROWS in kinds or any(tensor.shape.rank is None for tensor in inputs):
        return UNKNOWN
    if op.type in ELEMENTWISE:
        return _of_elements(inputs, kinds)
    if op.type in ("BatchMatMulV2", "BatchMatMulV3", "MatMul"):
        return _of_product(op, inputs, kinds)
    if moves(op):
        return of_moved(op, inputs, kinds)
    rule = _RULES.get(op.type)
    if rule is None or kinds[0] is not COLUMNS or set(kinds[1:]) - {NONE}:
        return UNKNOWN
    return rule(tensor, op, inputs)


_rule = functools.partial(rule_for, _RULES)


def _of_elements(inputs, kinds):
    """Handles operations on elements: broadcasting must not pair two examples."""
    ranks = {t.shape.rank for t, k in zip(inputs, kinds, strict=True) if k is COLUMNS}
    if len(ranks) != 1:
        return UNKNOWN
    (rank,) = ranks
    for other, kind in zip(inputs, kinds, strict=True):
        # The axis that meets the examples' axis, if the input has so many axes.
        axis = other.shape.rank - rank + 1
        if kind is COLUMNS or axis < 0:
            continue
        if axis > 1 or other.shape[axis] != 1:
            return UNKNOWN
    return COLUMNS


def _of_product(op, inputs, kinds):
    rank, other = (tensor.shape.rank for tensor in inputs)
    if NONE in kinds:
        return of_factor(op, inputs, kinds)
    return COLUMNS if rank == other and rank > 3 else UNKNOWN


@_rule(*_LAST_AXIS)
def _of_last_axis(tensor, op, inputs):
    return COLUMNS if inputs[0].shape.rank > 2 else UNKNOWN


@_rule(*_REDUCTIONS)
def _of_reduction(tensor, op, inputs):
    axes = integers(inputs[1])
    if axes is None:
        return UNKNOWN
    axes = [axis % inputs[0].shape.rank for axis in axes]
    kept = tensor.shape.rank == inputs[0].shape.rank
    return UNKNOWN if 1 in axes else with_examples_at(1 - (0 in axes and not kept))


@_rule("Reshape")
def _of_reshape(tensor, op, inputs):
    """Keeps the first axis, and makes a whole number of columns of each example."""
    old, new = inputs[0].shape, tensor.shape
    if old.rank == 2 and new.rank and new.rank > 2 and new[-1] is None:
        return of_reshape(tensor, inputs)
    if new.rank is None or new.rank < 2 or old[0] is None or old[0] != new[0]:
        return UNKNOWN
    size, parts = old[2:].num_elements(), new[2:].num_elements()
    whole = size is not None and parts and size % parts == 0
    return COLUMNS if whole and new[1] is None else UNKNOWN


@_rule("Pad", "PadV2")
def _of_padding(tensor, op, inputs):
    paddings = integers(inputs[1])
    return COLUMNS if paddings is not None and not any(paddings[2:4]) else UNKNOWN


@_rule("StridedSlice")
def _of_slice(tensor, op, inputs):
    """Keeps the examples if the slice takes all of their axis."""
    begin, steps = (tf.get_static_value(inputs[i], partial=True) for i in (1, 3))
    if begin is None or steps is None:
        return UNKNOWN
    marks = {
        name: [bool(op.get_attr(f"{name}_mask") >> i & 1) for i in range(len(begin))]
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    rest = inputs[0].shape.rank - (len(begin) - 1 - sum(marks["new_axis"]))
    axis, position = 0, 1
    for i in range(len(begin)):
        if axis > 1:
            break
        if marks["ellipsis"][i]:
            axis += rest
        elif marks["new_axis"][i]:
            position += 1
        elif axis == 1:
            whole = marks["end"][i] and (marks["begin"][i] or begin[i] == 0)
            if not whole or marks["shrink_axis"][i] or steps[i] != 1:
                return UNKNOWN
            axis += 1
        else:
            position -= marks["shrink_axis"][i]
            axis += 1
    return with_examples_at(position)


@_rule("Shape")
def _of_shape(tensor, op, inputs):
    return TURNED


@_rule("GatherV2")
def _of_gather(tensor, op, inputs):
    """Replaces the first axis, or a later one, by the axes of the indices."""
    axis, rank = integers(inputs[2]), inputs[0].shape.rank
    ids_rank = inputs[1].shape.rank
    if axis is None or ids_rank is None or op.get_attr("batch_dims"):
        return UNKNOWN
    if axis[0] % rank == 1:
        return UNKNOWN
    return with_examples_at(1 if axis[0] % rank else ids_rank, tensor.shape.rank)


# Operations on tensors whose last axis is the examples'.
#
# Block-sparse products have features first: a block of them is one piece of memory.


def of_last(
    tensor: tf.Tensor,
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    kinds: Sequence[Dependence],
) -> Dependence:
    """Tells how what an operation returns depends on the examples.

    Args:
        tensor: What it returns.
        op: The operation.
        inputs: What it takes.
        kinds: Of each input LAST or NONE; LAST of one at least.
    """
    if any(each.shape.rank is None for each in inputs) or tensor.shape.rank is None:
        return UNKNOWN
    if moves(op):
        return of_moved(op, inputs, kinds)
    if op.type in ELEMENTWISE:
        return _last_elements(tensor, inputs, kinds)
    if op.type in _PRODUCTS:
        return _last_product(op, inputs, kinds)
    rule = {
        "GatherV2": _last_gather,
        "Pad": _last_padding,
        "PadV2": _last_padding,
        "Reshape": of_reshape,
    }.get(op.type)
    if rule is None or kinds[0] is not LAST or {*kinds[1:]} - {NONE}:
        return UNKNOWN
    return rule(tensor, inputs)


def _last_elements(tensor, inputs, kinds):
    """Of operations on elements, where broadcasting must not pair two examples."""
    for other, kind in zip(inputs, kinds, strict=True):
        if kind is LAST and other.shape.rank != tensor.shape.rank:
            return UNKNOWN
        if kind is NONE and other.shape.rank and other.shape[-1] != 1:
            return UNKNOWN
    return LAST


def _last_product(op, inputs, kinds):
    if NONE in kinds:
        return of_factor(op, inputs, kinds)
    # Over the examples, of products of their values.
    return SUM if flipped(op) == (False, True) else UNKNOWN


def _last_gather(tensor, inputs):
    axis, rank = integers(inputs[2]), inputs[0].shape.rank
    batched = tensor.op.get_attr("batch_dims") != 0
    if axis is None or batched or axis[0] % rank == rank - 1:
        return UNKNOWN
    return with_examples_at(tensor.shape.rank - 1, tensor.shape.rank)


def _last_padding(tensor, inputs):
    paddings = integers(inputs[1])
    return LAST if paddings is not None and not any(paddings[-2:]) else UNKNOWN


def of_reshape(tensor: tf.Tensor, inputs: Sequence[tf.Tensor]) -> Dependence:
    """Tells where the examples are, if a reshape leaves the last axis as it is.

    Args:
        tensor: What it returns.
        inputs: What it takes; the last axis of the first is the examples'.
    """
    old, new = inputs[0].shape, tensor.shape
    if new.rank is None or new.rank < 2 or new[-1] is not None or old[-1] is not None:
        return UNKNOWN
    before, after = old[:-1].num_elements(), new[:-1].num_elements()
    if before is None or before != after:
        return UNKNOWN
    return with_examples_at(new.rank - 1, new.rank)
