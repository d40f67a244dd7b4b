"""Fits a model in successive generations of elastic hosts.

A host may be lost in the middle of a step, and Keras's loop cannot change its hosts. So
an exception ends Keras's `fit`. The process joins the next generation, and fits again
from the position that `RunState` has kept, with the variables of a host that has done
the most steps.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from towers.hosts import group
from towers.hosts.group import HostFailedError, HostsChange, HostsDifferError
from towers.layers.variables import steps_done
from towers.model.program import Program
from towers.program.features import feature


def fit(
    program: Program,
    swap: Callable[[Callable[[dict[str, Any]], dict[str, Any]]], None],
    run: Callable[[], Any],
    rehearse: Callable[[], None],
) -> Any:
    """Calls `run` in each generation until one completes; returns its result.

    Before each call, this process joins a generation, and `program` takes its hosts.
    `run` itself remembers the progress of earlier generations; see
    `lifecycle.run_state`.

    Args:
        program: Holds the current builder, and how it was chosen.
        swap: Takes a function, calls it with the functions of the current builder, and
            replaces them by its result.
        run: Trains. Raises `HostsChange` if all hosts have agreed to stop, and the
            error of a collective if a host is lost.
        rehearse: Traces the step of `run`, before others wait for this process.

    Raises:
        HostsDifferError: This host has joined last, and has other arguments or data
            than the others, who continue without it; or hosts that have begun together
            differ.
        HostsMissingError: No other generation begins, or not with this host.
    """
    if group.joined() is None:
        rehearse()
    _begin(program)
    why, before = "", None
    while True:
        now = group.joined().processes
        try:
            with group.together():
                if not program.is_of_hosts(group.joined()):
                    swap(functools.partial(program.follow_hosts, why))
                try:
                    with _leaving():
                        result = run()
                    program.state_lost = False
                    return result
                except HostsChange:
                    # Each host has all variables now.
                    program.state_lost = False
                    why = group.change() or "another host has heard of a change"
        except (HostFailedError, ConnectionError) as error:
            if not group.is_broken():
                raise  # The user's own error.
            why = str(error).partition(", so this host")[0]
            program.state_lost |= _lose_parts(program)
        except HostsDifferError as error:
            if before is None or now <= before:
                raise
            # Hosts that have joined since end with the same error.
            why, now = str(error), before
            program.state_lost |= _lose_parts(program)
        before = now
        feature("cluster.process_group").join_next(steps_done(program.model))


@contextlib.contextmanager
def _leaving():
    """Inside, if this host is asked to end, it leaves the others, who continue."""
    try:
        yield
    except SystemExit:
        feature("cluster.process_group").leave()
        raise


def _lose_parts(program):
    """Zeroes divided variables after a host was lost; returns if there are any."""
    parts = program.builder.pieces.store.hosts_parts
    return parts is not None and parts.lose()


def _begin(program):
    """Joins a generation, unless this process is in one that continues."""
    ends = group.change() is not None or group.is_broken()
    if group.joined() is None or ends:
        parts = program.builder.pieces.store.hosts_parts
        program.state_lost |= parts is not None and parts.take_home()
        feature("cluster.process_group").join_next(steps_done(program.model))
