"""RandAugment (Cubuk et al. 2019): a few of fourteen operations, chosen by chance.

Each operation maps a uint8 image [H, W, C], with 1 or 3 channels, to one of the same
shape, grey level for grey level as Pillow does. None draws: random numbers are
arguments.
"""

import functools

import tensorflow as tf

FILL = 128  # pixels from outside the image, as in the authors' code


def randaugment_draws(layers: int = 2) -> int:
    """Returns how many uniform numbers ``randaugment`` takes: two for each layer."""
    return 2 * layers


def randaugment(
    image: tf.Tensor, u: tf.Tensor, layers: int = 2, magnitude: float = 9
) -> tf.Tensor:
    """Applies operations one after another (Cubuk et al. 2019, RandAugment).

    Magnitude 0 changes nothing except by autocontrast and equalize, 10 is the whole
    range of AutoAugment (Cubuk et al. 2018), and values between are linear. In the
    authors' code, solarize and posterize become weaker with the magnitude; here, all
    operations become stronger.

    Args:
        image: uint8 [H, W, C], C 1 or 3; H and W may be unknown until run time.
        u: float32 [layers, 2] or [2 * layers], uniform in [0, 1): the operation, and
            its direction.
        layers: number of operations to apply; N in the paper.
        magnitude: the magnitude of all of them, from 0 to 10; M in the paper.

    Returns:
        uint8 [H, W, C].

    Raises:
        ValueError: another type, number of channels or of draws, or a magnitude outside
            of its range.
    """
    _check(image, u, layers, magnitude)
    shape = image.shape
    u = tf.reshape(u, [layers, 2])
    for layer in range(layers):
        which = tf.cast(u[layer, 0] * len(OPERATIONS), tf.int32)
        level = tf.where(u[layer, 1] < 0.5, -magnitude / 10, magnitude / 10)
        branches = [
            functools.partial(operation, image, level)
            for operation in OPERATIONS.values()
        ]
        image = tf.switch_case(which, branches)
        image.set_shape(shape)
    return image


def identity(image: tf.Tensor) -> tf.Tensor:
    """Returns the image as it is."""
    return tf.identity(image)


def autocontrast(image: tf.Tensor) -> tf.Tensor:
    """Stretches each channel to 0..255, as ``ImageOps.autocontrast``."""
    low = tf.cast(tf.reduce_min(image, [0, 1]), tf.float64)
    high = tf.cast(tf.reduce_max(image, [0, 1]), tf.float64)
    # float64, as Pillow truncates what it computes in float64.
    scale = 255.0 / tf.maximum(high - low, 1.0)
    stretched = tf.clip_by_value(_levels(tf.float64) * scale - low * scale, 0.0, 255.0)
    return _look_up(tf.where(high > low, stretched, _levels(tf.float64)), image)


def equalize(image: tf.Tensor) -> tf.Tensor:
    """Makes each channel's histogram even, as ``ImageOps.equalize``."""
    channels = image.shape[-1]
    counts = tf.math.bincount(_index(image), minlength=256 * channels)
    counts = tf.reshape(counts, [256, channels])
    darker = tf.cast(image < tf.reduce_max(image, [0, 1]), tf.int32)
    step = tf.reduce_sum(darker, [0, 1]) // 255
    even = tf.cumsum(counts, exclusive=True) + step // 2
    even = tf.minimum(even // tf.maximum(step, 1), 255)
    return _look_up(tf.where(step > 0, even, _levels(tf.int32)), image)


def rotate(image: tf.Tensor, degrees: float | tf.Tensor) -> tf.Tensor:
    """Turns counterclockwise around the centre, as ``Image.rotate``."""
    size = tf.cast(tf.shape(image), tf.float32)
    y, x = size[0] / 2, size[1] / 2
    angle = tf.cast(degrees, tf.float32) * (3.14159265 / 180)
    sin, cos = tf.sin(angle), tf.cos(angle)
    rows = (cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y)
    return _affine(image, *rows)


def solarize(image: tf.Tensor, threshold: float | tf.Tensor) -> tf.Tensor:
    """Inverts pixels that are not below the threshold, as ``ImageOps.solarize``."""
    return tf.where(tf.cast(image, tf.float32) < threshold, image, 255 - image)


def color(image: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Blends between grey, at 0, and the image, at 1, as ``ImageEnhance.Color``."""
    return _blend(_luma(image), image, factor)


def posterize(image: tf.Tensor, bits: int | tf.Tensor) -> tf.Tensor:
    """Keeps the upper bits, 1 to 8 of them, as ``ImageOps.posterize``."""
    mask = 256 - tf.bitwise.left_shift(1, 8 - bits)
    return tf.bitwise.bitwise_and(image, tf.cast(mask, tf.uint8))


def contrast(image: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Blends between mean grey, at 0, and the image, as ``ImageEnhance.Contrast``."""
    # Whole numbers, as Pillow rounds the mean; float32 could not add them up.
    luma = tf.cast(_luma(image), tf.int64)
    count = tf.maximum(tf.size(luma, tf.int64), 1)
    mean = (2 * tf.reduce_sum(luma) + count) // (2 * count)
    return _blend(mean, image, factor)


def brightness(image: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Blends between black, at 0, and the image, as ``ImageEnhance.Brightness``."""
    return _blend(0, image, factor)


def sharpness(image: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Blends between blurred, at 0, and the image, as ``ImageEnhance.Sharpness``."""
    height, width = tf.unstack(tf.shape(image)[:2])
    pixels = tf.cast(image, tf.int32)
    wide = tf.pad(pixels, [[1, 1], [1, 1], [0, 0]])
    wide = wide[:-2] + wide[1:-1] + wide[2:]
    around = wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:] + 4 * pixels
    smooth = (2 * around + 13) // 26  # a thirteenth, rounded
    # Pillow leaves the outermost pixels alone.
    y, x = tf.range(height)[:, None, None], tf.range(width)[None, :, None]
    inside = (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
    return _blend(tf.where(inside, smooth, pixels), image, factor)


def shear_x(image: tf.Tensor, slope: float | tf.Tensor) -> tf.Tensor:
    """Takes pixel (x, y) from (x + slope * y, y), as ``Image.transform``."""
    return _affine(image, (1.0, slope, 0.0), (0.0, 1.0, 0.0))


def shear_y(image: tf.Tensor, slope: float | tf.Tensor) -> tf.Tensor:
    """Takes pixel (x, y) from (x, y + slope * x), as ``Image.transform``."""
    return _affine(image, (1.0, 0.0, 0.0), (slope, 1.0, 0.0))


def translate_x(image: tf.Tensor, pixels: float | tf.Tensor) -> tf.Tensor:
    """Takes pixel (x, y) from (x + pixels, y), as ``Image.transform``."""
    return _affine(image, (1.0, 0.0, pixels), (0.0, 1.0, 0.0))


def translate_y(image: tf.Tensor, pixels: float | tf.Tensor) -> tf.Tensor:
    """Takes pixel (x, y) from (x, y + pixels), as ``Image.transform``."""
    return _affine(image, (1.0, 0.0, 0.0), (0.0, 1.0, pixels))


def _part(image: tf.Tensor, axis: int, level: tf.Tensor) -> tf.Tensor:
    """Returns whole pixels: AutoAugment's 150 of 331, scaled to the image's size."""
    return tf.round(level * (150 / 331) * tf.cast(tf.shape(image)[axis], tf.float32))


# Each takes a level from -1 to 1: the magnitude / 10, with the direction as its sign.
OPERATIONS = {
    "identity": lambda image, level: identity(image),
    "autocontrast": lambda image, level: autocontrast(image),
    "equalize": lambda image, level: equalize(image),
    "rotate": lambda image, level: rotate(image, 30 * level),
    "solarize": lambda image, level: solarize(image, 256 - 256 * tf.abs(level)),
    "color": lambda image, level: color(image, 1 + 0.9 * level),
    "posterize": lambda image, level: posterize(
        image, 8 - tf.cast(tf.round(4 * tf.abs(level)), tf.int32)
    ),
    "contrast": lambda image, level: contrast(image, 1 + 0.9 * level),
    "brightness": lambda image, level: brightness(image, 1 + 0.9 * level),
    "sharpness": lambda image, level: sharpness(image, 1 + 0.9 * level),
    "shear_x": lambda image, level: shear_x(image, 0.3 * level),
    "shear_y": lambda image, level: shear_y(image, 0.3 * level),
    "translate_x": lambda image, level: translate_x(image, _part(image, 1, level)),
    "translate_y": lambda image, level: translate_y(image, _part(image, 0, level)),
}


def _levels(dtype: tf.DType) -> tf.Tensor:
    """Returns the grey levels, [256, 1]."""
    return tf.cast(tf.range(256)[:, None], dtype)


def _index(image: tf.Tensor) -> tf.Tensor:
    """Returns the position of each pixel's level in a table [256, C], as int32."""
    channels = image.shape[-1]
    return tf.cast(image, tf.int32) * channels + tf.range(channels)


def _look_up(table: tf.Tensor, image: tf.Tensor) -> tf.Tensor:
    """Replaces the levels of each channel by those of the table [256, C]."""
    return tf.gather(tf.reshape(tf.cast(table, tf.uint8), [-1]), _index(image))


def _luma(image: tf.Tensor) -> tf.Tensor:
    """Returns the grey image [H, W, 1], in integers as ``Image.convert("L")``."""
    if image.shape[-1] == 1:
        return image
    red, green, blue = tf.split(tf.cast(image, tf.int32), 3, axis=-1)
    return (19595 * red + 38470 * green + 7471 * blue + 2**15) // 2**16


def _blend(
    start: int | tf.Tensor, image: tf.Tensor, factor: float | tf.Tensor
) -> tf.Tensor:
    """Blends ``start``, at 0, and the image, at 1, and beyond; as ``Image.blend``."""
    start = tf.cast(start, tf.float32)
    blended = start + factor * (tf.cast(image, tf.float32) - start)
    return tf.cast(tf.clip_by_value(blended, 0.0, 255.0), tf.uint8)


def _affine(image: tf.Tensor, row_x: tuple, row_y: tuple) -> tf.Tensor:
    """Takes pixel (x, y) from the nearest one to (a x + b y + c, d x + e y + f).

    Args:
        image: uint8 [H, W, C].
        row_x: (a, b, c); coordinates are those of pixels' centres, as in Pillow.
        row_y: (d, e, f).
    """
    # TensorFlow counts from the centre of the first pixel, Pillow from its corner.
    terms = [x for a, b, c in (row_x, row_y) for x in (a, b, c + (a + b) / 2 - 0.5)]
    terms = [tf.cast(term, tf.float32) for term in terms + [0, 0]]
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None],
        transforms=tf.stack(terms)[None],
        output_shape=tf.shape(image)[:2],
        fill_value=float(FILL),
        interpolation="NEAREST",
        fill_mode="CONSTANT",
    )[0]


def _check(image, u, layers, magnitude):
    if (
        image.dtype != tf.uint8
        or image.shape.rank != 3
        or image.shape[-1] not in (1, 3)
    ):
        raise ValueError(
            f"the image is {image.dtype.name} {image.shape}, expected uint8 [H, W, 1] "
            "or [H, W, 3]: augment before normalizing, and set the number of channels"
        )
    if not 0 <= magnitude <= 10:
        raise ValueError(
            f"magnitude is {magnitude}, expected 0 to 10: 10 is the whole range of "
            "each operation"
        )
    count = randaugment_draws(layers)
    if u.shape.num_elements() not in (None, count):
        raise ValueError(
            f"u has shape {u.shape}, expected {count} numbers for {layers} layers: "
            "draw randaugment_draws(layers)"
        )
