"""A convolution whose kernel has only some blocks of channels x filters."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from towers.models.block_sparse import patterns, product, weights
from towers.models.block_sparse.layout import Layout


@keras.saving.register_keras_serializable(package="towers")
class BlockSparseConv2D(keras.layers.Layer):
    """A convolution whose kernel is zero but for some blocks of channels x filters.

    It computes what `keras.layers.Conv2D` does. The same blocks are there at each place
    of the kernel [height, width, channels, filters], and only they are weights; so
    gradients and the optimizer's slots have no more. docs/block_sparse.md tells which
    pattern is for what.

    The filters of an output block are one convolution of TensorFlow, of the channels
    that they read. With "block_diagonal" these are the groups of a grouped convolution
    (Krizhevsky et al. 2012; ResNeXt, Xie et al. 2017:
    https://arxiv.org/abs/1611.05431). Blocks of fewer than 16 channels are slow.

    Args:
        filters: Number of filters.
        kernel_size: Height and width of the kernel, or a number for both.
        strides: As of `keras.layers.Conv2D`.
        padding: "valid" or "same".
        block_size: Channels and filters of a block. "block_diagonal" and "butterfly"
            make larger ones, in multiples of it, as sparsity allows.
        pattern: Which blocks are there: "block_diagonal", "butterfly",
            "local_strided", "random", "erdos_renyi", "barabasi_albert", or a matrix
            [blocks of channels, blocks of filters] of 0 and 1.
        sparsity: The share of the kernel that is zero. The nearest that the pattern has
            is taken; a matrix has its own.
        data_format: "channels_last" or "channels_first"; that of Keras's settings if it
            is not given. The latter is transposed, so CPUs compute it as well.
        dilation_rate: As of `keras.layers.Conv2D`.
        activation: As of `keras.layers.Conv2D`.
        use_bias: As of `keras.layers.Conv2D`.
        kernel_initializer: As of `keras.layers.Conv2D`; it counts the channels and
            filters that blocks join.
        bias_initializer: As of `keras.layers.Conv2D`.
        kernel_regularizer: Of the blocks.
        bias_regularizer: As of `keras.layers.Conv2D`.
        kernel_constraint: Of the blocks [blocks, height, width, channels, filters].
        bias_constraint: As of `keras.layers.Conv2D`.
        dynamic: Whether training may move blocks, as `towers.RigL` does. Which channels
            each block reads is then a weight.
        seed: Of random patterns.
        **kwargs: As of any layer.

    Raises:
        ValueError: An argument is none of these.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int],
        strides: int | tuple[int, int] = 1,
        padding: str = "valid",
        *,
        block_size: int = 32,
        pattern: Any = "butterfly",
        sparsity: float = 0.75,
        data_format: str | None = None,
        dilation_rate: int | tuple[int, int] = 1,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        dynamic: bool = False,
        seed: int = 0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.filters = filters
        self.kernel_size = _pair("kernel_size", kernel_size)
        self.strides = _pair("strides", strides)
        self.dilation_rate = _pair("dilation_rate", dilation_rate)
        self.padding = str(padding).lower()
        self.data_format = data_format or keras.config.image_data_format()
        self.block_size, self.sparsity, self.seed = block_size, sparsity, seed
        self.pattern = pattern if isinstance(pattern, str) else np.asarray(pattern)
        self.dynamic, self.use_bias = dynamic, use_bias
        self.activation = keras.activations.get(activation)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        _check(self)

    @property
    def _channels_last(self):
        return self.data_format == "channels_last"

    def build(self, input_shape):
        """Creates the blocks."""
        axis = -1 if self._channels_last else 1
        channels = input_shape[axis]
        if len(input_shape) != 4 or channels is None:
            raise ValueError(
                f"Received inputs of shape {tuple(input_shape)}; expected four axes, "
                f"and the number of channels on axis {axis} for "
                f"data_format={self.data_format!r}."
            )
        self.layouts = patterns.layouts(
            self.pattern,
            channels,
            self.filters,
            self.block_size,
            self.sparsity,
            self.seed,
        )
        self.kernels = weights.add_kernels(self, self.layouts, self.kernel_size)
        self.bias = weights.add_bias(self, self.filters)
        self.places = weights.add_places(self, self.layouts)
        self.input_spec = keras.layers.InputSpec(ndim=4, axes={axis: channels})

    def call(self, inputs):
        """Convolves pictures; returns [batch, height, width, filters].

        With `data_format="channels_first"`, both have channels on the second axis.
        """
        x = tf.convert_to_tensor(inputs)
        if not self._channels_last:
            x = tf.transpose(x, (0, 2, 3, 1))
        missing = self.layouts[0].shape[0] - x.shape[-1]
        if missing:
            x = tf.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing)))
        x = _convolve(
            x,
            tf.convert_to_tensor(self.kernels[0]),
            self.layouts[0],
            self._inputs(),
            {
                "strides": (1, *self.strides, 1),
                "padding": self.padding.upper(),
                "dilations": (1, *self.dilation_rate, 1),
            },
        )
        x = x[..., : self.filters]
        if self.bias is not None:
            x = ops.add(x, self.bias)
        if not self._channels_last:
            x = tf.transpose(x, (0, 3, 1, 2))
        return self.activation(x)

    def _inputs(self):
        """The block of channels that each block reads: an array, or a tensor."""
        if self.dynamic:
            return tf.convert_to_tensor(self.places)
        return self.layouts[0].inputs

    def dense_kernel(self) -> tf.Tensor:
        """Returns the kernel [height, width, channels, filters], with its zeros."""
        (layout,), (blocks,) = self.layouts, self.kernels
        rows, columns = layout.mask.shape
        place = self._inputs() * columns + layout.outputs
        grid = tf.scatter_nd(
            place[:, None],
            tf.convert_to_tensor(blocks),
            (rows * columns, *blocks.shape[1:]),
        )
        grid = tf.reshape(grid, (rows, columns, *blocks.shape[1:]))
        kernel = tf.reshape(
            tf.transpose(grid, (2, 3, 0, 4, 1, 5)), (*self.kernel_size, *layout.shape)
        )
        (channels,) = self.input_spec.axes.values()
        return kernel[:, :, :channels, : self.filters]

    def compute_output_shape(self, input_shape):
        """Returns the shape of what it makes of pictures of a shape."""
        begin = 1 if self._channels_last else 2
        sizes = [
            size and _output_size(self.padding, size, *window)
            for size, *window in zip(
                input_shape[begin : begin + 2],
                self.kernel_size,
                self.strides,
                self.dilation_rate,
                strict=True,
            )
        ]
        if self._channels_last:
            return (input_shape[0], *sizes, self.filters)
        return (input_shape[0], self.filters, *sizes)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "filters": self.filters,
            "kernel_size": self.kernel_size,
            "strides": self.strides,
            "padding": self.padding,
            "data_format": self.data_format,
            "dilation_rate": self.dilation_rate,
            **weights.config(self),
        }


def _pair(name: str, value: Any) -> tuple[int, int]:
    """Returns height and width."""
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise ValueError(
            f"Received {name}={value!r}; expected a whole number of at least 1, or two "
            "for height and width, such as (3, 3)."
        )
    return pair


def _check(layer: BlockSparseConv2D) -> None:
    if not isinstance(layer.filters, int) or layer.filters < 1:
        raise ValueError(
            f"Received filters={layer.filters!r}; expected a whole number of at least "
            "1, such as 256."
        )
    for name, values in {
        "padding": ("valid", "same"),
        "data_format": ("channels_last", "channels_first"),
    }.items():
        if getattr(layer, name) not in values:
            raise ValueError(
                f"Received {name}={getattr(layer, name)!r}; expected {values[0]!r} or "
                f"{values[1]!r}."
            )
    if max(layer.strides) > 1 and max(layer.dilation_rate) > 1:
        raise ValueError(
            f"Received strides={layer.strides} and dilation_rate={layer.dilation_rate};"
            " expected one of them to be 1, as of keras.layers.Conv2D."
        )
    if isinstance(layer.pattern, str) and layer.pattern == "monarch":
        raise ValueError(
            "Received pattern='monarch'; expected a pattern of one matrix, as the two "
            "of Monarch are no single kernel, so take 'butterfly' or 'random'."
        )


def _output_size(padding, size, kernel, stride, dilation):
    if padding == "valid":
        size -= (kernel - 1) * dilation
    return -(-size // stride)


# In what follows, pictures are [batch, height, width, channels], and blocks
# [blocks, height, width, channels, filters].


def _convolve(
    x: tf.Tensor, blocks: tf.Tensor, layout: Layout, inputs: Any, options: dict
) -> tf.Tensor:
    """Convolves pictures.

    A product of slabs, as that of BlockSparseDense, would need each pixel once for each
    place of the kernel. TensorFlow's convolution does not, and so is several times as
    fast, with one for each output block. docs/block_sparse.md has what was tried.

    Args:
        x: Pictures.
        blocks: The kernel's.
        layout: Which of them are there.
        inputs: Int [blocks]: the block of channels that each reads.
        options: Strides, padding and dilations, as TensorFlow's operations take them.
    """
    settings = {"layout": layout, "inputs": inputs, "options": options}
    return product.bilinear(
        functools.partial(_forward, **settings),
        functools.partial(_backward, **settings),
    )(x, blocks)


def _forward(x, blocks, layout, inputs, options):
    """Makes one convolution for each output block."""
    read = _reader(x, layout.mask.shape[0])
    returned = {}
    for number, own in _slices(layout.mask.sum(0)):
        kernel = tf.transpose(blocks[own], (1, 2, 0, 3, 4))
        kernel = tf.reshape(kernel, (*kernel.shape[:2], -1, kernel.shape[-1]))
        with _after(returned):
            source = read(inputs[own])
        returned[number] = tf.raw_ops.Conv2D(input=source, filter=kernel, **options)
    return _joined(returned, layout.mask.shape[1])


def _backward(upstream, x, blocks, layout, inputs, options):
    """Returns the gradients of pictures and blocks: two for each input block.

    They read the same channels of `upstream`.
    """
    read = _reader(upstream, layout.mask.shape[1])
    sources = tf.split(x, layout.mask.shape[0], -1)
    # Sorted by input, as the loop goes through them.
    order, ranks = _order(inputs)
    of_sources, of_blocks = {}, []
    for number, own in _slices(layout.mask.sum(1)):
        kernel = tf.transpose(tf.gather(blocks, order[own]), (1, 2, 3, 0, 4))
        split = kernel.shape
        kernel = tf.reshape(kernel, (*split[:3], -1))
        with _after(of_sources):
            gradient = read(_take(layout.outputs, order[own]))
        of_sources[number] = tf.raw_ops.Conv2DBackpropInput(
            input_sizes=tf.shape(sources[number]),
            filter=kernel,
            out_backprop=gradient,
            **options,
        )
        of_kernel = tf.raw_ops.Conv2DBackpropFilter(
            input=sources[number],
            filter_sizes=kernel.shape,
            out_backprop=gradient,
            **options,
        )
        of_blocks.append(tf.transpose(tf.reshape(of_kernel, split), (3, 0, 1, 2, 4)))
    of_x = _joined(of_sources, layout.mask.shape[0])
    return of_x, tf.gather(tf.concat(of_blocks, 0), ranks)


def _slices(counts: np.ndarray) -> Iterator[tuple[int, slice]]:
    """The number of each block that has others, and where they are in their list."""
    for number, (begin, end) in enumerate(itertools.pairwise((0, *np.cumsum(counts)))):
        if begin < end:
            yield number, slice(begin, end)


def _reader(x: tf.Tensor, number: int) -> Callable[[Any], tf.Tensor]:
    """Returns a function that reads blocks of channels, one beside the other.

    Args:
        x: Pictures.
        number: How many blocks they have.
    """
    parts = tf.split(x, number, -1)

    def read(blocks):
        # This is faster than to gather, if the numbers are known.
        if isinstance(blocks, np.ndarray):
            return tf.concat([parts[block] for block in blocks], -1)
        size, shape = parts[0].shape[-1], tf.shape(x)[:-1]
        grid = tf.reshape(x, tf.concat([shape, (number, size)], 0))
        taken = tf.gather(grid, blocks, axis=-2)
        return tf.reshape(taken, tf.concat([shape, (blocks.shape[0] * size,)], 0))

    return read


def _after(returned):
    """Lets what a convolution reads be copied when the one before is done.

    So the memory of one such copy is enough, and it is still in the cache.
    """
    return tf.control_dependencies([*returned.values()][-1:])


def _joined(returned: dict[int, tf.Tensor], number: int) -> tf.Tensor:
    """Puts blocks of channels beside each other; those that are missing are zero."""
    zeros = tf.zeros_like(next(iter(returned.values())))
    return tf.concat([returned.get(block, zeros) for block in range(number)], -1)


def _order(inputs):
    """The blocks by input, and where each one is among them."""
    if isinstance(inputs, np.ndarray):
        order = np.argsort(inputs, kind="stable")
        return order, np.argsort(order)
    order = tf.argsort(inputs, stable=True)
    return order, tf.argsort(order)


def _take(values, numbers):
    known = isinstance(numbers, np.ndarray)
    return values[numbers] if known else tf.gather(values, numbers)
