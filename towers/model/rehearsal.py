"""Traces a host's first step before it joins others, so that they need not wait.

The step is traced for the rank that the host will probably have. It ends before it
changes anything, like a step in which a host announces that others join.
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
from towers.model.program import Program
from towers.program import words
from towers.program.features import feature
from towers.program.voice import say


class Echo:
    """Replaces a `Communicator`, as if all hosts sent the same data as this one.

    A sum is that of this host alone.
    """

    def __init__(self, count: int):
        """Takes the number of hosts, including this one."""
        self._count = count

    def grouped_all_reduce(
        self, arrays: Sequence[np.ndarray], purpose: str, wire: Any = None
    ) -> list[np.ndarray]:
        """Returns the arrays unchanged; see `Communicator`."""
        return [*arrays]

    def all_gather(self, data: Any, purpose: str) -> list[memoryview]:
        """Returns this host's data once for each host; see `Communicator`."""
        own = np.frombuffer(data, np.uint8)
        gathered, size = np.tile(own, self._count), len(own)
        return [memoryview(gathered)[k * size :][:size] for k in range(self._count)]

    def broadcast(self, content: Any, purpose: str) -> None:
        """Does nothing, as this host is the first; see `Communicator`."""


def rehearse(
    call: FitCall,
    program: Program,
    swap: Callable[[Callable[[dict[str, Any]], dict[str, Any]]], None],
    trace: Callable[[FitCall], None],
) -> None:
    """Traces the step that this process is about to run with training hosts.

    Variables keep their values, and no callback is called. Does nothing if no host
    trains yet, for data that can be read only once, for steps that are not traced or
    not chosen yet, and if hosts divide variables.

    Args:
        call: The call of `fit` that is about to run, whose options are changed.
        program: Holds the current builder, and how it was chosen.
        swap: See `generations.fit`.
        trace: Traces the first step of a call of `fit`.
    """
    model, options = program.model, call.options
    chosen = program.chosen or program.told is not None
    if not chosen or program.config.divides_variables or model.run_eagerly:
        return
    if "callbacks" not in options or (data := _apart(options)) is None:
        return
    if (expected := group.member().expects()) is None:
        return
    with _noted():
        call.build_layers()
    if not model.built:
        return
    hosts = feature("cluster.hosts").place_among(*expected, Echo(expected[1]))
    swap(functools.partial(program.expect_hosts, hosts))
    data = fit_call.of_host(data, program.builder.plan.share)
    options |= {"x": data, "callbacks": None, "verbose": 0}
    program.builder.context.agreement.wish = CHANGE
    with _noted(), undisturbed(), contextlib.suppress(HostsChange):
        trace(call)


@contextlib.contextmanager
def _noted():
    """Turns errors into a note: they are raised again in the actual step."""
    try:
        yield
    except Exception as error:
        message = words.error_sentence(error)
        say(
            f"Note: This host's first step is not traced before others wait: {message}."
        )


def _apart(options: Mapping[str, Any]) -> Any:
    """Returns data like those of `fit`, to read without advancing them, or `None`."""
    data = options["x"]
    if (pipeline := getattr(data, "pipeline", None)) is not None:
        return pipeline.dataset()
    if isinstance(data, tf.data.Dataset):
        copied = fit_call.unopened(data)
        return None if copied is data else copied
    return data if fit_call.is_arrays(options) else None
