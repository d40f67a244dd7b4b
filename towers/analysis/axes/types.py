"""Types of operations, by which axes they join and what they take."""

from collections.abc import Callable
from typing import Any, TypeVar

from towers.analysis.kinds import NONE, ROWS, SHAPE, SUM, Dependence

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
