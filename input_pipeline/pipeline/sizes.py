"""Describes the sizes of the first images if nothing else tells them."""

import tensorflow as tf

from towers.input_pipeline.images.decode import decode_image
from towers.input_pipeline.records.checks import BAD_RECORD
from towers.input_pipeline.sources.base import Source

_FIRST = 16


def unknown_size(source: Source) -> str:
    """Explains why images have no common size, with advice.

    It looks at the first images; the others may have other sizes.

    Args:
        source: a source of images of unknown size.

    Returns:
        A sentence.
    """
    try:
        sizes = _first_sizes(source)
    except (*BAD_RECORD, KeyError, ValueError):
        sizes = []  # reading them raises the error
    names = sorted({f"{height}x{width}" for height, width in sizes})
    if not names:
        why, advice = f"The size of the images of {source.name} is not known", "224"
    elif len(names) == 1:
        why = (
            f"The first images of {source.name} are {names[0]}, but nothing says that "
            "all are"
        )
        advice = names[0]
    else:
        why = (
            f"The images of {source.name} differ in size, such as {names[0]} and "
            f"{names[1]}"
        )
        advice = "224"
    return (
        f"{why}; expected one size for all, so give --image_size, such as "
        f"--image_size={advice} (in Python, image_shape)."
    )


@tf.autograph.experimental.do_not_convert
def _first_sizes(source: Source) -> list[list[int]]:
    """Returns height and width of the first images; none if not at hand yet."""
    if not source.splits or not source.encoded:
        return []
    with tf.device("/CPU:0"):
        split = next(iter(source.splits))
        for _, records in source.batches(split, _FIRST).take(1):
            images, _ = source.parse(records)
            decoded = [
                decode_image(source.load(image), source.image_shape) for image in images
            ]
            return [image.shape[:2].as_list() for image in decoded]
    return []
