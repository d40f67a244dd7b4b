"""A model that reads on: it keeps the keys and values of tokens that it has read.

A token then costs one position, not a whole window.
"""

import keras
import tensorflow as tf

from towers.models.block_sparse import BlockSparseDense
from towers.models.text.layers import (
    LearnedPositions,
    Projection,
    SelfAttention,
    TiedEmbedding,
)

# These treat each token for itself.
_BY_TOKEN = {
    keras.layers.InputLayer,
    keras.layers.Embedding,
    keras.layers.Dropout,
    keras.layers.LayerNormalization,
    keras.layers.Add,
    keras.layers.Activation,
    TiedEmbedding,
    Projection,
    BlockSparseDense,
}


def build(
    model: keras.Model, rows: int, length: int, start: tf.Variable
) -> keras.Model | None:
    """Makes a model that reads tokens from a position on.

    It has the layers of the model, and its weights. Its own attention keeps the keys
    and values of the positions before.

    Args:
        model: A language model, such as `transformer_lm`.
        rows: Texts of a batch.
        length: Most tokens of a text.
        start: Position of the first token that a call reads; int32.

    Returns:
        A model from tokens [rows, tokens] to what `model` returns for them. None if
        the model has layers of which it is not known that this gives the same.
    """
    if not _can_read_on(model):
        return None

    def call(layer, *args, **kwargs):
        if isinstance(layer, SelfAttention):
            return _Attention(layer, rows, length, start)(args[0])
        if isinstance(layer, LearnedPositions):
            return _Positions(layer, start)(args[0])
        return layer(*args, **kwargs)

    # Of a compiled model, the clone would get an optimizer, too.
    plain = keras.Model(model.inputs[0], model.outputs[0])
    return keras.models.clone_model(
        plain,
        keras.Input((None,), rows, model.inputs[0].dtype),
        clone_function=lambda layer: layer,
        call_function=call,
    )


def _can_read_on(model):
    # Other models than functional ones do not tell how their layers are connected.
    operations = getattr(model, "operations", None)
    if not operations or (len(model.inputs), len(model.outputs)) != (1, 1):
        return False
    attentions = [one for one in operations if type(one) is SelfAttention]
    known = {*_BY_TOKEN, SelfAttention, LearnedPositions}
    return (
        bool(attentions)
        and all(attention.causal for attention in attentions)
        and all(type(operation) in known for operation in operations)
    )


class _Attention(keras.layers.Layer):
    """Attention that writes keys and values of its inputs behind earlier ones."""

    def __init__(
        self, attention: SelfAttention, rows: int, length: int, start: tf.Variable
    ):
        super().__init__(dtype=attention.dtype_policy)
        self.attention, self.start = attention, start
        shape = rows, length, attention.heads, attention.project.kernel.shape[-1]
        zeros = tf.zeros(shape, attention.compute_dtype)
        self.keys = tf.Variable(zeros, trainable=False)
        self.values = tf.Variable(zeros, trainable=False)

    def call(self, inputs):
        """Attends to all positions before, and to those of the inputs."""
        query, key, value = self.attention.divided(inputs, self.start)
        end = self.start + tf.shape(inputs)[1]
        self.keys[:, self.start : end].assign(key)
        self.values[:, self.start : end].assign(value)
        return self.attention.attend(
            query, self.keys.read_value(), self.values.read_value(), start=self.start
        )

    def compute_output_spec(self, inputs) -> keras.KerasTensor:
        """Tells the shape and the type of what `call` returns."""
        return keras.KerasTensor(inputs.shape, self.compute_dtype)


class _Positions(keras.layers.Layer):
    """Adds the learned vectors from a position on."""

    def __init__(self, positions: LearnedPositions, start: tf.Variable):
        super().__init__(dtype=positions.dtype_policy)
        self.positions, self.start = positions, start

    def call(self, inputs):
        """Adds them."""
        end = self.start + tf.shape(inputs)[1]
        return inputs + self.positions.positions[self.start : end]

    def compute_output_spec(self, inputs) -> keras.KerasTensor:
        """Tells the shape and the type of what `call` returns."""
        return keras.KerasTensor(inputs.shape, self.compute_dtype)
