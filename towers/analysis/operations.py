"""Derives how the result of an operation depends on the examples from its inputs.

This module has the rules for rows, totals and layers. `axes.py` has the rules for
shapes, and for tensors whose batch axis moves or is not the first.
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

from towers.analysis.axes import (
    ELEMENTWISE,
    LAST_AXES,
    MATRICES,
    ROWWISE,
    SIGNATURES,
    axis_of,
    flipped,
    integers,
    leading,
    moves,
    of_columns,
    of_einsum,
    of_factor,
    of_last,
    of_moved,
    of_sizes,
    of_turned,
    rule_for,
    with_examples_at,
)
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

# Modules of this project that define functions with custom gradients. The functions and
# their gradients keep rows apart.
BLOCK_PRODUCTS = (
    "towers.models.block_sparse.attention",
    "towers.models.block_sparse.product",
)
# TensorFlow's activations with custom gradients are elementwise.
_ROWS_APART = ("tensorflow.python.ops.nn_impl", *BLOCK_PRODUCTS)
# Linear operations: the result for a sum is the sum of the results, along any axis.
_LINEAR = set(
    "Cast ExpandDims GatherV2 Identity Mean Neg Pad Reshape Squeeze StopGradient "
    "StridedSlice Sum Transpose".split()
)
# Results of operations on rows that do not depend on attributes or shapes.
_ALWAYS = {"L2Loss": SUM, "Rank": NONE, "Shape": SHAPE, "Size": SIZE}
# Rules by type of operation. Those in `_RULES` take (tensor, op, inputs, kinds). Those
# in `_RULES_OF_FIRST` take (op, inputs), where the first input has rows and no other
# input depends on the examples.
_RULES, _RULES_OF_FIRST = {}, {}


def of_operation(
    tensor: tf.Tensor, inputs: Sequence[tf.Tensor], kinds: Sequence[Dependence]
) -> Dependence:
    """Determines how a result of an operation depends on the examples.

    Args:
        tensor: The result.
        inputs: The inputs of the operation.
        kinds: How the inputs depend on the examples: at least one does, and none is
            COUPLED or UNKNOWN.
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
        # An elementwise operation has no axis: it mixes examples where it takes a total
        # and no rule above holds. Integer results are sizes for shapes and stay
        # UNKNOWN, as do comparisons with a size.
        mixing = set()
        if tensor.dtype.is_floating:
            mixing = {SUM, MEAN, SIZE}
        elif any(t.dtype.is_floating for t in inputs):
            mixing = {SUM, MEAN}
        return COUPLED if present & mixing else UNKNOWN
    return kind


def _of_parts(op, inputs, kinds):
    """Determines the dependence of stacked or concatenated values."""
    if op.type == "Pack":
        axis = op.get_attr("axis")
    else:
        axis, inputs, kinds = tf.get_static_value(inputs[-1]), inputs[:-1], kinds[:-1]
    if axis is None or inputs[0].shape.rank is None:
        return UNKNOWN
    present = set(kinds) - {NONE}
    if present <= {SIZE, SHAPE}:
        if op.type == "ConcatV2":
            # No element may precede the number of rows; empty inputs do not count.
            pairs = zip(inputs, kinds, strict=True)
            kinds = [kind for part, kind in pairs if part.shape.num_elements() != 0]
        ahead = (
            kinds and kinds[0] is not NONE and all(kind is NONE for kind in kinds[1:])
        )
        # A stack of shapes is no shape.
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
    """Determines the dependence of a result of sums and means; linear rules keep it."""
    if op.type in ("Shape", "Size", "Rank"):
        return NONE
    if op.type in ("Cast", "Mean") and not tensor.dtype.is_floating:
        return UNKNOWN
    if op.type in _LINEAR:
        # The other inputs are axes and shapes.
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
    """Checks whether a tensor is known to be zeros."""
    # The filling value decides, whatever the number of elements.
    filled = tensor.op.type == "Fill"
    value = tf.get_static_value(tensor.op.inputs[1] if filled else tensor)
    return value is not None and not value.any()


def of_target(tensor: tf.Tensor, kind: Dependence) -> Dependence:
    """Determines how the target shape of a reshape depends on the examples.

    A shape with a single unknown axis does not depend on them: the number of elements
    gives the size of that axis.
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
    """Determines how a result of a trusted layer depends on the examples.

    A layer treats each example by itself, except for the shape of the whole result.

    Args:
        tensor: The result.
        inputs: The inputs of the layer.
        kinds: How the inputs depend on the examples.
        packed: Whether the result is a component of a ragged or sparse tensor.
    """
    if not set(kinds) <= {NONE, ROWS, PACKED}:
        return COUPLED if set(kinds) & {SUM, MEAN} else UNKNOWN
    if packed:
        return PACKED
    if tensor.shape.rank in (0, None) or tensor.shape[0] is not None:
        return UNKNOWN
    # The longest ragged row decides how far all of them are padded.
    if PACKED in kinds and None in tensor.shape[1:]:
        return UNKNOWN
    return ROWS


# Rules for operations on rows, of which each example has one or more.
#
# An operation that treats each row by itself returns rows, one that adds rows up a
# total. If an operation mixes examples in any other way, its result is coupled.


def of_rows(
    tensor: tf.Tensor,
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    kinds: Sequence[Dependence],
) -> Dependence:
    """Determines how a result of an operation on rows depends on the examples.

    Args:
        tensor: The result.
        op: The operation.
        inputs: The inputs.
        kinds: ROWS, SHAPE or NONE for each input; ROWS or SHAPE for at least one.
    """
    if op.type in ELEMENTWISE:
        if op.type == "Select" and kinds[0] is NONE and inputs[0].shape.rank:
            # A vector condition selects rows.
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
    """Handles one transform for all images, or one transform for each image."""
    one = kinds[1] is NONE and inputs[1].shape.rank == 2 and inputs[1].shape[0] == 1
    apart = kinds[0] is ROWS and {*kinds[2:]} == {NONE}
    return ROWS if apart and (one or kinds[1] is ROWS) else UNKNOWN


@_rule("ReverseSequence")
def _of_reversed(tensor, op, inputs, kinds):
    return ROWS if kinds == [ROWS, ROWS] and not op.get_attr("batch_dim") else UNKNOWN


@_rule("MaxPoolWithArgmax")
def _of_pooling(tensor, op, inputs, kinds):
    """Rejects argmax indices that count from the first example of the batch."""
    counted = tensor.value_index and op.get_attr("include_batch_in_index")
    return UNKNOWN if counted else ROWS


@_rule("FusedBatchNormV3")
def _of_normalization(tensor, op, inputs, kinds):
    """Handles inference, where the statistics are inputs."""
    inference = not op.get_attr("is_training") and kinds == [ROWS, *4 * [NONE]]
    return ROWS if inference and tensor.value_index == 0 else UNKNOWN


@_rule("BroadcastTo")
def _of_broadcast(tensor, op, inputs, kinds):
    """Rejects constant shapes, which would give a tower the batch's row count."""
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
    """Handles one diagonal, which takes one axis, or several, which take two."""
    offsets = integers(inputs[1])
    one = offsets is not None and offsets[0] == offsets[-1]
    return _if_more_axes_than(1 if one else 2, inputs)


@_rule("MatrixSetDiagV3")
def _of_set_diagonals(tensor, op, inputs, kinds):
    apart = kinds == [ROWS, ROWS, NONE]
    return _if_more_axes_than(2, inputs) if apart else UNKNOWN


def _if_more_axes_than(axes, inputs):
    """Returns ROWS if the first axis is not among the last `axes` axes."""
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
    """Keeps rows if the slice takes the whole first axis."""
    begin, size = (leading(tensor, 1) for tensor in inputs[1:])
    return ROWS if (begin, size) == ([0], [-1]) else UNKNOWN


@_rule_of_first("Cumprod", "Cumsum", "CumulativeLogsumexp", "ReverseV2", "Roll")
def _of_moved(op, inputs):
    """Handles operations that move or accumulate values along axes."""
    axes, rank = tf.get_static_value(inputs[-1]), inputs[0].shape.rank
    if axes is None or rank is None:
        return UNKNOWN
    return COUPLED if any(int(axis) % rank == 0 for axis in axes.flat) else ROWS


def _of_elements(inputs, kinds):
    """Handles elementwise operations: broadcasting must not pair two examples."""
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
    # The maximum of integers may be a sequence length, used as a shape only.
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
    # All pairs of examples, or a mixture of all examples, as by an adjacency matrix.
    return UNKNOWN if flip else COUPLED


@_rule("Reshape")
def _of_reshape(tensor, op, inputs, kinds):
    """Keeps the batch axis if each example becomes an integral number of rows."""
    if kinds[0] is not ROWS:
        return UNKNOWN
    if kinds[1] is SHAPE:
        return ROWS
    if kinds[1] is not NONE or tensor.shape.rank in (None, 0):
        return UNKNOWN
    old, new = inputs[0].shape[1:].as_list(), tensor.shape[1:].as_list()
    if None in new:
        # Cross entropy reshapes to a shape that is computed from another tensor.
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
    # If both inputs have the batch axis, each example gathers from its own row.
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
    """Keeps rows if the slice takes the whole first axis."""
    begin, steps = leading(inputs[1], 1), leading(inputs[3], 1)
    if not begin or not steps or op.get_attr("new_axis_mask") & 1:
        return UNKNOWN
    if op.get_attr("ellipsis_mask") & 1:
        rank, count = inputs[0].shape.rank, inputs[1].shape[0]
        return ROWS if None not in (rank, count) and count - 1 < rank else UNKNOWN
    takes_all = (
        (op.get_attr("begin_mask") & 1 or begin == [0])
        and op.get_attr("end_mask") & 1
        and not op.get_attr("shrink_axis_mask") & 1
        and steps == [1]
    )
    if takes_all:
        return ROWS
    # The slice selects some examples. A slice of integers may be meant for a shape.
    known = tf.get_static_value(inputs[1]) is not None
    return COUPLED if known and inputs[0].dtype.is_floating else UNKNOWN
