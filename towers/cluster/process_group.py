"""Connects this process to other hosts.

`hosts/group.py` has those that it has joined, and answers who asks about them.
"""

import functools
import os
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from towers.cluster import environment, mpi, rendezvous, tensorflow_engine
from towers.hosts import group
from towers.hosts.group import HostFailedError, Membership
from towers.program import forks
from towers.program.ending import ANOTHER_FAILED

# How long a program that is at its end waits for those of the other hosts.
_FINISH_S = 60.0


def join_as_started(environ: Mapping[str, str] = os.environ) -> Membership | None:
    """Meets the hosts that the environment names, and joins them.

    Args:
        environ: The environment.

    Returns:
        Which hosts there are; `None` if this process was started alone.

    Raises:
        ValueError: The environment contradicts itself.
        HostsMissingError: Not all hosts have come.
    """
    place = environment.find(environ)
    if place is None:
        return None
    if place.mpi is not None:
        joined = mpi.join(place)
    else:
        joined = tensorflow_engine.join(rendezvous.meet(place), place.join_seconds)
    _begin(joined)
    return joined.membership


def join(membership: Membership) -> None:
    """Joins hosts that have met, by TensorFlow's collectives, and connects to them.

    Args:
        membership: Which hosts there are.

    Raises:
        RuntimeError: This process has joined other hosts, or TensorFlow is initialised.
    """
    if group.current is not None:
        raise RuntimeError("This process has joined other hosts already.")
    _begin(tensorflow_engine.join(membership, group.JOIN_SECONDS))
    group.world()


def connect() -> Any:
    """Connects the hosts that this process has joined; returns their `World`.

    All hosts draw the same random numbers from here on, unless the user sets a seed.
    """
    world = group.current.connect()
    _draw_from(world.broadcast_value(secrets.randbelow(2**32)))
    return world


def _begin(joined: group.Joined) -> None:
    """Makes hosts those of this process."""
    group.current = joined
    if group.is_together():
        joined.watch.enter()
    _tell_of_the_end()
    _end_by_own_code()


def _draw_from(seed):
    # They take seconds to import.
    import keras

    from towers.keras_adapter import runtime

    if runtime.random_seed() is None:
        keras.utils.set_random_seed(seed)


@functools.cache
def _tell_of_the_end():
    """Has the others told once this host's program is at its end."""
    forks.at_exit(_finish)


@functools.cache
def _end_by_own_code():
    """Has a program that another host's failure ends exit with `ANOTHER_FAILED`.

    By Python's 1, a launcher could not tell it from the host that has failed first.
    """
    show = sys.excepthook

    def end(kind, error, traceback):
        show(kind, error, traceback)
        if isinstance(error, HostFailedError):
            sys.exit(ANOTHER_FAILED)

    sys.excepthook = end


def _finish():
    if group.current is not None:
        group.current.watch.finish(_FINISH_S)
