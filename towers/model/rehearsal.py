"""Traces a host's first step before it joins others, who then do not wait for that.

The step is that of the place which the host will probably have. It ends before anything
has changed, as a step does in which a host says that others come.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.hosts import group
from towers.hosts.group import HostsChange
from towers.keras_adapter.randomness import undisturbed
from towers.loop.agreement import CHANGE
from towers.model import fit_call
from towers.model.fit_call import FitCall
from towers.model.update.variable_update import VariableUpdate
from towers.program import words
from towers.program.features import feature
from towers.program.voice import say


class Echo:
    """Stands in for a `Communicator` to hosts that all say what this one says.

    A sum is that of this host alone.
    """

    def __init__(self, count: int):
        """Takes the number of hosts, this one included."""
        self._count = count

    def grouped_all_reduce(
        self, arrays: Sequence[np.ndarray], purpose: str, wire: Any = None
    ) -> list[np.ndarray]:
        """See `Communicator`."""
        return [*arrays]

    def all_gather(self, data: Any, purpose: str) -> list[memoryview]:
        """See `Communicator`."""
        mine = np.frombuffer(data, np.uint8)
        whole, size = np.tile(mine, self._count), len(mine)
        return [memoryview(whole)[k * size :][:size] for k in range(self._count)]

    def broadcast(self, content: Any, purpose: str) -> None:
        """See `Communicator`."""


def rehearse(
    call: FitCall,
    update: VariableUpdate,
    swap: Callable[[Callable[[dict[str, Any]], dict[str, Any]]], None],
    trace: Callable[[FitCall], None],
) -> None:
    """Traces the step that this process is about to make with hosts that train.

    The variables keep their values, and no callback hears of it. It does nothing where
    nobody trains yet, for data that can be read only once, for steps that are not
    traced or not chosen yet, and where hosts divide variables.

    Args:
        call: A call of `fit` as it is about to come, whose options are changed.
        update: How the variables are updated.
        swap: As of `generations.fit`.
        trace: Has a call of `fit` trace its first step.
    """
    model, options = update.model, call.options
    chosen = update.chosen or update.told is not None
    if not chosen or update.config.divides_variables or model.run_eagerly:
        return
    if "callbacks" not in options or (data := _apart(options)) is None:
        return
    if (place := group.member().expects()) is None:
        return
    with _noted():
        call.build_layers()
    if not model.built:
        return
    hosts = feature("cluster.hosts").place_among(*place, Echo(place[1]))
    swap(functools.partial(update.expect_hosts, hosts))
    data = fit_call.of_host(data, update.builder.plan.share)
    options |= {"x": data, "callbacks": None, "verbose": 0}
    update.builder.context.agreement.wish = CHANGE
    with _noted(), undisturbed(), contextlib.suppress(HostsChange):
        trace(call)


@contextlib.contextmanager
def _noted():
    """Turns errors into a note: what is wrong is said again where it matters."""
    try:
        yield
    except Exception as error:
        said = words.error_sentence(error)
        say(f"Note: This host's first step is not traced before others wait: {said}.")


def _apart(options: Mapping[str, Any]) -> Any:
    """Data like those of `fit`, which can be read without those going on; or `None`."""
    data = options["x"]
    if (pipeline := getattr(data, "pipeline", None)) is not None:
        return pipeline.dataset()
    if isinstance(data, tf.data.Dataset):
        copied = fit_call.unopened(data)
        return None if copied is data else copied
    return data if fit_call.is_arrays(options) else None
