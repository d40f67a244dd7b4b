"""A small recurrent network, which reads a picture row by row."""

import keras


def build(
    input_shape: tuple[int, int, int],
    num_outputs: int,
    *,
    units: int = 64,
) -> keras.Model:
    """Builds one LSTM over the rows of the picture, then the logits of its last state.

    Args:
        input_shape: Height, width and channels of one example: `height` steps, each of
            width * channels numbers.
        num_outputs: Number of logits.
        units: Units of the LSTM.

    Returns:
        A model from [batch, *input_shape] to float32 logits [batch, num_outputs].
    """
    height, width, channels = input_shape
    inputs = keras.Input(input_shape)
    rows = keras.layers.Reshape((height, width * channels))(inputs)
    x = keras.layers.LSTM(units)(rows)
    logits = keras.layers.Dense(num_outputs, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="lstm")
