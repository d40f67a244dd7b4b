"""A contender: our own pipeline."""

import numpy as np

from towers import input_pipeline

from ..works import CLASSES, FILES, WORKS


def batches(contender, work, folder):
    """Yields batches for ever; "stream" reads files in every epoch."""
    if work == "arrays":
        arrays = (np.load(folder / f"{name}.npy") for name in ("images", "labels"))
        source = input_pipeline.ArraySource(*arrays)
    else:
        files = folder / FILES[work]
        source = input_pipeline.open_source(f"tfrecord:{files}", num_classes=CLASSES)
    deterministic = "deterministic" in contender
    cache = "none" if "stream" in contender else "auto"
    source = input_pipeline.cached(
        source,
        cache,
        deterministic=deterministic,
        image_shape=WORKS[work].shape,
        recipe=WORKS[work].recipe,
    )
    dataset = input_pipeline.make_dataset(
        source,
        "train",
        batch_size=WORKS[work].batch,
        image_shape=WORKS[work].shape,
        training=True,
        recipe=WORKS[work].recipe,
        deterministic=deterministic,
        repeat=True,
    )
    yield from dataset
