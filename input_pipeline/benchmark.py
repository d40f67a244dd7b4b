"""Says how fast the input pipeline is, without any training, and what slows it down.

    python -m towers.input_pipeline.benchmark --dataset=tfds:cifar10 --ablate

Each stage is read with all those before it, but nothing behind it; "copy" is the whole
pipeline and the copying of each tower's share to its device. It takes a minute or two,
--ablate twice as long; nothing else should run meanwhile.
Exit codes: 0 done; 1 error; 130 stopped by Ctrl-C.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.input_pipeline import startup

    startup.begin("towers.input_pipeline.benchmark")

import contextlib
import functools
import gc
import importlib.util
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import app, flags

from towers.input_pipeline import measure, recipes, report, sources, startup
from towers.input_pipeline.cache import CACHES, cached
from towers.input_pipeline.checks import blame_records
from towers.input_pipeline.commands import (
    check_data_service,
    fail,
    parse_flags,
    quieten,
    read_image_size,
    read_randaugment,
)
from towers.input_pipeline.pipeline import Pipeline

FLAGS = flags.FLAGS
_PROGRAM = "towers.input_pipeline.benchmark"

flags.DEFINE_string(
    "dataset",
    "digits",
    "digits, tfds:NAME, tfrecord:GLOB, folder:DIR, ... as in training.",
)
flags.DEFINE_string("data_dir", "data", "Where digits and tfds: keep their files.")
flags.DEFINE_string("split", "train", "train or test; only train is shuffled.")
flags.DEFINE_string(
    "image_size", None, "N or HxW to resize images to. Default: as they are."
)
flags.DEFINE_integer("batch_size", 64, "Examples in a batch.", lower_bound=1)
flags.DEFINE_enum("recipe", "none", recipes.RECIPES, "What becomes of images.")
flags.DEFINE_list(
    "randaugment", None, "Layers and magnitude of RandAugment, such as 2,9."
)
flags.DEFINE_bool("deterministic", False, "Same order for the same seed.")
flags.DEFINE_enum("cache", "auto", CACHES, "Where to keep examples, as in training.")
flags.DEFINE_string("cache_dir", None, "Where --cache=disk keeps its files.")
flags.DEFINE_integer(
    "shuffle_mb", 256, "Memory to draw the next record from.", lower_bound=0
)
flags.DEFINE_string(
    "data_service", None, "Dispatcher of a tf.data service, as grpc://HOST:PORT."
)
flags.DEFINE_integer("num_classes", None, "Classes of tfrecord: data.", lower_bound=1)
flags.DEFINE_string("image_key", "image/encoded", "Field of the image.")
flags.DEFINE_string("label_key", "image/class/label", "Field of the label.")
flags.DEFINE_integer("seed", 0, "Of order and augmentation.", lower_bound=0)
flags.DEFINE_integer(
    "examples",
    None,
    "Examples to read for each figure. Default: as many as five seconds allow.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "towers",
    2,
    "Towers that share a batch: GPUs, in turn; without a GPU, logical CPUs.",
    lower_bound=1,
)
flags.DEFINE_list(
    "step_ms",
    None,
    "What towers take for a batch, to say how long they would wait for the next. "
    "Default: 1, 2 and 4 times what the pipeline takes.",
)
flags.DEFINE_bool(
    "ablate", False, "Say also what each trick is worth, by turning it off."
)
flags.DEFINE_bool("json", False, "Print one line of JSON instead of tables.")
flags.DEFINE_string("plot", None, "PNG file for a bar chart (needs matplotlib).")


def main(argv: Sequence[str]) -> int:
    """Measures what the flags describe.

    Args:
        argv: The program's name, and nothing else.

    Returns:
        The exit code.
    """
    try:
        startup.end()
        pipeline, towers = set_up(argv)
        steps = FLAGS.step_ms and [float(step) for step in FLAGS.step_ms]
        results = describe(pipeline)
        with blame_records(pipeline.source):
            results |= measure.measure(pipeline, FLAGS.examples, towers, steps)
            if FLAGS.ablate:
                results["ablation"] = measure.ablate(pipeline, FLAGS.examples)
        print(json.dumps(results) if FLAGS.json else report.text(results))
        if FLAGS.plot:
            report.plot(results, FLAGS.plot)
    except KeyboardInterrupt:
        fail("Stopped by Ctrl-C.", _PROGRAM)
        return 130
    except (ValueError, OSError) as error:
        return fail(error, _PROGRAM)
    finally:
        # A half-read epoch ends here: TensorFlow warns if Python has gone before it.
        gc.collect()
    return 0


def set_up(argv: Sequence[str]) -> tuple[Pipeline, list[str]]:
    """Checks the flags, and opens the data.

    Args:
        argv: As for `main`.

    Returns:
        The pipeline, and the towers' devices.

    Raises:
        ValueError: If any input is bad.
    """
    check_flags(argv)
    quieten()
    towers = configure_devices(FLAGS.towers)
    source = sources.open_source(
        FLAGS.dataset,
        data_dir=os.path.expanduser(FLAGS.data_dir),
        seed=FLAGS.seed,
        image_key=FLAGS.image_key,
        label_key=FLAGS.label_key,
        num_classes=FLAGS.num_classes,
    )
    shape = tuple(source.image_shape)
    if len(shape) == 3 and (asked := read_image_size(FLAGS.image_size)) is not None:
        shape = (*asked, shape[-1])
    if None in shape:
        raise ValueError(
            f"The images of {source.name} differ in size; expected one size for all, "
            "so give --image_size, such as --image_size=224."
        )
    with contextlib.redirect_stdout(sys.stderr):  # TFDS says what it does.
        source.prepare()
    cache = "none" if FLAGS.data_service else FLAGS.cache
    with blame_records(source):
        source = cached(source, cache, FLAGS.cache_dir, FLAGS.deterministic)
    training = FLAGS.split == "train"
    pipeline = Pipeline(
        source,
        FLAGS.split,
        batch_size=FLAGS.batch_size,
        image_shape=shape,
        training=training,
        recipe=FLAGS.recipe,
        randaugment=read_randaugment(FLAGS.randaugment),
        seed=FLAGS.seed,
        deterministic=FLAGS.deterministic or not training,
        shuffle_mb=FLAGS.shuffle_mb,
        data_service=FLAGS.data_service,
        repeat=training,
    )
    return pipeline, towers


def check_flags(argv: Sequence[str]) -> None:
    """Checks the flags that can be checked by themselves."""
    if len(argv) > 1:
        raise ValueError(
            f"Received the argument {argv[1]!r}; expected flags only, such as "
            "--dataset=digits (see --help)."
        )
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
            "Received --ablate and --data_service, whose workers have the tricks; "
            "expected one of them, so measure on one of those machines."
        )
    check_data_service(FLAGS.data_service)
    if FLAGS.plot is not None:
        folder = os.path.dirname(os.path.abspath(FLAGS.plot))
        if not FLAGS.plot.endswith(".png") or not os.path.isdir(folder):
            raise ValueError(
                f"Received --plot={FLAGS.plot}; expected a PNG file in a folder that "
                "exists, such as --plot=stages.png."
            )
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError(
                f"Received --plot={FLAGS.plot}, but matplotlib, which draws it, is not "
                "installed; pip install matplotlib, or leave out --plot."
            )


def _is_time(step: str) -> bool:
    try:
        return 0 <= float(step) < math.inf
    except ValueError:
        return False


def configure_devices(towers: int) -> list[str]:
    """Sets up a device for each tower, before TensorFlow initialises."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        return [f"/GPU:{tower % len(gpus)}" for tower in range(towers)]
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * towers,
    )
    return [f"/CPU:{tower}" for tower in range(towers)]


def describe(pipeline: Pipeline) -> dict[str, Any]:
    """What is measured, for the results."""
    return {
        "dataset": pipeline.source.name,
        "batch_size": pipeline.batch_size,
        "image_shape": pipeline.image_shape,
        "towers": FLAGS.towers,
        "versions": {"python": platform.python_version(), "tensorflow": tf.__version__},
    }


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(parse_flags, program=_PROGRAM))
