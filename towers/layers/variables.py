"""All variables that training changes: moved, saved, restored, and compared."""

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.devices.names import HOST, is_gpu
from towers.keras_adapter.layers import layers_of, own_metrics, own_seed_generators
from towers.keras_adapter.models import already, compiled_loss, overrides
from towers.keras_adapter.optimizers import all_variables
from towers.keras_adapter.variables import put_behind, value_behind, variable_like
from towers.layers import sharded

# Variables of these types do not exist on GPUs.
NOT_ON_GPUS = frozenset(
    [
        *(tf.int32, tf.string),
        *(tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2),
    ]
)
# Knuth's multiplier, "The Art of Computer Programming", volume 2, 3.3.4.
_ODD = 6364136223846793005
# Types by which the bits of a value are read; larger values are read as several.
_BITS = {2: tf.int16, 4: tf.int32, 8: tf.int32, 16: tf.int32}


def of(model: keras.Model) -> list[keras.Variable]:
    """Returns all variables of the model, its optimizers, metrics and loss."""
    variables = [*already(model, "variables"), *already(model, "metrics_variables")]
    for optimizer in optimizers(model).values():
        variables += all_variables(optimizer)
    if (loss := compiled_loss(model)) is not None:
        variables += loss.variables
    return list({id(variable): variable for variable in variables}.values())


def not_trained(model: keras.Model) -> list[keras.Variable]:
    """Returns the state that a call of a model may assign, and that is not trained.

    This is `model.non_trainable_variables`, and the variables of metrics that layers
    hold.
    """
    variables = [
        *model.non_trainable_variables,
        *(v for metric in metrics_of_layers(model) for v in metric.variables),
    ]
    return [*{id(variable): variable for variable in variables}.values()]


def metrics_of_layers(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics that a model and its layers hold."""
    return [metric for layer in layers_of(model) for metric in own_metrics(layer)]


def optimizers(
    model: keras.Model, only_built: bool = True
) -> dict[str, keras.optimizers.Optimizer]:
    """Returns a model's optimizers, by the names of the attributes that hold them.

    The first is `optimizer`, the argument of `compile`. If a model has a `train_step`
    of its own, others follow: those that are built, if `only_built`.
    """
    first = getattr(model, "optimizer", None)
    named = {} if first is None else {"optimizer": first}
    for name, optimizer in _attributes(model, keras.optimizers.Optimizer).items():
        if optimizer is not first and (optimizer.built or not only_built):
            named[name] = optimizer
    return named


def plain(model: keras.Model) -> dict[str, tf.Variable]:
    """Returns the `tf.Variable`s in a model with a `train_step` of its own.

    These include the states of random generators, the variables of `tf.Module`s, and
    those of layers' attributes.
    """
    kinds = tf.Variable, tf.random.Generator, tf.Module
    named = {}
    for name, owner in _attributes(model, kinds).items():
        if isinstance(owner, tf.Module):
            labelled = {f"{name} {i}": v for i, v in enumerate(owner.variables, 1)}
        else:
            value = owner if isinstance(owner, tf.Variable) else owner.state
            labelled = {name: value}
        for label, variable in labelled.items():
            # The second variable of a module may have the name of another attribute.
            while label in named:
                label += " again"
            named[label] = variable
    known = {id(value_behind(variable)) for variable in of(model)}
    unique = {id(variable): name for name, variable in reversed(named.items())}
    return {n: v for n, v in named.items() if unique[id(v)] == n and id(v) not in known}


def steps_done(model: keras.Model) -> int:
    """Returns the number of steps of a model's optimizer; the most of several."""
    first = getattr(model, "optimizer", None)
    if first is not None and (done := int(first.iterations)):
        return done
    return max(
        (int(optimizer.iterations) for optimizer in optimizers(model).values()),
        default=0,
    )


def _attributes(model, kind):
    """Returns the objects of a type in attributes of a model and its layers."""
    named, seen = {}, set()
    model = getattr(model, "__wrapped__", model)
    if not (isinstance(model, keras.Model) and overrides(model, "train_step")):
        return named
    for part in layers_of(model):
        for name in vars(part):
            # TensorFlow stores lists of tracked objects under this prefix.
            if name.startswith("_self_"):
                continue
            for leaf in _leaves(vars(part)[name]):
                if isinstance(leaf, kind) and id(leaf) not in seen:
                    seen.add(id(leaf))
                    alike = sum(label.split()[0] == name for label in named)
                    named[f"{name} {alike + 1}" if alike else name] = leaf
    return named


def _leaves(value):
    if isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, Mapping):
        parts = value.values()
    else:
        yield value
        return
    for part in parts:
        yield from _leaves(part)


def seed_ids(model: keras.Model) -> set[int]:
    """Returns the `id` of each variable of a model that is a random seed."""
    return {
        id(generator.state)
        for layer in layers_of(model)
        for generator in own_seed_generators(layer)
    }


@contextlib.contextmanager
def replacing(model: keras.Model) -> Iterator[None]:
    """Makes Keras trace again if variables are replaced within the context.

    Traces of Keras's own loop refer to the variables that were there before.
    """
    before = [*map(value_behind, of(model))]
    yield
    after = [*map(value_behind, of(model))]
    if len(before) != len(after) or any(map(operator.is_not, before, after)):
        model.train_function = model.test_function = model.predict_function = None


def move(model: keras.Model, home_of: Callable[[keras.Variable], str]) -> None:
    """Moves the variables `of` a model to their devices, except for sharded ones.

    If the device is a GPU, random seeds go to the host, where TensorFlow reads them,
    and so do variables of types that GPUs do not have.

    Args:
        model: The model.
        home_of: Returns the device of a variable.
    """
    seeds = seed_ids(model)
    with replacing(model):
        for variable in of(model):
            if sharded.of(variable) is not None:
                continue
            old, home = variable.value, home_of(variable)
            seeded = seeds if is_gpu(home) else ()
            hosted = id(variable) in seeded or (
                is_gpu(home) and old.dtype in NOT_ON_GPUS
            )
            where = HOST if hosted else home
            if old.device.endswith(where):
                continue
            put_behind(variable, variable_like(old, where, old))


def values(model: keras.Model) -> list[np.ndarray]:
    """Returns the values of the variables `of` a model."""
    return [variable.numpy() for variable in of(model)]


def assign(model: keras.Model, start: Sequence[np.ndarray]) -> None:
    """Assigns the values that `values` returned."""
    for variable, value in zip(of(model), start, strict=True):
        variable.assign(value)


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Restores the values of all variables `of` a model after the context."""
    start = values(model)
    try:
        yield
    finally:
        assign(model, start)


def digest(values: Iterable[Any]) -> tf.Tensor:
    """Returns a digest that depends on the values and their order.

    The computation needs 64 bits for each number of one value at a time.

    Args:
        values: Tensors, or variables, of numbers.

    Returns:
        An int64, as if drawn at random: values that differ hardly ever share one.
    """
    total = tf.zeros([], tf.int64)
    for value in map(tf.convert_to_tensor, values):
        if value.dtype.is_floating and value.dtype.size == 1:
            value = tf.cast(value, tf.float16)
        if value.dtype.size in _BITS and not value.dtype.is_bool:
            # Read as floats, minus zero would equal zero.
            value = tf.bitcast(value, _BITS[value.dtype.size])
        bits = _mixed(tf.cast(value, tf.int64))
        if bits.shape.rank > 2:
            bits = tf.reshape(bits, [-1, bits.shape[-1] or tf.shape(bits)[-1]])
        # Axis by axis, which needs few multipliers: TensorFlow stores these as
        # constants.
        while bits.shape.rank:
            bits = tf.reduce_sum(bits * _multipliers(bits), -1)
        total = total * _ODD + bits
    return total


def _multipliers(bits):
    """Returns a multiplier for each index of the last axis, differing by rank."""
    first = 2**40 * bits.shape.rank
    count = bits.shape[-1]
    if count is not None and count < 2**16:
        indices = np.arange(first, first + count)
    else:
        indices = tf.range(first, first + tf.shape(bits, tf.int64)[-1])
    return _mixed(indices)


def _mixed(numbers):
    """Mixes integers to odd pseudorandom ones, whose sums rarely coincide."""
    numbers = numbers * _ODD
    library = np if isinstance(numbers, np.ndarray) else tf.bitwise
    numbers = (numbers ^ library.right_shift(numbers, 29)) * _ODD
    # Even multipliers would lose the highest bits.
    return numbers | 1
