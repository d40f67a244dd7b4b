"""Reads masks: PNG files with a class for each pixel."""

import zlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from towers.input_pipeline.choices import IGNORED

# Positions in a PNG: bits of a sample, kind of colours, and the checksum over both.
_DEPTH, _KIND, _CHECKSUM = 24, 25, 29
_GREY, _PALETTE = 0, 3
_END = _CHECKSUM + 4
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
EXPECTED = "a PNG of grey pixels, or with a palette, that are numbers of classes"


def _change_of_checksum() -> int:
    """Returns the change of the header's checksum when its palette is dropped.

    It is the same for all headers, as a CRC is linear.
    """
    header = bytearray(_CHECKSUM - 12)
    before = zlib.crc32(header)
    header[_KIND - 12] = _PALETTE
    return before ^ zlib.crc32(header)


_CHANGE = np.frombuffer(_change_of_checksum().to_bytes(4, "big"), np.uint8)


def fault(encoded: bytes) -> str:
    """Returns why bytes are no mask, as a phrase; empty if their header is good."""
    if not encoded.startswith(_SIGNATURE) or len(encoded) < _END:
        return f"no PNG, expected {EXPECTED}"
    if encoded[_KIND] not in (_GREY, _PALETTE):
        return f"a PNG of colours, expected {EXPECTED}"
    if encoded[_DEPTH] > 8:
        return f"a PNG of {encoded[_DEPTH]} bits, expected {EXPECTED}, in 8 bits"
    return ""


def decode(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes the numbers of classes of a mask.

    TensorFlow converts a palette to colours, and 1 in one bit to 255. So the file is
    declared grey, and the factor for few bits is divided out.

    Args:
        encoded: scalar string, a PNG.

    Returns:
        uint8 [H, W]. Other files are an error at run time.
    """
    # Missing bytes of a short file are 0.
    header = tf.io.decode_raw(encoded, tf.uint8, fixed_length=_END)
    depth, kind = header[_DEPTH], header[_KIND]
    good = tf.reduce_all(header[: len(_SIGNATURE)] == [*_SIGNATURE])
    good &= ((kind == _GREY) | (kind == _PALETTE)) & (depth <= 8)
    check = tf.debugging.Assert(good, [f"a mask is not {EXPECTED}"])
    with tf.control_dependencies([check]):
        change = tf.where(kind == _PALETTE, _CHANGE, np.zeros_like(_CHANGE))
    checksum = tf.bitwise.bitwise_xor(header[_CHECKSUM:], change)
    header = [header[:_KIND], [_GREY], header[_KIND + 1 : _CHECKSUM], checksum]
    letters = tf.constant([bytes([byte]) for byte in range(256)])
    header = tf.gather(letters, tf.cast(tf.concat(header, axis=0), tf.int32))
    rest = tf.strings.substr(encoded, _END, tf.strings.length(encoded) - _END)
    grey = tf.io.decode_png(tf.strings.reduce_join(header) + rest, channels=1)
    depth = tf.maximum(tf.cast(depth, tf.int32), 1)  # for a bad file, it may be 0
    largest = tf.bitwise.left_shift(1, depth) - 1
    return grey[..., 0] // tf.cast(255 // largest, tf.uint8)


def resize(mask: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Resizes masks [..., H, W] to the nearest pixels: classes are not mixed."""
    if mask.shape[-2:] == (height, width):
        return mask
    nearest = tf.image.ResizeMethod.NEAREST_NEIGHBOR
    return tf.image.resize(mask[..., None], (height, width), nearest)[..., 0]


def with_mask(
    change: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    images: tf.Tensor,
    masks: tf.Tensor,
    u: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Moves images and their masks in the same way.

    Args:
        change: moves pixels of images, of any number of channels; pixels from outside
            are 0.
        images: uint8 [..., H, W, C].
        masks: uint8 [..., H, W]; pixels from outside are ignored.
        u: see `change`.
    """
    both = tf.concat([images, IGNORED - masks[..., None]], axis=-1)
    both = change(both, u)
    return both[..., :-1], IGNORED - both[..., -1]
