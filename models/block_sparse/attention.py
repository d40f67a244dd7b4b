"""Self-attention that computes only some blocks of the scores."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.models.block_sparse import arguments, attention_patterns, product
from towers.models.block_sparse.attention_patterns import Gather, Gathers

# A score of what is not to be looked at: far below any other, and finite.
_NEVER = -1e9


@keras.saving.register_keras_serializable(package="towers")
class BlockSparseAttention(keras.layers.Layer):
    """Attention of tokens to others of their example, in some blocks of the scores.

    Tokens are cut into blocks; a pattern tells which blocks of keys each block of
    queries looks at. No other scores are computed or stored, so time and memory grow
    with the number of these blocks, and not with the square of the tokens. Weights are
    those of `keras.layers.MultiHeadAttention`, in the same order.

    Patterns, with distances in blocks:
        "local": Blocks that are at most `window` apart.
        "strided": These, and each one at a multiple of `stride` (Sparse Transformers,
            Child et al. 2019: https://arxiv.org/abs/1904.10509).
        "global": These, and the first `global_blocks`, which look at all blocks and at
            which all look (Longformer, Beltagy et al. 2020:
            https://arxiv.org/abs/2004.05150; BigBird, Zaheer et al. 2020:
            https://arxiv.org/abs/2007.14062).

    Args:
        num_heads: Number of heads.
        key_dim: Size of queries, keys and values of each head.
        block_size: Tokens of a block. The last block may have fewer.
        pattern: "local", "strided", "global", or a matrix [query blocks, key blocks] of
            0 and 1.
        window: How many blocks on each side of its own a query block looks at.
        stride: Of "strided".
        global_blocks: Of "global".
        causal: Whether tokens look only at themselves and at what is before them.
        dropout: The share of weights of attention that is dropped in training.
        use_bias: Whether the projections add a bias.
        kernel_initializer: Of the projections' kernels.
        bias_initializer: Of their biases.
        kernel_regularizer: Of their kernels.
        bias_regularizer: Of their biases.
        kernel_constraint: Of their kernels.
        bias_constraint: Of their biases.
        seed: Of dropout.
        **kwargs: As of any layer.

    Raises:
        ValueError: An argument is none of these, or the number of tokens is not known.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        block_size: int = 32,
        pattern: Any = "local",
        *,
        window: int = 1,
        stride: int = 4,
        global_blocks: int = 1,
        causal: bool = False,
        dropout: float = 0.0,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        seed: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        attention_patterns.check(
            pattern,
            num_heads=num_heads,
            key_dim=key_dim,
            block_size=block_size,
            window=window,
            stride=stride,
            global_blocks=global_blocks,
        )
        arguments.keep(
            self,
            num_heads=num_heads,
            key_dim=key_dim,
            block_size=block_size,
            pattern=pattern,
            window=window,
            stride=stride,
            global_blocks=global_blocks,
            causal=causal,
            dropout=dropout,
            use_bias=use_bias,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            bias_regularizer=bias_regularizer,
            kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint,
            seed=seed,
        )
        self._drop = keras.layers.Dropout(dropout, seed=seed, dtype=self.dtype_policy)
        self.supports_masking = True

    def build(self, input_shape):
        """Creates the projections."""
        self._gathers(input_shape)
        width, heads = input_shape[-1], (self.num_heads, self.key_dim)
        self._query, self._key, self._value = (
            self._add_projection(name, (width, *heads), heads)
            for name in ("query", "key", "value")
        )
        self._output = self._add_projection("output", (*heads, width), (width,))
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: width})

    def _add_projection(self, name, kernel_shape, bias_shape):
        """Returns a kernel, and a bias or None."""
        # Of one initializer, all kernels would get the same numbers.
        of_kernel, of_bias = (
            type(each).from_config(each.get_config())
            for each in (self.kernel_initializer, self.bias_initializer)
        )
        kernel = self.add_weight(
            shape=kernel_shape,
            initializer=of_kernel,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
            name=f"{name}_kernel",
        )
        if not self.use_bias:
            return kernel, None
        return kernel, self.add_weight(
            shape=bias_shape,
            initializer=of_bias,
            regularizer=self.bias_regularizer,
            constraint=self.bias_constraint,
            name=f"{name}_bias",
        )

    def _gathers(self, shape):
        """What is read for inputs of a shape."""
        if len(shape) != 3 or shape[1] is None:
            raise ValueError(
                f"Received inputs of shape {tuple(shape)}; expected [batch, tokens, "
                "width] with a known number of tokens, for which the pattern is made, "
                "so tell keras.Input that number and pad all examples to it."
            )
        pattern = self.pattern
        if not isinstance(pattern, str):
            pattern = tuple(map(tuple, pattern.tolist()))
        blocks = self.window, self.stride, self.global_blocks
        return attention_patterns.gathers(
            pattern, shape[1], self.block_size, self.causal, *blocks
        )

    def call(
        self,
        inputs: tf.Tensor,
        padding_mask: tf.Tensor | None = None,
        mask: tf.Tensor | None = None,
        training: bool | None = None,
    ) -> tf.Tensor:
        """Returns features [batch, tokens, width].

        Args:
            inputs: Features [batch, tokens, width].
            padding_mask: Bool [batch, tokens]: which tokens are to be looked at; None
                for all. Where a token may look at none, attention returns zeros.
            mask: The same, from Keras, as by an embedding with `mask_zero`; it counts
                where there is no `padding_mask`.
            training: Whether weights of attention are dropped.
        """
        gathers, tokens = self._gathers(inputs.shape), inputs.shape[1]
        inputs = _blocks(inputs, self.block_size)
        padding_mask = mask if padding_mask is None else padding_mask
        if padding_mask is not None:
            padding_mask = tf.convert_to_tensor(padding_mask)
            if not padding_mask.shape.is_compatible_with([None, tokens]):
                raise ValueError(
                    f"Received a mask of shape {tuple(padding_mask.shape)}; expected "
                    f"[batch, tokens] of {tokens} tokens."
                )
            padding_mask = _blocks(tf.cast(padding_mask, "bool"), self.block_size)
        visible = [
            _visible(rows, keys, self.block_size, tokens, self.causal, padding_mask)
            for rows, keys in gathers.groups
        ]
        attended = attend(
            _heads(inputs, *self._query) * self.key_dim**-0.5,
            _heads(inputs, *self._key),
            _heads(inputs, *self._value),
            gathers,
            visible,
            functools.partial(self._drop, training=training),
        )
        kernel, bias = self._output
        outputs = tf.einsum("bhnsd,hdw->bnsw", attended, kernel)
        if bias is not None:
            outputs += bias
        _, count, size, width = outputs.shape
        return tf.reshape(outputs, (-1, count * size, width))[:, :tokens]

    def compute_output_shape(self, input_shape):
        """Returns [batch, tokens, width]."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), **arguments.config(self)}


def attend(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    gathers: Gathers,
    visible: Sequence[tf.Tensor | None],
    drop: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Computes attention in some blocks of the scores.

    Args:
        query: Scaled queries [batch, heads, blocks, block size, key size].
        key: Keys of the same shape.
        value: Values of the same shape.
        gathers: Which blocks of keys each block of queries looks at.
        visible: For each group of query blocks, which keys each query may look at; see
            `_visible`.
        drop: Drops some weights of attention.

    Returns:
        The weighted sums of values, of the same shape.
    """
    spread_queries, collect_queries = _transfers(gathers.queries)
    spread_keys, _ = _transfers(gathers.keys)
    groups = spread_queries(query), spread_keys(key), spread_keys(value), visible
    return collect_queries(*(_attended(*g, drop) for g in zip(*groups, strict=True)))


def _attended(query, key, value, visible, drop):
    """Attention within rows: of each row's queries to the keys that it reads."""
    scores = tf.matmul(query, key, transpose_b=True)
    if scores.dtype.size < 4:
        scores = tf.cast(scores, "float32")
    if visible is not None:
        scores = tf.where(visible, scores, _NEVER)
    weights = tf.cast(tf.nn.softmax(scores), value.dtype)
    attended = tf.matmul(drop(weights), value)
    if visible is not None and visible.shape.rank == 5:
        # Padding may hide all keys, and then all have the same score.
        attended = tf.where(tf.reduce_any(visible, -1, keepdims=True), attended, 0)
    return attended


def _visible(rows, read, size, tokens, causal, padding_mask):
    """Which keys that rows of query blocks read may be looked at.

    Args:
        rows: Query blocks, int [rows].
        read: Key blocks that they read, int [rows, width], -1 for none.
        size: Tokens of a block.
        tokens: Tokens of an example.
        causal: Whether later keys are hidden.
        padding_mask: Bool [batch, blocks, size] or None.

    Returns:
        Bool [rows, queries or 1, keys], or [batch, 1, rows, queries or 1, keys] with a
        padding mask, or None for all.
    """
    within = np.arange(size)
    keys = np.reshape(read[:, :, None] * size + within, (len(read), 1, -1))
    there = (keys >= 0) & (keys < tokens)
    visible = None if there.all() else tf.constant(there)
    if causal:
        queries = rows[:, None, None] * size + within[:, None]
        # As numbers, which are fewer than the pairs, these are in the graph.
        keys = np.where(there, keys, queries.max() + 1)
        visible = tf.constant(keys, "int64") <= tf.constant(queries, "int64")
    if padding_mask is None:
        return visible
    seen = tf.gather(padding_mask, np.maximum(read, 0), axis=1)
    seen = tf.reshape(seen, (-1, 1, len(read), 1, keys.shape[-1]))
    return seen if visible is None else seen & visible


def _transfers(gather: Gather):
    """Two linear functions that are each other's gradient.

    TensorFlow's own gradient of a gather scatters, which GPUs do in any order. Places
    that read no block are not added up: whatever they hold is hidden, so its gradient
    is zero.

    Args:
        gather: What is read.

    Returns:
        One function from blocks [batch, heads, blocks, size, features] to what each
        group reads [batch, heads, rows, width * size, features], and one that adds up
        for each block what is in the places that read it.
    """

    @tf.custom_gradient
    def spread(blocks):
        return _read(blocks, gather), lambda *upstream: collect(*upstream)

    @tf.custom_gradient
    def collect(*parts):
        return _added_up(parts, gather), lambda upstream: spread(upstream)

    return spread, collect


def _read(blocks, gather):
    """What each group reads; any block where it reads none."""
    _, heads, _, size, features = blocks.shape
    return [
        tf.reshape(
            product.taken(blocks, np.maximum(group, 0), axis=2),
            (-1, heads, len(group), group.shape[1] * size, features),
        )
        for group in gather.blocks
    ]


def _added_up(parts, gather):
    """For each block, the sum of what is in the places that read it."""
    _, heads, _, keys, features = parts[0].shape
    size = keys // gather.blocks[0].shape[1]
    places = [
        tf.reshape(part, (-1, heads, group.size, size, features))
        for part, group in zip(parts, gather.blocks, strict=True)
    ]
    count = sum(group.size for group in gather.blocks)
    if any((group == count).any() for group in gather.readers):
        places.append(tf.zeros_like(places[0][:, :, :1]))
    places = tf.concat(places, 2)
    blocks = [_summed(product.taken(places, group, axis=2)) for group in gather.readers]
    return product.taken(tf.concat(blocks, 2), gather.order, axis=2)


def _summed(taken):
    return tf.squeeze(taken, 3) if taken.shape[3] == 1 else tf.reduce_sum(taken, 3)


def _blocks(tokens, size):
    """Cuts [batch, tokens, ...] into blocks [batch, blocks, size, ...], with zeros."""
    count = -(-tokens.shape[1] // size)
    missing = count * size - tokens.shape[1]
    others = tokens.shape[2:]
    if missing:
        tokens = tf.pad(tokens, ((0, 0), (0, missing), *((0, 0) for _ in others)))
    return tf.reshape(tokens, (-1, count, size, *others))


def _heads(blocks, kernel, bias):
    """Projects [batch, blocks, size, width] to [batch, heads, blocks, size, key]."""
    heads = tf.einsum("bnsw,whd->bhnsd", blocks, kernel)
    return heads if bias is None else heads + bias[:, None, None]
