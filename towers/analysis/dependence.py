"""Tells how a traced value depends on the examples of the batch.

A mean over examples is the weighted mean of the shares' means, a sum the sum of the
shares' sums, and a value that no example touches is the same on every tower. Anything
else (a maximum, a variance, a ratio of sums) cannot be put together from shares. To
tell which it is, the graph is read from the value back to the batch. Only what is
proved counts: an operation that is not listed here makes a value unknown, never wrong.

Keras's own layers are known to treat every example by itself (`trust.py`), but for
BatchNormalization, which differs by design. What cannot be read in another layer is
taken to do so, too, and listed: numbers have to show it then (`compare.py`). Losses
that layers add, and state that they assign, are read operation by operation.
"""

import contextlib
import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.analysis.trust import is_trusted
from towers.keras_adapter.layers import LAYER_CALL, logits_of
from towers.keras_adapter.patching import patched


class Dependence(enum.Enum):
    """How a tensor depends on the examples of a batch.

    Attributes:
        NONE: Not at all.
        ROWS: The first axis is the examples', in order, each with the same number of
            rows; no row depends on another example.
        COLUMNS: Like ROWS, transposed: of two axes, the second is the examples'.
        SHAPE: A vector of integers; the first is the number of rows, no other depends
            on it.
        SIZE: The number of examples, times something that does not depend on them.
        SUM: A sum over the examples.
        MEAN: A mean over the examples, perhaps with something added that does not
            depend on them.
        PACKED: Part of a ragged or sparse tensor of examples.
        COUPLED: On several examples, in a way that is none of these.
        UNKNOWN: In a way that cannot be told.
    """

    NONE = enum.auto()
    ROWS = enum.auto()
    COLUMNS = enum.auto()
    SHAPE = enum.auto()
    SIZE = enum.auto()
    SUM = enum.auto()
    MEAN = enum.auto()
    PACKED = enum.auto()
    COUPLED = enum.auto()
    UNKNOWN = enum.auto()


NONE, ROWS, COLUMNS, SHAPE, SIZE, SUM, MEAN, PACKED, COUPLED, UNKNOWN = Dependence

_ELEMENTWISE = set(
    """Abs Acos Acosh AddN AddV2 Add Asin Asinh Atan Atan2 Atanh BitwiseAnd BitwiseOr
    BitwiseXor Cast Ceil Invert LeftShift RightShift
    CheckNumerics ClipByValue Cos Cosh Digamma Div DivNoNan Elu Equal Erf Erfc Exp
    Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity Inv IsFinite
    IsInf IsNan LeakyRelu Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot
    LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg NotEqual OnesLike Pow
    PreventGradient RealDiv Reciprocal Relu Relu6 Rint Round Rsqrt Select SelectV2 Selu
    Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square SquaredDifference StopGradient
    Sub Tan Tanh TruncateDiv Xdivy Xlog1py Xlogy ZerosLike""".split()
)
# They treat the rows of their first input each by itself.
_ROWWISE = set(
    """AvgPool AvgPool3D BiasAdd Conv2D Conv3D DepthToSpace DepthwiseConv2dNative
    MaxPool MaxPool3D ResizeBicubic ResizeBilinear ResizeNearestNeighbor
    SpaceToDepth Bitcast""".split()
)
# They treat the last two axes as a matrix.
_OF_MATRICES = set("MatrixBandPart MatrixDiagPartV3 MatrixSetDiagV3".split())
# Each element is drawn by itself.
_DRAWS = set(
    """RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal
    StatelessRandomGammaV3 StatelessRandomNormalV2 StatelessRandomUniformFullIntV2
    StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessTruncatedNormalV2
    """.split()
)
# Their result for a sum is the sum of their results, wherever the axes are.
_LINEAR = set(
    "Cast ExpandDims Identity Mean Neg Reshape Squeeze StopGradient StridedSlice Sum "
    "Transpose".split()
)
_REDUCTIONS = {"All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum"}


class _Call(NamedTuple):
    """How a layer made a tensor.

    Attributes:
        inputs: The tensors that it was called with.
        packed: Whether the tensor is part of a ragged or sparse one.
        trusted: Whether the layer is known to treat each example by itself.
        layer: The layer.
        around: The calls of layers around it that have returned the same tensor.
    """

    inputs: Sequence[tf.Tensor]
    packed: bool
    trusted: bool
    layer: keras.layers.Layer
    around: "list[_Call]"


class Culprit(NamedTuple):
    """What makes a tensor coupled or unknown.

    Attributes:
        operation: An operation.
        layer: The innermost layer that it is a part of, if it is of one.
    """

    operation: tf.Operation
    layer: keras.layers.Layer | None = None

    def __str__(self) -> str:
        """Names it, as a phrase."""
        operation = f"'{self.operation.name}' ({self.operation.type})"
        if self.layer is None:
            return f"operation {operation}"
        name, kind = self.layer.name, type(self.layer).__name__
        what = "model" if isinstance(self.layer, keras.Model) else "layer"
        return f"{what} '{name}' ({kind}), operation {operation}"


# Also for `compare.py`.
@contextlib.contextmanager
def recorded_layers() -> Iterator[dict[Any, _Call]]:
    """Inside, remembers what layers made of what.

    Yields:
        For the key of each tensor that a layer returned, how it was made.
    """
    calls = {}

    def record(original, layer, *args, **kwargs):
        outputs = original(layer, *args, **kwargs)
        inputs = [part for _, part in parts([args, kwargs])]
        known = {_key(tensor) for tensor in inputs}
        trusted = is_trusted(layer, inputs)
        made = [outputs, _logits(outputs)] if trusted else outputs
        for packed, output in parts(made):
            # What is passed through stays what it was; of nested layers that are not
            # known, the innermost tells most.
            if _key(output) in known:
                continue
            call = _Call(inputs, packed, trusted, layer, [])
            inner = calls.get(_key(output))
            if inner is None or call.trusted:
                # Of a layer that is known, its parts need not be.
                calls[_key(output)] = call
            else:
                inner.around.append(call)
        return outputs

    with patched(LAYER_CALL, record):
        yield calls


def _logits(outputs):
    """What sigmoids and softmaxes were made of: a loss uses it in their place."""
    return [*map(logits_of, tf.nest.flatten(outputs))]


def _key(tensor):
    """A tensor's name is its own in one graph only."""
    return id(tensor.graph), tensor.name


def parts(nest: Any) -> Iterator[tuple[bool, tf.Tensor]]:
    """The tensors of a nest; of ragged and sparse ones (True) their components."""
    for leaf in tf.nest.flatten(nest):
        packed = isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
        for part in tf.nest.flatten(leaf, expand_composites=True):
            if tf.is_symbolic_tensor(part):
                yield packed, part


class Reader:
    """Reads from a graph how its tensors depend on the examples."""

    def __init__(self, share: Any, calls: dict[Any, _Call]):
        """Prepares to read.

        Args:
            share: The nest of tensors that holds the examples, one row each; their
                number must not be known to the graph.
            calls: What `recorded_layers` remembered.
        """
        self._calls = calls
        self._culprits = {}
        self._unread = []
        self._known = {
            _key(part): PACKED if packed else NONE if part.shape.rank == 0 else ROWS
            for packed, part in parts(share)
        }

    def of(self, tensor: tf.Tensor) -> Dependence:
        """Returns how `tensor` depends on the examples."""
        # No recursion: a network is deeper than Python's stack.
        waiting = [tensor]
        while waiting:
            current = waiting[-1]
            inputs = self._inputs(current)
            missing = [t for t in inputs if _key(t) not in self._known]
            if _key(current) not in self._known and missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            if _key(current) not in self._known:
                self._known[_key(current)] = self._combine(current)
        return self._known[_key(tensor)]

    def why(self, tensor: tf.Tensor) -> Culprit:
        """Returns what made `tensor` coupled or unknown, or else what made it."""
        return self._culprits.get(_key(tensor), Culprit(tensor.op))

    @property
    def unread(self) -> list[Culprit]:
        """What could not be read in layers that are taken to keep rows apart."""
        return self._unread

    def _inputs(self, tensor):
        call = self._calls.get(_key(tensor))
        if call is None:
            return list(tensor.op.inputs)
        return [*call.inputs, *(() if call.trusted else tensor.op.inputs)]

    def _combine(self, tensor):
        call = self._calls.get(_key(tensor))
        if call is None:
            return self._of(tensor.op.inputs, _of_operation, tensor)
        if call.trusted:
            found = self._of(call.inputs, _of_layer, tensor, call.packed)
            self._blame(tensor, call)
            return found
        seen = self._of(tensor.op.inputs, _of_operation, tensor)
        self._blame(tensor, call)
        if seen is not UNKNOWN:
            return seen
        # That an operation cannot be read says nothing against the layer.
        culprit = self._culprits.pop(_key(tensor))
        taken = self._of(call.inputs, _of_layer, tensor, call.packed)
        if taken is ROWS and culprit not in self._unread:
            self._unread.append(culprit)
        self._blame(tensor, call)
        return taken

    def _blame(self, tensor, call):
        """Names the layer in which a tensor has become coupled or unknown."""
        culprit = self._culprits.get(_key(tensor))
        if culprit is None or culprit.layer is not None:
            return
        for each in call, *call.around:
            if not {self._known.get(_key(t)) for t in each.inputs} & {COUPLED, UNKNOWN}:
                self._culprits[_key(tensor)] = culprit._replace(layer=each.layer)
                return

    def _of(self, inputs, rule, tensor, *extra):
        kinds = [self._known[_key(t)] for t in inputs]
        if all(kind is NONE for kind in kinds):
            return NONE
        for kind in (COUPLED, UNKNOWN):
            if kind in kinds:
                origin = _key(inputs[kinds.index(kind)])
                self._culprits[_key(tensor)] = self._culprits[origin]
                return kind
        found = rule(tensor, list(inputs), kinds, *extra)
        if found in (COUPLED, UNKNOWN):
            self._culprits[_key(tensor)] = Culprit(tensor.op)
        return found


def _of_layer(tensor, inputs, kinds, packed):
    """A layer treats each example by itself, but for what it returns as a whole."""
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


def _of_operation(tensor, inputs, kinds):
    op = tensor.op
    present = set(kinds) - {NONE}
    if present == {PACKED}:
        unary = op.type in _ELEMENTWISE and len(inputs) == 1
        return PACKED if unary else UNKNOWN
    if present == {COLUMNS} or present == {COLUMNS, ROWS}:
        return _of_columns(tensor, op, inputs, kinds)
    if op.type in ("Pack", "ConcatV2"):
        return _of_parts(op, inputs, kinds)
    found = UNKNOWN
    if present <= {SUM, MEAN}:
        found = _of_totals(tensor, op, inputs, kinds, present)
    elif present <= {SIZE, SHAPE}:
        found = _of_sizes(op, inputs, kinds)
    elif op.type in ("RealDiv", "DivNoNan") and kinds == [SUM, SIZE]:
        found = MEAN
    elif present <= {ROWS, SHAPE}:
        found = _of_rows(tensor, op, inputs, kinds)
    if found is UNKNOWN and op.type in _ELEMENTWISE:
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


def _of_columns(tensor, op, inputs, kinds):
    """Of transposed matrices, which are made to be multiplied."""
    if op.type == "MatMul" and not (
        op.get_attr("transpose_a") or op.get_attr("transpose_b")
    ):
        # Over the examples; or each with each.
        return {(COLUMNS, ROWS): SUM, (ROWS, COLUMNS): COUPLED}.get(
            tuple(kinds), UNKNOWN
        )
    if op.type in _ELEMENTWISE and all(
        kind is COLUMNS or t.shape.rank == 0
        for t, kind in zip(inputs, kinds, strict=True)
    ):
        return COLUMNS
    if op.type == "Transpose" and tensor.shape.rank == 2:
        return ROWS
    return UNKNOWN


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
        return SHAPE if ahead else UNKNOWN
    if present == {MEAN}:
        return MEAN
    if present == {SUM} and NONE not in kinds:
        return SUM
    rank = inputs[0].shape.rank + (op.type == "Pack")
    if present == {ROWS} and NONE not in kinds and int(axis) % rank != 0:
        return ROWS
    return UNKNOWN


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


def _of_sizes(op, inputs, kinds):
    """Of numbers of examples, and of shapes."""
    if op.type == "Cast" and not inputs[0].dtype.is_integer:
        return UNKNOWN
    if op.type in ("Cast", "Identity"):
        return kinds[0]
    if op.type == "StridedSlice" and kinds[0] is SHAPE:
        begin, end, step = (tf.get_static_value(t) for t in inputs[1:4])
        if begin is None or end is None or step is None or len(begin) != 1:
            return UNKNOWN
        first = 0 if op.get_attr("begin_mask") & 1 else int(begin[0])
        if first < 0 and inputs[0].shape[0] is not None:
            first += inputs[0].shape[0]
        if first < 0 or int(step[0]) != 1 or op.get_attr("new_axis_mask"):
            return UNKNOWN
        if first > 0:
            return NONE
        return SIZE if op.get_attr("shrink_axis_mask") & 1 else SHAPE
    if op.type == "Slice" and kinds[0] is SHAPE:
        begin = _integers(inputs[1])
        return UNKNOWN if begin is None else NONE if begin[0] > 0 else SHAPE
    if op.type == "Prod" and kinds[0] is SHAPE:
        return SIZE
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


def _integers(tensor):
    """The known value of a vector of integers, more than TensorFlow tells: a list."""
    value = tf.get_static_value(tensor)
    if value is not None:
        return value.ravel().tolist()
    op = tensor.op
    if op.type == "Slice" and op.inputs[0].op.type == "Shape":
        begin, size = map(_integers, op.inputs[1:])
        shape = op.inputs[0].op.inputs[0].shape
        if begin is None or size is None or shape.rank is None:
            return None
        found = shape[begin[0] : begin[0] + size[0]].as_list()
        return None if None in found else found
    if op.type == "Range":
        start, limit, delta = map(_integers, op.inputs)
        known = None not in (start, limit, delta)
        return [*range(*start, *limit, *delta)] if known else None
    if op.type not in ("Sub", "Pack", "ConcatV2"):
        return None
    parts = [_integers(part) for part in op.inputs[: -1 if "V2" in op.type else None]]
    if None in parts:
        return None
    if op.type == "Sub":
        return [a - b for a, b in zip(*parts, strict=True)]
    return [each for part in parts for each in part]


def _of_rows(tensor, op, inputs, kinds):
    """Of rows: what treats each by itself gives rows, what adds them up a total."""
    if op.type == "Shape":
        return SHAPE
    if op.type == "Size":
        return SIZE
    if op.type == "Rank":
        return NONE
    if op.type in _ELEMENTWISE:
        return _of_elements(inputs, kinds)
    if op.type in _REDUCTIONS:
        return _of_reduction(op, inputs)
    if op.type == "L2Loss":
        return SUM
    if op.type == "Split" and inputs[1].shape.rank is not None:
        axis = tf.get_static_value(inputs[0])
        apart = axis is not None and int(axis) % inputs[1].shape.rank != 0
        return ROWS if apart else UNKNOWN
    first_only = kinds[0] is ROWS and all(kind is NONE for kind in kinds[1:])
    rank = inputs[0].shape.rank
    if op.type in ("Softmax", "LogSoftmax"):
        return ROWS if rank is not None and rank > 1 else UNKNOWN
    if op.type in (
        "SparseSoftmaxCrossEntropyWithLogits",
        "SoftmaxCrossEntropyWithLogits",
    ):
        return ROWS if kinds == [ROWS, ROWS] else UNKNOWN
    if op.type in ("MatMul", "BatchMatMulV2"):
        return _of_product(op, inputs, kinds)
    if op.type == "Einsum":
        return _of_einsum(op, inputs, kinds)
    if op.type == "BroadcastTo":
        same = first_only or kinds == [ROWS, SHAPE]
        return ROWS if same and tensor.shape.rank == rank else UNKNOWN
    if op.type == "Reshape":
        return _of_reshape(tensor, inputs, kinds)
    if op.type == "OneHot":
        return ROWS if first_only and op.get_attr("axis") == -1 else UNKNOWN
    if op.type == "GatherV2":
        return _of_gather(op, inputs, kinds)
    if not first_only:
        return UNKNOWN
    if op.type in _ROWWISE:
        return ROWS
    if op.type in _OF_MATRICES:
        return ROWS if rank is not None and rank > 2 else UNKNOWN
    if op.type in ("MirrorPad", "Pad", "PadV2"):
        paddings = _integers(inputs[1])
        return ROWS if paddings is not None and not any(paddings[:2]) else UNKNOWN
    if op.type == "Tile":
        multiples = _integers(inputs[1])
        return ROWS if multiples is not None and multiples[0] == 1 else UNKNOWN
    if op.type == "TopKV2":
        return ROWS if rank is not None and rank > 1 else UNKNOWN
    if op.type == "ExpandDims":
        axis = tf.get_static_value(inputs[1])
        if axis is None or rank is None:
            return UNKNOWN
        return ROWS if int(axis) % (rank + 1) != 0 else UNKNOWN
    if op.type == "Squeeze":
        axes = op.get_attr("squeeze_dims")
        if rank is None or not axes:
            return UNKNOWN
        return ROWS if all(axis % rank != 0 for axis in axes) else UNKNOWN
    if op.type == "Transpose":
        order = _integers(inputs[1])
        if order is None or order[0] == 0:
            return UNKNOWN if order is None else ROWS
        return COLUMNS if rank == 2 else UNKNOWN
    if op.type == "Unpack":
        return ROWS if rank and op.get_attr("axis") % rank != 0 else UNKNOWN
    if op.type in ("Cumprod", "Cumsum", "ReverseV2", "Roll"):
        # They move values along axes.
        axes = tf.get_static_value(inputs[-1])
        if axes is None or rank is None:
            return UNKNOWN
        return COUPLED if any(int(axis) % rank == 0 for axis in axes.flat) else ROWS
    if op.type == "StridedSlice":
        return _of_slice(op, inputs)
    return UNKNOWN


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


def _of_reduction(op, inputs):
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


def _of_product(op, inputs, kinds):
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


def _of_einsum(op, inputs, kinds):
    equation = op.get_attr("equation").decode().replace(" ", "")
    if "..." in equation:
        equation = _spelled_out(equation, [t.shape.rank for t in inputs])
        if equation is None:
            return UNKNOWN
    terms, result = equation.split("->")
    terms = terms.split(",")
    firsts = {term[:1] for term, kind in zip(terms, kinds, strict=True) if kind is ROWS}
    others = [
        term[1:] if kind is ROWS else term
        for term, kind in zip(terms, kinds, strict=True)
    ]
    if len(firsts) > 1:
        return COUPLED  # each with each
    (examples,) = firsts
    if any(examples in other for other in others):
        return UNKNOWN
    if examples not in result:
        return SUM
    return ROWS if result.startswith(examples) else UNKNOWN


def _spelled_out(equation, ranks):
    """An equation with letters for its ellipsis, `None` if they are not known."""
    terms = equation.split("->")[0].split(",")
    hidden = {
        None if rank is None else rank - len(term.replace("...", ""))
        for term, rank in zip(terms, ranks, strict=True)
        if "..." in term
    }
    if len(hidden) != 1 or None in hidden:
        return None
    return equation.replace("...", "αβγδεζηθ"[: hidden.pop()])


def _of_reshape(tensor, inputs, kinds):
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
        target = _integers(inputs[1]) or [None]
        new = target[1:] if target[0] == -1 else new
    if tensor.shape[0] is not None or None in new:
        return UNKNOWN
    if new == old[len(old) - len(new) :]:
        return ROWS
    size = tf.TensorShape(old).num_elements()
    parts = tf.TensorShape(new).num_elements()
    return ROWS if size is not None and parts and size % parts == 0 else UNKNOWN


def _of_gather(op, inputs, kinds):
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
