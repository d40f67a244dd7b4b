"""Measures the speed of a pipeline by stage, and the gain of each optimization.

`towers.input_pipeline.benchmark` has the flags, and reports the results.
"""

import collections
import dataclasses
import itertools
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers.input_pipeline.images import augment, recipes
from towers.input_pipeline.images.decode import Tricks, is_jpeg
from towers.input_pipeline.pipeline import Pipeline

_SECONDS = 2
# The fraction of the examples of a measurement that is read before, in each round.
_WARM_UP = 0.1
_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Reading:
    """The cost of reading some examples.

    Attributes:
        examples: Examples read.
        seconds: Time in total.
        waited: The part of that time spent waiting for batches.
        cpu: CPU time of the whole process.
    """

    examples: int
    seconds: float
    waited: float
    cpu: float

    @property
    def rate(self) -> float:
        """The number of examples per second."""
        return self.examples / self.seconds


def _nothing(*batch):
    """Does nothing with a batch, as a device that is faster than any pipeline."""


def read(
    dataset: tf.data.Dataset,
    examples: int | None,
    *,
    share: float = 1.0,
    use: Callable[..., Any] = _nothing,
) -> Reading:
    """Reads a dataset, epoch after epoch, after a warm-up.

    Args:
        dataset: Of tuples; the second item of each has a row for each example.
        examples: The number of examples to read; None reads for two seconds.
        share: The fraction of that to read.
        use: Is called with each batch.

    Returns:
        The cost, without the warm-up.
    """
    iterator = iter(dataset.repeat())
    next(iterator)  # fills the shuffle buffer
    _read(iterator, examples, _WARM_UP, use)
    return _read(iterator, examples, share, use)


def _read(iterator: Iterator, examples, share, use) -> Reading:
    count, waited = 0, 0.0
    begin, cpu = time.perf_counter(), time.process_time()
    while True:
        asked = time.perf_counter()
        batch = next(iterator)
        now = time.perf_counter()
        waited += now - asked
        count += batch[1].shape[0]
        use(*batch)
        done = (now - begin) / _SECONDS if examples is None else count / examples
        if done >= share:
            break
    # Copies to GPUs go on asynchronously.
    tf.test.experimental.sync_devices()
    seconds = time.perf_counter() - begin
    return Reading(count, seconds, waited, time.process_time() - cpu)


def measure(
    pipeline: Pipeline,
    examples: int | None,
    towers: Sequence[str],
    step_ms: Sequence[float] | None,
) -> dict[str, Any]:
    """Measures a pipeline.

    Args:
        pipeline: The pipeline to read.
        examples: The number of examples for each figure; None reads for two seconds.
        towers: Devices, which share each batch.
        step_ms: The milliseconds that towers take for a batch; None tries 1, 2 and 4
            times the pipeline's own time.

    Returns:
        examples_per_sec, first_batch_s, peak_rss_mb, cpu_cores, stages and waiting, as
        ``towers.input_pipeline.benchmark --json`` prints them.
    """
    begin = time.perf_counter()
    dataset = pipeline.dataset()
    next(iter(dataset))
    first_batch_s = time.perf_counter() - begin
    whole = read(dataset, examples)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    copy = _copy_to(towers, dataset.element_spec)
    last = "service" if pipeline.data_service else "augment"
    stages = {**_prefixes(pipeline), last: dataset, "copy": dataset}
    rates = _in_rounds(stages, examples, {"copy": copy})
    stages = {name: statistics.median(rounds) for name, rounds in rates.items()}
    if step_ms is None:
        own = 1000 * pipeline.batch_size / stages[last]
        step_ms = [float(f"{factor * own:.3g}") for factor in (1, 2, 4)]
    waiting = {}
    for step in step_ms:

        def work(*batch, step=step):
            copy(*batch)
            time.sleep(step / 1000)  # a busy device costs the host nothing

        reading = read(dataset, examples, use=work)
        waiting[f"{step:g}"] = reading.waited / reading.seconds
    return {
        "examples_per_sec": stages[last],
        "first_batch_s": first_batch_s,
        # In KiB, but for macOS.
        "peak_rss_mb": peak / (2**20 if sys.platform == "darwin" else 2**10),
        "cpu_cores": whole.cpu / whole.seconds,
        "stages": stages,
        "waiting": waiting,
    }


def added_seconds(stages: dict[str, float]) -> dict[str, float]:
    """Returns the time that each stage adds to an example.

    For each stage, in order, `stages` has the examples per second up to its end.
    """
    # No part takes longer than the whole; if one seemed to, that was noise.
    times = itertools.accumulate((1 / rate for rate in reversed(stages.values())), min)
    times = [0.0, *reversed([*times])]
    added = [after - before for before, after in itertools.pairwise(times)]
    return dict(zip(stages, added, strict=True))


def _in_rounds(datasets, examples, uses=None) -> dict[str, list[float]]:
    """Returns the examples per second of each dataset in each round.

    All are read in turn, so that a drift of the machine's speed affects all of them.
    """
    rates = collections.defaultdict(list)
    for _, (name, dataset) in itertools.product(range(_ROUNDS), datasets.items()):
        use = (uses or {}).get(name, _nothing)
        reading = read(dataset, examples, share=1 / _ROUNDS, use=use)
        rates[name].append(reading.rate)
    return rates


def _prefixes(pipeline: Pipeline) -> dict[str, tf.data.Dataset]:
    """Returns the stages but the last, as fast as the pipeline runs them."""
    if pipeline.data_service:
        return {}  # they run on its workers
    size, prefixes = pipeline.batch_size, {}
    for name, dataset in pipeline.stages()[:-1]:
        if name == "window" or (name == "decode" and "window" not in prefixes):
            # Reading one by one in Python would be slower than the stage: instead, one
            # of each `size` examples is read, and counts for all.
            dataset = dataset.shard(size, size - 1)
            dataset = dataset.map(lambda *_: (0, tf.zeros([size])))
        prefixes[name] = pipeline.finish(dataset)
    return prefixes


def _copy_to(towers: Sequence[str], spec: tuple) -> Callable[..., Any]:
    """Returns a function that copies each tower's part of a batch to its device."""

    @tf.function(input_signature=spec, autograph=False)
    def copy(images, labels):
        count, parts = tf.shape(labels)[0], []
        for k, device in enumerate(towers):
            rows = slice(count * k // len(towers), count * (k + 1) // len(towers))
            with tf.device("/CPU:0"):
                share = images[rows], labels[rows]
            with tf.device(device):
                parts.append([tf.identity(part) for part in share])
        return parts

    return copy


def ablate(pipeline: Pipeline, examples: int | None) -> dict[str, float]:
    """Measures the gain of the optimizations, by turning off one at a time.

    Args:
        pipeline: With all optimizations, and without a data service.
        examples: As for `measure`, in all rounds together.

    Returns:
        The factors by which the pipeline is faster than with each change: the medians
        over rounds. Changes that cannot matter to this source are left out.
    """
    whole, variants = "the pipeline", _variants(pipeline)
    rates = _in_rounds({whole: pipeline.dataset(), **variants}, examples)
    return {
        name: statistics.median(
            before / after
            for before, after in zip(rates[whole], rates[name], strict=True)
        )
        for name in variants
    }


def _variants(pipeline: Pipeline) -> dict[str, tf.data.Dataset]:
    """Returns the pipeline with one change each."""

    def changed(**attributes):
        return dataclasses.replace(pipeline, **attributes).dataset()

    variants = {
        f"{name} off": changed(tricks=Tricks(**{name: False}))
        for name in _tricks(pipeline)
    }
    if not pipeline.deterministic:
        variants["deterministic on"] = changed(deterministic=True)
    if pipeline.source.origin is not pipeline.source:
        variants["cache off"] = changed(source=pipeline.source.origin)
    if pipeline.repeat:
        variants["epochs without a gap off"] = changed(repeat=False)
    if pipeline.training and pipeline.source.has_buffer:
        variants["shuffle off"] = changed(shuffle_mb=0)
    last = pipeline.stages()[-1][1]
    ahead = last.prefetch(tf.data.AUTOTUNE)
    # AUTOTUNE takes no more threads than there are.
    variants["parallel maps off"] = ahead.with_options(pipeline.options(1))
    variants["private threads off"] = ahead.with_options(pipeline.options(None))
    variants["prefetch off"] = last.with_options(pipeline.options())
    variants["float32 on"] = pipeline.finish(
        last.map(
            lambda images, labels: (augment.normalize(images), labels),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
    )
    return variants


def _tricks(pipeline: Pipeline) -> list[str]:
    """Returns the optimizations of decoding that matter to these images."""
    source, size = pipeline.source, pipeline.image_shape[:2]
    recipe = recipes.find(
        pipeline.recipe, pipeline.training, size, pipeline.randaugment
    )
    # Without cropping or resizing, none is used.
    if not source.encoded or (source.image_shape[:2] == size and not recipe.window):
        return []
    images, *_ = next(iter(pipeline.stages()[1][1]))
    if not is_jpeg(source.load(images[0])):
        return []
    names = (field.name for field in dataclasses.fields(Tricks))
    crops = "fused_crop", "plain_upsampling"
    return [name for name in names if recipe.window or name not in crops]
