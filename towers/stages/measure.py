"""Measures the time of each layer of a model, forward and backward.

A tower's graph is cut layer by layer, in the same way as it is cut into stages. The
phases run one after another, on one device, on a batch of zeros.
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
    """Measures the time of a tower's computation, part by part.

    Args:
        towers: The functions that the tower computes; all their inputs have known
            shapes.
        parts: The number of parts. An operation of no part counts for the part that it
            takes from.
        device: The device to compute on.
        clock: Returns seconds.

    Returns:
        The seconds that each part takes, the minimum over some rounds.

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
    """Runs all phases on zeros; returns the seconds of each phase."""
    made = {}
    for tensor in staged.inputs:
        if not tensor.shape.is_fully_defined() or tensor.dtype == tf.variant:
            raise ValueError(
                f"Received '{tensor.name}' of shape {tensor.shape} in what a tower "
                "computes; expected shapes that are known before it runs."
            )
        with tf.device(device):
            made[key(tensor)] = tf.zeros(tensor.shape, tensor.dtype)
    seconds = []
    for phase in staged.phases:
        begun_s = clock()
        with tf.device(device):
            results, _ = phase([made[name] for name in phase.takes])
        for value in results[:1]:
            # All results of a phase come at once.
            if value.dtype not in (tf.resource, tf.variant):
                value.numpy()
        seconds.append(clock() - begun_s)
        made.update(zip(phase.makes, results, strict=True))
    return seconds
