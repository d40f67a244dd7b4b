"""Rules for operations on shapes, and on numbers of examples."""

import functools
from collections.abc import Sequence

import tensorflow as tf

from towers.analysis.axes.position import rule_for
from towers.analysis.kinds import (
    NONE,
    ROWS,
    SHAPE,
    SIZE,
    TURNED,
    UNKNOWN,
    Dependence,
)
from towers.analysis.static_values import integers, leading

# They draw each element by itself, and take a shape first, and then the seed.
STATELESS_DRAWS = set(
    """StatelessRandomGammaV3 StatelessRandomNormalV2 StatelessRandomUniformFullIntV2
    StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessTruncatedNormalV2
    """.split()
)
DRAWS = STATELESS_DRAWS | set(
    "RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal".split()
)
# Numbers of these types can count examples. Smaller integers overflow.
_COUNTS = {tf.int32, tf.int64, tf.bfloat16, tf.float16, tf.float32, tf.float64}
# For each type of operation, a rule that takes (tensor, op, inputs), where the first
# input is a shape, and no other input depends on the examples.
_RULES_OF_SHAPES = {}


def of_sizes(
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
        kinds: SHAPE, SIZE or NONE for each input; SHAPE or SIZE for at least one.
    """
    if op.type == "Cast":
        exact = inputs[0].dtype.is_integer and tensor.dtype in _COUNTS
        return kinds[0] if exact else UNKNOWN
    if op.type == "Identity":
        return kinds[0]
    if op.type in _RULES_OF_SHAPES:
        of_shape = kinds[0] is SHAPE and {*kinds[1:]} <= {NONE}
        return _RULES_OF_SHAPES[op.type](tensor, op, inputs) if of_shape else UNKNOWN
    if op.type == "Tile" and kinds == [NONE, SHAPE] and inputs[0].shape.rank:
        return ROWS if inputs[0].shape[0] == 1 else UNKNOWN
    if op.type == "Prod" and kinds[0] is SHAPE:
        return SIZE
    if op.type == "ExpandDims" and kinds[0] is SIZE and not inputs[0].shape.rank:
        return SHAPE
    if op.type in ("Squeeze", "Reshape") and kinds[0] is SIZE:
        return SIZE if all(kind is NONE for kind in kinds[1:]) else UNKNOWN
    if op.type == "Mul" and set(kinds) == {SIZE, NONE}:
        return SIZE
    if op.type == "Fill" and kinds == [SHAPE, NONE]:
        return ROWS
    if op.type == "BroadcastTo" and kinds == [NONE, SHAPE]:
        old, new = inputs[0].shape, inputs[1].shape[0]
        same = old.rank is not None and (old.rank != new or old[0] == 1)
        return ROWS if same and new is not None else UNKNOWN
    if op.type in DRAWS and kinds[0] is SHAPE and set(kinds[1:]) <= {NONE}:
        return ROWS
    return UNKNOWN


def of_turned(
    op: tf.Operation, inputs: Sequence[tf.Tensor], kinds: Sequence[Dependence]
) -> Dependence:
    """Determines the kind of a result that is made from a shape of columns.

    Args:
        op: The operation.
        inputs: The inputs.
        kinds: How each input depends on the examples: one is TURNED.
    """
    if kinds[0] is not TURNED or {*kinds[1:]} - {NONE}:
        return UNKNOWN
    if op.type == "Identity":
        return TURNED
    if op.type != "StridedSlice" or not op.get_attr("shrink_axis_mask"):
        return UNKNOWN
    begin, rank = integers(inputs[1]), inputs[0].shape[0]
    if begin is None or rank is None:
        return UNKNOWN
    return SIZE if begin[0] % rank == 1 else NONE


_rule = functools.partial(rule_for, _RULES_OF_SHAPES)


@_rule("StridedSlice")
def _of_slice(tensor, op, inputs):
    begin, end, step = map(integers, inputs[1:4])
    if begin is None or end is None or step is None or len(begin) != 1:
        return UNKNOWN
    first = 0 if op.get_attr("begin_mask") & 1 else int(begin[0])
    if first < 0 and inputs[0].shape[0] is not None:
        first += inputs[0].shape[0]
    if first < 0 or int(step[0]) != 1 or op.get_attr("new_axis_mask"):
        return UNKNOWN
    if first > 0:
        return NONE
    if op.get_attr("shrink_axis_mask") & 1:
        return SIZE
    last = None if op.get_attr("end_mask") & 1 else int(end[0])
    if last is not None and last < 0:
        if inputs[0].shape[0] is None:
            return UNKNOWN
        last += inputs[0].shape[0]
    return NONE if last is not None and last <= 0 else SHAPE


@_rule("Slice")
def _of_part(tensor, op, inputs):
    begin, sizes = integers(inputs[1]), integers(inputs[2])
    if begin is None or sizes is None:
        return UNKNOWN
    return NONE if begin[0] > 0 or sizes[0] == 0 else SHAPE


@_rule("GatherV2")
def _of_places(tensor, op, inputs):
    numbers = integers(inputs[1])
    if not numbers or 0 in numbers[1:] or min(numbers) < 0:
        return UNKNOWN
    if numbers[0] > 0:
        return NONE
    return SHAPE if inputs[1].shape.rank == 1 else SIZE


@_rule("Unpack")
def _of_one(tensor, op, inputs):
    return NONE if tensor.value_index else SIZE


@_rule("SplitV")
def _of_piece(tensor, op, inputs):
    sizes, count = integers(inputs[1]), tensor.shape.num_elements()
    before = None if sizes is None else sizes[: tensor.value_index]
    if before is None or count is None or min(before, default=0) < 0:
        return UNKNOWN
    return NONE if any(before) or not count else SHAPE


@_rule("Pad", "PadV2")
def _of_longer(tensor, op, inputs):
    return SHAPE if leading(inputs[1], 1) == [0] else UNKNOWN
