"""A dense layer of which only some blocks are there."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from towers.models.block_sparse import arguments, patterns, product, weights
from towers.models.block_sparse.layout import Reads


@keras.saving.register_keras_serializable(package="towers")
class BlockSparseDense(keras.layers.Layer):
    """A dense layer whose kernel is zero but for some blocks.

    It computes `activation(x @ kernel + bias)`. Only the blocks that are there are
    weights; so gradients and the optimizer's slots have no more.
    docs/scale/block_sparse.md tells which pattern is for what.

    Args:
        units: Number of outputs.
        block_size: Rows and columns of a block. "block_diagonal", "butterfly" and
            "monarch" make larger ones, in multiples of it, as sparsity allows.
        pattern: Which blocks are there: "block_diagonal", "butterfly", "monarch",
            "local_strided", "random", "erdos_renyi", "barabasi_albert", or a matrix
            [input blocks, output blocks] of 0 and 1.
        sparsity: The share of the kernel that is zero. The nearest that the pattern has
            is taken; a matrix has its own.
        activation: As of `keras.layers.Dense`.
        use_bias: As of `keras.layers.Dense`.
        kernel_initializer: As of `keras.layers.Dense`; it counts the inputs and outputs
            that blocks join.
        bias_initializer: As of `keras.layers.Dense`.
        kernel_regularizer: Of the blocks.
        bias_regularizer: As of `keras.layers.Dense`.
        kernel_constraint: Of the blocks [blocks, inputs, outputs].
        bias_constraint: As of `keras.layers.Dense`.
        dynamic: Whether training may move blocks, as `towers.RigL` does. Which input
            each block reads is then a weight.
        seed: Of random patterns, and of which groups meet in a butterfly. By default
            each layer draws one, so that layers have different patterns.
        **kwargs: As of any layer.

    Raises:
        ValueError: An argument is none of these.
    """

    def __init__(
        self,
        units: int,
        block_size: int = 32,
        pattern: Any = "butterfly",
        sparsity: float = 0.75,
        *,
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
            units=units,
            block_size=block_size,
            pattern=pattern,
            sparsity=sparsity,
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
        self.supports_masking = True
        patterns.check_whole("units", units, 1, "128")
        patterns.check(block_size, sparsity, self.seed)
        # A kernel [inputs, units] that is added to the blocks, to see its gradient.
        self.added_kernel: tf.Tensor | None = None

    def build(self, input_shape):
        """Creates the blocks."""
        inputs = input_shape[-1]
        self.layouts = patterns.layouts(
            self.pattern, inputs, self.units, self.block_size, self.sparsity, self.seed
        )
        self.kernels = weights.add_kernels(self, self.layouts)
        self.bias = weights.add_bias(self, self.units)
        self.places = weights.add_places(self, self.layouts)
        self.present = weights.add_present(self, self.layouts)
        self.dense_shape = inputs, self.units
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: inputs})

    def call(self, inputs):
        """Multiplies [..., inputs] by the blocks; returns [..., units]."""
        outputs = self._multiplied(inputs)
        if self.added_kernel is not None:
            added = tf.cast(self.added_kernel, outputs.dtype)
            outputs += tf.tensordot(inputs, added, 1)
        if self.bias is not None:
            outputs = ops.add(outputs, self.bias)
        return self.activation(outputs)

    def _multiplied(self, inputs):
        slabs = product.slabs_of(inputs, self.layouts[0])
        for layout, blocks in zip(self.layouts, weights.values(self), strict=True):
            reads = layout.reads
            if self.dynamic:
                reads = Reads.of(layout, tf.convert_to_tensor(self.places))
            if len(self.layouts) > 1:
                # If features are padded, groups of one can be of another size.
                shape = layout.mask.shape[0], layout.block_shape[0], -1
                slabs = tf.reshape(slabs, shape)
            slabs = product.multiply(slabs, blocks, layout, reads)
            if len(self.layouts) > 1:
                slabs = _dealt(slabs)
        return product.rows_of(slabs, inputs, self.units)

    def dense_kernel(self) -> tf.Tensor:
        """Returns the kernel [inputs, units], with its zeros."""
        return self._multiplied(tf.eye(self.dense_shape[0], dtype=self.variable_dtype))

    def compute_output_shape(self, input_shape):
        """Returns [..., units]."""
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), **arguments.config(self)}


def _dealt(slabs):
    """Deals out features, one of each group in turn (the permutation of Monarch)."""
    groups, size, _ = slabs.shape
    return tf.reshape(tf.transpose(slabs, (1, 0, 2)), (groups, size, -1))
