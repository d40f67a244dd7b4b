"""The variables of a model that is saved, and which checkpoints are of it.

They are a list, with names, shapes and types beside: Keras does not track random seeds
as children of a checkpoint. A changed model needs a new run.
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
    """A checkpoint is of another model; the message says how they differ."""


def check_checkpoint(directory: str, model: keras.Model) -> None:
    """Checks that there is a checkpoint of this model, if there is any.

    The model need not be compiled.

    Raises:
        ValueError: All are of another model, or cannot be read.
    """
    newest_good(directory, store.load_about, model, quiet=True)


def newest_good(
    directory: str, load: Callable[[str], Any], model: keras.Model, quiet: bool = False
) -> tuple[str | None, Any]:
    """Finds the newest checkpoint in a directory that is of a model.

    Args:
        directory: Where the checkpoints lie.
        load: Reads one, or what it says of itself.
        model: The model.
        quiet: Whether not to say which were passed over.

    Returns:
        Its path, and what `load` has returned of it; `None` twice if there is none.

    Raises:
        ValueError: All are of another model, or cannot be read.
    """
    failed = None
    for path in store.find(directory):
        try:
            found = load(path)
            check_is_of(path, getattr(found, "about", found), model)
        except ValueError as error:
            failed = failed or error
            continue
        if failed is not None and not quiet:
            lost = f"what was trained after it is lost: going back to {path}"
            warn(f"{str(failed).partition('; choose')[0]}; {lost}.")
        return path, found
    if failed is not None:
        raise failed
    return None, None


def check_is_of(path: str, about: Mapping[str, Any], model: keras.Model) -> None:
    """Raises an `OtherModelError` if a checkpoint is not of a model.

    Optimizers of a model's own step that are built as it trains are built here.
    """
    _build_optimizers(about, model)
    for part, variables in parts(model).items():
        found, expected = about["variables"].get(part, []), describe(variables)
        if found != expected:
            raise OtherModelError(
                f"The checkpoint {path} holds another {part}: "
                f"{_difference(found, expected)}; choose another directory."
            )


def parts(model: keras.Model) -> dict[str, list[Any]]:
    """Returns the variables that a run cannot do without, by what they belong to."""
    found = {"model": model.variables}
    for name, optimizer in optimizers(model).items():
        found[name] = optimizer.variables
    if others := plain(model):
        found["other variables"] = [*others.values()]
    return found


def built_for(model: keras.Model) -> dict[str, list[int]]:
    """Tells which of a model's variables each of its optimizers was built for."""
    places = {id(variable): i for i, variable in enumerate(model.variables)}
    found = {}
    for name, optimizer in optimizers(model).items():
        known = [id(each) for each in known_variables(innermost(optimizer))]
        if optimizer.built and {*known} <= places.keys():
            found[name] = [places[each] for each in known]
    return found


def _build_optimizers(about, model):
    """Builds those that a checkpoint has values for."""
    variables, mine = model.variables, optimizers(model, only_built=False)
    for name, places in about.get("built_for", {}).items():
        optimizer = mine.get(name)
        if (
            optimizer is None
            or optimizer.built
            or max(places, default=-1) >= len(variables)
        ):
            continue
        with tf.device(optimizer.iterations.value.device):
            optimizer.build([variables[i] for i in places])


def averages(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tells whether averages come in the place of weights as `fit` ends."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner.use_ema and inner.ema_overwrite_frequency is None


def values(model: keras.Model) -> dict[str, list[Any]]:
    """Returns the values of all variables as they are now, by what they belong to.

    They stay what they are while training goes on, for which it takes a copy of each
    variable that it changes.
    """
    return {part: copies(variables) for part, variables in parts(model).items()}


class ValuesOnDemand:
    """The values of a model, each read when it is asked for.

    Hosts read together the variables that they divide; see `read_together`.

    Attributes:
        by_part: The values, each to be asked for once, in order.
    """

    def __init__(self, model: keras.Model):
        """Reads nothing yet."""
        self.by_part = {
            part: OnDemand(self._read, variables)
            for part, variables in parts(model).items()
        }
        variables = itertools.chain.from_iterable(parts(model).values())
        self._unread = [variable for variable in variables if is_divided(variable)]

    def _read(self, variable):
        value = _read(variable)
        if is_divided(variable):
            # One that could not be read is tried again, for what is then said.
            self._unread.pop(0)
        return value

    def read_rest_together(self) -> None:
        """Reads what hosts divide and nobody has asked for, as other hosts do."""
        while self._unread:
            self._read(self._unread[0])


def own_values(model: keras.Model) -> dict[str, OnDemand]:
    """Returns values on demand; of a variable that hosts divide, this host's part."""
    return {part: OnDemand(_own, variables) for part, variables in parts(model).items()}


def nbytes(model: keras.Model) -> int:
    """Returns the bytes of what `values` returns."""
    variables = itertools.chain.from_iterable(parts(model).values())
    return sum(
        math.prod(size or 1 for size in v.shape) * tf.as_dtype(v.dtype).size
        for v in variables
    )


def is_divided(variable: keras.Variable | tf.Variable) -> bool:
    """Tells whether each of several hosts has a part of a variable only."""
    return sharded.across_hosts(variable)


def _own(variable):
    if is_divided(variable):
        return sharded.of(variable).own()
    return _read(variable)


def read_together(model: keras.Model) -> None:
    """Takes part in reading what hosts have divided, and keeps nothing."""
    for variables in parts(model).values():
        for variable in variables:
            if is_divided(variable):
                variable.numpy()


def assign(model: keras.Model, values: Mapping[str, Sequence[Any]]) -> None:
    """Gives all variables the values that `values` has returned, or a checkpoint."""
    for part, variables in parts(model).items():
        for variable, value in zip(variables, values[part], strict=True):
            variable.assign(value)


def copies(variables: Sequence[keras.Variable]) -> list[Any]:
    """Returns the values as they are now, in the host's memory."""
    return [_copy(variable) for variable in variables]


def _copy(variable):
    # What is in the host's memory already is not copied: TensorFlow does that when it
    # is next written to. This takes a third of the time of `tf.identity`.
    return store.on_host(_read(variable))


def _read(variable):
    """The value where it is: the variable's own memory, if nothing was put behind."""
    if not isinstance(variable, tf.Variable):
        if sharded.of(variable) is not None:
            return variable.numpy()
        variable = variable.value
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def describe(variables: Sequence[keras.Variable]) -> list[list[Any]]:
    """Returns name, shape and type of each, as JSON has them."""
    # Keras numbers names by how many were made before in the process.
    return [
        [re.sub(r"_\d+", "", v.name), list(v.shape), v.dtype.name]
        if isinstance(v, tf.Variable)
        else [re.sub(r"_\d+", "", v.path), list(v.shape), v.dtype]
        for v in variables
    ]


def _difference(found, expected):
    for a, b in zip(found, expected, strict=False):
        if a != b:
            return f"it has {_name(a)} where this one has {_name(b)}"
    return f"it has {len(found)} variables where this one has {len(expected)}"


def _name(variable):
    path, shape, dtype = variable
    return f"{path} {shape} {dtype}"
