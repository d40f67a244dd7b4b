"""Keeps the training examples on the towers' devices, with --cache=devices."""

import dataclasses
import math

import numpy as np
import tensorflow as tf

from towers.collectives.joined_hosts import this_host
from towers.devices.configuration import Devices
from towers.devices.names import is_gpu
from towers.machine import limits, nvml
from towers.program import words
from towers.program.progress import Progress
from towers.tower.kept import KeptExamples
from towers.train.parts.data import Data
from towers.train.parts.own_data import OwnData
from towers.train.settings import Settings

# Of a device's memory, the rest is for the model.
_MOST = 0.5
# Record numbers may have gaps, such as those of bad records.
_MOST_ROWS = 2


def keep(
    data: Data | OwnData, devices: Devices, kept: KeptExamples
) -> tuple[Data, str]:
    """Reads all training examples, and keeps them on the devices.

    Args:
        data: The data, as far as they are at hand.
        devices: The devices of the towers.
        kept: Gets the examples.

    Returns:
        The data, of which training sends the numbers of examples only; and a sentence
        that says how much memory it takes.

    Raises:
        ValueError: The data cannot be kept, or there is no room for them.
    """
    _check(data)
    in_order = {"training": False, "repeat": False}
    batches = data.open_training(**in_order)
    numbered = data.open_training(**in_order, numbered=True).as_numpy_iterator()
    numbers = np.concatenate([part for (part,) in numbered])
    first, rows = int(numbers.min()), int(np.ptp(numbers)) + 1
    if rows > _MOST_ROWS * len(numbers):
        raise _without_numbers(data)
    room = _room(devices, data)
    size = rows * sum(
        math.prod(spec.shape[1:]) * spec.dtype.size
        for spec in tf.nest.flatten(batches.element_spec)
    )
    each = f"{words.size(size)} on each of {words.count(len(devices.towers), 'tower')}"
    if size > _MOST * room:
        raise ValueError(
            f"Received --cache=devices, and the training data of {data.facts.name} "
            f"take {each}, of {words.size(room)} that a tower has; expected at most "
            "half of it, so leave out the flag."
        )
    kept.fill(_read(batches, numbers - first, rows, data.facts.name), first)
    kept.place(devices.towers)
    line = f"Training examples stay on the devices: {each}."
    return dataclasses.replace(data, sends_numbers=True), line


def _check(data):
    """Checks what is known once data are open; `checks.check` checks flags."""
    if this_host().count > 1:
        raise ValueError(
            f"Received --cache=devices with {this_host().count} hosts; expected one, "
            "so leave out the flag."
        )
    if isinstance(data, OwnData) or data.source.splits["train"] is None:
        raise _without_numbers(data)


def _without_numbers(data):
    return ValueError(
        f"Received --cache=devices for {data.facts.name}, whose examples are not "
        "numbered one by one; expected a data set of known size, so leave out the flag."
    )


def _read(batches, places, rows, name):
    """Reads batches into arrays of examples; row `places[i]` is the i-th example."""
    spec, done = batches.element_spec, 0
    arrays = tf.nest.map_structure(
        lambda one: np.zeros((rows, *one.shape[1:]), one.dtype.as_numpy_dtype), spec
    )
    flat = tf.nest.flatten(arrays)
    with Progress(f"Reading {name}", unit="examples") as progress:
        for batch in batches.as_numpy_iterator():
            parts = tf.nest.flatten(batch)
            count = len(parts[0])
            for array, part in zip(flat, parts, strict=True):
                array[places[done : done + count]] = part
            done += count
            progress.add(count)
    x, y, *weights = arrays
    return x, y, *(weights or [None])


def _room(devices: Devices, data: Data) -> float:
    """Returns the bytes of memory that a tower has, or may take of the host's."""
    settings: Settings = data.settings
    if not is_gpu(devices.towers[0]):
        # The arrays that are copied to the devices stay, too.
        return limits.free_memory() / (len(devices.towers) + 1)
    if settings.gpu_memory_limit_mb is not None:
        return settings.gpu_memory_limit_mb * 2**20
    cards = [nvml.gpu(index) for index in devices.physical]
    if not all(card and card.memory_mb for card in cards):
        raise ValueError(
            "Received --cache=devices, but the driver does not tell the memory of "
            "the GPUs; expected a limit, so give one by --gpu_memory, or leave the "
            "flag out."
        )
    on_one = max(map(devices.physical.count, devices.physical))
    part = (settings.gpu_memory_fraction or 1) / on_one
    return min(card.memory_mb for card in cards) * 2**20 * part
