"""Says of images whose size nothing tells beforehand what the first ones have."""

import tensorflow as tf

from towers.input_pipeline.images.decode import decode_image
from towers.input_pipeline.records.checks import BAD_RECORD
from towers.input_pipeline.sources.base import Source

_FIRST = 16


def unknown_size(source: Source) -> str:
    """Says why there is no one size of a source's images, and what to do.

    It looks at the first images; all others may have other sizes.

    Args:
        source: of images whose size is not known.

    Returns:
        A sentence.
    """
    try:
        sizes = _first_sizes(source)
    except (*BAD_RECORD, KeyError, ValueError):
        sizes = []  # which whoever reads them says
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
    """Height and width of the first images; none where they are not at hand yet."""
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
