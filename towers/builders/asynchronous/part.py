"""The parts of a tower's step, each of which it does in one go.

A step tells its parts: each at home or on the tower, and whether it reads or updates
there. Threads and staleness know nothing else of it. A tower that updates and goes on
becomes the newest in flight, so the bound holds for each update.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf


class TowerPart(NamedTuple):
    """A part of a tower's step, done in one go at home or on the tower's device.

    The last part of a step is at home, and returns the logs.

    Attributes:
        function: Takes the local batch, and the results of all parts before.
        at_home: Whether it runs at home, where one tower is at a time.
        reads: Whether it reads there what towers compute with.
        updates: Whether it changes that.
        goes_on: Whether the tower comes home again in this step.
    """

    function: Callable[..., Any]
    at_home: bool = True
    reads: bool = False
    updates: bool = False
    goes_on: bool = False


def graph(function: Callable) -> Callable:
    """Makes a function to be traced for several kinds of local batches."""
    return tf.function(function, autograph=False, reduce_retracing=True)
