"""Checks that a pipeline's options go together, and with its source."""

from typing import Any

from towers.input_pipeline.records.checks import check_image_shape


def check(pipeline: Any) -> None:
    """Checks a ``Pipeline``, whose image_shape is known.

    Raises:
        ValueError: see ``Pipeline``.
    """
    source, shape = pipeline.source, pipeline.image_shape
    if pipeline.scaling is None:
        check_image_shape(source, shape)
    if pipeline.split not in source.splits:
        known = ", ".join(source.splits) or "none yet: call prepare() first"
        raise ValueError(f"{source.name} has no split {pipeline.split!r}, only {known}")
    for name in ("batch_size", "seed", "shuffle_mb", "start_epoch", "start_record"):
        least = 1 if name == "batch_size" else 0
        if getattr(pipeline, name) < least:
            raise ValueError(
                f"{name} is {getattr(pipeline, name)}, expected at least {least}"
            )
    if pipeline.data_service is not None and not source.in_graph:
        raise ValueError(
            f"data_service is {pipeline.data_service}, but {source.name} is read "
            "by Python, which its workers cannot run: expected TFRecord files, to "
            "which towers.input_pipeline.convert turns any source"
        )
    service = pipeline.data_service is not None
    if service and pipeline.share is not None and not pipeline.deterministic:
        raise ValueError(
            f"data_service is {pipeline.data_service} on several hosts, whose workers "
            "would give each host other batches: expected deterministic=True, or no "
            "data service, as each host decodes its own rows only"
        )
    if pipeline.group_by_length and not source.has_padding:
        raise ValueError(
            f"group_by_length is True, but {source.name} has no padded rows "
            "of tokens: expected texts or sentences of different lengths, so leave "
            "it out"
        )
    if (scaling := pipeline.scaling) is not None and (
        tuple(source.image_shape) != (len(scaling.names),)
        or shape != (len(scaling.all_names),)
    ):
        raise ValueError(
            f"scaling makes {len(scaling.all_names)} columns of {len(scaling.names)}, "
            f"but examples of {source.name} have the shape {tuple(source.image_shape)} "
            f"and image_shape is {shape}: expected the same columns, so measure "
            "scaling on this source, or leave it out"
        )
    if source.target.kind == "mask" and pipeline.randaugment is not None:
        raise ValueError(
            f"randaugment is {pipeline.randaugment}, which changes images without "
            f"their masks, and {source.name} has masks: expected None"
        )
    plain = pipeline.recipe == "none" and pipeline.randaugment is None
    if len(shape) == 1 and not plain:
        raise ValueError(
            f"recipe is {pipeline.recipe!r}, randaugment {pipeline.randaugment}: "
            f"{source.name} has no images but rows of numbers, so expected "
            "'none' and None"
        )
