"""Follows the examples' axis where operations move axes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from towers.analysis.kinds import (
    COLUMNS,
    COUPLED,
    LAST,
    NONE,
    ROWS,
    SHAPE,
    SUM,
    UNKNOWN,
    Dependence,
)
from towers.analysis.static_values import integers

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
# They treat the rows of their first input each by itself.
ROWWISE = set(
    """AvgPool AvgPool3D BiasAdd Bitcast Bucketize Conv2D Conv3D DepthToSpace
    DepthwiseConv2dNative Dilation2D ExtractImagePatches ExtractVolumePatches
    FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars LRN MaxPool MaxPool3D MaxPoolV2
    ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor ScaleAndTranslate
    SpaceToDepth""".split()
)
# So do these where the first axis is none of so many last ones, which they join.
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
# How what operations take has to depend on the examples, so that they join row k of one
# with row k of another, and what they make of it; by type. TensorFlow refuses rows of
# different number.
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
# The same of those that make rows, where all rows have as many axes, and the first is
# none of so many last ones.
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


def rule_for(rules: dict[str, Any], *types: str) -> Callable[[Rule], Rule]:
    """Decorates a function as the rule for these types of operations."""

    def register(function):
        rules.update(dict.fromkeys(types, function))
        return function

    return register


# By type of operation, what takes (op, inputs, axis) and returns where the axis of
# examples is afterwards. It returns `None` if that axis is split, or not known.
_RULES = {}


def with_examples_at(axis: int | None, rank: int | None = None) -> Dependence:
    """Returns the kind of what has the examples at an axis, in order.

    Args:
        axis: The axis; None if it is not known.
        rank: Number of axes; None if the last axis does not matter.
    """
    if axis is not None and axis > 1 and axis + 1 == rank:
        return LAST
    return {0: ROWS, 1: COLUMNS}.get(axis, UNKNOWN)


def axis_of(tensor: tf.Tensor, kind: Dependence) -> int | None:
    """Returns the axis of the examples; None if a tensor of this kind has none."""
    last = None if tensor.shape.rank is None else tensor.shape.rank - 1
    return {ROWS: 0, COLUMNS: 1, LAST: last}.get(kind)


def moves(op: tf.Operation) -> bool:
    """Whether an operation moves axes, and does nothing else; see `of_moved`."""
    return op.type in _RULES


def of_moved(
    op: tf.Operation, inputs: Sequence[tf.Tensor], kinds: Sequence[Dependence]
) -> Dependence:
    """Tells how what an operation returns depends on the examples.

    Args:
        op: The operation, which moves axes.
        inputs: What it takes.
        kinds: How each input depends on the examples.
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
    return [each % len(order) for each in order].index(axis)


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
    given, rank = op.get_attr("squeeze_dims"), inputs[0].shape.rank
    if rank is None or not given:
        return None
    gone = [each % rank for each in given]
    return None if axis in gone else axis - sum(each < axis for each in gone)


@_rule("ExpandDims")
def _of_expanded(op, inputs, axis):
    new, rank = tf.get_static_value(inputs[1]), inputs[0].shape.rank
    if new is None or rank is None:
        return None
    return axis + (int(new) % (rank + 1) <= axis)


def flipped(op: tf.Operation) -> tuple[bool, bool]:
    """Tells of a product of matrices which of the two are transposed."""
    names = (
        ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    )
    return op.get_attr(names[0]), op.get_attr(names[1])


def of_factor(
    op: tf.Operation, inputs: Sequence[tf.Tensor], kinds: Sequence[Dependence]
) -> Dependence:
    """Tells how a product of matrices depends on the examples, if one of them does.

    Args:
        op: The product, of matrices or of batches of them, whose ranks are known.
        inputs: What it takes.
        kinds: Of one input ROWS, COLUMNS or LAST, of the other NONE.
    """
    cut = int(kinds[0] is NONE)
    other, axis = inputs[1 - cut].shape, axis_of(inputs[cut], kinds[cut])
    rank = max(inputs[cut].shape.rank, other.rank)
    new = rank - inputs[cut].shape.rank
    if axis < inputs[cut].shape.rank - 2:
        # It counts matrices, of which others may be one for all, or one for each.
        meets = axis + new - (rank - other.rank)
        apart = meets < 0 or other[meets] == 1
        return with_examples_at(axis + new, rank) if apart else UNKNOWN
    # The left matrix's rows stay, and the right one's columns.
    last = axis == inputs[cut].shape.rank - 1
    stays = last == (cut != flipped(op)[cut])
    return with_examples_at(rank - 2 + cut, rank) if stays else UNKNOWN


def of_einsum(
    op: tf.Operation, inputs: Sequence[tf.Tensor], kinds: Sequence[Dependence]
) -> Dependence:
    """Tells how a sum of products depends on the examples.

    Args:
        op: The operation.
        inputs: What it takes.
        kinds: Of each input ROWS, COLUMNS or NONE; ROWS or COLUMNS of one at least.
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
        place = {ROWS: 0, COLUMNS: 1}.get(kind, len(term))
        letters |= {*term[place : place + 1]}
        others += term[:place] + term[place + 1 :]
    if len(letters) > 1:
        return COUPLED  # each with each
    (examples,) = letters
    if examples in others:
        return UNKNOWN
    return with_examples_at(result.index(examples)) if examples in result else SUM


def _spelled_out(equation, ranks):
    """Returns an equation with letters for its ellipsis; `None` if they are unknown."""
    terms = equation.split("->")[0].split(",")
    hidden = {
        None if rank is None else rank - len(term.replace("...", ""))
        for term, rank in zip(terms, ranks, strict=True)
        if "..." in term
    }
    if len(hidden) != 1 or None in hidden:
        return None
    return equation.replace("...", "αβγδεζηθ"[: hidden.pop()])
