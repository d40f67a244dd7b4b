"""Fits a model in one generation of hosts after another, where hosts come and go.

A host may be lost in the middle of a step, and Keras's loop cannot change its hosts. So
what was raised ends Keras's `fit`. The process joins the next generation, and fits
again from the position that `RunState` has kept, with the variables of one host that
has done most steps.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from towers.hosts import group
from towers.hosts.group import HostFailedError, HostsChange, HostsDifferError
from towers.layers.variables import steps_done
from towers.model.update.variable_update import VariableUpdate
from towers.program.features import feature


def fit(
    update: VariableUpdate,
    swap: Callable[[Callable[[dict[str, Any]], dict[str, Any]]], None],
    run: Callable[[], Any],
    rehearse: Callable[[], None],
) -> Any:
    """Calls `run` in each generation until it ends in one; returns what it returns.

    Before each call, this process joins a generation, and `update` takes its hosts.
    What has been done in those before is for `run` to remember; see
    `lifecycle.run_state`.

    Args:
        update: How variables are updated.
        swap: Puts what a function returns in the place of what was made by the builder
            that is in use, which it is given.
        run: Trains. It raises `HostsChange` where all hosts have agreed to stop, and
            whatever a collective raises where a host is lost.
        rehearse: Traces what `run` will need, before others wait for this process.

    Raises:
        HostsDifferError: This host, which has come last, was given other arguments or
            data than the others, who go on without it; or hosts differ that have begun
            together.
        HostsMissingError: No other generation begins, or not with this host.
    """
    if group.joined() is None:
        rehearse()
    _begin(update)
    why, before = "", None
    while True:
        now = group.joined().processes
        try:
            with group.together():
                if not update.is_of_hosts(group.joined()):
                    swap(functools.partial(update.follow_hosts, why))
                try:
                    with _leaving():
                        found = run()
                    update.state_lost = False
                    return found
                except HostsChange:
                    # Each host has all variables now.
                    update.state_lost = False
                    why = group.change() or "another host has heard of a change"
        except (HostFailedError, ConnectionError) as error:
            if not group.is_broken():
                raise  # the user's own
            why = str(error).partition(", so this host")[0]
            update.state_lost |= _lose_parts(update)
        except HostsDifferError as error:
            if before is None or now <= before:
                raise
            # Those that have come since end, by the same error.
            why, now = str(error), before
            update.state_lost |= _lose_parts(update)
        before = now
        feature("cluster.process_group").join_next(steps_done(update.model))


@contextlib.contextmanager
def _leaving():
    """Has this host leave the others, who go on, if it is asked to end."""
    try:
        yield
    except SystemExit:
        feature("cluster.process_group").leave()
        raise


def _lose_parts(update):
    """Returns whether a host has gone with its part of what hosts divide."""
    parts = update.builder.pieces.store.hosts_parts
    return parts is not None and parts.lose()


def _begin(update):
    """Joins a generation, unless this process is in one that goes on."""
    ends = group.change() is not None or group.is_broken()
    if group.joined() is None or ends:
        parts = update.builder.pieces.store.hosts_parts
        update.state_lost |= parts is not None and parts.take_home()
        feature("cluster.process_group").join_next(steps_done(update.model))
