"""A transformer that reads a text as a whole: its class, or each token's."""

import keras
from keras import ops

from towers.models.text import blocks
from towers.models.text.layers import MaskedMean


def build(
    vocabulary_size: int,
    num_outputs: int,
    sequence_length: int | None,
    task: str = "text_classification",
    *,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    positions: str = "rotary",
    dropout: float = 0.1,
    sparsity: float = 0.0,
) -> keras.Model:
    """Builds an encoder: the blocks of `transformer_lm`, where tokens look both ways.

    The token 0 is padding, which no token looks at.

    Args:
        vocabulary_size: Number of tokens.
        num_outputs: Logits of a text, or of a token.
        sequence_length: Tokens of a text; None for any number.
        task: "tagging" for logits of each token; any other for those of the text, from
            the mean of its tokens.
        layers: Blocks of attention and perceptron.
        width: Features of a token.
        heads: Heads of attention, which divide the width.
        positions: "rotary" or "learned".
        dropout: Share of the features dropped, in training.
        sparsity: Share of the perceptrons' weights that is zero, in blocks.

    Returns:
        A model from int tokens [batch, tokens] to float32 logits [batch, num_outputs]
        or, for tagging, [batch, tokens, num_outputs].

    Raises:
        ValueError: The arguments do not go together.
    """
    blocks.check(
        *("transformer_encoder", layers, width, heads, positions, dropout, sparsity),
        sequence_length,
    )
    inputs = keras.Input((sequence_length,), dtype="int32", name="tokens")
    mask = ops.not_equal(inputs, 0)
    x = keras.layers.Embedding(vocabulary_size, width, name="embedding")(inputs)
    x = blocks.stack(
        x,
        sequence_length,
        depth=layers,
        heads=heads,
        causal=False,
        positions=positions,
        dropout=dropout,
        sparsity=sparsity,
        padding_mask=mask,
    )
    if task != "tagging":
        x = MaskedMean(name="mean")(x, mask)
    logits = keras.layers.Dense(num_outputs, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="transformer_encoder")
