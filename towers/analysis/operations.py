"""Tells of an operation how its result depends on the examples, where its inputs do.

`axes/rows.py` does so for rows, `axes/columns.py` for columns, `axes/position.py` where
the axis is all that matters, and this module for all other kinds.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.analysis.axes.columns import of_columns
from towers.analysis.axes.position import of_einsum, with_examples_at
from towers.analysis.axes.rows import ELEMENTWISE, of_rows
from towers.analysis.kinds import (
    COLUMNS,
    COUPLED,
    MEAN,
    NONE,
    PACKED,
    ROWS,
    SHAPE,
    SIZE,
    SUM,
    UNKNOWN,
    Dependence,
)
from towers.analysis.static_values import integers
from towers.keras_adapter.graphs import gradient_module

# Each element is drawn by itself. Their second input is of the seed.
STATELESS_DRAWS = set(
    """StatelessRandomGammaV3 StatelessRandomNormalV2 StatelessRandomUniformFullIntV2
    StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessTruncatedNormalV2
    """.split()
)
_DRAWS = STATELESS_DRAWS | set(
    "RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal".split()
)
# Numbers of these types count examples. Smaller integers overflow.
_COUNTS = {tf.int32, tf.int64, tf.bfloat16, tf.float16, tf.float32, tf.float64}
# Where TensorFlow defines them.
_ACTIVATIONS = "tensorflow.python.ops.nn_impl"
# Their result for a sum is the sum of their results, wherever the axes are.
_LINEAR = set(
    "Cast ExpandDims Identity Mean Neg Reshape Squeeze StopGradient StridedSlice Sum "
    "Transpose".split()
)


def of_operation(
    tensor: tf.Tensor, inputs: Sequence[tf.Tensor], kinds: Sequence[Dependence]
) -> Dependence:
    """Tells how what an operation returns depends on the examples.

    Args:
        tensor: What it returns.
        inputs: What it takes.
        kinds: How each input depends on them: one does, none is COUPLED or UNKNOWN.
    """
    op = tensor.op
    if op.type == "IdentityN":
        # It has a custom gradient. Those of TensorFlow's activations are elementwise.
        known = gradient_module(op) == _ACTIVATIONS
        return kinds[tensor.value_index] if known else UNKNOWN
    present = set(kinds) - {NONE}
    if present == {PACKED}:
        unary = op.type in ELEMENTWISE and len(inputs) == 1
        return PACKED if unary else UNKNOWN
    if op.type in ("Pack", "ConcatV2"):
        return _of_parts(op, inputs, kinds)
    if op.type == "Einsum" and present <= {COLUMNS, ROWS}:
        return of_einsum(op, inputs, kinds)
    if present == {COLUMNS} or present == {COLUMNS, ROWS}:
        return of_columns(tensor, op, inputs, kinds)
    found = UNKNOWN
    if present <= {SUM, MEAN}:
        found = _of_totals(tensor, op, inputs, kinds, present)
    elif present <= {SIZE, SHAPE}:
        found = _of_sizes(tensor, op, inputs, kinds)
    elif op.type in ("RealDiv", "DivNoNan") and kinds == [SUM, SIZE]:
        found = MEAN
    elif present <= {ROWS, SHAPE}:
        found = of_rows(tensor, op, inputs, kinds)
    if found is UNKNOWN and op.type in ELEMENTWISE:
        # It knows no axis: where it takes a total and does none of the above, examples
        # meet. Integers are sizes for shapes, of which nothing is said; nor is it of a
        # comparison with a size.
        meeting = set()
        if tensor.dtype.is_floating:
            meeting = {SUM, MEAN, SIZE}
        elif any(t.dtype.is_floating for t in inputs):
            meeting = {SUM, MEAN}
        return COUPLED if present & meeting else UNKNOWN
    return found


def _of_parts(op, inputs, kinds):
    """Of values put side by side."""
    if op.type == "Pack":
        axis = op.get_attr("axis")
    else:
        axis, inputs, kinds = tf.get_static_value(inputs[-1]), inputs[:-1], kinds[:-1]
    if axis is None or inputs[0].shape.rank is None:
        return UNKNOWN
    present = set(kinds) - {NONE}
    if present <= {SIZE, SHAPE}:
        ahead = kinds[0] is not NONE and all(kind is NONE for kind in kinds[1:])
        # Shapes one above the other are no shape.
        flat = op.type != "Pack" or inputs[0].shape.rank == 0
        return SHAPE if ahead and flat else UNKNOWN
    if present == {MEAN}:
        return MEAN
    if present == {SUM} and NONE not in kinds:
        return SUM
    if NONE in kinds or present not in ({ROWS}, {COLUMNS}):
        return UNKNOWN
    packed, examples = op.type == "Pack", int(present == {COLUMNS})
    axis = int(axis) % (inputs[0].shape.rank + packed)
    if axis == examples and not packed:
        return UNKNOWN
    return with_examples_at(examples + (packed and axis <= examples))


def _of_totals(tensor, op, inputs, kinds, present):
    """Of sums and of means, where only what is linear leaves them so."""
    if op.type in ("Shape", "Size", "Rank"):
        return NONE
    if op.type in ("Cast", "Mean") and not tensor.dtype.is_floating:
        return UNKNOWN
    if op.type in _LINEAR:
        # All but the first are axes and shapes.
        return kinds[0] if all(kind is NONE for kind in kinds[1:]) else UNKNOWN
    if op.type == "Mul":
        return next(iter(present)) if NONE in kinds else UNKNOWN
    if op.type in ("RealDiv", "DivNoNan"):
        return kinds[0] if kinds[1] is NONE else UNKNOWN
    if op.type in ("AddV2", "Add", "Sub", "AddN"):
        if present == {MEAN}:
            return MEAN
        others = [t for t, kind in zip(inputs, kinds, strict=True) if kind is NONE]
        if present == {SUM} and all(map(_is_zero, others)):
            return SUM
    return UNKNOWN


def _is_zero(tensor):
    value = tf.get_static_value(tensor)
    return value is not None and not value.any()


def _of_sizes(tensor, op, inputs, kinds):
    """Of numbers of examples, and of shapes."""
    if op.type == "Cast":
        exact = inputs[0].dtype.is_integer and tensor.dtype in _COUNTS
        return kinds[0] if exact else UNKNOWN
    if op.type == "Identity":
        return kinds[0]
    if op.type == "StridedSlice" and kinds[0] is SHAPE:
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
    if op.type == "Slice" and kinds[0] is SHAPE:
        begin, sizes = integers(inputs[1]), integers(inputs[2])
        if begin is None or sizes is None:
            return UNKNOWN
        return NONE if begin[0] > 0 or sizes[0] == 0 else SHAPE
    if op.type == "GatherV2" and kinds == [SHAPE, NONE, NONE]:
        places = integers(inputs[1])
        if places is None or 0 in places[1:] or min(places) < 0:
            return UNKNOWN
        if places[0] > 0:
            return NONE
        return SHAPE if inputs[1].shape.rank == 1 else SIZE
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
    if op.type in _DRAWS and kinds[0] is SHAPE and set(kinds[1:]) <= {NONE}:
        return ROWS
    return UNKNOWN


def of_target(tensor: tf.Tensor, kind: Dependence) -> Dependence:
    """How the shape that a tensor is given depends on the examples.

    Where all but one axis are known, the number of elements tells that one.
    """
    rank = tensor.shape.rank
    if kind in (NONE, SHAPE) or rank is None or [*tensor.shape].count(None) > 1:
        return kind
    return NONE


def of_layer(
    tensor: tf.Tensor,
    inputs: Sequence[tf.Tensor],
    kinds: Sequence[Dependence],
    packed: bool,
) -> Dependence:
    """Tells how what a layer returns depends on the examples; see `of_operation`.

    A layer treats each example by itself, but for what it returns as a whole.
    """
    if not set(kinds) <= {NONE, ROWS, PACKED}:
        return COUPLED if set(kinds) & {SUM, MEAN} else UNKNOWN
    if packed:
        return PACKED
    if tensor.shape.rank in (0, None) or tensor.shape[0] is not None:
        return UNKNOWN
    # How far ragged rows are padded depends on the longest of them.
    if PACKED in kinds and None in tensor.shape[1:]:
        return UNKNOWN
    return ROWS
