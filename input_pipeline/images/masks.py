"""Masks: PNG files of a class for each pixel."""

import zlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from towers.input_pipeline.choices import IGNORED

# Places in a PNG: bits of a sample and kind of colours, and the checksum over both.
_DEPTH, _KIND, _CHECKSUM = 24, 25, 29
_GREY, _PALETTE = 0, 3
_END = _CHECKSUM + 4
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
EXPECTED = "a PNG of grey pixels, or with a palette, that are numbers of classes"


def _change_of_checksum() -> int:
    """What the header's checksum changes by, if its palette is forgotten.

    That is the same for all headers, as a CRC is linear.
    """
    header = bytearray(_CHECKSUM - 12)
    before = zlib.crc32(header)
    header[_KIND - 12] = _PALETTE
    return before ^ zlib.crc32(header)


_CHANGE = np.frombuffer(_change_of_checksum().to_bytes(4, "big"), np.uint8)


def fault(encoded: bytes) -> str:
    """Says why these bytes are no mask, a phrase; empty if their header is good."""
    if not encoded.startswith(_SIGNATURE) or len(encoded) < _END:
        return f"no PNG, expected {EXPECTED}"
    if encoded[_KIND] not in (_GREY, _PALETTE):
        return f"a PNG of colours, expected {EXPECTED}"
    if encoded[_DEPTH] > 8:
        return f"a PNG of {encoded[_DEPTH]} bits, expected {EXPECTED}, in 8 bits"
    return ""


def decode(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes the numbers of classes of a mask.

    TensorFlow makes colours of a palette, and 255 of a 1 in one bit. So the file is
    said to be grey, and what few bits stand for is divided out.

    Args:
        encoded: scalar string, a PNG.

    Returns:
        uint8 [H, W]. What is no mask is an error at run time.
    """
    # Bytes behind the end of a file that is too short are 0.
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
    depth = tf.maximum(tf.cast(depth, tf.int32), 1)  # of a bad one, it may be 0
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
        change: moves pixels of images, of any number of channels; what moves in is 0.
        images: uint8 [..., H, W, C].
        masks: uint8 [..., H, W]; what moves in is ignored.
        u: see `change`.
    """
    both = tf.concat([images, IGNORED - masks[..., None]], axis=-1)
    both = change(both, u)
    return both[..., :-1], IGNORED - both[..., -1]
