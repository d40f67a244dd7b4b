"""A convolution whose kernel has only some blocks of channels x filters."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from towers.models.block_sparse import arguments, convolve, patterns, weights
from towers.models.block_sparse.convolve import Window


@keras.saving.register_keras_serializable(package="towers")
class BlockSparseConv2D(keras.layers.Layer):
    """A convolution whose kernel is zero but for some blocks of channels x filters.

    It computes what `keras.layers.Conv2D` does. The same blocks are there at each place
    of the kernel [height, width, channels, filters], and only they are weights; so
    gradients and the optimizer's slots have no more. docs/scale/block_sparse.md tells
    which pattern is for what.

    The filters of an output block are one convolution of TensorFlow, of the channels
    that they read. With "block_diagonal" these are the groups of a grouped convolution
    (Krizhevsky et al. 2012; ResNeXt, Xie et al. 2017:
    https://arxiv.org/abs/1611.05431). Blocks of fewer than 16 channels are slow, and
    those of fewer than 32 if the kernel is 1 x 1.

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
        seed: Of random patterns, and of which groups meet in a butterfly. By default
            each layer draws one, so that layers have different patterns.
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
        seed: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        arguments.keep(
            self,
            filters=filters,
            kernel_size=_pair("kernel_size", kernel_size),
            strides=_pair("strides", strides),
            padding=str(padding).lower(),
            block_size=block_size,
            pattern=pattern,
            sparsity=sparsity,
            data_format=data_format or keras.config.image_data_format(),
            dilation_rate=_pair("dilation_rate", dilation_rate),
            activation=activation,
            use_bias=use_bias,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            bias_regularizer=bias_regularizer,
            kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint,
            dynamic=dynamic,
            seed=arguments.drawn(seed),
        )
        patterns.check(block_size, sparsity, self.seed)
        # A kernel of `dense_shape` that is added to the blocks, to see its gradient.
        self.added_kernel: tf.Tensor | None = None
        _check(self)

    @property
    def _channels_last(self):
        return self.data_format == "channels_last"

    @property
    def _window(self):
        return Window(self.kernel_size, self.strides, self.padding, self.dilation_rate)

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
        if any(size is not None and size < 1 for size in self._sizes(input_shape)):
            raise ValueError(
                f"Received inputs of shape {tuple(input_shape)}; expected at least the "
                f"height and width of the kernel, {self.kernel_size} with "
                f"dilation_rate={self.dilation_rate}, so make it smaller or pass "
                "padding='same'."
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
        self.present = weights.add_present(self, self.layouts)
        self.dense_shape = *self.kernel_size, channels, self.filters
        self.input_spec = keras.layers.InputSpec(ndim=4, axes={axis: channels})

    def call(self, inputs):
        """Convolves pictures; returns [batch, height, width, filters].

        With `data_format="channels_first"`, both have channels on the second axis.
        """
        pictures = tf.convert_to_tensor(inputs)
        if not self._channels_last:
            pictures = tf.transpose(pictures, (0, 2, 3, 1))
        x, missing = pictures, self.layouts[0].shape[0] - pictures.shape[-1]
        if missing:
            x = tf.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing)))
        (blocks,) = weights.values(self)
        x = convolve.convolve(x, blocks, self.layouts[0], self._inputs(), self._window)
        if x.shape[-1] > self.filters:
            x = x[..., : self.filters]
        if self.added_kernel is not None:
            x += self._added(pictures)
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

    def _added(self, pictures):
        """What the added kernel makes of pictures, with channels last."""
        return ops.conv(
            pictures,
            tf.cast(self.added_kernel, pictures.dtype),
            strides=self.strides,
            padding=self.padding,
            data_format="channels_last",
            dilation_rate=self.dilation_rate,
        )

    def dense_kernel(self) -> tf.Tensor:
        """Returns the kernel [height, width, channels, filters], with its zeros."""
        (layout,), (blocks,) = self.layouts, weights.values(self)
        kernel = layout.dense(blocks, self._inputs())
        (channels,) = self.input_spec.axes.values()
        return kernel[:, :, :channels, : self.filters]

    def _sizes(self, input_shape):
        """Height and width of what it makes of pictures of a shape."""
        begin = 1 if self._channels_last else 2
        return self._window.output_sizes(input_shape[begin : begin + 2])

    def compute_output_shape(self, input_shape):
        """Returns the shape of what it makes of pictures of a shape."""
        sizes = self._sizes(input_shape)
        if self._channels_last:
            return (input_shape[0], *sizes, self.filters)
        return (input_shape[0], self.filters, *sizes)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), **arguments.config(self)}


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
