"""The flags of towers.input_pipeline.benchmark, and their checks."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from towers.input_pipeline import specs
from towers.input_pipeline.choices import RECIPES
from towers.input_pipeline.data_flags import (
    CacheFlag,
    DataFlags,
    DecodeFlag,
    check_decoding,
)
from towers.input_pipeline.local_store import store_flags
from towers.program.commands import (
    check_data_service,
    check_plot,
    read_image_size,
    read_randaugment,
)
from towers.program.flags import command_line
from towers.program.flags.table import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(DataFlags, CacheFlag, DecodeFlag, store_flags.StoreFlags):
    """The flags of towers.input_pipeline.benchmark."""

    dataset: str = flag(
        "digits",
        "Data",
        "Data set to read: digits, tfds:NAME, tfrecord:GLOB, folder:DIR, or another "
        "form that towers train --help lists.",
    )
    data_dir: str = flag(
        "data", "Data", "Folder where digits and tfds: store their files."
    )
    split: str = flag(
        "train", "Data", "Split to read: train or test. Only train is shuffled."
    )
    image_size: str | None = flag(
        None,
        "Input pipeline",
        "Size to resize images to: N or HxW pixels. Default: no resizing.",
    )
    batch_size: int = flag(
        64, "Input pipeline", "Number of examples in a batch.", at_least=1
    )
    recipe: Literal[*RECIPES] = flag(
        "none",
        "Input pipeline",
        "How to augment images, as towers train --help describes.",
    )
    randaugment: tuple[str, ...] | None = flag(
        None,
        "Input pipeline",
        "Number of operations and magnitude of RandAugment, such as 2,9.",
    )
    deterministic: bool = flag(
        False,
        "Input pipeline",
        "Read records in the same order in every run with the same seed.",
    )
    shuffle_mb: int = flag(
        256, "Input pipeline", "Memory of the shuffle buffer, in MB.", at_least=0
    )
    data_service: str | None = flag(
        None,
        "Input pipeline",
        "Address of the dispatcher of a tf.data service, such as "
        "grpc://localhost:5050.",
    )
    seed: int = flag(0, "Input pipeline", "Seed of order and augmentation.", at_least=0)
    examples: int | None = flag(
        None,
        "Measuring",
        "Number of examples to read for each figure. Default: as many as two seconds "
        "allow.",
        at_least=1,
    )
    num_gpus: int = flag(
        2,
        "Measuring",
        "Number of towers that share a batch, on GPUs, or on logical CPUs without a "
        "GPU.",
        at_least=1,
    )
    step_ms: tuple[str, ...] | None = flag(
        None,
        "Measuring",
        "Milliseconds that towers compute a batch, such as 20,50, to say how long they "
        "would wait for the next one. Default: 1, 2 and 4 times the time of the "
        "pipeline.",
    )
    ablate: bool = flag(
        False,
        "Measuring",
        "Measure each optimization of the pipeline as well, by turning it off.",
    )
    json: bool = flag(False, "Measuring", "Print one line of JSON instead of tables.")
    plot: str | None = flag(
        None, "Measuring", "PNG file to write a bar chart to (needs matplotlib)."
    )


def read(argv: Sequence[str], doc: str) -> BenchmarkOptions:
    """Reads the flags, as `command_line.read`, and checks them."""
    options = command_line.read(BenchmarkOptions, argv, doc)
    specs.check(options.dataset)
    store_flags.check(options, [options.dataset])
    read_image_size(options.image_size)
    read_randaugment(options.randaugment)
    _ = options.cache_kind
    for step in options.step_ms or []:
        if not _is_time(step):
            raise ValueError(
                f"Received --step_ms={','.join(options.step_ms)}; expected "
                "milliseconds of at least 0, such as --step_ms=20,50."
            )
    if options.data_service is not None and options.ablate:
        raise ValueError(
            "Received --ablate and --data_service, but the tricks are turned off in "
            "this process, not in the workers; expected one of the two flags, so "
            "measure on a worker's machine without --data_service."
        )
    check_data_service(options.data_service)
    check_decoding(options)
    check_plot(options.plot, "stages.png")
    return options


def _is_time(step: str) -> bool:
    try:
        return 0 <= float(step) < math.inf
    except ValueError:
        return False
