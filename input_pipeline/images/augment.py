"""Pure image functions on uint8: no state, no files; random numbers are arguments.

Operations on floats are left to the towers: uint8 takes a quarter of the bytes to make,
keep and copy.
"""

import tensorflow as tf

# Up to this factor, mixing two pixels is nearly the same as averaging all.
MIXED = 2.5

# The number of draws in [0, 1) that one record needs.
WINDOW_DRAWS = 4
PAD_CROP_FLIP_DRAWS = 3


def convert_channels(image: tf.Tensor, channels: int) -> tf.Tensor:
    """Turns grey images into coloured ones, or the reverse.

    Args:
        image: [..., H, W, C] with C known.
        channels: number of channels wanted; C itself, or 1 and 3 in either direction.

    Returns:
        [..., H, W, channels] of the same dtype.

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


def resize(
    image: tf.Tensor,
    height: int,
    width: int,
    *,
    antialias: str = "exact",
    mixed: float | tf.Tensor = MIXED,
) -> tf.Tensor:
    """Resizes bilinearly, without keeping the aspect ratio.

    Args:
        image: uint8 [..., H, W, C]; H and W may be unknown until run time.
        height: pixels.
        width: pixels.
        antialias: the treatment of sides that shrink. "none" mixes the nearest two
            pixels, as the customary random crops do. "exact" weighs all pixels by a
            triangle, which takes many times as long. "fast" averages over sides that
            shrink by more than `mixed`, and mixes two pixels of the others.
        mixed: see `antialias`. 1 comes as near to Lanczos' filter as "exact" does.

    Returns:
        uint8 [..., height, width, C]; the image itself if its static shape fits
        already.
    """
    if image.shape[-3:-1] == (height, width):
        return image

    wanted = height, width

    def bilinear(image):
        # TensorFlow's kernel reads floats faster.
        image = tf.cast(image, tf.float32)
        return tf.image.resize(image, wanted, antialias=antialias == "exact")

    def averaged():
        # The next step resizes the other side.
        sides = tf.where(much, wanted, size)
        return bilinear(tf.image.resize(image, sides, tf.image.ResizeMethod.AREA))

    size = image.shape[-3:-1]
    if antialias != "fast":
        resized = bilinear(image)
    elif size.is_fully_defined() and not tf.is_tensor(mixed):
        much = [side > mixed * least for side, least in zip(size, wanted, strict=True)]
        resized = averaged() if any(much) else bilinear(image)
    else:
        size = tf.shape(image)[-3:-1]
        much = tf.cast(size, tf.float32) > mixed * tf.cast(wanted, tf.float32)
        any_much = tf.reduce_any(much)
        resized = tf.cond(any_much, averaged, lambda: bilinear(image))
    # No value is negative, so this rounds.
    return tf.cast(resized + 0.5, tf.uint8)


def normalize(image: tf.Tensor, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Maps pixels from 0..255 to [-1, 1]: one multiplication and one addition."""
    return tf.cast(image, dtype) * (1 / 127.5) - 1.0


def random_window(shape: tf.Tensor, u: tf.Tensor) -> tf.Tensor:
    """Chooses a window of 8 to 100% of an image's area, in a ratio of 3/4 to 4/3.

    For training on ImageNet (Szegedy et al. 2015, "Going deeper with convolutions"),
    with the distribution of TensorFlow's ``sample_distorted_bounding_box``: first the
    ratio, then a height for which the window is large enough and fits in the image. In
    an image too narrow for both, the window fits.

    Args:
        shape: int32 [2 or more], height and width of the image first.
        u: float32 [WINDOW_DRAWS] in [0, 1): ratio, height, and the position, down and
            right.

    Returns:
        int32 [4]: y, x, height, width.
    """
    size = tf.cast(shape[:2], tf.float32)
    ratio = 3 / 4 + (4 / 3 - 3 / 4) * u[0]
    most = tf.reduce_min(size / tf.stack([1.0, ratio]))
    least = tf.minimum(tf.sqrt(0.08 * tf.reduce_prod(size) / ratio), most)
    height = least + (most - least) * u[1]
    chosen = tf.round(tf.stack([height, height * ratio]))
    chosen = tf.clip_by_value(chosen, 1.0, size)
    corner = tf.floor(u[2:] * (size - chosen + 1))
    return tf.cast(tf.concat([corner, chosen], axis=0), tf.int32)


def center_window(
    shape: tf.Tensor, height: int, width: int, fraction: float = 0.875
) -> tf.Tensor:
    """Chooses the middle of an image, for evaluation.

    Resizing this window gives the same as resizing the whole image and then cropping.

    Args:
        shape: int32 [2 or more], height and width of the image first.
        height: the height after resizing, in pixels.
        width: the width after resizing, in pixels.
        fraction: the fraction of the largest window of that shape; 0.875 is 224 of 256.

    Returns:
        int32 [4]: y, x, height, width.
    """
    size = tf.cast(shape[:2], tf.float32)
    wanted = tf.constant([height, width], tf.float32)
    chosen = tf.round(wanted * tf.reduce_min(size / wanted) * fraction)
    chosen = tf.clip_by_value(chosen, 1.0, size)
    corner = tf.floor((size - chosen) / 2)
    return tf.cast(tf.concat([corner, chosen], axis=0), tf.int32)


def whole_window(shape: tf.Tensor) -> tf.Tensor:
    """Returns the window of a whole image: int32 [4], y, x, height, width."""
    return tf.concat([tf.zeros([2], tf.int32), shape[:2]], axis=0)


def crop(image: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    """Cuts a window (int32 [4]: y, x, height, width) out of an image [H, W, C]."""
    y, x, height, width = tf.unstack(window, num=4)
    return image[y : y + height, x : x + width]


def flip(image: tf.Tensor, u: tf.Tensor) -> tf.Tensor:
    """Mirrors an image [H, W, C] left to right where the scalar u is below 1/2."""
    return tf.cond(u < 0.5, lambda: tf.reverse(image, [1]), lambda: image)


def pad_crop_flip(images: tf.Tensor, u: tf.Tensor, padding: int = 4) -> tf.Tensor:
    """Moves images by up to `padding` pixels each way, and mirrors half of them.

    Pixels from outside are black. As for CIFAR (He et al. 2015, "Deep residual
    learning", section 4.2): pad, crop at random, flip. This takes a whole batch at
    once, in one pass: each pixel is fetched from its origin.

    Args:
        images: [B, H, W, C]; H, W and C known.
        u: float32 [B, PAD_CROP_FLIP_DRAWS] in [0, 1): down, right, mirrored.
        padding: pixels.

    Returns:
        [B, H, W, C] of the same dtype.
    """
    _, height, width, channels = images.shape
    offsets = tf.cast(u[:, :2] * (2 * padding + 1), tf.int32) - padding
    y = tf.range(height) + offsets[:, :1]
    x = tf.range(width)
    x = tf.where(u[:, 2:] < 0.5, width - 1 - x, x) + offsets[:, 1:2]
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None]
    count = tf.shape(images)[0]
    first = tf.range(count)[:, None, None] * (height * width)
    index = first + (y * width)[:, :, None] + x[:, None]
    # A black pixel comes after the last one.
    pixels = tf.reshape(images, [-1, channels])
    pixels = tf.concat([pixels, tf.zeros([1, channels], images.dtype)], axis=0)
    return tf.gather(pixels, tf.where(inside, index, count * (height * width)))
