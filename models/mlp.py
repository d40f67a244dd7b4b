"""A multi-layer perceptron: the smallest model, for inputs of any shape."""

from collections.abc import Mapping, Sequence

import keras

# Numbers that stand for a category: fewer than there are texts, and no more than that.
_MOST = 32


def build(
    input_shape: Sequence[int] | Mapping[str, Sequence[int]],
    num_outputs: int,
    *,
    table_sizes: Mapping[str, int] | None = None,
    widths: tuple[int, ...] = (512, 512),
) -> keras.Model:
    """Builds Flatten, then Dense + ReLU for each width, then the logits.

    It has no layer that depends on the rest of the batch and none that draws
    random numbers, so any number of towers must give one device's numbers.

    Args:
        input_shape: Shape of one example, of any rank; of a table with categories, the
            shape of each column, by its name.
        num_outputs: Number of logits.
        table_sizes: Number of ids of each column of categories, by its name. Each
            becomes a few numbers that are learnt: the square root of the
            number of its ids, at least 2 and at most 32.
        widths: Units of each hidden layer.

    Returns:
        A model from [batch, *input_shape], or from a dict of columns, to float32 logits
        [batch, num_outputs].
    """
    if isinstance(input_shape, Mapping):
        inputs, x = _columns(input_shape, table_sizes or {})
    else:
        inputs = keras.Input(tuple(input_shape))
        x = keras.layers.Flatten()(inputs)
    for number, width in enumerate(widths):
        x = keras.layers.Dense(
            width,
            activation="relu",
            kernel_initializer="he_normal",
            # Keras's own name, "dense", may be that of a column.
            name=f"hidden_{number}" if isinstance(input_shape, Mapping) else None,
        )(x)
    logits = keras.layers.Dense(num_outputs, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="mlp")


def _columns(shapes, table_sizes):
    """Inputs by their names, and one tensor of all of their numbers."""
    inputs, parts = {}, []
    for name, shape in shapes.items():
        size = table_sizes.get(name)
        inputs[name] = x = keras.Input(
            tuple(shape), dtype="int64" if size else None, name=name
        )
        if size:
            width = min(_MOST, max(2, round(size**0.5)))
            x = keras.layers.Embedding(size, width, name=f"mlp_category_{len(parts)}")(
                x
            )
        parts.append(keras.layers.Flatten(name=f"mlp_column_{len(parts)}")(x))
    x = (
        parts[0]
        if len(parts) == 1
        else keras.layers.Concatenate(name="mlp_columns")(parts)
    )
    return inputs, x
