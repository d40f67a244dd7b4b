"""Tells of an operation on rows, one or more for each example, what it makes of them.

What treats each row by itself gives rows, what adds them up a total. Where two examples
meet in another way, the result is coupled.
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

from towers.analysis.axes.position import flipped, moves, of_factor, of_moved
from towers.analysis.axes.types import (
    ELEMENTWISE,
    LAST_AXES,
    MATRICES,
    ROWWISE,
    SIGNATURES,
    rule_for,
)
from towers.analysis.kinds import (
    COUPLED,
    MEAN,
    NONE,
    ROWS,
    SHAPE,
    SIZE,
    SUM,
    UNKNOWN,
    Dependence,
)
from towers.analysis.static_values import integers, leading

# What these make of rows, whatever they are.
_ALWAYS = {"L2Loss": SUM, "Rank": NONE, "Shape": SHAPE, "Size": SIZE}
# By type of operation, what takes (tensor, op, inputs, kinds); and what takes (op,
# inputs), where the first input holds rows and no other depends on the examples.
_RULES, _RULES_OF_FIRST = {}, {}


def of_rows(
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
        kinds: Of each input ROWS, SHAPE or NONE; ROWS or SHAPE of one at least.
    """
    if op.type in ELEMENTWISE:
        if op.type == "Select" and kinds[0] is NONE and inputs[0].shape.rank:
            # A vector chooses rows.
            return UNKNOWN
        return _of_elements(inputs, kinds)
    if moves(op):
        return of_moved(op, inputs, kinds)
    if op.type in _ALWAYS:
        return _ALWAYS[op.type]
    if op.type in _RULES:
        return _RULES[op.type](tensor, op, inputs, kinds)
    if op.type in SIGNATURES:
        wanted, kind = SIGNATURES[op.type]
        return kind if [*kinds] == wanted else UNKNOWN
    if op.type in MATRICES:
        return _of_matrices(op, inputs, kinds)
    if kinds[0] is not ROWS or any(kind is not NONE for kind in kinds[1:]):
        return UNKNOWN
    if op.type in ROWWISE:
        return ROWS
    if op.type in LAST_AXES:
        return _if_more_axes_than(LAST_AXES[op.type], inputs)
    rule = _RULES_OF_FIRST.get(op.type)
    return UNKNOWN if rule is None else rule(op, inputs)


_rule = functools.partial(rule_for, _RULES)
_rule_of_first = functools.partial(rule_for, _RULES_OF_FIRST)


def _of_matrices(op, inputs, kinds):
    wanted, axes = MATRICES[op.type]
    ranks = {t.shape.rank for t, k in zip(inputs, kinds, strict=True) if k is ROWS}
    if [*kinds] != wanted or len(ranks) > 1:
        return UNKNOWN
    return _if_more_axes_than(axes, inputs)


@_rule("ShapeN")
def _of_shapes(tensor, op, inputs, kinds):
    of_shapes = {NONE: NONE, ROWS: SHAPE}
    return of_shapes.get(kinds[tensor.value_index], UNKNOWN)


@_rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def _of_projection(tensor, op, inputs, kinds):
    """One transform is for all images; otherwise each has its own."""
    one = kinds[1] is NONE and inputs[1].shape.rank == 2 and inputs[1].shape[0] == 1
    apart = kinds[0] is ROWS and {*kinds[2:]} == {NONE}
    return ROWS if apart and (one or kinds[1] is ROWS) else UNKNOWN


@_rule("ReverseSequence")
def _of_reversed(tensor, op, inputs, kinds):
    return ROWS if kinds == [ROWS, ROWS] and not op.get_attr("batch_dim") else UNKNOWN


@_rule("MaxPoolWithArgmax")
def _of_pooling(tensor, op, inputs, kinds):
    """The places may be counted from the first example on."""
    counted = tensor.value_index and op.get_attr("include_batch_in_index")
    return UNKNOWN if counted else ROWS


@_rule("FusedBatchNormV3")
def _of_normalization(tensor, op, inputs, kinds):
    """In inference, its statistics are given."""
    given = not op.get_attr("is_training") and kinds == [ROWS, *4 * [NONE]]
    return ROWS if given and tensor.value_index == 0 else UNKNOWN


@_rule("BroadcastTo")
def _of_broadcast(tensor, op, inputs, kinds):
    """A number of rows that is given would be one tower's as well as the batch's."""
    same = tensor.shape.rank == inputs[0].shape.rank
    return ROWS if kinds == [ROWS, SHAPE] and same else UNKNOWN


@_rule_of_first("EnsureShape")
def _of_ensured(op, inputs):
    shape = tf.TensorShape(op.get_attr("shape"))
    return ROWS if shape.rank is None or shape[0] is None else UNKNOWN


@_rule_of_first("OneHot")
def _of_one_hot(op, inputs):
    return ROWS if op.get_attr("axis") else UNKNOWN


@_rule_of_first("MatrixDiagV3")
def _of_diagonals(op, inputs):
    """One diagonal has one axis, several have two."""
    offsets = integers(inputs[1])
    one = offsets is not None and offsets[0] == offsets[-1]
    return _if_more_axes_than(1 if one else 2, inputs)


@_rule("MatrixSetDiagV3")
def _of_set_diagonals(tensor, op, inputs, kinds):
    apart = kinds == [ROWS, ROWS, NONE]
    return _if_more_axes_than(2, inputs) if apart else UNKNOWN


def _if_more_axes_than(axes, inputs):
    """Rows, where the first axis is not among the last ones."""
    rank = inputs[0].shape.rank
    return ROWS if rank is not None and rank > axes else UNKNOWN


@_rule_of_first("MirrorPad", "Pad", "PadV2")
def _of_padding(op, inputs):
    paddings = leading(inputs[1], 2)
    return ROWS if paddings is not None and not any(paddings) else UNKNOWN


@_rule_of_first("Tile")
def _of_tile(op, inputs):
    return ROWS if leading(inputs[1], 1) == [1] else UNKNOWN


@_rule_of_first("Slice")
def _of_part(op, inputs):
    """Rows stay if all of the first axis are taken."""
    begin, size = (leading(each, 1) for each in inputs[1:])
    return ROWS if (begin, size) == ([0], [-1]) else UNKNOWN


@_rule_of_first("Cumprod", "Cumsum", "CumulativeLogsumexp", "ReverseV2", "Roll")
def _of_moved(op, inputs):
    """Of what moves values along axes."""
    axes, rank = tf.get_static_value(inputs[-1]), inputs[0].shape.rank
    if axes is None or rank is None:
        return UNKNOWN
    return COUPLED if any(int(axis) % rank == 0 for axis in axes.flat) else ROWS


def _of_elements(inputs, kinds):
    """Of operations on elements, where broadcasting must not pair two examples."""
    if not set(kinds) <= {ROWS, NONE}:
        return UNKNOWN
    ranks = {
        t.shape.rank for t, kind in zip(inputs, kinds, strict=True) if kind is ROWS
    }
    if None in ranks or len(ranks) != 1:
        return UNKNOWN
    (rank,) = ranks
    for other, kind in zip(inputs, kinds, strict=True):
        if kind is ROWS:
            continue
        if other.shape.rank is None or other.shape.rank > rank:
            return UNKNOWN
        if other.shape.rank == rank and other.shape[0] != 1:
            return UNKNOWN
    return ROWS


@_rule(*"All Any ArgMax ArgMin EuclideanNorm Max Mean Min Prod Sum".split())
def _of_reduction(tensor, op, inputs, kinds):
    axes, rank = integers(inputs[1]), inputs[0].shape.rank
    if axes is None or rank is None:
        return UNKNOWN
    if all(axis % rank != 0 for axis in axes):
        return ROWS
    if op.type == "Mean" and inputs[0].dtype.is_floating:
        return MEAN
    if op.type == "Sum":
        return SUM
    # A largest integer may be the longest row, and that no more than a shape.
    return COUPLED if inputs[0].dtype.is_floating else UNKNOWN


@_rule("MatMul", "BatchMatMulV2", "BatchMatMulV3")
def _of_product(tensor, op, inputs, kinds):
    rank, other = inputs[0].shape.rank, inputs[1].shape.rank
    if rank is None or other is None:
        return UNKNOWN
    if NONE in kinds:
        return of_factor(op, inputs, kinds)
    if kinds != [ROWS, ROWS] or rank != other:
        return UNKNOWN
    if rank > 2:
        return ROWS
    flip, flip_other = flipped(op)
    if flip and not flip_other:
        return SUM  # over the examples, of products of their rows
    # Each with each; or each with all, as by an adjacency matrix.
    return UNKNOWN if flip else COUPLED


@_rule("Reshape")
def _of_reshape(tensor, op, inputs, kinds):
    """The first axis stays if each example becomes a whole number of rows."""
    if kinds[0] is not ROWS:
        return UNKNOWN
    if kinds[1] is SHAPE:
        return ROWS
    if kinds[1] is not NONE or tensor.shape.rank in (None, 0):
        return UNKNOWN
    old, new = inputs[0].shape[1:].as_list(), tensor.shape[1:].as_list()
    if None in new:
        # As cross entropy asks for it, by the shape of something.
        target = integers(inputs[1]) or [None]
        new = target[1:] if target[0] == -1 else new
    if tensor.shape[0] is not None or None in new:
        return UNKNOWN
    if new == old[len(old) - len(new) :]:
        return ROWS
    size = tf.TensorShape(old).num_elements()
    parts = tf.TensorShape(new).num_elements()
    return ROWS if size is not None and parts and size % parts == 0 else UNKNOWN


@_rule("GatherV2")
def _of_gather(tensor, op, inputs, kinds):
    axis, rank = integers(inputs[2]), inputs[0].shape.rank
    if axis is None or rank is None:
        return UNKNOWN
    # Where both have the examples' axis, each takes from its own row.
    apart = axis[0] % rank != 0
    if op.get_attr("batch_dims") > 0:
        return ROWS if kinds[:2] == [ROWS, ROWS] and apart else UNKNOWN
    if op.get_attr("batch_dims") != 0:
        return UNKNOWN
    if kinds[:2] == [NONE, ROWS]:
        return UNKNOWN if apart else ROWS
    return ROWS if kinds[:2] == [ROWS, NONE] and apart else UNKNOWN


@_rule_of_first("StridedSlice")
def _of_slice(op, inputs):
    """Rows stay if the slice takes all of the first axis."""
    begin, steps = leading(inputs[1], 1), leading(inputs[3], 1)
    if not begin or not steps or op.get_attr("new_axis_mask") & 1:
        return UNKNOWN
    if op.get_attr("ellipsis_mask") & 1:
        rank, count = inputs[0].shape.rank, inputs[1].shape[0]
        return ROWS if None not in (rank, count) and count - 1 < rank else UNKNOWN
    whole = (
        (op.get_attr("begin_mask") & 1 or begin == [0])
        and op.get_attr("end_mask") & 1
        and not op.get_attr("shrink_axis_mask") & 1
        and steps == [1]
    )
    if whole:
        return ROWS
    # Some examples picked out; of integers, perhaps for a shape.
    known = tf.get_static_value(inputs[1]) is not None
    return COUPLED if known and inputs[0].dtype.is_floating else UNKNOWN
