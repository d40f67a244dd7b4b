"""Tells of an operation how its result depends on the examples, where its inputs do.

`axes/rows.py` does so for rows, `axes/columns.py` for columns, `axes/last.py` where
the last axis is the examples', `axes/sizes.py` for shapes, `axes/position.py` where the
axis is all that matters, this module for others.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.analysis.axes.columns import of_columns
from towers.analysis.axes.last import of_last
from towers.analysis.axes.position import axis_of, of_einsum, with_examples_at
from towers.analysis.axes.rows import of_rows
from towers.analysis.axes.sizes import of_sizes, of_turned
from towers.analysis.axes.types import ELEMENTWISE
from towers.analysis.kinds import (
    COLUMNS,
    COUPLED,
    LAST,
    MEAN,
    NONE,
    PACKED,
    ROWS,
    SHAPE,
    SIZE,
    SUM,
    TURNED,
    UNKNOWN,
    Dependence,
)
from towers.keras_adapter.graphs import gradient_module

# Modules of this project with functions whose gradients are custom. All of these keep
# rows apart, as the functions do.
BLOCK_PRODUCTS = (
    "towers.models.block_sparse.attention",
    "towers.models.block_sparse.product",
)
# So do TensorFlow's activations, which are elementwise.
_ROWS_APART = ("tensorflow.python.ops.nn_impl", *BLOCK_PRODUCTS)
# Their result for a sum is the sum of their results, wherever the axes are.
_LINEAR = set(
    "Cast ExpandDims GatherV2 Identity Mean Neg Pad Reshape Squeeze StopGradient "
    "StridedSlice Sum Transpose".split()
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
        known = gradient_module(op.node_def) in _ROWS_APART
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
    if present == {LAST}:
        return of_last(tensor, op, inputs, kinds)
    if present == {TURNED}:
        return of_turned(op, inputs, kinds)
    kind = UNKNOWN
    if present <= {SUM, MEAN}:
        kind = _of_totals(tensor, op, inputs, kinds, present)
    elif present <= {SIZE, SHAPE}:
        kind = of_sizes(tensor, op, inputs, kinds)
    elif op.type in ("RealDiv", "DivNoNan") and kinds == [SUM, SIZE]:
        kind = MEAN
    elif present <= {ROWS, SHAPE}:
        kind = of_rows(tensor, op, inputs, kinds)
    if kind is UNKNOWN and op.type in ELEMENTWISE:
        # It knows no axis: where it takes a total and does none of the above, examples
        # meet. Integers are sizes for shapes, of which nothing is said; nor is it of a
        # comparison with a size.
        meeting = set()
        if tensor.dtype.is_floating:
            meeting = {SUM, MEAN, SIZE}
        elif any(t.dtype.is_floating for t in inputs):
            meeting = {SUM, MEAN}
        return COUPLED if present & meeting else UNKNOWN
    return kind


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
        if op.type == "ConcatV2":
            # Nothing may stand before it, such as what comes before the first axis.
            pairs = zip(inputs, kinds, strict=True)
            kinds = [kind for each, kind in pairs if each.shape.num_elements() != 0]
        ahead = (
            kinds and kinds[0] is not NONE and all(kind is NONE for kind in kinds[1:])
        )
        # Shapes one above the other are no shape.
        flat = op.type != "Pack" or inputs[0].shape.rank == 0
        return SHAPE if ahead and flat else UNKNOWN
    if present == {MEAN}:
        return MEAN
    if present == {SUM} and NONE not in kinds:
        return SUM
    if NONE in kinds or present not in ({ROWS}, {COLUMNS}, {LAST}):
        return UNKNOWN
    packed, examples = op.type == "Pack", axis_of(inputs[0], *present)
    axis = int(axis) % (inputs[0].shape.rank + packed)
    if axis == examples and not packed:
        return UNKNOWN
    moved = packed and axis <= examples
    return with_examples_at(examples + moved, inputs[0].shape.rank + packed)


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
        if present == {SUM} and all(map(is_zero, others)):
            return SUM
    return UNKNOWN


def is_zero(tensor: tf.Tensor) -> bool:
    """Tells whether a tensor is known to be zeros."""
    # One number tells of as many as there may be.
    filled = tensor.op.type == "Fill"
    value = tf.get_static_value(tensor.op.inputs[1] if filled else tensor)
    return value is not None and not value.any()


def of_target(tensor: tf.Tensor, kind: Dependence) -> Dependence:
    """Tells how the shape that a tensor is given depends on the examples.

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
