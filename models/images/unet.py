"""A small U-Net, which gives each pixel of a picture its class.

Ronneberger, Fischer, Brox: "U-Net: Convolutional Networks for Biomedical Image
Segmentation", 2015 (https://arxiv.org/abs/1505.04597), with padding, so that the map of
classes has the picture's size, and with batch normalisation.
"""

import keras


def build(
    input_shape: tuple[int, int, int],
    num_outputs: int,
    *,
    layers: int = 3,
    width: int = 16,
) -> keras.Model:
    """Builds the network.

    Args:
        input_shape: Height, width and channels of one example.
        num_outputs: Number of logits of a pixel.
        layers: How often the map is halved, and doubled again.
        width: Filters at full size; twice as many with each halving.

    Returns:
        A model from [batch, *input_shape] to float32 logits [batch, height, width,
        num_outputs].

    Raises:
        ValueError: The picture cannot be halved so often.
    """
    step = 2**layers
    if any(side % step for side in input_shape[:2]):
        height, across = (-(-side // step) * step for side in input_shape[:2])
        raise ValueError(
            f"The model 'unet' with {layers} layers takes pictures whose sides are "
            f"multiples of {step}, but input_shape={tuple(input_shape)} was received; "
            f"give --image_size={height}x{across}, or fewer layers in --model_options."
        )
    inputs = keras.Input(input_shape)
    x, passed_by = inputs, []
    for level in range(layers):
        x = _two_convolutions(x, width * 2**level)
        passed_by.append(x)
        x = keras.layers.MaxPooling2D(2)(x)
    x = _two_convolutions(x, width * step)
    for level in reversed(range(layers)):
        x = keras.layers.Conv2DTranspose(
            width * 2**level, 2, strides=2, kernel_initializer="he_normal"
        )(x)
        x = keras.layers.Concatenate()([passed_by[level], x])
        x = _two_convolutions(x, width * 2**level)
    logits = keras.layers.Conv2D(num_outputs, 1, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="unet")


def _two_convolutions(x, filters):
    for _ in range(2):
        x = keras.layers.Conv2D(
            filters,
            3,
            padding="same",
            # The normalisation that follows has the bias.
            use_bias=False,
            kernel_initializer="he_normal",
        )(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.9)(x))
    return x
