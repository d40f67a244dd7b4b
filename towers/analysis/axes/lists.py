"""Tells of an operation what it makes of lists of tensors, which loops fill and read.

A list depends on the examples as each of its tensors does. How many these are, and
what shape the list asks of them, is alike everywhere: what makes a list, or adds to
one, is only known where nothing but the tensors depends on the examples.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.analysis.axes.position import axis_of, with_examples_at
from towers.analysis.kinds import (
    COLUMNS,
    LAST,
    MEAN,
    NONE,
    ROWS,
    SHAPE,
    SIZE,
    SUM,
    TURNED,
    UNKNOWN,
    Dependence,
)

# What tensors of a list may be, beside NONE.
_OF_TENSORS = {COLUMNS, LAST, MEAN, ROWS, SHAPE, SIZE, SUM, TURNED}
_SIZES = {SHAPE, SIZE, TURNED}
# By type, the place of what is put into the list that comes first.
_PUT = {"TensorListPushBack": 1, "TensorListSetItem": 2}
_MAKE = {"TensorListFromTensor", "TensorListScatterV2"}
_SAME = {"Identity", "TensorListResize", "ZerosLike"}
_STACK = {"TensorListGather", "TensorListStack"}
_TAKE = {"TensorListGetItem", "TensorListPopBack"}


def is_of_lists(op: tf.Operation) -> bool:
    """Tells whether an operation takes or makes lists."""
    return any(t.dtype == tf.variant for t in (*op.inputs, *op.outputs))


def is_new(op: tf.Operation) -> bool:
    """Tells whether an operation makes a list of which no tensor is set."""
    return op.type in ("EmptyTensorList", "TensorListReserve")


def of_list(
    tensor: tf.Tensor,
    inputs: Sequence[tf.Tensor],
    kinds: Sequence[Dependence],
    empty: bool,
) -> Dependence:
    """Tells how what an operation returns depends on the examples.

    Args:
        tensor: What it returns.
        inputs: What it takes.
        kinds: How each input depends on them: one does, none is COUPLED or UNKNOWN.
        empty: Whether the first input is a list of which no tensor is set.
    """
    type_, first, others = tensor.op.type, kinds[0], {*kinds[1:]}
    if type_ in _PUT:
        put = kinds[_PUT[type_]]
        known = put in _OF_TENSORS and [*kinds[1:]].count(NONE) == _PUT[type_] - 1
        return put if known and (empty or put is first) else UNKNOWN
    if first not in _OF_TENSORS:
        return UNKNOWN
    if type_ == "AddN":
        return first if {*kinds} == {first} and first not in _SIZES else UNKNOWN
    if type_ in _TAKE and first is ROWS:
        # What is not set is zeros, of a shape that is given.
        others -= {SHAPE}
    if not others <= {NONE}:
        return UNKNOWN
    if type_ in ("TensorListElementShape", "TensorListLength"):
        return NONE
    if first in _SIZES and type_ in ("TensorListGetItem", "ZerosLike"):
        # Zeros, as of what is not set, are no sizes.
        return UNKNOWN
    if type_ in _TAKE or type_ in _SAME:
        return first
    if type_ in _MAKE:
        return _moved(first, axis_of(inputs[0], first), -1, inputs[0].shape.rank)
    if type_ in _STACK:
        rank = tensor.shape.rank
        axes = {ROWS: 0, COLUMNS: 1, LAST: None if rank is None else rank - 2}
        return _moved(first, axes.get(first), 1, rank and rank - 1)
    return UNKNOWN


def _moved(kind, axis, by, rank):
    """Returns what tensors become that get an axis in front, or lose the first one."""
    if kind in (MEAN, SUM):
        return kind
    if axis is None or axis + by < 0:
        return UNKNOWN
    return with_examples_at(axis + by, None if rank is None else rank + by)
