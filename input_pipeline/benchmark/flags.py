"""The flags of towers.input_pipeline.benchmark, and their checks."""

import math
from collections.abc import Sequence

from absl import flags

from towers.input_pipeline import data_flags, specs
from towers.input_pipeline.choices import CACHES, RECIPES
from towers.input_pipeline.local_store import store_flags
from towers.program.commands import (
    check_data_service,
    check_plot,
    read_image_size,
    read_randaugment,
)
from towers.program.flags import command_line

FLAGS = flags.FLAGS
_DATA = {"module_name": "Data"}
_INPUT = {"module_name": "Input pipeline"}
_MEASURE = {"module_name": "Measuring"}

flags.DEFINE_string(
    "dataset",
    "digits",
    "Data set to read: digits, tfds:NAME, tfrecord:GLOB, folder:DIR, or another "
    "form that towers train --help lists.",
    **_DATA,
)
flags.DEFINE_string(
    "data_dir", "data", "Folder where digits and tfds: store their files.", **_DATA
)
flags.DEFINE_string(
    "split", "train", "Split to read: train or test. Only train is shuffled.", **_DATA
)
data_flags.define(_DATA)

flags.DEFINE_string(
    "image_size",
    None,
    "Size to resize images to: N or HxW pixels. Default: no resizing.",
    **_INPUT,
)
flags.DEFINE_integer(
    "batch_size", 64, "Number of examples in a batch.", lower_bound=1, **_INPUT
)
flags.DEFINE_enum(
    "recipe",
    "none",
    RECIPES,
    "How to augment images, as towers train --help describes.",
    **_INPUT,
)
flags.DEFINE_list(
    "randaugment",
    None,
    "Number of operations and magnitude of RandAugment, such as 2,9.",
    **_INPUT,
)
flags.DEFINE_bool(
    "deterministic",
    False,
    "Read records in the same order in every run with the same seed.",
    **_INPUT,
)
flags.DEFINE_enum(
    "cache",
    "auto",
    CACHES,
    "Where to keep examples, as towers train --helpfull describes.",
    **_INPUT,
)
flags.DEFINE_string(
    "cache_dir", None, "Folder for the files of --cache=disk.", **_INPUT
)
store_flags.define(_INPUT)
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
    "Address of the dispatcher of a tf.data service, such as grpc://localhost:5050.",
    **_INPUT,
)
flags.DEFINE_integer(
    "seed", 0, "Seed of order and augmentation.", lower_bound=0, **_INPUT
)

flags.DEFINE_integer(
    "examples",
    None,
    "Number of examples to read for each figure. Default: as many as two "
    "seconds allow.",
    lower_bound=1,
    **_MEASURE,
)
flags.DEFINE_integer(
    "num_gpus",
    2,
    "Number of towers that share a batch, on GPUs, or on logical CPUs without a GPU.",
    lower_bound=1,
    **_MEASURE,
)
flags.DEFINE_list(
    "step_ms",
    None,
    "Milliseconds that towers compute a batch, such as 20,50, to say how long "
    "they would wait for the next one. Default: 1, 2 and 4 times the time of "
    "the pipeline.",
    **_MEASURE,
)
flags.DEFINE_bool(
    "ablate",
    False,
    "Measure each optimization of the pipeline as well, by turning it off.",
    **_MEASURE,
)
flags.DEFINE_bool(
    "json", False, "Print one line of JSON instead of tables.", **_MEASURE
)
flags.DEFINE_string(
    "plot", None, "PNG file to write a bar chart to (needs matplotlib).", **_MEASURE
)


def read(argv: Sequence[str], doc: str) -> None:
    """Reads the flags, as `command_line.read`, and checks them."""
    groups = command_line.below(g["module_name"] for g in (_DATA, _INPUT, _MEASURE))
    command_line.read(argv, doc, groups, example="--dataset=digits")
    check_flags()


def check_flags() -> None:
    """Checks the flags that can be checked by themselves."""
    specs.check(FLAGS.dataset)
    store_flags.check(FLAGS, [FLAGS.dataset])
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
