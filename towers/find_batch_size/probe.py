"""Trains a few steps with one batch size, and says how fast and in how much memory.

`towers.find_batch_size` starts it, a process for each size, since TensorFlow seldom
gives memory back. All is as in training but the input: a random batch in the images'
real shape and type, again and again, so that no data set is read.
What is found is printed on stdout, in lines of JSON.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.find_batch_size import search_flags
    from towers.program import startup

    # Of its errors, `towers.find_batch_size` reads what TensorFlow writes.
    _settings = startup.begin(
        "towers.find_batch_size.probe", search_flags.read_checked, sift=False
    )

import functools
import itertools
import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.collectives.joined_hosts import this_host
from towers.devices.configuration import Devices
from towers.find_batch_size import child, search
from towers.find_batch_size.search_flags import Search
from towers.keras_adapter.runtime import device_memory_limits
from towers.machine.limits import free_memory
from towers.model.options import grouped
from towers.monitoring.bottleneck import uneven
from towers.program import startup
from towers.train.job import check_reduction
from towers.train.parts import fine_tune, my_model
from towers.train.parts import setup as setup_parts
from towers.train.parts.data import open_data
from towers.train.parts.devices import configure_devices, split_ratios
from towers.train.parts.model import build_model, build_towers
from towers.train.parts.own_data import OwnData
from towers.train.parts.setup import Setup
from towers.train.settings import DEFAULTS

# Calls that are not measured: in the first graphs are built, in the second buffers.
_WARM_UP = 2
# No more are measured once so many have taken so long.
_ENOUGH_CALLS, _ENOUGH_S = 2, 3.0
# Distinct examples in a batch; more would only take time to make.
_POOL = 64
# Of a sequence that may have any.
_LENGTH = 128
_SHARE_OF_FREE = 0.9
# Batches are divided unequally if a GPU has so many times the memory of another.
_DIFFERENT = 1.1


def probe(settings: Search, tell: Callable[..., None]) -> None:
    """Trains some steps, and tells of it.

    Args:
        settings: How to train; the batch is made a multiple of the ratios.
        tell: Takes facts: first what is tried on which towers, then how it went.

    Raises:
        ValueError: If any input is bad.
    """
    devices = configure_devices(settings)
    towers = [" + ".join(each) for each in grouped(devices.towers, settings.stages)]
    settings, note = with_ratios_by_memory(settings, devices)
    ratios, towers = of_all_hosts(split_ratios(settings, devices), towers)
    check_reduction(settings, devices)
    unit = search.unit(ratios, settings.micro_batch_count)
    settings = settings.but(batch_size=max(settings.batch_size // unit, 1) * unit)
    gpus = bool(devices.physical)
    tell(
        batch_size=settings.batch_size,
        towers=towers,
        split_ratios=ratios,
        memory="GPU" if gpus else "process",
        note=" ".join(filter(None, [devices.note, note])),
    )
    if gpus and settings.memory_limit_mb is not None:
        raise ValueError(
            f"Received {settings.as_flag('memory_limit_mb')} for towers on GPUs; "
            "expected --gpu_memory there."
        )
    mine = my_model.load(settings)
    # Own data may have batches of one size. Of texts, the longest need most memory.
    settings = settings.but(group_by_length=False)
    opened = open_data(settings.but(batch_size=DEFAULTS.batch_size), mine)
    setup = setup_parts.of(settings, opened.facts, mine)
    if not gpus:
        # Not before: a library that finds no memory while it is imported says anything.
        limit_memory(settings.memory_limit_mb)
    model = build_model(setup, devices.home)
    # What is frozen needs less memory; which weights it begins with does not matter.
    fine_tune.prepare(settings.but(init_weights=None), model, goes_on=False)
    # What is there already, as nothing is known of the numbers that are allowed.
    own = opened.batches(1)[0] if isinstance(opened, OwnData) else None
    clock = Clock()
    # How many examples an epoch has changes the learning rate only.
    build_towers(setup, model, devices, settings.batch_size).fit(
        batches(setup, own),
        steps_per_epoch=(_WARM_UP + settings.probe_steps) * settings.steps_per_loop,
        callbacks=[clock],
        verbose=0,
        shuffle=False,
    )
    step_s = statistics.median(clock.measured_s()) / settings.steps_per_loop
    tell(
        fits=True,
        examples_per_sec=settings.batch_size / step_s,
        step_ms=1000 * step_s,
        peak_memory_mb=child.peak_memory_mb(devices),
    )


def with_ratios_by_memory(
    settings: Search,
    devices: Devices,
    limits: Callable[[], Mapping[str, int]] = device_memory_limits,
) -> tuple[Search, str]:
    """Divides batches by the memory of GPUs that differ in it, unless asked otherwise.

    Args:
        settings: How to train.
        devices: The devices of this host.
        limits: Returns the bytes that each device may take.

    Returns:
        The settings, and a sentence if they are others now.
    """
    if settings.split_ratios is not None or not devices.physical:
        return settings, ""
    bytes_of = limits()
    towers = grouped(devices.towers, settings.stages)
    room = [min(bytes_of[device] for device in tower) for tower in towers]
    if max(room) < _DIFFERENT * min(room):
        return settings, ""
    # A tower with twice the memory has it full after twice the examples.
    full = [max(room) / each for each in room]
    ratios = tuple(map(str, uneven.better_ratios(full, (1,) * len(room))))
    settings = settings.but(split_ratios=ratios)
    memory = " and ".join(f"{each / 2**20:,.0f}" for each in room)
    return settings, (
        f"The GPUs have {memory} MB, so batches are divided by "
        f"{settings.as_flag('split_ratios')}."
    )


def of_all_hosts(
    ratios: Sequence[int], towers: Sequence[str]
) -> tuple[list[int], list[str]]:
    """Returns the ratios and the names of the towers of all hosts, of this one's."""
    every = this_host().exchange([[*ratios], [*towers]])
    if len(every) == 1:
        return [*ratios], [*towers]
    named = enumerate(names for _, names in every)
    return (
        [ratio for mine, _ in every for ratio in mine],
        [f"host {k} {name}" for k, names in named for name in names],
    )


def batches(setup: Setup, examples: Any = None) -> tf.data.Dataset:
    """Makes batches like those of the pipeline, without end.

    Args:
        setup: What the data have, and how many examples make a batch.
        examples: What to make them of, a batch (x, y, ...); by default random ones.

    Returns:
        A dataset of (x, y), as the data set gives them.
    """
    seed = setup.settings.seed
    pool = examples or (_inputs(setup.facts, seed), _targets(setup.facts, seed))

    @tf.autograph.experimental.do_not_convert
    def batch(size):
        # The size is a tensor, so that it is unknown to the graph, as in training.
        def rows(tensor):
            return tf.gather(tensor, tf.range(size) % tf.shape(tensor)[0])

        return tf.nest.map_structure(rows, pool)

    data = tf.data.Dataset.from_tensors(setup.settings.batch_size).repeat()
    return data.map(batch).prefetch(tf.data.AUTOTUNE)


def _inputs(facts, seed):
    """Random examples: uint8 images, float32 rows, or numbers of tokens or values."""
    sizes = facts.table_sizes or {}

    def draw(path, spec):
        shape = (_POOL, *(size or _LENGTH for size in spec.shape[1:]))
        most = 256 if facts.has_images else facts.vocabulary_size
        most = sizes.get(path[-1], most) if path else most
        if most is None:
            return tf.random.stateless_uniform(shape, seed=(seed, 0))
        drawn = tf.random.stateless_uniform(shape, (seed, 0), 0, most, tf.int32)
        return tf.cast(drawn, tf.uint8) if facts.has_images else drawn

    drawn = [draw(*each) for each in keras.tree.flatten_with_path(facts.inputs)]
    return keras.tree.pack_sequence_as(facts.inputs, drawn)


def _targets(facts, seed):
    """Random targets, in the form of the task's."""
    shape = (_POOL, *(size or _LENGTH for size in facts.target_shape))
    draw = functools.partial(tf.random.stateless_uniform, shape, (seed, 0))
    if facts.target.kind == "numbers":
        return draw()
    if facts.target.kind == "labels":
        return tf.round(draw())
    return draw(maxval=facts.target.size, dtype=tf.int64)


class Clock(keras.callbacks.Callback):
    """Notes when training calls end, and ends training once that is enough."""

    def __init__(self):
        super().__init__()
        self._ends_s = []

    def on_train_batch_end(self, batch, logs=None):
        """Waits for the step's loss, since a GPU is only told to compute."""
        float(logs["loss"])
        self._ends_s.append(time.perf_counter())
        calls_s = self.measured_s()
        if len(calls_s) >= _ENOUGH_CALLS and sum(calls_s) >= _ENOUGH_S:
            self.model.stop_training = True

    def measured_s(self) -> list[float]:
        """Returns the times of the calls after warming up."""
        ends_s = self._ends_s[_WARM_UP - 1 :]
        return [end - begin for begin, end in itertools.pairwise(ends_s)]


def limit_memory(limit_mb: int | None) -> None:
    """Has allocating fail beyond the limit, or before no memory is left.

    RLIMIT_DATA counts what is allocated; RLIMIT_AS would count TensorFlow's libraries
    and addresses that are merely reserved, and Linux ignores RLIMIT_RSS.

    Raises:
        ValueError: If more is allocated already.
    """
    taken_mb = child.of_process_mb("VmData")
    if limit_mb is None:
        # So that the kernel ends no other process.
        free = free_memory() / this_host().count
        limit_mb = taken_mb + _SHARE_OF_FREE * free / 2**20
    elif limit_mb <= taken_mb:
        raise ValueError(
            f"Received --memory_limit_mb={limit_mb}; expected at least "
            f"{math.ceil(taken_mb) + 1}, as TensorFlow and the data set take "
            f"{taken_mb:,.0f} MB before the model is built."
        )
    limit = int(limit_mb * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    startup.leave(child.answer(functools.partial(probe, _settings)))
