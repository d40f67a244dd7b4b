"""A language model: a transformer that tells each token's successor."""

import keras

from towers.models.text import blocks
from towers.models.text.layers import TiedEmbedding


def build(
    vocabulary_size: int,
    sequence_length: int | None,
    *,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    positions: str = "rotary",
    dropout: float = 0.1,
    sparsity: float = 0.0,
) -> keras.Model:
    """Builds a decoder like GPT-2 (Radford et al. 2019).

    Normalisation comes before attention and perceptron (pre-norm), and the table of the
    embedding makes the logits, too. Sampling is `towers.generate`.

    Args:
        vocabulary_size: Number of tokens.
        sequence_length: Tokens of a text; None for any number.
        layers: Blocks of attention and perceptron.
        width: Features of a token.
        heads: Heads of attention, which divide the width.
        positions: "rotary" or "learned".
        dropout: Share of the features dropped, in training.
        sparsity: Share of the perceptrons' weights that is zero, in blocks.

    Returns:
        A model from int tokens [batch, tokens] to float32 logits [batch, tokens,
        vocabulary_size]; the logits at a token are of the next one.

    Raises:
        ValueError: The arguments do not go together.
    """
    blocks.check(
        *("transformer_lm", layers, width, heads, positions, dropout, sparsity),
        sequence_length,
    )
    inputs = keras.Input((sequence_length,), dtype="int32", name="tokens")
    embedding = TiedEmbedding(
        vocabulary_size,
        width,
        embeddings_initializer=keras.initializers.RandomNormal(stddev=0.02),
        name="embedding",
    )
    x = blocks.stack(
        embedding(inputs),
        sequence_length,
        depth=layers,
        heads=heads,
        causal=True,
        positions=positions,
        dropout=dropout,
        sparsity=sparsity,
    )
    logits = embedding(x, reverse=True)
    return keras.Model(inputs, logits, name="transformer_lm")
