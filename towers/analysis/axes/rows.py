"""Tells of an operation on rows, one or more for each example, what it makes of them.

What treats each row by itself gives rows, what adds them up a total. Where two examples
meet in another way, the result is coupled.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.analysis.axes.position import moves, of_moved
from towers.analysis.kinds import (
    COLUMNS,
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
from towers.analysis.static_values import integers

ELEMENTWISE = set(
    """Abs Acos Acosh AddN AddV2 Add Asin Asinh Atan Atan2 Atanh BitwiseAnd BitwiseOr
    BitwiseXor Cast Ceil Complex ComplexAbs Conj Imag Invert LeftShift RightShift
    CheckNumerics ClipByValue Cos Cosh Digamma Div DivNoNan Elu Equal Erf Erfc Exp
    Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity Inv IsFinite
    IsInf IsNan LeakyRelu Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot
    LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg NotEqual OnesLike Pow
    PreventGradient Real RealDiv Reciprocal Relu Relu6 Rint Round Rsqrt Select SelectV2
    Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square SquaredDifference
    StopGradient Sub Tan Tanh TruncateDiv Xdivy Xlog1py Xlogy ZerosLike""".split()
)
# They treat the rows of their first input each by itself.
_ROWWISE = set(
    """AvgPool AvgPool3D BiasAdd Conv2D Conv3D DepthToSpace DepthwiseConv2dNative
    MaxPool MaxPool3D ResizeBicubic ResizeBilinear ResizeNearestNeighbor
    SpaceToDepth Bitcast""".split()
)
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
        return _of_elements(inputs, kinds)
    if moves(op):
        return of_moved(op, inputs, kinds)
    if op.type in _ALWAYS:
        return _ALWAYS[op.type]
    if op.type in _RULES:
        return _RULES[op.type](tensor, op, inputs, kinds)
    if kinds[0] is not ROWS or any(kind is not NONE for kind in kinds[1:]):
        return UNKNOWN
    if op.type in _ROWWISE:
        return ROWS
    rule = _RULES_OF_FIRST.get(op.type)
    return UNKNOWN if rule is None else rule(op, inputs)


def _rule(*types, rules=_RULES):
    """A decorator: the function is the rule for these types of operations."""

    def register(function):
        rules.update(dict.fromkeys(types, function))
        return function

    return register


def _rule_of_first(*types):
    return _rule(*types, rules=_RULES_OF_FIRST)


@_rule("TensorListSetItem")
def _of_list_with_item(tensor, op, inputs, kinds):
    """A list is rows if each of its tensors is: it was, or there was none."""
    fits = kinds[0] is ROWS or inputs[0].op.type == "TensorListReserve"
    return ROWS if fits and kinds[1:] == [NONE, ROWS] else UNKNOWN


@_rule_of_first("TensorListGetItem")
def _of_list_item(op, inputs):
    return ROWS


@_rule_of_first("TensorListStack")
def _of_stacked_list(op, inputs):
    return COLUMNS


@_rule("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
def _of_cross_entropy(tensor, op, inputs, kinds):
    return ROWS if kinds == [ROWS, ROWS] else UNKNOWN


@_rule("BroadcastTo")
def _of_broadcast(tensor, op, inputs, kinds):
    stays = kinds in ([ROWS, NONE], [ROWS, SHAPE])
    return ROWS if stays and tensor.shape.rank == inputs[0].shape.rank else UNKNOWN


@_rule_of_first("OneHot")
def _of_one_hot(op, inputs):
    return ROWS if op.get_attr("axis") == -1 else UNKNOWN


@_rule_of_first("MatrixBandPart", "MatrixDiagPartV3", "MatrixSetDiagV3")
def _of_matrices(op, inputs):
    return _if_more_axes_than(2, inputs)


@_rule_of_first("FFT2D", "IFFT2D", "IRFFT2D", "RFFT2D")
def _of_last_two_axes(op, inputs):
    return _if_more_axes_than(2, inputs)


@_rule_of_first("FFT", "IFFT", "IRFFT", "LogSoftmax", "RFFT", "Softmax", "TopKV2")
def _of_last_axis(op, inputs):
    return _if_more_axes_than(1, inputs)


def _if_more_axes_than(axes, inputs):
    """Rows, where the first axis is not among the last ones."""
    rank = inputs[0].shape.rank
    return ROWS if rank is not None and rank > axes else UNKNOWN


@_rule_of_first("MirrorPad", "Pad", "PadV2")
def _of_padding(op, inputs):
    paddings = integers(inputs[1])
    return ROWS if paddings is not None and not any(paddings[:2]) else UNKNOWN


@_rule_of_first("Tile")
def _of_tile(op, inputs):
    multiples = integers(inputs[1])
    return ROWS if multiples is not None and multiples[0] == 1 else UNKNOWN


@_rule_of_first("Cumprod", "Cumsum", "ReverseV2", "Roll")
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


@_rule("All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum")
def _of_reduction(tensor, op, inputs, kinds):
    axes = tf.get_static_value(inputs[1])
    rank = inputs[0].shape.rank
    if axes is None or rank is None:
        return UNKNOWN
    if all(int(axis) % rank != 0 for axis in axes.ravel()):
        return ROWS
    if op.type == "Mean" and inputs[0].dtype.is_floating:
        return MEAN
    if op.type == "Sum":
        return SUM
    # A largest integer may be the longest row, and that no more than a shape.
    return COUPLED if inputs[0].dtype.is_floating else UNKNOWN


@_rule("MatMul", "BatchMatMulV2")
def _of_product(tensor, op, inputs, kinds):
    matmul = op.type == "MatMul"
    flip = op.get_attr("transpose_a" if matmul else "adj_x")
    flip_other = op.get_attr("transpose_b" if matmul else "adj_y")
    rank, other = inputs[0].shape.rank, inputs[1].shape.rank
    if rank is None or other is None:
        return UNKNOWN
    if rank == other == 2:
        if kinds == [ROWS, ROWS] and flip and not flip_other:
            return SUM  # over the examples, of products of their rows
        if kinds == [ROWS, ROWS] and flip_other and not flip:
            return COUPLED  # each with each
        if kinds == [ROWS, ROWS] and not flip:
            return COUPLED  # each with all, as by an adjacency matrix
        return ROWS if kinds == [ROWS, NONE] and not flip else UNKNOWN
    if kinds == [ROWS, ROWS] and rank == other:
        return ROWS
    if kinds == [ROWS, NONE] and other == 2:
        return ROWS
    return UNKNOWN


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
    axis, rank = tf.get_static_value(inputs[2]), inputs[0].shape.rank
    if axis is None or rank is None:
        return UNKNOWN
    # Where both have the examples' axis, each takes from its own row.
    apart = int(axis) % rank != 0
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
    begin = tf.get_static_value(inputs[1])
    steps = tf.get_static_value(inputs[3])
    if begin is None or steps is None or op.get_attr("new_axis_mask") & 1:
        return UNKNOWN
    if op.get_attr("ellipsis_mask") & 1:
        rank = inputs[0].shape.rank
        return ROWS if rank is not None and len(begin) - 1 < rank else UNKNOWN
    whole = (
        (op.get_attr("begin_mask") & 1 or int(begin[0]) == 0)
        and op.get_attr("end_mask") & 1
        and not op.get_attr("shrink_axis_mask") & 1
        and int(steps[0]) == 1
    )
    # Some examples picked out; of integers, perhaps for a shape.
    return ROWS if whole else COUPLED if inputs[0].dtype.is_floating else UNKNOWN
