"""The flags of towers.input_pipeline.benchmark, and their checks."""

import math
from collections.abc import Sequence

from absl import flags

from towers.input_pipeline import data_flags, specs
from towers.input_pipeline.choices import CACHES, RECIPES
from towers.program import command_line
from towers.program.commands import (
    check_data_service,
    check_plot,
    read_image_size,
    read_randaugment,
)

FLAGS = flags.FLAGS
_DATA = {"module_name": "Data"}
_INPUT = {"module_name": "Input pipeline"}
_MEASURE = {"module_name": "Measuring"}

flags.DEFINE_string(
    "dataset",
    "digits",
    "What to read: digits, tfds:NAME, tfrecord:GLOB, folder:DIR, or another of "
    "towers.train --help.",
    **_DATA,
)
flags.DEFINE_string(
    "data_dir", "data", "Where digits and tfds: keep their files.", **_DATA
)
flags.DEFINE_string("split", "train", "train or test; only train is shuffled.", **_DATA)
data_flags.define(_DATA)

flags.DEFINE_string(
    "image_size",
    None,
    "N or HxW to resize images to. Default: as they are.",
    **_INPUT,
)
flags.DEFINE_integer("batch_size", 64, "Examples in a batch.", lower_bound=1, **_INPUT)
flags.DEFINE_enum(
    "recipe",
    "none",
    RECIPES,
    "How to augment images; see towers.train --help.",
    **_INPUT,
)
flags.DEFINE_list(
    "randaugment",
    None,
    "Layers and magnitude of RandAugment, such as 2,9.",
    **_INPUT,
)
flags.DEFINE_bool("deterministic", False, "Same order for the same seed.", **_INPUT)
flags.DEFINE_enum(
    "cache",
    "auto",
    CACHES,
    "Where to keep examples; see towers.train --helpfull.",
    **_INPUT,
)
flags.DEFINE_string("cache_dir", None, "Where --cache=disk keeps its files.", **_INPUT)
flags.DEFINE_integer(
    "shuffle_mb",
    256,
    "Memory of the shuffle buffer, in MB.",
    lower_bound=0,
    **_INPUT,
)
flags.DEFINE_string(
    "data_service",
    None,
    "Dispatcher of a tf.data service, as grpc://HOST:PORT.",
    **_INPUT,
)
flags.DEFINE_integer(
    "seed", 0, "Seed of order and augmentation.", lower_bound=0, **_INPUT
)

flags.DEFINE_integer(
    "examples",
    None,
    "Examples to read for each figure. Default: as many as two seconds allow.",
    lower_bound=1,
    **_MEASURE,
)
flags.DEFINE_integer(
    "towers",
    2,
    "Towers that share a batch: GPUs, in turn; without a GPU, logical CPUs.",
    lower_bound=1,
    **_MEASURE,
)
flags.DEFINE_list(
    "step_ms",
    None,
    "Milliseconds that towers take for a batch, to say how long they would wait for "
    "the next. Default: 1, 2 and 4 times the time of the pipeline.",
    **_MEASURE,
)
flags.DEFINE_bool(
    "ablate",
    False,
    "Also measure each trick of the pipeline, by turning it off.",
    **_MEASURE,
)
flags.DEFINE_bool(
    "json", False, "Print one line of JSON instead of tables.", **_MEASURE
)
flags.DEFINE_string(
    "plot", None, "PNG file for a bar chart (needs matplotlib).", **_MEASURE
)


def read(argv: Sequence[str], doc: str) -> None:
    """Reads the flags, and checks them.

    Args:
        argv: The program's name and its arguments.
        doc: What the program is for.

    Raises:
        ValueError: If a flag is bad, or there is anything but flags.
    """
    by_module = FLAGS.flags_by_module_dict()
    titles = [group["module_name"] for group in (_DATA, _INPUT, _MEASURE)]
    groups = {title: by_module[title] for title in titles}
    check_flags(command_line.read(argv, doc, groups))


def check_flags(argv: Sequence[str]) -> None:
    """Checks the flags that can be checked by themselves."""
    if len(argv) > 1:
        raise ValueError(
            f"Received the argument {argv[1]!r}; expected flags only, such as "
            "--dataset=digits (see --help)."
        )
    specs.check(FLAGS.dataset)
    read_image_size(FLAGS.image_size)
    read_randaugment(FLAGS.randaugment)
    for step in FLAGS.step_ms or []:
        if not _is_time(step):
            raise ValueError(
                f"Received --step_ms={','.join(FLAGS.step_ms)}; expected milliseconds "
                "of at least 0, such as --step_ms=20,50."
            )
    if FLAGS.data_service is not None and FLAGS.ablate:
        raise ValueError(
            "Received --ablate and --data_service, but the tricks are turned off in "
            "this process, not in the workers; expected one of the two flags, so "
            "measure on a worker's machine without --data_service."
        )
    check_data_service(FLAGS.data_service)
    check_plot(FLAGS.plot, "stages.png")


def _is_time(step: str) -> bool:
    try:
        return 0 <= float(step) < math.inf
    except ValueError:
        return False
