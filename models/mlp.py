"""A multi-layer perceptron: the smallest model, for inputs of any shape."""

import keras


def build(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    widths: tuple[int, ...] = (512, 512),
) -> keras.Model:
    """Builds Flatten, then Dense + ReLU for each width, then the logits.

    It has no layer that depends on the rest of the batch and none that draws
    random numbers, so any number of towers must give one device's numbers.

    Args:
        input_shape: Shape of one example, of any rank.
        num_outputs: Number of logits.
        widths: Units of each hidden layer.

    Returns:
        A model from [batch, *input_shape] to float32 logits [batch, num_outputs].
    """
    inputs = keras.Input(input_shape)
    x = keras.layers.Flatten()(inputs)
    for width in widths:
        x = keras.layers.Dense(
            width, activation="relu", kernel_initializer="he_normal"
        )(x)
    logits = keras.layers.Dense(num_outputs, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="mlp")
