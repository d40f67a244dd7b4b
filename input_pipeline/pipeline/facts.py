"""What decides which records a pipeline's batches have, and what becomes of these.

How much memory is free is none of it: a deterministic run keeps up to 1 GB of examples,
by the data alone. The limit of a container counts, and is among what a run needs to go
on.
"""

import hashlib
from typing import Any

from towers.input_pipeline.pipeline import room


def order(pipeline: Any) -> dict[str, Any]:
    """See ``Pipeline.order``."""
    source, split = pipeline.source, pipeline.split
    files = source.origin.files_digest(split)
    has_files = not files.startswith("0 ")
    buffer_mb, target = room.shuffle_mb(pipeline.shuffle_mb), source.target
    return {
        "dataset": source.name.partition(":")[0] if has_files else source.name,
        "files": files,
        # Data that were changed have other sizes, mostly; times change with each copy.
        "bytes": source.origin.bytes_of(split) if has_files else None,
        "split": split,
        "batch size": pipeline.batch_size,
        # Also those that are passed over: the others keep their places.
        "examples": source.size_of_all(split),
        "seed": pipeline.seed,
        "classes": target.names or target.size,
        "kept in memory": source.origin is not source,
        "shuffle_mb": buffer_mb if source.has_buffer else None,
        "grouped by length": pipeline.group_by_length or None,
    }


def makes(pipeline: Any) -> dict[str, Any]:
    """See ``Pipeline.makes``."""
    measured = pipeline.scaling, {**pipeline.source.vocabularies}
    return {
        "image_shape": pipeline.image_shape,
        "recipe": pipeline.recipe,
        "randaugment": pipeline.randaugment,
        "what was measured of the data": hashlib.sha256(
            repr(measured).encode()
        ).hexdigest()[:8],
    }
