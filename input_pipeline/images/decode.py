"""Decodes encoded images to uint8 pixels, at no more cost than necessary."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from towers.input_pipeline.images import augment

# Change this when the pixels of `decode_window` change.
VERSION = "v1"
_JPEG = b"\xff\xd8\xff"
_JPEG_END = b"\xff\xd9"


@dataclasses.dataclass(frozen=True)
class Tricks:
    """Optimizations of decoding; each can be turned off, to measure its gain.

    Attributes:
        fused_crop: Decodes the window only, not the whole JPEG.
        scaled: Decodes a JPEG at a half, a quarter or an eighth of its size if the
            window stays at least as large as the requested image. This also averages.
        fast_dct: Takes the cheaper of libjpeg's cosine transforms.
        plain_upsampling: Repeats colour, where a JPEG has less of it, instead of
            interpolating. For a whole JPEG, interpolating is faster: libjpeg then
            copies fewer rows.
    """

    fused_crop: bool = True
    scaled: bool = True
    fast_dct: bool = True
    plain_upsampling: bool = True


ALL_TRICKS = Tricks()


def decode_window(
    encoded: tf.Tensor,
    window: Callable[[tf.Tensor], tf.Tensor] | None,
    size: tuple[int, int, int],
    *,
    antialias: str = "none",
    tricks: Tricks = ALL_TRICKS,
) -> tf.Tensor:
    """Decodes a window of an image, and resizes it.

    Args:
        encoded: Scalar string: a file of any kind that ``decode_image`` reads.
        window: Chooses y, x, height and width (int32 [4]) by the image's shape (int32
            [3]); None takes the whole image.
        size: (H, W, C) wanted, in pixels.
        antialias: See `augment.resize`.
        tricks: The optimizations.

    Returns:
        Uint8 [H, W, C].
    """
    height, width, channels = size

    def of_jpeg():
        return _decode_jpeg(encoded, window, size, tricks)

    def of_other():
        image = decode_image(encoded, (None, None, channels))
        if window is not None:
            image = augment.crop(image, window(tf.shape(image)))
        return image, 1.0

    # If decoding takes longer, more averaging costs little.
    image, mixed = tf.cond(is_jpeg(encoded), of_jpeg, of_other)
    image.set_shape([None, None, channels])
    image = augment.resize(image, height, width, antialias=antialias, mixed=mixed)
    return tf.ensure_shape(image, size)


def cut(
    encoded: tf.Tensor,
    window: Callable[[tf.Tensor], tf.Tensor] | None,
    size: tuple[int, int, int],
    mirrored: bool | tf.Tensor,
    *,
    antialias: str = "none",
) -> tuple[tf.Tensor, tf.Tensor]:
    """Prepares an image for a decoder of batches, such as `dali.Decoders`.

    Such a decoder gets only whole JPEGs, in grey or RGB. Any other file is decoded
    here, and goes on as a PNG of the requested size. Thus broken files fail as in
    `decode_window`.

    Args:
        encoded: See `decode_window`.
        window: See `decode_window`.
        size: See `decode_window`.
        mirrored: Whether the decoder is to mirror the image left to right.
        antialias: See `augment.resize`.

    Returns:
        The file, a scalar string, and the cut, int32 [6]: y, x, height and width of the
        window; 1 where resizing weighs all pixels, 0 where it mixes the nearest two;
        and 1 to mirror. All pixels count where `decode_window` averages.
    """
    height, width, _ = size
    starts = is_jpeg(encoded) & (tf.strings.substr(encoded, -2, 2) == _JPEG_END)

    def of_jpeg():
        shape = tf.io.extract_jpeg_shape(encoded)
        chosen = augment.whole_window(shape) if window is None else window(shape)
        shrinks = chosen[2:] / tf.constant([height, width])
        averages = tf.reduce_min(shrinks) >= 2
        if antialias != "none":
            averages |= tf.reduce_max(shrinks) > augment.MIXED
        return encoded, tf.concat([chosen, [tf.cast(averages, tf.int32)]], axis=0)

    def of_other():
        image = decode_window(encoded, window, size, antialias=antialias)
        # Uncompressed, as it is decoded at once.
        return tf.io.encode_png(image, compression=0), tf.constant(
            [0, 0, height, width, 0]
        )

    def has_colours():
        return tf.io.extract_jpeg_shape(encoded)[2] <= 3

    usable = tf.cond(starts, has_colours, lambda: tf.constant(False))
    file, chosen = tf.cond(usable, of_jpeg, of_other)
    return file, tf.concat([chosen, [tf.cast(mirrored, tf.int32)]], axis=0)


def _decode_jpeg(
    encoded: tf.Tensor,
    window: Callable[[tf.Tensor], tf.Tensor] | None,
    size: tuple[int, int, int],
    tricks: Tricks,
) -> tuple[tf.Tensor, float | tf.Tensor]:
    """Decodes a window of a JPEG, at a fraction of its size; also returns `mixed`."""
    height, width, channels = size
    whole = window is None
    options = {
        "dct_method": "INTEGER_FAST" if tricks.fast_dct else "INTEGER_ACCURATE",
        "fancy_upscaling": whole or not tricks.plain_upsampling,
        "channels": channels,
    }
    shape = tf.io.extract_jpeg_shape(encoded)
    chosen = augment.whole_window(shape) if whole else window(shape)

    def at(ratio):
        if whole or not tricks.fused_crop:
            image = tf.io.decode_jpeg(encoded, ratio=ratio, **options)
            image = image if whole else augment.crop(image, chosen)
        else:
            image = tf.image.decode_and_crop_jpeg(
                encoded, _scaled(chosen, shape, ratio), ratio=ratio, **options
            )
        return image, augment.MIXED if ratio == 1 else 1.0

    if not tricks.scaled or not (whole or tricks.fused_crop):
        return at(1)
    spare = tf.reduce_min(chosen[2:] // tf.constant([height, width]))
    return tf.cond(
        spare < 2,
        lambda: at(1),
        lambda: tf.cond(
            spare < 4,
            lambda: at(2),
            lambda: tf.cond(spare < 8, lambda: at(4), lambda: at(8)),
        ),
    )


def decode_image(
    encoded: tf.Tensor, shape: tuple[int | None, int | None, int]
) -> tf.Tensor:
    """Decodes JPEG, PNG, GIF (its first picture), BMP or WebP bytes.

    Args:
        encoded: scalar string.
        shape: (H, W, C) expected, None where it varies. C decides the number of
            channels of the result.

    Returns:
        uint8 image [H, W, C]. Another size than expected is an error at run time.
    """
    image = tf.io.decode_image(encoded, channels=shape[-1], expand_animations=False)
    return tf.ensure_shape(image, shape)


def is_jpeg(encoded: tf.Tensor) -> tf.Tensor:
    """Tells which strings [...] begin as a JPEG does: bool [...]."""
    return tf.strings.substr(encoded, 0, len(_JPEG)) == _JPEG


def _scaled(window: tf.Tensor, shape: tf.Tensor, ratio: int) -> tf.Tensor:
    """Returns the same window of an image that is decoded at 1 / ratio of its size."""
    if ratio == 1:
        return window
    whole = (shape[:2] + ratio - 1) // ratio  # libjpeg rounds up
    # Both borders go to the nearest pixel: the picture moves by less than half a pixel.
    corner = (window[:2] + ratio // 2) // ratio
    end = (window[:2] + window[2:] + ratio // 2) // ratio
    corner = tf.minimum(corner, whole - 1)
    end = tf.clip_by_value(end, corner + 1, whole)
    return tf.concat([corner, end - corner], axis=0)
