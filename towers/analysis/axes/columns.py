"""Tells of an operation what it makes of tensors whose second axis is the examples'.

Attention puts queries, keys and values first, and a mixture of experts puts these. Most
of it is undone soon, so what is known here are the ways back to rows.
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

from towers.analysis.axes.last import of_reshape
from towers.analysis.axes.position import (
    moves,
    of_factor,
    of_moved,
    with_examples_at,
)
from towers.analysis.axes.types import ELEMENTWISE, rule_for
from towers.analysis.kinds import (
    COLUMNS,
    COUPLED,
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
# By type of operation, what takes (tensor, op, inputs), where the first input has
# columns, and nothing else depends on the examples.
_RULES = {}


def of_columns(
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
        kinds: Of each input COLUMNS, ROWS or NONE; COLUMNS of one at least.
    """
    if op.type == "MatMul" and NONE not in kinds:
        # Over the examples; or each with each.
        flipped = op.get_attr("transpose_a") or op.get_attr("transpose_b")
        kind = {(COLUMNS, ROWS): SUM, (ROWS, COLUMNS): COUPLED}.get(tuple(kinds))
        return UNKNOWN if flipped or kind is None else kind
    if ROWS in kinds or any(each.shape.rank is None for each in inputs):
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
    """Of operations on elements, where broadcasting must not pair two examples."""
    ranks = {t.shape.rank for t, k in zip(inputs, kinds, strict=True) if k is COLUMNS}
    if len(ranks) != 1:
        return UNKNOWN
    (rank,) = ranks
    for other, kind in zip(inputs, kinds, strict=True):
        # Where it meets the examples' axis, if it has so many axes.
        axis = other.shape.rank - rank + 1
        if kind is COLUMNS or axis < 0:
            continue
        if axis > 1 or other.shape[axis] != 1:
            return UNKNOWN
    return COLUMNS


def _of_product(op, inputs, kinds):
    rank, other = (each.shape.rank for each in inputs)
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
    """The first axis stays, and each example becomes a whole number of columns."""
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
    """The examples stay if the slice takes all of their axis."""
    begin, steps = (tf.get_static_value(inputs[i], partial=True) for i in (1, 3))
    if begin is None or steps is None:
        return UNKNOWN
    marks = {
        name: [bool(op.get_attr(f"{name}_mask") >> i & 1) for i in range(len(begin))]
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    rest = inputs[0].shape.rank - (len(begin) - 1 - sum(marks["new_axis"]))
    axis, place = 0, 1
    for i in range(len(begin)):
        if axis > 1:
            break
        if marks["ellipsis"][i]:
            axis += rest
        elif marks["new_axis"][i]:
            place += 1
        elif axis == 1:
            whole = marks["end"][i] and (marks["begin"][i] or begin[i] == 0)
            if not whole or marks["shrink_axis"][i] or steps[i] != 1:
                return UNKNOWN
            axis += 1
        else:
            place -= marks["shrink_axis"][i]
            axis += 1
    return with_examples_at(place)


@_rule("Shape")
def _of_shape(tensor, op, inputs):
    return TURNED


@_rule("GatherV2")
def _of_gather(tensor, op, inputs):
    """Numbers of places stand for the first axis, or for a later one."""
    axis, rank = integers(inputs[2]), inputs[0].shape.rank
    ids_rank = inputs[1].shape.rank
    if axis is None or ids_rank is None or op.get_attr("batch_dims"):
        return UNKNOWN
    if axis[0] % rank == 1:
        return UNKNOWN
    return with_examples_at(1 if axis[0] % rank else ids_rank, tensor.shape.rank)
