"""A small convolutional network, from 8x8 digits to 32x32 photographs."""

import keras

# A map with a side below this many pixels is not halved again: a 3x3 kernel on
# a 2x2 map would see mostly padding.
SMALLEST_SIDE = 4


def build(
    input_shape: tuple[int, int, int],
    num_outputs: int,
    *,
    widths: tuple[int, ...] = (32, 64, 128),
    dropout: float = 0.3,
) -> keras.Model:
    """Builds stages of two 3x3 convolutions each, halving the map in between.

    The depth follows the image: a stage is left out when halving for it would
    make a side smaller than `SMALLEST_SIDE`. So 8x8 has two stages (the last at
    4x4), while 28x28 and 32x32 have three (the last at 7x7 and 8x8).

    Args:
        input_shape: Height, width and channels of one example.
        num_outputs: Number of logits.
        widths: Filters of each stage.
        dropout: Share of the features dropped before the logits, in training.

    Returns:
        A model from [batch, *input_shape] to float32 logits [batch, num_outputs].
    """
    inputs = keras.Input(input_shape)
    x = inputs
    side = min(input_shape[:2])
    for stage, width in enumerate(widths):
        if stage > 0:
            side //= 2
            if side < SMALLEST_SIDE:
                break
            x = keras.layers.MaxPooling2D(2)(x)
        x = _conv_bn_relu(_conv_bn_relu(x, width), width)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dropout(dropout)(x)
    logits = keras.layers.Dense(num_outputs, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="cnn")


def _conv_bn_relu(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    x = keras.layers.Conv2D(
        filters,
        3,
        padding="same",
        # The normalisation that follows has the bias.
        use_bias=False,
        # By name: one initializer object would give equal layers equal weights.
        kernel_initializer="he_normal",
    )(x)
    x = keras.layers.BatchNormalization(momentum=0.9)(x)
    return keras.layers.ReLU()(x)
