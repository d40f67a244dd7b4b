"""Advises on stages of the pipeline, by the name that `Pipeline` gives them."""

from collections.abc import Mapping

# "read" brings records to `parse`.
_TEXTS = {
    "read": "keep the data in memory ({cache}), on a faster disk ({local_store} for "
    "remote files), or in fewer and larger files ({tfrecord})",
    "shuffle": "take a smaller {shuffle_mb}, or keep the data in memory ({cache})",
    "parse": "keep nothing but image and label in the records, or take a larger "
    "{batch_size}",
    "load": "keep the data in memory ({cache}), or more of them in the local store "
    "({local_store_gb})",
    "decode": "store the images no larger than needed, as JPEG, take a lighter "
    "{recipe}, or decode on the GPU ({decode_on}) or on other machines "
    "({data_service})",
    "batch": "take a smaller {image_size}, to copy less",
    "augment": "take a lighter {recipe}, no {randaugment}, or a larger {batch_size}",
    "service": "start more workers",
    "prefetch": "several steps in a call, such as {steps}, or a larger {ram_budget_mb}",
    "copy": "take fewer towers, a larger {batch_size} or a smaller {image_size}",
}
# The same for examples that are kept.
_OF_KEPT = dict.fromkeys(
    ("read", "parse"),
    "take a larger {batch_size}: after the first epoch, the examples are at hand "
    "already",
)

_NAMES = "batch_size data_service ram_budget_mb randaugment recipe shuffle_mb".split()
_FLAGS = {name: f"--{name}" for name in (*_NAMES, "cache", "image_size")} | {
    "local_store": "--local_store",
    "local_store_gb": "--local_store=GB:FOLDER",
    "decode_on": "--decode_on=gpu",
    "steps": "--steps_per_loop=10",
    "tfrecord": "tfrecord:",
}
_ARGUMENTS = {name: name for name in _NAMES} | {
    "cache": "input_pipeline.cached",
    "decode_on": 'decode_on="gpu"',
    "image_size": "image_shape",
    "local_store": "input_pipeline.LocalStore",
    "local_store_gb": "input_pipeline.LocalStore",
    "steps": "compile(steps_per_execution=10)",
    "tfrecord": "TFRecord",
}


def stage_advice(kept: bool = False, flags: bool = False) -> Mapping[str, str]:
    """Returns advice on each stage, for when it is slow.

    Args:
        kept: whether the examples are kept in memory or on disk.
        flags: whether to name the flags of programs; else, the arguments of `cached`,
            `make_dataset` and Keras.
    """
    names = _FLAGS if flags else _ARGUMENTS
    texts = _TEXTS | (_OF_KEPT if kept else {})
    return {stage: text.format(**names) for stage, text in texts.items()}


ADVICE = stage_advice(flags=True)
