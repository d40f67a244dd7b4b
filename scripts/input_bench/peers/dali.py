"""A contender: NVIDIA DALI on the CPU, which decodes only the crop."""

import os

from nvidia.dali import fn, pipeline_def, types

from ..works import AREA, RATIO, WORKS


def batches(contender, work, folder):
    """Yields batches for ever."""
    pipeline = _pipeline(
        folder / "folder",
        WORKS[work].shape,
        batch_size=WORKS[work].batch,
        num_threads=os.cpu_count(),
        device_id=None,
        seed=0,
    )
    pipeline.build()
    while True:
        images, labels = pipeline.run()
        yield images.as_array(), labels.as_array()[:, 0]


@pipeline_def
def _pipeline(folder, shape):
    jpegs, labels = fn.readers.file(file_root=str(folder), random_shuffle=True)
    images = fn.decoders.image_random_crop(
        jpegs, random_area=AREA, random_aspect_ratio=RATIO, num_attempts=10
    )
    images = fn.resize(
        images,
        size=shape[:2],
        interp_type=types.DALIInterpType.INTERP_LINEAR,
        antialias=False,
    )
    return fn.flip(images, horizontal=fn.random.coin_flip()), labels
