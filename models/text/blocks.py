"""The blocks that a transformer is made of, and what all of them check."""

import warnings

import keras

from towers.models.block_sparse import BlockSparseDense, patterns
from towers.models.spec import POSITIONS
from towers.models.text import layers


def check(
    name: str,
    layers: int,
    width: int,
    heads: int,
    positions: str,
    dropout: float,
    sparsity: float,
    sequence_length: int | None,
) -> None:
    """Checks the arguments of a transformer.

    Raises:
        ValueError: They do not go together.
    """
    for what, value in (("layers", layers), ("width", width), ("heads", heads)):
        if value < 1:
            raise ValueError(
                f"The model {name!r} received {what}={value}; expected at least 1."
            )
    if width % heads:
        raise ValueError(
            f"The model {name!r} received width={width} and heads={heads}; expected a "
            "width that the heads divide, such as "
            f"width={max(width // heads, 1) * heads}."
        )
    if positions not in POSITIONS:
        raise ValueError(
            f"The model {name!r} received positions={positions!r}; expected one of "
            f"{', '.join(POSITIONS)}."
        )
    if positions == "rotary" and width // heads % 2:
        raise ValueError(
            f"The model {name!r} received width={width} and heads={heads}, which makes "
            f"heads of {width // heads}; expected an even number for rotary positions, "
            "so give another of the two, or positions=learned."
        )
    if positions == "learned" and sequence_length is None:
        raise ValueError(
            f"The model {name!r} received positions=learned for texts of any length; "
            "expected positions=rotary, or a sequence_length."
        )
    for what, value in (("dropout", dropout), ("sparsity", sparsity)):
        if not 0 <= value < 1:
            raise ValueError(
                f"The model {name!r} received {what}={value}; expected at least 0 and "
                "less than 1."
            )


def stack(
    x: keras.KerasTensor,
    length: int | None,
    *,
    depth: int,
    heads: int,
    causal: bool,
    positions: str,
    dropout: float,
    sparsity: float = 0.0,
    padding_mask: keras.KerasTensor | None = None,
) -> keras.KerasTensor:
    """Makes features of embedded tokens: positions, blocks, and a last normalisation.

    Args:
        x: Embedded tokens [batch, tokens, width].
        length: Tokens of a text; None for any number, with rotary positions.
        depth: Number of blocks.
        heads: Heads of attention.
        causal: Whether tokens look back only.
        positions: "learned" ones are added to the tokens; "rotary" ones come with
            attention.
        dropout: Share of the features dropped.
        sparsity: Share of the perceptrons' weights that is zero.
        padding_mask: Which tokens are no padding; None if all are.
    """
    if positions == "learned":
        x = layers.LearnedPositions(length, name="positions")(x)
    x = keras.layers.Dropout(dropout)(x)
    for number in range(depth):
        x = _block(
            x,
            number,
            depth=depth,
            heads=heads,
            causal=causal,
            rotary=positions == "rotary",
            dropout=dropout,
            sparsity=sparsity,
            padding_mask=padding_mask,
        )
    return _normalised(x, "norm")


def _block(
    x: keras.KerasTensor,
    number: int,
    *,
    depth: int,
    heads: int,
    causal: bool,
    rotary: bool,
    dropout: float,
    sparsity: float,
    padding_mask: keras.KerasTensor | None,
) -> keras.KerasTensor:
    """Adds attention and a perceptron, each of normalised features (pre-norm)."""
    width = x.shape[-1]
    attended = layers.SelfAttention(
        heads,
        causal=causal,
        rotary=rotary,
        depth=depth,
        name=f"attention_{number}",
    )(_normalised(x, f"attention_norm_{number}"), padding_mask=padding_mask)
    x = keras.layers.Add()([x, keras.layers.Dropout(dropout)(attended)])
    normalised = _normalised(x, f"expand_norm_{number}")
    hidden = _dense(width, 4 * width, sparsity, 0, f"expand_{number}", 2 * number)(
        normalised
    )
    hidden = keras.layers.Activation("gelu")(hidden)
    hidden = _dense(
        4 * width, width, sparsity, depth, f"reduce_{number}", 2 * number + 1
    )(hidden)
    return keras.layers.Add()([x, keras.layers.Dropout(dropout)(hidden)])


def _dense(
    inputs: int, units: int, sparsity: float, depth: int, name: str, seed: int
) -> keras.layers.Layer:
    """Makes a layer of a perceptron; `depth` is as for `layers.project`."""
    if not sparsity:
        return layers.project("btw,wo->bto", (None, units), depth, name=name)
    # Of a narrow model, a butterfly needs smaller blocks.
    width = min(inputs, units)
    blocks = {"block_size": max(1, min(32, width // 8)), "sparsity": sparsity}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (layout,) = patterns.layouts("butterfly", inputs, units, seed=seed, **blocks)
    density = layout.size / inputs / units
    if abs(1 - density - sparsity) > patterns.NEAR:
        raise ValueError(
            f"Received sparsity={sparsity} for a transformer of width={width}; the "
            f"nearest that it can have is {1 - density:.2f}, so give that, or another "
            "width."
        )
    # An output has fewer inputs, so that these count for more.
    scale = layers.first_scale(depth) / density**0.5
    return BlockSparseDense(
        units,
        pattern="butterfly",
        kernel_initializer=keras.initializers.RandomNormal(stddev=scale),
        seed=seed,
        name=name,
        **blocks,
    )


def _normalised(x: keras.KerasTensor, name: str) -> keras.KerasTensor:
    """Normalises each token's features."""
    return keras.layers.LayerNormalization(epsilon=1e-5, name=name)(x)
