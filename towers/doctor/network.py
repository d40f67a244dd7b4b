"""Connects to hosts that have met, as training does, and measures their network.

    python -m towers.doctor.network OPTIONS     as JSON; see `measure`

It is a process of its own, as TensorFlow stops all of Python until hosts are connected,
and knows no limit of time. Writes a line of JSON, [name, value], for each thing it has
found; `hosts.py` reads them.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from towers.cluster import process_group
from towers.doctor.finding import in_a_line
from towers.hosts import group
from towers.hosts.group import HostsDifferError, Membership
from towers.program import keras_settings

_TIMES, _LARGE_BYTES, _LARGE_TIMES = 100, 10**8, 3

Say = Callable[[str, Any], None]


def main(options: str) -> None:
    """Finds out as much as it can.

    Args:
        options: The arguments of `measure`, as JSON.
    """
    # What libraries print is no line of ours.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(name, value):
        print(json.dumps([name, value]), file=lines, flush=True)

    try:
        measure(say, **json.loads(options))
    except (OSError, RuntimeError, HostsDifferError) as error:
        say("error", str(error))
    except Exception as error:
        say("error", in_a_line(error))


def measure(
    say: Say,
    rank: int,
    addresses: Sequence[str],
    names: Sequence[str],
    told: Any,
    measures: bool,
) -> None:
    """Connects, and tells what it finds.

    Args:
        say: Takes names and values: "told", for all hosts; and the "clocks" of all,
            and seconds of "latency" and "bandwidth".
        rank: Rank of this host.
        addresses: Of all hosts.
        names: Of all hosts.
        told: What this host tells all.
        measures: Whether to measure.
    """
    keras_settings.override()
    process_group.join(Membership(rank, tuple(addresses), tuple(names)))
    world = group.world()
    say("told", world.exchange(told))
    if measures:
        # If one fails meanwhile, or ends, the others learn it.
        with group.together():
            _seconds(world, 4, "clocks")
            say("clocks", world.exchange(time.time()))
            say("latency", [_seconds(world, 4, "latency") for _ in range(_TIMES)])
            size = _LARGE_BYTES // 4
            seconds = [_seconds(world, size, "sums") for _ in range(_LARGE_TIMES)]
            say("bandwidth", seconds)


def _seconds(world, size, purpose):
    """Returns how long all hosts take to add so many ones; checks the sums."""
    import tensorflow as tf

    ones = tf.ones([size])
    begun_s = time.perf_counter()
    (total,) = world.all_reduce([ones], purpose)
    seconds = time.perf_counter() - begun_s
    if not tf.reduce_all(total == world.count):
        raise RuntimeError(f"the sum of {size:,} numbers is not that of all hosts")
    return seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
