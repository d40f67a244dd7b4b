"""Pure image functions: one image in, one image out, no state and no files."""

import tensorflow as tf


def convert_channels(image: tf.Tensor, channels: int) -> tf.Tensor:
    """Turns a grey image into a coloured one, or the reverse.

    Args:
        image: [H, W, C] with C known.
        channels: channels wanted; C itself, or 1 and 3 in either direction.

    Returns:
        [H, W, channels] of the same dtype.

    Raises:
        ValueError: there is no conversion between the two numbers of channels.
    """
    if image.shape[-1] == channels:
        return image
    if (image.shape[-1], channels) == (1, 3):
        return tf.image.grayscale_to_rgb(image)
    if (image.shape[-1], channels) == (3, 1):
        return tf.image.rgb_to_grayscale(image)
    raise ValueError(
        f"images have {image.shape[-1]} channels but {channels} are wanted; only 1 "
        "and 3 convert into each other: choose the source's own number of channels"
    )


def resize(image: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Resizes without keeping the aspect ratio; averages over pixels when shrinking.

    Args:
        image: [H, W, C]; H and W may be unknown until run time.
        height: pixels.
        width: pixels.

    Returns:
        [height, width, C]: the image itself where its static shape fits already, so
        that no resize op is added; float32 in the image's own range otherwise.
    """
    if image.shape[:2] == (height, width):
        return image
    return tf.image.resize(image, (height, width), antialias=True)


def normalize(image: tf.Tensor) -> tf.Tensor:
    """Maps 0..255 to [-1, 1], as float32."""
    return tf.cast(image, tf.float32) / 127.5 - 1.0
