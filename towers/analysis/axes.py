"""Follows the batch axis through operations that move axes, and through shapes.

The sections are: tables of operations by type; rules for operations that only move
axes, and products; values known before the graph runs; rules for shapes and sizes; and
rules for tensors whose second or last axis is the batch axis.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from towers.analysis.kinds import (
    COLUMNS,
    COUPLED,
    LAST,
    NONE,
    ROWS,
    SHAPE,
    SIZE,
    SUM,
    TURNED,
    UNKNOWN,
    Dependence,
)

ELEMENTWISE = set(
    """Abs Acos Acosh AddN AddV2 Add Angle Asin Asinh Atan Atan2 Atanh BesselI0
    BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e
    BesselY0 BesselY1 Betainc BitwiseAnd BitwiseOr BitwiseXor Cast Ceil Complex
    ComplexAbs Conj Imag Invert LeftShift RightShift CheckNumerics ClipByValue Cos Cosh
    Dawsn Digamma Div DivNoNan Elu EluGrad Equal Erf Erfc Erfinv Exp Expint Expm1 Floor
    FloorDiv FloorMod FresnelCos FresnelSin Greater GreaterEqual Identity Igamma Igammac
    Inv InvGrad IsFinite IsInf IsNan LeakyRelu LeakyReluGrad Less LessEqual Lgamma Log
    Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg
    NextAfter NotEqual OnesLike Polygamma PopulationCount Pow PreventGradient Real
    RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt
    RsqrtGrad Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus
    SoftplusGrad Softsign SoftsignGrad Spence Sqrt SqrtGrad Square SquaredDifference
    StopGradient Sub Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py Xlogy
    ZerosLike Zeta""".split()
)
# Operations that treat each row of their first input by itself.
ROWWISE = set(
    """AvgPool AvgPool3D BiasAdd Bitcast Bucketize Conv2D Conv3D DepthToSpace
    DepthwiseConv2dNative Dilation2D ExtractImagePatches ExtractVolumePatches
    FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars LRN MaxPool MaxPool3D MaxPoolV2
    ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor ScaleAndTranslate
    SpaceToDepth""".split()
)
# Operations over this many last axes, which keep rows apart if the batch axis is not
# among these.
LAST_AXES = {
    **dict.fromkeys(
        """AdjustHue AdjustSaturation FakeQuantWithMinMaxVarsPerChannel FFT HSVToRGB
        IFFT IRFFT IsotonicRegression LogSoftmax NthElement RFFT RGBToHSV Softmax
        TopKV2""".split(),
        1,
    ),
    **dict.fromkeys(
        """Cholesky Eig FFT2D IFFT2D IRFFT2D LogMatrixDeterminant Lu MatrixBandPart
        MatrixDeterminant MatrixDiagPartV3 MatrixInverse MatrixLogarithm
        MatrixSquareRoot Qr RFFT2D SelfAdjointEigV2 Svd""".split(),
        2,
    ),
    **dict.fromkeys("AdjustContrastv2 FFT3D IFFT3D IRFFT3D RFFT3D".split(), 3),
}
# For each type of operation that pairs row k of one input with row k of another: the
# required kinds of the inputs, and the kind of the result. TensorFlow rejects different
# numbers of rows.
_IN_PAIRS = [ROWS, ROWS]
SIGNATURES: dict[str, tuple[list[Dependence], Dependence]] = {
    "AvgPool3DGrad": ([SHAPE, ROWS], ROWS),
    "AvgPoolGrad": ([SHAPE, ROWS], ROWS),
    "BiasAddGrad": ([ROWS], SUM),
    "CombinedNonMaxSuppression": (_IN_PAIRS + 4 * [NONE], ROWS),
    "Conv2DBackpropFilter": ([ROWS, NONE, ROWS], SUM),
    "Conv2DBackpropInput": ([SHAPE, NONE, ROWS], ROWS),
    "Conv3DBackpropFilterV2": ([ROWS, NONE, ROWS], SUM),
    "Conv3DBackpropInputV2": ([SHAPE, NONE, ROWS], ROWS),
    "DepthwiseConv2dNativeBackpropFilter": ([ROWS, NONE, ROWS], SUM),
    "DepthwiseConv2dNativeBackpropInput": ([SHAPE, NONE, ROWS], ROWS),
    "DrawBoundingBoxesV2": ([ROWS, ROWS, NONE], ROWS),
    "InTopKV2": ([ROWS, ROWS, NONE], ROWS),
    "LowerBound": (_IN_PAIRS, ROWS),
    "MaxPool3DGrad": ([ROWS, ROWS, ROWS], ROWS),
    "MaxPoolGrad": ([ROWS, ROWS, ROWS], ROWS),
    "ResizeBicubicGrad": (_IN_PAIRS, ROWS),
    "ResizeBilinearGrad": (_IN_PAIRS, ROWS),
    "SoftmaxCrossEntropyWithLogits": (_IN_PAIRS, ROWS),
    "SparseSoftmaxCrossEntropyWithLogits": (_IN_PAIRS, ROWS),
    "UpperBound": (_IN_PAIRS, ROWS),
}
# Further operations in pairs, whose result is ROWS if all inputs with rows have the
# same rank, and the batch axis is not among this many last axes.
MATRICES: dict[str, tuple[list[Dependence], int]] = {
    "BandedTriangularSolve": (_IN_PAIRS, 2),
    "Cross": (_IN_PAIRS, 1),
    "MatrixSolve": (_IN_PAIRS, 2),
    "MatrixSolveLs": ([ROWS, ROWS, NONE], 2),
    "MatrixTriangularSolve": (_IN_PAIRS, 2),
    "TridiagonalMatMul": (4 * [ROWS], 2),
    "TridiagonalSolve": (_IN_PAIRS, 2),
}


Rule = TypeVar("Rule", bound=Callable[..., Any])
# Operations that keep the values and their order.
_KEEP = "ExpandDims", "Identity", "Reshape", "Squeeze"
_ELEMENTS = {
    "AddV2": np.add,
    "FloorMod": np.mod,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Sub": np.subtract,
}
# Operations that draw each element independently. Their first input is the shape; the
# seed follows.
STATELESS_DRAWS = set(
    """StatelessRandomGammaV3 StatelessRandomNormalV2 StatelessRandomUniformFullIntV2
    StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessTruncatedNormalV2
    """.split()
)
DRAWS = STATELESS_DRAWS | set(
    "RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal".split()
)
# Types that can count examples. Smaller integers overflow.
_COUNTS = {tf.int32, tf.int64, tf.bfloat16, tf.float16, tf.float32, tf.float64}
# Rules by type of operation. A rule takes (tensor, op, inputs), where the first input
# is a shape and no other input depends on the examples.
_RULES_OF_SHAPES = {}
_LAST_AXIS = {"LogSoftmax", "Softmax"}
_REDUCTIONS = {"All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum"}
# Rules by type of operation. A rule takes (tensor, op, inputs), where the first input
# has columns and no other input depends on the examples.
_RULES_OF_COLUMNS = {}
_PRODUCTS = "BatchMatMulV2", "BatchMatMulV3"


def rule_for(rules: dict[str, Any], *types: str) -> Callable[[Rule], Rule]:
    """Returns a decorator that registers a rule for types of operations."""

    def register(function):
        rules.update(dict.fromkeys(types, function))
        return function

    return register


# Rules by type of operation. A rule takes (op, inputs, axis) and returns the batch axis
# of the result, `None` if that axis is split or not known.
_RULES = {}


def with_examples_at(axis: int | None, rank: int | None = None) -> Dependence:
    """Returns the kind of a tensor with the batch axis at an index, in order.

    Args:
        axis: The batch axis; `None` if unknown.
        rank: The number of axes; `None` if the last axis does not matter.
    """
    if axis is not None and axis > 1 and axis + 1 == rank:
        return LAST
    return {0: ROWS, 1: COLUMNS}.get(axis, UNKNOWN)


def axis_of(tensor: tf.Tensor, kind: Dependence) -> int | None:
    """Returns the batch axis; `None` if a tensor of this kind has none."""
    last = None if tensor.shape.rank is None else tensor.shape.rank - 1
    return {ROWS: 0, COLUMNS: 1, LAST: last}.get(kind)


def moves(op: tf.Operation) -> bool:
    """Checks whether an operation only moves axes; see `of_moved`."""
    return op.type in _RULES


def of_moved(
    op: tf.Operation, inputs: Sequence[tf.Tensor], kinds: Sequence[Dependence]
) -> Dependence:
    """Determines how a result of an operation that moves axes depends on the examples.

    Args:
        op: The operation.
        inputs: The inputs.
        kinds: How the inputs depend on the examples.
    """
    moved = 1 if op.type == "Split" else 0
    others = [kind for i, kind in enumerate(kinds) if i != moved]
    axis = axis_of(inputs[moved], kinds[moved])
    if axis is None or set(others) - {NONE}:
        return UNKNOWN
    return with_examples_at(_RULES[op.type](op, inputs, axis), op.outputs[0].shape.rank)


_rule = functools.partial(rule_for, _RULES)


@_rule("Transpose")
def _of_transposed(op, inputs, axis):
    order = integers(inputs[1])
    if order is None:
        return None
    return [index % len(order) for index in order].index(axis)


@_rule("Split")
def _of_split(op, inputs, axis):
    return _unless_parted(inputs[1], inputs[0], axis)


@_rule("SplitV")
def _of_sizes_split(op, inputs, axis):
    return _unless_parted(inputs[0], inputs[2], axis)


def _unless_parted(tensor, along, axis):
    along, rank = tf.get_static_value(along), tensor.shape.rank
    known = along is not None and rank is not None
    return axis if known and int(along) % rank != axis else None


@_rule("Unpack")
def _of_unpacked(op, inputs, axis):
    rank = inputs[0].shape.rank
    gone = op.get_attr("axis") % rank if rank else axis
    return None if gone == axis else axis - (gone < axis)


@_rule("Squeeze")
def _of_squeezed(op, inputs, axis):
    squeezed, rank = op.get_attr("squeeze_dims"), inputs[0].shape.rank
    if rank is None or not squeezed:
        return None
    gone = [index % rank for index in squeezed]
    return None if axis in gone else axis - sum(index < axis for index in gone)


@_rule("ExpandDims")
def _of_expanded(op, inputs, axis):
    new, rank = tf.get_static_value(inputs[1]), inputs[0].shape.rank
    if new is None or rank is None:
        return None
    return axis + (int(new) % (rank + 1) <= axis)


def flipped(op: tf.Operation) -> tuple[bool, bool]:
    """Returns which factors of a matrix product are transposed."""
    names = (
        ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    )
    return op.get_attr(names[0]), op.get_attr(names[1])


def of_factor(
    op: tf.Operation, inputs: Sequence[tf.Tensor], kinds: Sequence[Dependence]
) -> Dependence:
    """Determines how a matrix product depends on the examples, if one factor does.

    Args:
        op: The product, of matrices or of batches of matrices, with known ranks.
        inputs: The inputs.
        kinds: ROWS, COLUMNS or LAST for one input, NONE for the other.
    """
    cut = int(kinds[0] is NONE)
    other, axis = inputs[1 - cut].shape, axis_of(inputs[cut], kinds[cut])
    rank = max(inputs[cut].shape.rank, other.rank)
    new = rank - inputs[cut].shape.rank
    if axis < inputs[cut].shape.rank - 2:
        # The batch axis indexes matrices; the other factor may have one matrix for all,
        # or one for each index.
        meets = axis + new - (rank - other.rank)
        apart = meets < 0 or other[meets] == 1
        return with_examples_at(axis + new, rank) if apart else UNKNOWN
    # The rows of the left factor are kept, and the columns of the right factor.
    last = axis == inputs[cut].shape.rank - 1
    is_kept = last == (cut != flipped(op)[cut])
    return with_examples_at(rank - 2 + cut, rank) if is_kept else UNKNOWN


def of_einsum(
    op: tf.Operation, inputs: Sequence[tf.Tensor], kinds: Sequence[Dependence]
) -> Dependence:
    """Determines how an einsum depends on the examples.

    Args:
        op: The operation.
        inputs: The inputs.
        kinds: ROWS, COLUMNS or NONE for each input; ROWS or COLUMNS for at least one.
    """
    equation = op.get_attr("equation").decode().replace(" ", "")
    if "..." in equation:
        equation = _spelled_out(equation, [t.shape.rank for t in inputs])
        if equation is None:
            return UNKNOWN
    terms, result = equation.split("->")
    terms = terms.split(",")
    letters, others = set(), ""
    for term, kind in zip(terms, kinds, strict=True):
        axis = {ROWS: 0, COLUMNS: 1}.get(kind, len(term))
        letters |= {*term[axis : axis + 1]}
        others += term[:axis] + term[axis + 1 :]
    if len(letters) > 1:
        return COUPLED  # pairs of examples
    (examples,) = letters
    if examples in others:
        return UNKNOWN
    return with_examples_at(result.index(examples)) if examples in result else SUM


def _spelled_out(equation, ranks):
    """Returns an equation with letters for its ellipsis; `None` if unknown."""
    terms = equation.split("->")[0].split(",")
    hidden = {
        None if rank is None else rank - len(term.replace("...", ""))
        for term, rank in zip(terms, ranks, strict=True)
        if "..." in term
    }
    if len(hidden) != 1 or None in hidden:
        return None
    return equation.replace("...", "αβγδεζηθ"[: hidden.pop()])


# Values that are known before the graph runs, beyond those that TensorFlow finds.


def integers(tensor: tf.Tensor) -> list[int] | None:
    """Returns the integers of a tensor, in order; `None` if one is unknown."""
    value = tf.get_static_value(tensor)
    if value is not None:
        return value.ravel().tolist()
    op = tensor.op
    if op.type in ("Slice", "StridedSlice"):
        return _picked(op)
    if op.type in _KEEP:
        return integers(op.inputs[0])
    if op.type == "Range":
        start, limit, delta = map(integers, op.inputs)
        known = None not in (start, limit, delta)
        return [*range(*start, *limit, *delta)] if known else None
    parts = [*map(integers, _parts(op))]
    if not parts or None in parts:
        return None
    if op.type in _ELEMENTS:
        return _ELEMENTS[op.type](*(np.array(part, int) for part in parts)).tolist()
    return [number for part in parts for number in part]


def leading(tensor: tf.Tensor, count: int) -> list[int] | None:
    """Returns the first integers of a tensor; `None` if one of these is unknown."""
    if (known := integers(tensor)) is not None:
        return known[:count]
    op, numbers = tensor.op, []
    if op.type in _KEEP:
        return leading(op.inputs[0], count)
    for part in _parts(op) if op.type in ("Pack", "ConcatV2") else ():
        values = leading(part, count - len(numbers))
        if values is None:
            return None
        numbers += values
        if len(numbers) == count:
            return numbers
    return None


def _parts(op: tf.Operation) -> Sequence[tf.Tensor]:
    """Returns the tensors that an operation combines, by element or in sequence."""
    if op.type in _ELEMENTS and op.outputs[0].dtype.is_integer:
        # The elements of scalars and vectors can be paired in one way only.
        return op.inputs if op.outputs[0].shape.rank in (0, 1) else ()
    vector = op.outputs and op.outputs[0].shape.rank == 1
    if op.type == "Pack":
        return op.inputs if vector or op.get_attr("axis") == 0 else ()
    if op.type == "ConcatV2":
        along = vector or tf.get_static_value(op.inputs[-1]) == 0
        return op.inputs[:-1] if along else ()
    return ()


def _picked(op: tf.Operation) -> list[int] | None:
    """Returns the known values of a slice of a vector, such as a tensor's shape."""
    source = op.inputs[0]
    positions = [*map(integers, op.inputs[1:])]
    values = integers(source) if source.shape.rank == 1 else None
    if source.op.type == "Shape" and source.op.inputs[0].shape.rank is not None:
        values = source.op.inputs[0].shape.as_list()
    if None in positions or values is None:
        return None
    if op.type == "Slice":
        (begin,), (size,) = positions
        picked = values[begin : None if size < 0 else begin + size]
    else:
        if op.get_attr("new_axis_mask") or op.get_attr("ellipsis_mask"):
            return None
        (begin,), (end,), (step,) = positions
        if op.get_attr("shrink_axis_mask"):
            picked = [values[begin]]
        else:
            begin = None if op.get_attr("begin_mask") else begin
            end = None if op.get_attr("end_mask") else end
            picked = values[begin:end:step]
    return None if None in picked else picked


# Rules for operations on shapes, and on numbers of examples.


def of_sizes(
    tensor: tf.Tensor,
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    kinds: Sequence[Dependence],
) -> Dependence:
    """Determines how a result of an operation on sizes depends on the examples.

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
        kinds: How the inputs depend on the examples: one is TURNED.
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


_rule_of_sizes = functools.partial(rule_for, _RULES_OF_SHAPES)


@_rule_of_sizes("StridedSlice")
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


@_rule_of_sizes("Slice")
def _of_part(tensor, op, inputs):
    begin, sizes = integers(inputs[1]), integers(inputs[2])
    if begin is None or sizes is None:
        return UNKNOWN
    return NONE if begin[0] > 0 or sizes[0] == 0 else SHAPE


@_rule_of_sizes("GatherV2")
def _of_places(tensor, op, inputs):
    numbers = integers(inputs[1])
    if not numbers or 0 in numbers[1:] or min(numbers) < 0:
        return UNKNOWN
    if numbers[0] > 0:
        return NONE
    return SHAPE if inputs[1].shape.rank == 1 else SIZE


@_rule_of_sizes("Unpack")
def _of_one(tensor, op, inputs):
    return NONE if tensor.value_index else SIZE


@_rule_of_sizes("SplitV")
def _of_piece(tensor, op, inputs):
    sizes, count = integers(inputs[1]), tensor.shape.num_elements()
    before = None if sizes is None else sizes[: tensor.value_index]
    if before is None or count is None or min(before, default=0) < 0:
        return UNKNOWN
    return NONE if any(before) or not count else SHAPE


@_rule_of_sizes("Pad", "PadV2")
def _of_longer(tensor, op, inputs):
    return SHAPE if leading(inputs[1], 1) == [0] else UNKNOWN


# Rules for operations on tensors whose second axis is the batch axis.
#
# Attention puts the stacked queries, keys and values first, and a mixture of experts
# its experts. Most models soon undo this, so the rules include the ways back to rows.


def of_columns(
    tensor: tf.Tensor,
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    kinds: Sequence[Dependence],
) -> Dependence:
    """Determines how a result of an operation on columns depends on the examples.

    Args:
        tensor: The result.
        op: The operation.
        inputs: The inputs.
        kinds: COLUMNS, ROWS or NONE for each input; COLUMNS for at least one.
    """
    if op.type == "MatMul" and NONE not in kinds:
        # A sum over the examples, or all pairs of examples.
        transposed = op.get_attr("transpose_a") or op.get_attr("transpose_b")
        kind = {(COLUMNS, ROWS): SUM, (ROWS, COLUMNS): COUPLED}.get(tuple(kinds))
        return UNKNOWN if transposed or kind is None else kind
    if ROWS in kinds or any(tensor.shape.rank is None for tensor in inputs):
        return UNKNOWN
    if op.type in ELEMENTWISE:
        return _of_elements(inputs, kinds)
    if op.type in ("BatchMatMulV2", "BatchMatMulV3", "MatMul"):
        return _of_product(op, inputs, kinds)
    if moves(op):
        return of_moved(op, inputs, kinds)
    rule = _RULES_OF_COLUMNS.get(op.type)
    if rule is None or kinds[0] is not COLUMNS or set(kinds[1:]) - {NONE}:
        return UNKNOWN
    return rule(tensor, op, inputs)


_rule_of_columns = functools.partial(rule_for, _RULES_OF_COLUMNS)


def _of_elements(inputs, kinds):
    """Handles elementwise operations: broadcasting must not pair two examples."""
    ranks = {t.shape.rank for t, k in zip(inputs, kinds, strict=True) if k is COLUMNS}
    if len(ranks) != 1:
        return UNKNOWN
    (rank,) = ranks
    for other, kind in zip(inputs, kinds, strict=True):
        # The axis that is aligned with the batch axis, if the input has that many axes.
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


@_rule_of_columns(*_LAST_AXIS)
def _of_last_axis(tensor, op, inputs):
    return COLUMNS if inputs[0].shape.rank > 2 else UNKNOWN


@_rule_of_columns(*_REDUCTIONS)
def _of_reduction(tensor, op, inputs):
    axes = integers(inputs[1])
    if axes is None:
        return UNKNOWN
    axes = [axis % inputs[0].shape.rank for axis in axes]
    kept = tensor.shape.rank == inputs[0].shape.rank
    return UNKNOWN if 1 in axes else with_examples_at(1 - (0 in axes and not kept))


@_rule_of_columns("Reshape")
def _of_reshape(tensor, op, inputs):
    """Keeps the first axis, and makes an integral number of columns of each example."""
    old, new = inputs[0].shape, tensor.shape
    if old.rank == 2 and new.rank and new.rank > 2 and new[-1] is None:
        return of_reshape(tensor, inputs)
    if new.rank is None or new.rank < 2 or old[0] is None or old[0] != new[0]:
        return UNKNOWN
    size, parts = old[2:].num_elements(), new[2:].num_elements()
    divides = size is not None and parts and size % parts == 0
    return COLUMNS if divides and new[1] is None else UNKNOWN


@_rule_of_columns("Pad", "PadV2")
def _of_padding(tensor, op, inputs):
    paddings = integers(inputs[1])
    return COLUMNS if paddings is not None and not any(paddings[2:4]) else UNKNOWN


@_rule_of_columns("StridedSlice")
def _of_slice_of_columns(tensor, op, inputs):
    """Keeps the examples if the slice takes the whole batch axis."""
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
            takes_all = marks["end"][i] and (marks["begin"][i] or begin[i] == 0)
            if not takes_all or marks["shrink_axis"][i] or steps[i] != 1:
                return UNKNOWN
            axis += 1
        else:
            position -= marks["shrink_axis"][i]
            axis += 1
    return with_examples_at(position)


@_rule_of_columns("Shape")
def _of_shape(tensor, op, inputs):
    return TURNED


@_rule_of_columns("GatherV2")
def _of_gather(tensor, op, inputs):
    """Replaces the first axis, or a later one, by the axes of the indices."""
    axis, rank = integers(inputs[2]), inputs[0].shape.rank
    ids_rank = inputs[1].shape.rank
    if axis is None or ids_rank is None or op.get_attr("batch_dims"):
        return UNKNOWN
    if axis[0] % rank == 1:
        return UNKNOWN
    return with_examples_at(1 if axis[0] % rank else ids_rank, tensor.shape.rank)


# Rules for operations on tensors whose last axis is the batch axis.
#
# Block-sparse products have features first: a block of these is contiguous in memory.


def of_last(
    tensor: tf.Tensor,
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    kinds: Sequence[Dependence],
) -> Dependence:
    """Determines how a result of an operation depends on the examples of the last axis.

    Args:
        tensor: The result.
        op: The operation.
        inputs: The inputs.
        kinds: LAST or NONE for each input; LAST for at least one.
    """
    if (
        any(operand.shape.rank is None for operand in inputs)
        or tensor.shape.rank is None
    ):
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
    """Handles elementwise operations: broadcasting must not pair two examples."""
    for other, kind in zip(inputs, kinds, strict=True):
        if kind is LAST and other.shape.rank != tensor.shape.rank:
            return UNKNOWN
        if kind is NONE and other.shape.rank and other.shape[-1] != 1:
            return UNKNOWN
    return LAST


def _last_product(op, inputs, kinds):
    if NONE in kinds:
        return of_factor(op, inputs, kinds)
    # A sum over the examples, of products of their values.
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
    """Determines the batch axis after a reshape that keeps the last axis.

    Args:
        tensor: The result.
        inputs: The inputs; the last axis of the first input is the batch axis.
    """
    old, new = inputs[0].shape, tensor.shape
    if new.rank is None or new.rank < 2 or new[-1] is not None or old[-1] is not None:
        return UNKNOWN
    before, after = old[:-1].num_elements(), new[:-1].num_elements()
    if before is None or before != after:
        return UNKNOWN
    return with_examples_at(new.rank - 1, new.rank)
