"""Tells of an operation what it makes of tensors whose last axis is the examples'.

Block-sparse products have features first: a block of them is one piece of memory.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.analysis.axes.position import (
    flipped,
    moves,
    of_factor,
    of_moved,
    with_examples_at,
)
from towers.analysis.axes.types import ELEMENTWISE
from towers.analysis.kinds import LAST, NONE, SUM, UNKNOWN, Dependence
from towers.analysis.static_values import integers

_PRODUCTS = "BatchMatMulV2", "BatchMatMulV3"


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
        return _of_elements(tensor, inputs, kinds)
    if op.type in _PRODUCTS:
        return _of_product(op, inputs, kinds)
    rule = {
        "GatherV2": _of_gather,
        "Pad": _of_padding,
        "PadV2": _of_padding,
        "Reshape": of_reshape,
    }.get(op.type)
    if rule is None or kinds[0] is not LAST or {*kinds[1:]} - {NONE}:
        return UNKNOWN
    return rule(tensor, inputs)


def _of_elements(tensor, inputs, kinds):
    """Of operations on elements, where broadcasting must not pair two examples."""
    for other, kind in zip(inputs, kinds, strict=True):
        if kind is LAST and other.shape.rank != tensor.shape.rank:
            return UNKNOWN
        if kind is NONE and other.shape.rank and other.shape[-1] != 1:
            return UNKNOWN
    return LAST


def _of_product(op, inputs, kinds):
    if NONE in kinds:
        return of_factor(op, inputs, kinds)
    # Over the examples, of products of their values.
    return SUM if flipped(op) == (False, True) else UNKNOWN


def _of_gather(tensor, inputs):
    axis, rank = integers(inputs[2]), inputs[0].shape.rank
    batched = tensor.op.get_attr("batch_dims") != 0
    if axis is None or batched or axis[0] % rank == rank - 1:
        return UNKNOWN
    return with_examples_at(tensor.shape.rank - 1, tensor.shape.rank)


def _of_padding(tensor, inputs):
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
