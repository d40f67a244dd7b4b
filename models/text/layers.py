"""What Keras has no layer for, or has not had for long enough.

Products with a kernel are TensorFlow's Einsum, which multiplies all tokens of a batch
at once, forward and backward. Keras's layers multiply each example's for themselves,
and add up as many gradients of the kernel: that takes 1.5 to 2 times as long.
"""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

# A score of what is not to be attended to: far below any other, and finite.
_NEVER = -1e9
# The wavelengths of rotary positions grow to this, times 2 pi (Su et al. 2021).
_LONGEST = 10_000.0


@keras.saving.register_keras_serializable(package="towers")
class TiedEmbedding(keras.layers.Embedding):
    """An embedding that also makes logits, by the same table (Press and Wolf 2016).

    Keras's ReversibleEmbedding does the same; it came with Keras 3.13.
    """

    def call(self, inputs, reverse: bool = False):
        """Looks up tokens; with `reverse`, makes float32 logits of features."""
        if not reverse:
            return super().call(inputs)
        # Keras's Embedding does not cast its variables by itself.
        table = ops.cast(self.embeddings, inputs.dtype)
        logits = tf.einsum("btw,vw->btv", inputs, table)
        return ops.cast(logits, "float32")

    def compute_output_spec(self, inputs, reverse: bool = False) -> keras.KerasTensor:
        """Tells the shape and the type of what `call` returns."""
        if reverse:
            return keras.KerasTensor((*inputs.shape[:-1], self.input_dim), "float32")
        return keras.KerasTensor((*inputs.shape, self.output_dim), self.compute_dtype)


@keras.saving.register_keras_serializable(package="towers")
class LearnedPositions(keras.layers.Layer):
    """Adds a vector of its own to each position.

    Args:
        length: Most tokens of a text.
        **kwargs: As of any layer.
    """

    def __init__(self, length: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.length = length

    def build(self, input_shape):
        """Creates the vectors."""
        self.positions = self.add_weight(
            shape=(self.length, input_shape[-1]),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="positions",
        )

    def call(self, inputs):
        """Adds them."""
        return inputs + self.positions[: ops.shape(inputs)[1]]

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "length": self.length}


@keras.saving.register_keras_serializable(package="towers")
class SelfAttention(keras.layers.Layer):
    """Each token looks at the others of its text: attention with several heads.

    Args:
        heads: Number of heads, which divide the width.
        causal: Whether a token looks only at itself and at what is before it.
        rotary: Whether queries and keys are turned by their positions, so that scores
            depend on how far tokens are apart (RoFormer, Su et al. 2021).
        depth: Layers of the network, which make the first outputs smaller.
        **kwargs: As of any layer.
    """

    def __init__(
        self,
        heads: int,
        *,
        causal: bool = False,
        rotary: bool = False,
        depth: int = 1,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.heads, self.causal, self.rotary = heads, causal, rotary
        self.depth = depth

    def build(self, input_shape):
        """Creates the kernels."""
        width = input_shape[-1]
        size = width // self.heads
        self.project = project(
            "btw,whd->bthd", (None, 3 * self.heads, size), dtype=self.dtype_policy
        )
        self.project.build(input_shape)
        self.output_dense = project(
            "bthd,hdw->btw", (None, width), self.depth, dtype=self.dtype_policy
        )
        self.output_dense.build((*input_shape[:-1], self.heads, size))

    def call(self, inputs, padding_mask=None):
        """Returns features [batch, tokens, width].

        Args:
            inputs: Features [batch, tokens, width].
            padding_mask: Bool [batch, tokens]: which tokens are to be looked at; None
                for all.
        """
        query, key, value = self.divided(inputs)
        return self.attend(query, key, value, padding_mask)

    def divided(self, inputs, start=None):
        """Returns queries, keys and values [batch, tokens, heads, size].

        Args:
            inputs: Features [batch, tokens, width].
            start: Position of the first token; None for 0.
        """
        projected = self.project(inputs)
        if not self.rotary:
            return ops.split(projected, 3, axis=2)
        # Queries and keys turn together: half as many operations, in a smaller graph.
        # For parts of different sizes, Keras's `split` makes several operations.
        both, value = tf.split(projected, [2 * self.heads, self.heads], axis=2)
        query, key = ops.split(turned(both, start), 2, axis=2)
        return query, key, value

    def attend(self, query, key, value, padding_mask=None, start=None):
        """Returns features [batch, queries, width].

        Args:
            query: Of some tokens, as `divided` returns it.
            key: Of all tokens from position 0.
            value: Of the same ones.
            padding_mask: As for `call`.
            start: Position of the first query; None where all tokens ask.
        """
        query *= query.shape[-1] ** -0.5
        scores = ops.cast(ops.einsum("bqhd,bkhd->bhqk", query, key), "float32")
        if padding_mask is not None:
            scores = ops.where(padding_mask[:, None, None, :], scores, _NEVER)
        if self.causal:
            place = ops.arange(ops.shape(key)[1])
            asking = place
            if start is not None:
                asking = start + ops.arange(ops.shape(query)[1])
            scores = ops.where(asking[:, None] >= place[None, :], scores, _NEVER)
        weights = ops.cast(ops.softmax(scores), self.compute_dtype)
        attended = ops.einsum("bhqk,bkhd->bqhd", weights, value)
        return self.output_dense(attended)

    def compute_output_spec(self, inputs, padding_mask=None):
        """Tells the shape and the type of what `call` returns."""
        del padding_mask
        return keras.KerasTensor(inputs.shape, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "heads": self.heads,
            "causal": self.causal,
            "rotary": self.rotary,
            "depth": self.depth,
        }


@keras.saving.register_keras_serializable(package="towers")
class MaskedMean(keras.layers.Layer):
    """The mean of the features of tokens that are no padding; zeros without any."""

    def call(self, inputs, padding_mask):
        """Returns float32 [batch, width] of [batch, tokens, width]."""
        counted = ops.cast(padding_mask, "float32")[:, :, None]
        total = ops.sum(ops.cast(inputs, "float32") * counted, axis=1)
        return total / ops.maximum(ops.sum(counted, axis=1), 1.0)

    def compute_output_spec(self, inputs, padding_mask) -> keras.KerasTensor:
        """Tells the shape and the type of what `call` returns."""
        del padding_mask
        return keras.KerasTensor((inputs.shape[0], inputs.shape[-1]), "float32")


def turned(vectors, start=None):
    """Turns vectors [batch, tokens, heads, size] by their positions, by pairs.

    Args:
        vectors: Queries or keys.
        start: Position of the first one; None for 0.
    """
    half = vectors.shape[-1] // 2
    places = ops.arange(ops.shape(vectors)[1])
    if start is not None:
        places = start + places
    places = ops.cast(places, "float32")
    speeds = _LONGEST ** (-ops.cast(ops.arange(half), "float32") / half)
    angles = places[:, None, None] * speeds  # [tokens, 1, half]
    cos = ops.cast(ops.cos(angles), vectors.dtype)
    sin = ops.cast(ops.sin(angles), vectors.dtype)
    one, other = ops.split(vectors, 2, axis=-1)
    return ops.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)


@keras.saving.register_keras_serializable(package="towers")
class Projection(keras.layers.EinsumDense):
    """A dense layer for tokens [batch, tokens, ...]."""

    def call(self, inputs):
        """Multiplies by the kernel and adds the bias."""
        return tf.einsum(self.equation, inputs, self.kernel) + self.bias

    def compute_output_shape(self, input_shape):
        """Tells the shape of what `call` returns: of as many tokens as it gets."""
        return (*input_shape[:2], *super().compute_output_shape(input_shape)[2:])


def project(
    equation: str, shape: tuple[int | None, ...], depth: int = 0, **kwargs: Any
) -> Projection:
    """Makes a dense layer, which begins with small numbers as GPT-2's do.

    Args:
        equation: Of inputs and kernel, such as "btw,wo->bto".
        shape: Of its outputs, without the batch.
        depth: As for `first_scale`.
        **kwargs: As of any layer.
    """
    scale = first_scale(depth)
    return Projection(
        equation,
        output_shape=shape,
        bias_axes=equation.partition("->bt")[2],
        kernel_initializer=keras.initializers.RandomNormal(stddev=scale),
        **kwargs,
    )


def first_scale(depth: int) -> float:
    """Returns the standard deviation of a kernel's first values, as GPT-2 has it.

    Args:
        depth: For a layer that adds to what passes by it, the layers of the network:
            2 * depth such sums are not to grow. 0 for any other.
    """
    return 0.02 / (2 * depth) ** 0.5 if depth else 0.02
