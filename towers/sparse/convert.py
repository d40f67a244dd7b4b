"""Makes block-sparse layers of a model's dense ones."""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import keras
import numpy as np

from towers.keras_adapter.layers import layers_of
from towers.model.tower_model import TowerModel
from towers.models.block_sparse import BlockSparseConv2D, BlockSparseDense
from towers.models.block_sparse.layout import sums_of_blocks
from towers.models.block_sparse.patterns import check
from towers.models.text.layers import Projection
from towers.program.voice import say

# The pattern that keeps the blocks with the largest values.
MAGNITUDE = "magnitude"
_BLOCK_SIZE = 32
# A product of the last axis and a matrix, such as "btw,wo->bto".
_OF_LAST_AXIS = re.compile(r"((?:\.{3})?\w*)(\w),\2(\w)->\1\3")
_SPARSE = BlockSparseConv2D, BlockSparseDense
# What these arguments say stays as it is.
_KEPT = (
    *("name", "dtype", "trainable", "activation", "use_bias", "bias_initializer"),
    *("kernel_initializer", "kernel_regularizer", "bias_regularizer"),
    *("bias_constraint", "activity_regularizer"),
)
_OF_CONVOLUTIONS = (
    *("filters", "kernel_size", "strides", "padding", "data_format"),
    "dilation_rate",
)


def sparsify(
    model: keras.Model,
    pattern: Any = MAGNITUDE,
    sparsity: float = 0.75,
    *,
    block_size: int | None = None,
    layers: Collection[str] | None = None,
    dynamic: bool = False,
    seed: int = 0,
) -> keras.Model:
    """Makes a copy of a model in which layers are block-sparse.

    `Dense` becomes `BlockSparseDense`, and so does an `EinsumDense` that multiplies the
    last axis by a matrix. `Conv2D` becomes `BlockSparseConv2D`. The blocks that stay
    keep their values. Layers that have blocks already are made sparse again, so a model
    that `towers.PruneBlocks` has trained becomes as small as it is sparse. A line tells
    which layers changed, and which did not. Those whose kernels have constraints do
    not, nor do layers within layers of your own.

    Train the copy afterwards, so that the blocks that stay make up for the others.

    Examples:
        >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128)])
        >>> towers.sparsify(model, sparsity=0.5, block_size=16).count_params()
        4224

    Args:
        model: A functional or sequential model, before `multi_gpu_model`.
        pattern: "magnitude" keeps the blocks of each layer with the largest sums of
            squares. Else a pattern of `BlockSparseDense`, but "monarch".
        sparsity: The share of each kernel that becomes zero.
        block_size: Rows and columns of a block; by default 32, and for a layer that has
            blocks, its own.
        layers: Names of layers; by default all whose kernels have at least two blocks
            of inputs and two of outputs.
        dynamic: Whether `towers.RigL` or `towers.PruneBlocks` may change the blocks.
        seed: Of random patterns, which differ from layer to layer.

    Returns:
        The copy, which is to be compiled.

    Raises:
        ValueError: An argument is none of these.
    """
    _check(model, pattern)
    check(_BLOCK_SIZE if block_size is None else block_size, sparsity, seed)
    options = {"sparsity": sparsity, "block_size": block_size}
    options |= {"dynamic": dynamic, "seed": seed}
    copy, copies = _copied(model, pattern, layers, options)
    _check_found(model, copies, layers, block_size)
    for layer, new, kernel, is_sparse in copies:
        if is_sparse:
            _fill(new, kernel, layer.bias)
        else:
            new.set_weights(layer.get_weights())
    _tell(model, copy, copies)
    return copy


class _Copied(NamedTuple):
    """A layer.

    Attributes:
        layer: The layer.
        new: Its copy, without the weights.
        kernel: Its kernel, if it can be made sparse.
        is_sparse: Whether the copy is to have blocks of that.
    """

    layer: keras.layers.Layer
    new: keras.layers.Layer
    kernel: np.ndarray | None
    is_sparse: bool


def _copied(model, pattern, names, options):
    """Copies a model, without its weights.

    Returns:
        The copy, and what has become of each layer.
    """
    copies = []

    def copied(layer):
        if not isinstance(layer, keras.layers.Layer):
            # An operation, such as of `x + y`, has no weights.
            return type(layer).from_config(layer.get_config())
        kernel, own = _dense_kernel(layer), {**options}
        if own["block_size"] is None:
            own["block_size"] = getattr(layer, "block_size", _BLOCK_SIZE)
        is_sparse = _is_wanted(layer, kernel, names, own["block_size"])
        if not is_sparse:
            new = type(layer).from_config(layer.get_config())
        else:
            chosen = pattern
            if isinstance(pattern, str) and pattern == MAGNITUDE:
                chosen = _largest(kernel, own["sparsity"], own["block_size"])
            own["seed"] += len(copies)
            new = _like(layer, pattern=chosen, **own)
        copies.append(_Copied(layer, new, kernel, is_sparse))
        return new

    copy = keras.models.clone_model(model, clone_function=copied, recursive=True)
    return copy, copies


def _check(model, pattern):
    if isinstance(model, TowerModel):
        raise ValueError(
            "Received a model of several towers; expected the model that they are made "
            "of, so call sparsify before multi_gpu_model."
        )
    if not isinstance(model, keras.Model) or not (
        model.built and getattr(model, "inputs", None)
    ):
        raise ValueError(
            f"Received {getattr(model, 'name', model)!r}, whose layers are not known; "
            "expected a functional or sequential model with an Input, so use "
            "BlockSparseDense and BlockSparseConv2D in a class of your own."
        )
    if isinstance(pattern, str) and pattern == "monarch":
        raise ValueError(
            "Received pattern='monarch', which is a product of two matrices; expected "
            "a pattern of one, such as 'butterfly', which can keep a kernel's blocks."
        )
    quantized = [
        layer.name
        for layer in layers_of(model)
        if getattr(layer, "quantization_mode", None) is not None
    ]
    if quantized:
        raise ValueError(
            f"Received model {model.name!r}, in which {', '.join(quantized)} are "
            "quantized; expected one that is not, so call sparsify before quantize."
        )


def _check_found(model, copies, names, block_size):
    can = _candidates(copies)
    if not can:
        raise ValueError(
            f"Received model {model.name!r}, in which no layer can be made sparse; "
            "expected Dense, Conv2D or EinsumDense without a constraint of the kernel."
        )
    if missing := {*(names or ())} - {*can}:
        raise ValueError(
            f"Received layers={sorted(missing)} for model {model.name!r}; expected "
            f"some of its layers with a kernel: {', '.join(can)}."
        )
    if not any(each.is_sparse for each in copies):
        raise ValueError(
            f"Received model {model.name!r} and block_size="
            f"{block_size or _BLOCK_SIZE}; expected a "
            "layer whose kernel has two blocks at least each way, so use smaller ones, "
            "or name layers."
        )


def _dense_kernel(layer: keras.layers.Layer) -> np.ndarray | None:
    """The kernel [..., inputs, outputs] of a layer that can be made sparse."""
    # Of a constraint, it is not known what it makes of blocks.
    if getattr(layer, "kernel_constraint", None) is not None:
        return None
    if _is(layer, *_SPARSE):
        return None if len(layer.layouts) > 1 else layer.dense_kernel().numpy()
    convolves = _is(layer, keras.layers.Conv2D) and layer.groups == 1
    multiplies = _is(layer, keras.layers.EinsumDense, Projection) and _is_of_last_axis(
        layer
    )
    if convolves or multiplies or _is(layer, keras.layers.Dense):
        return keras.ops.convert_to_numpy(layer.kernel)
    return None


def _is(layer, *kinds) -> bool:
    """Whether a layer computes what one of these does, also in a class of its own."""
    return any(
        isinstance(layer, kind) and type(layer).call is kind.call for kind in kinds
    )


def _is_of_last_axis(layer: keras.layers.EinsumDense) -> bool:
    found = _OF_LAST_AXIS.fullmatch(layer.equation.replace(" ", ""))
    return bool(found) and layer.bias_axes in (None, "", found[3])


def _is_wanted(layer, kernel, names, block_size) -> bool:
    if kernel is None:
        return False
    if names is not None:
        return layer.name in names
    return min(kernel.shape[-2:]) >= 2 * block_size


def _largest(kernel: np.ndarray, sparsity: float, block_size: int) -> np.ndarray:
    """Which blocks have the largest sums of squares, bool [inputs, outputs]."""
    shape = tuple(-(-size // block_size) for size in kernel.shape[-2:])
    squares = kernel.astype("float64") ** 2
    squares = sums_of_blocks(squares, shape, (block_size, block_size)).numpy()
    number = max(1, round((1 - sparsity) * squares.size))
    mask = np.zeros(squares.size, bool)
    mask[np.argsort(-squares, axis=None, kind="stable")[:number]] = True
    return mask.reshape(shape)


def _like(layer: keras.layers.Layer, **options: Any) -> keras.layers.Layer:
    """Makes a block-sparse layer with the arguments of a dense one."""
    given = layer.get_config()
    kept = {name: given[name] for name in _KEPT if name in given}
    if isinstance(layer, keras.layers.EinsumDense):
        kept["use_bias"] = layer.bias is not None
    if "filters" in given:
        kept |= {name: given[name] for name in _OF_CONVOLUTIONS}
        return BlockSparseConv2D.from_config({**kept, **options})
    kept["units"] = given.get("units") or layer.kernel.shape[-1]
    return BlockSparseDense.from_config({**kept, **options})


def _fill(layer: keras.layers.Layer, kernel: np.ndarray, bias: Any) -> None:
    """Gives a layer its blocks of a kernel [..., inputs, outputs]."""
    (layout,) = layer.layouts
    layer.kernels[0].assign(layout.blocks_of(kernel))
    if bias is not None:
        layer.bias.assign(bias)


def _candidates(copies):
    return [each.layer.name for each in copies if each.kernel is not None]


def _tell(model, copy, copies):
    sparse = [each.layer.name for each in copies if each.is_sparse]
    left = [name for name in _candidates(copies) if name not in sparse]
    others = f"; unchanged: {', '.join(left)}" if left else ""
    say(
        f"Model {model.name!r} has {copy.count_params():,} parameters instead of "
        f"{model.count_params():,}. Block-sparse: {', '.join(sparse)}{others}."
    )
