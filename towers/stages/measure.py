"""Measures how long each layer of a model takes, forward and backward.

The graph of a tower is cut layer by layer, as it is cut into stages otherwise, and its
phases run one after another, on one device, with zeros for a batch.
"""

import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from towers.analysis.layer_calls import key
from towers.stages.staged import Staged

_ROUNDS = 3


def seconds_of_parts(
    towers: Sequence[Staged],
    parts: int,
    device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Measures what a tower computes, part by part.

    Args:
        towers: What it computes, each of which takes tensors of known shapes.
        parts: Number of the parts. What belongs to none counts for the one that it
            takes from.
        device: Where to compute.
        clock: Returns seconds.

    Returns:
        The seconds that each part takes, the least of some rounds.

    Raises:
        ValueError: A shape is not known.
    """
    seconds = [0.0] * parts
    for staged in towers:
        rounds = [_seconds(staged, device, clock) for _ in range(_ROUNDS)]
        for phase, *taken_s in zip(staged.phases, *rounds, strict=True):
            seconds[phase.place.part] += min(taken_s)
    return seconds


def _seconds(staged, device, clock):
    """Runs all phases on zeros; returns the seconds of each."""
    made = {}
    for each in staged.inputs:
        if not each.shape.is_fully_defined() or each.dtype == tf.variant:
            raise ValueError(
                f"Received '{each.name}' of shape {each.shape} in what a tower "
                "computes; expected shapes that are known before it runs."
            )
        with tf.device(device):
            made[key(each)] = tf.zeros(each.shape, each.dtype)
    seconds = []
    for phase in staged.phases:
        begun_s = clock()
        with tf.device(device):
            found, _ = phase([made[each] for each in phase.takes])
        for value in found[:1]:
            # All of a phase comes at once.
            if value.dtype not in (tf.resource, tf.variant):
                value.numpy()
        seconds.append(clock() - begun_s)
        made.update(zip(phase.makes, found, strict=True))
    return seconds
