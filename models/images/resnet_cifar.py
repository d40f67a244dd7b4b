"""Residual networks in the form for small images (CIFAR).

He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", 2015,
section 4.2 (https://arxiv.org/abs/1512.03385). A 3x3 stem with 16 filters,
three stages of n blocks with 16, 32 and 64 filters, the second and third at
half the size of the one before, global average pooling, one dense layer:
6n + 2 layers with weights.

The shortcut is the paper's option A, so it has no parameters: where a stage
changes the shape, the map is subsampled by two and padded with zero channels.
Weight decay (1e-4 in the paper) is left to the optimizer.
"""

import keras

DEPTHS = (20, 32, 56)


def build(
    input_shape: tuple[int, int, int], num_outputs: int, *, depth: int
) -> keras.Model:
    """Builds one network of the family.

    Args:
        input_shape: Height, width and channels of one example.
        num_outputs: Number of logits.
        depth: Layers with weights, 6n + 2 for a whole n >= 1.

    Returns:
        A model from [batch, *input_shape] to float32 logits [batch, num_outputs].

    Raises:
        ValueError: If `depth` is not 6n + 2.
    """
    blocks, rest = divmod(depth - 2, 6)
    if blocks < 1 or rest:
        raise ValueError(
            f"A CIFAR ResNet has 6n + 2 layers, but depth={depth} was received; "
            f"use one of {', '.join(map(str, DEPTHS))}."
        )
    inputs = keras.Input(input_shape)
    x = keras.layers.ReLU()(_conv_bn(inputs, 16))
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(blocks):
            x = _basic_block(x, filters, 2 if stage > 0 and block == 0 else 1)
    x = keras.layers.GlobalAveragePooling2D()(x)
    logits = keras.layers.Dense(
        num_outputs, kernel_initializer="he_normal", dtype="float32", name="logits"
    )(x)
    return keras.Model(inputs, logits, name=f"resnet{depth}")


def _basic_block(x: keras.KerasTensor, filters: int, strides: int) -> keras.KerasTensor:
    """Two 3x3 convolutions beside a shortcut, added before the last ReLU."""
    shortcut = x
    if strides > 1:
        # A pool of one pixel takes every second pixel and nothing else.
        shortcut = keras.layers.MaxPooling2D(1, strides, padding="same")(shortcut)
        missing = filters - x.shape[-1]
        shortcut = keras.ops.pad(
            shortcut, ((0, 0), (0, 0), (0, 0), (missing // 2, missing - missing // 2))
        )
    y = keras.layers.ReLU()(_conv_bn(x, filters, strides))
    y = _conv_bn(y, filters)
    return keras.layers.ReLU()(keras.layers.Add()([shortcut, y]))


def _conv_bn(x: keras.KerasTensor, filters: int, strides: int = 1) -> keras.KerasTensor:
    x = keras.layers.Conv2D(
        filters,
        3,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
    )(x)
    return keras.layers.BatchNormalization(momentum=0.9)(x)
