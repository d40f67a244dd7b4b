"""Measures the input pipeline, without training, and names its slowest stage.

    python -m towers.input_pipeline.benchmark --dataset=tfds:cifar10 --ablate

Each stage is measured together with all stages before it. "copy" is the whole pipeline,
with copying each tower's part of the batch to its device. It takes less than a minute,
and --ablate takes another one. Nothing else should run meanwhile.
Exit codes: 0 done; 1 error; 130 stopped by Ctrl-C.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.input_pipeline.benchmark import flags as benchmark_flags
    from towers.program import startup

    _options = startup.begin(
        "towers.input_pipeline.benchmark",
        lambda argv: benchmark_flags.read(argv, __doc__),
    )

import contextlib
import json
import os
import platform
import sys
from typing import Any

import tensorflow as tf

from towers.input_pipeline import data_flags, sources
from towers.input_pipeline.benchmark import measure, report
from towers.input_pipeline.benchmark.flags import BenchmarkOptions
from towers.input_pipeline.cache import cached
from towers.input_pipeline.local_store.store import LocalStore
from towers.input_pipeline.pipeline import Pipeline
from towers.input_pipeline.pipeline.sizes import unknown_size
from towers.input_pipeline.records.checks import blame_records
from towers.program import ending, startup, voice
from towers.program.commands import read_image_size, read_randaugment


def measure_and_say(options: BenchmarkOptions) -> None:
    """Measures the pipeline of the flags, which have been checked.

    Raises:
        ValueError: If any input is bad.
    """
    pipeline, towers = set_up(options)
    steps = options.step_ms and [float(step) for step in options.step_ms]
    results = describe(pipeline, len(towers))
    with blame_records(pipeline.source):
        results |= measure.measure(pipeline, options.examples, towers, steps)
        if options.ablate:
            results["ablation"] = measure.ablate(pipeline, options.examples)
    print(json.dumps(results) if options.json else report.text(results))
    if options.plot:
        report.plot(results, options.plot)


def set_up(options: BenchmarkOptions) -> tuple[Pipeline, list[str]]:
    """Opens the data.

    Returns:
        The pipeline, and the towers' devices.

    Raises:
        ValueError: If any input is bad.
    """
    towers = configure_devices(options.num_gpus)
    source = sources.open_source(
        options.dataset,
        data_dir=os.path.expanduser(options.data_dir),
        seed=options.seed,
        **data_flags.given(options),
        **_local_store(options),
    )
    for note in source.notes:
        print(note, file=sys.stderr)
    shape = tuple(source.image_shape)
    if len(shape) == 1 and options.image_size is not None:
        raise ValueError(
            f"Received --image_size={options.image_size}, but {source.name} has rows "
            "of numbers; expected images, so leave it out."
        )
    if (asked := read_image_size(options.image_size)) is not None:
        shape = (*asked, shape[-1])
    if None in shape:
        raise ValueError(unknown_size(source))
    with contextlib.redirect_stdout(sys.stderr):  # TFDS says what it does.
        source.prepare()
    cache = "none" if options.data_service else options.cache_kind
    with blame_records(source):
        source = cached(
            source,
            cache,
            options.cache_dir,
            options.deterministic,
            shape,
            options.recipe,
        )
    training = options.split == "train"
    pipeline = Pipeline(
        source,
        options.split,
        batch_size=options.batch_size,
        image_shape=shape,
        training=training,
        recipe=options.recipe,
        randaugment=read_randaugment(options.randaugment),
        seed=options.seed,
        deterministic=options.deterministic or not training,
        shuffle_mb=options.shuffle_mb,
        data_service=options.data_service,
        decode_on=options.decode_on,
        repeat=training,
    )
    if pipeline.decode_note:
        print(pipeline.decode_note, file=sys.stderr)
    return pipeline, towers


def _local_store(options: BenchmarkOptions) -> dict[str, LocalStore]:
    """Returns the store through which remote files are read, if there is one."""
    if options.local_store is None:
        return {}
    store = LocalStore(options.store_folder, options.store_gb, tell=voice.warn)
    return {"local_store": store}


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


def describe(pipeline: Pipeline, towers: int) -> dict[str, Any]:
    """Describes the measured pipeline, for the results."""
    return {
        "dataset": pipeline.source.name,
        "kept": pipeline.source.note,
        "batch_size": pipeline.batch_size,
        "image_shape": pipeline.image_shape,
        "towers": towers,
        "versions": {"python": platform.python_version(), "tensorflow": tf.__version__},
    }


if __name__ == "__main__":
    startup.leave(
        ending.run("towers.input_pipeline.benchmark", lambda: measure_and_say(_options))
    )
