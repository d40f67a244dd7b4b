"""Lists the variables of a saved model, and finds checkpoints of it.

A checkpoint holds them in a list, together with names, shapes and types: Keras does not
track random seeds as children of a checkpoint. A changed model needs a new run.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.keras_adapter.optimizers import innermost, known_variables
from towers.layers import sharded
from towers.layers.variables import optimizers, plain
from towers.lifecycle.checkpoints import store
from towers.lifecycle.checkpoints.store import OnDemand
from towers.program.voice import warn


class OtherModelError(ValueError):
    """A checkpoint is of another model; the message names the difference."""


def check_checkpoint(directory: str, model: keras.Model) -> None:
    """Checks that a checkpoint of this model exists, if there are any checkpoints.

    The model need not be compiled.

    Raises:
        ValueError: All are of another model, or cannot be read.
    """
    newest_good(directory, store.load_about, model, quiet=True)


def newest_good(
    directory: str, load: Callable[[str], Any], model: keras.Model, quiet: bool = False
) -> tuple[str | None, Any]:
    """Finds the newest checkpoint of a model in a directory.

    Args:
        directory: The folder of the checkpoints.
        load: Reads a checkpoint, or its description.
        model: The model.
        quiet: Whether to pass over bad checkpoints without a warning.

    Returns:
        The path, and the result of `load`; `None` twice if there is no checkpoint.

    Raises:
        ValueError: All are of another model, or cannot be read.
    """
    failed = None
    for path in store.find(directory):
        try:
            loaded = load(path)
            check_is_of(path, getattr(loaded, "about", loaded), model)
        except ValueError as error:
            failed = failed or error
            continue
        if failed is not None and not quiet:
            lost = f"what was trained after it is lost: going back to {path}"
            warn(f"{str(failed).partition('; choose')[0]}; {lost}.")
        return path, loaded
    if failed is not None:
        raise failed
    return None, None


def check_is_of(path: str, about: Mapping[str, Any], model: keras.Model) -> None:
    """Raises an `OtherModelError` if a checkpoint is not of a model.

    Optimizers of a model's own step, which are otherwise built as it trains, are built.
    """
    _build_optimizers(about, model)
    for part, variables in parts(model).items():
        saved, expected = about["variables"].get(part, []), describe(variables)
        if saved != expected:
            raise OtherModelError(
                f"The checkpoint {path} holds another {part}: "
                f"{_difference(saved, expected)}; choose another directory."
            )


def parts(model: keras.Model) -> dict[str, list[Any]]:
    """Returns the variables that a run needs, by the part that they belong to."""
    by_part = {"model": model.variables}
    for name, optimizer in optimizers(model).items():
        by_part[name] = optimizer.variables
    if others := plain(model):
        by_part["other variables"] = [*others.values()]
    return by_part


def built_for(model: keras.Model) -> dict[str, list[int]]:
    """Returns the indices of the variables that each optimizer was built for."""
    index_of = {id(variable): i for i, variable in enumerate(model.variables)}
    indices = {}
    for name, optimizer in optimizers(model).items():
        known = [id(variable) for variable in known_variables(innermost(optimizer))]
        if optimizer.built and {*known} <= index_of.keys():
            indices[name] = [index_of[variable] for variable in known]
    return indices


def _build_optimizers(about, model):
    """Builds the optimizers that a checkpoint has values for."""
    variables, own = model.variables, optimizers(model, only_built=False)
    for name, indices in about.get("built_for", {}).items():
        optimizer = own.get(name)
        if (
            optimizer is None
            or optimizer.built
            or max(indices, default=-1) >= len(variables)
        ):
            continue
        with tf.device(optimizer.iterations.value.device):
            optimizer.build([variables[i] for i in indices])


def averages(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tells whether averages replace the weights when `fit` ends."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner.use_ema and inner.ema_overwrite_frequency is None


def values(model: keras.Model) -> dict[str, list[Any]]:
    """Returns the current values of all variables, by part.

    The values do not change while training goes on; TensorFlow copies a variable when
    training changes it.
    """
    return {part: copies(variables) for part, variables in parts(model).items()}


class ValuesOnDemand:
    """The values of a model, each read when it is requested.

    Hosts read partitioned variables together; see `read_together`.

    Attributes:
        by_part: The values; request each once, in order.
    """

    def __init__(self, model: keras.Model):
        """Takes the variables, and reads none yet."""
        self.by_part = {
            part: OnDemand(self._read, variables)
            for part, variables in parts(model).items()
        }
        variables = itertools.chain.from_iterable(parts(model).values())
        self._unread = [variable for variable in variables if is_divided(variable)]

    def _read(self, variable):
        value = _read(variable)
        if is_divided(variable):
            # A variable that could not be read is tried again, and the error reported.
            self._unread.pop(0)
        return value

    def read_rest_together(self) -> None:
        """Reads the remaining partitioned variables, as other hosts do."""
        while self._unread:
            self._read(self._unread[0])


def own_values(model: keras.Model) -> dict[str, OnDemand]:
    """Returns values on demand; for a partitioned variable, this host's part."""
    return {part: OnDemand(_own, variables) for part, variables in parts(model).items()}


def nbytes(model: keras.Model) -> int:
    """Returns the size of the values of `values`, in bytes."""
    variables = itertools.chain.from_iterable(parts(model).values())
    return sum(
        math.prod(size or 1 for size in v.shape) * tf.as_dtype(v.dtype).size
        for v in variables
    )


def is_divided(variable: keras.Variable | tf.Variable) -> bool:
    """Tells whether each of several hosts has only a part of a variable."""
    return sharded.across_hosts(variable)


def _own(variable):
    if is_divided(variable):
        return sharded.of(variable).own()
    return _read(variable)


def read_together(model: keras.Model) -> None:
    """Takes part in reading partitioned variables, and keeps no values."""
    for variables in parts(model).values():
        for variable in variables:
            if is_divided(variable):
                variable.numpy()


def assign(model: keras.Model, values: Mapping[str, Sequence[Any]]) -> None:
    """Assigns values, from `values` or from a checkpoint, to all variables."""
    for part, variables in parts(model).items():
        for variable, value in zip(variables, values[part], strict=True):
            variable.assign(value)


def copies(variables: Sequence[keras.Variable]) -> list[Any]:
    """Returns the current values in the host's memory."""
    return [_copy(variable) for variable in variables]


def _copy(variable):
    # Values in the host's memory are not copied now: TensorFlow copies when a variable
    # is next written to. This takes a third of the time of `tf.identity`.
    return store.on_host(_read(variable))


def _read(variable):
    """Returns a value where it is: in the variable's memory, unless it was swapped."""
    if not isinstance(variable, tf.Variable):
        if sharded.of(variable) is not None:
            return variable.numpy()
        variable = variable.value
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def describe(variables: Sequence[keras.Variable]) -> list[list[Any]]:
    """Returns name, shape and type of each variable, as in JSON."""
    # Keras numbers names by the variables made before in the process.
    return [
        [re.sub(r"_\d+", "", v.name), list(v.shape), v.dtype.name]
        if isinstance(v, tf.Variable)
        else [re.sub(r"_\d+", "", v.path), list(v.shape), v.dtype]
        for v in variables
    ]


def _difference(saved, expected):
    for a, b in zip(saved, expected, strict=False):
        if a != b:
            return f"it has {_name(a)} where this one has {_name(b)}"
    return f"it has {len(saved)} variables where this one has {len(expected)}"


def _name(variable):
    path, shape, dtype = variable
    return f"{path} {shape} {dtype}"
