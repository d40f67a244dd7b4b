"""All variables that training changes: moved, kept, given back, and told apart."""

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

# Variables of these types exist on no GPU.
NOT_ON_GPUS = frozenset(
    [
        *(tf.int32, tf.string),
        *(tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2),
    ]
)
# Knuth's multiplier, "The Art of Computer Programming", volume 2, 3.3.4.
_ODD = 6364136223846793005
# Types of the same size in which to read the bits of a number; two of the larger ones.
_BITS = {2: tf.int16, 4: tf.int32, 8: tf.int32, 16: tf.int32}


def of(model: keras.Model) -> list[keras.Variable]:
    """Returns all that training changes: of model, optimizers, metrics and loss."""
    found = [*already(model, "variables"), *already(model, "metrics_variables")]
    for optimizer in optimizers(model).values():
        found += all_variables(optimizer)
    if (loss := compiled_loss(model)) is not None:
        found += loss.variables
    return list({id(variable): variable for variable in found}.values())


def not_trained(model: keras.Model) -> list[keras.Variable]:
    """Returns what a call of a model may assign and nobody trains: its state.

    That is `model.non_trainable_variables`, and what metrics have that layers hold.
    """
    every = [
        *model.non_trainable_variables,
        *(v for metric in metrics_of_layers(model) for v in metric.variables),
    ]
    return [*{id(variable): variable for variable in every}.values()]


def metrics_of_layers(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics that the layers of a model hold, itself among them."""
    return [metric for layer in layers_of(model) for metric in own_metrics(layer)]


def optimizers(
    model: keras.Model, only_built: bool = True
) -> dict[str, keras.optimizers.Optimizer]:
    """Returns a model's optimizers, by the names of the attributes that hold them.

    That is `optimizer`, which `compile` takes. Where a model has a `train_step` of its
    own, others come behind: those that it has built by now, if `only_built`.
    """
    first = getattr(model, "optimizer", None)
    found = {} if first is None else {"optimizer": first}
    for name, each in _attributes(model, keras.optimizers.Optimizer).items():
        if each is not first and (each.built or not only_built):
            found[name] = each
    return found


def plain(model: keras.Model) -> dict[str, tf.Variable]:
    """Returns TensorFlow's variables in a model with a `train_step` of its own.

    The states of its generators are among them, and what `tf.Module`s hold. Attributes
    of layers count, too.
    """
    kinds = tf.Variable, tf.random.Generator, tf.Module
    found = {}
    for name, each in _attributes(model, kinds).items():
        if isinstance(each, tf.Module):
            found |= {f"{name} {i}": v for i, v in enumerate(each.variables, start=1)}
        else:
            found[name] = each if isinstance(each, tf.Variable) else each.state
    known = {id(value_behind(variable)) for variable in of(model)}
    unique = {id(each): name for name, each in reversed(found.items())}
    return {n: v for n, v in found.items() if unique[id(v)] == n and id(v) not in known}


def steps_done(model: keras.Model) -> int:
    """Returns how many steps a model's optimizer has made; of several, the most."""
    first = getattr(model, "optimizer", None)
    if first is not None and (done := int(first.iterations)):
        return done
    return max((int(each.iterations) for each in optimizers(model).values()), default=0)


def _attributes(model, kind):
    """Those of a type that attributes of a model hold, and of the layers in it."""
    found, seen = {}, set()
    model = getattr(model, "__wrapped__", model)
    if not (isinstance(model, keras.Model) and overrides(model, "train_step")):
        return found
    for part in layers_of(model):
        for name in vars(part):
            # TensorFlow keeps lists of what it tracks.
            if name.startswith("_self_"):
                continue
            for leaf in _leaves(vars(part)[name]):
                if isinstance(leaf, kind) and id(leaf) not in seen:
                    seen.add(id(leaf))
                    alike = sum(each.split()[0] == name for each in found)
                    found[f"{name} {alike + 1}" if alike else name] = leaf
    return found


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
    """Inside, what is behind variables of a model is replaced.

    What Keras's own loop has traced refers to what was there before, so that Keras
    traces again if anything has changed.
    """
    before = [*map(value_behind, of(model))]
    yield
    after = [*map(value_behind, of(model))]
    if len(before) != len(after) or any(map(operator.is_not, before, after)):
        model.train_function = model.test_function = model.predict_function = None


def move(model: keras.Model, home_of: Callable[[keras.Variable], str]) -> None:
    """Moves the variables `of` a model to their devices, but for those that are cut.

    If that is a GPU, random seeds go to the host, where TensorFlow reads them, and so
    do types that GPUs do not have.

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
    """Assigns what `values` returned."""
    for variable, value in zip(of(model), start, strict=True):
        variable.assign(value)


@contextlib.contextmanager
def unchanged(model: keras.Model, others: Sequence[tf.Variable] = ()) -> Iterator[None]:
    """Leaves the values of all that training changes, and of others, as they are."""
    start, theirs = values(model), [variable.numpy() for variable in others]
    try:
        yield
    finally:
        assign(model, start)
        for variable, value in zip(others, theirs, strict=True):
            variable.assign(value)


def digest(values: Iterable[Any]) -> tf.Tensor:
    """Returns a number that tells values apart, and the same ones in another order.

    It computes with 64 bits for each number of one value at a time.

    Args:
        values: Tensors, or variables, of numbers.

    Returns:
        An int64, as if by chance: values that differ hardly ever share one.
    """
    total = tf.zeros([], tf.int64)
    for value in map(tf.convert_to_tensor, values):
        if value.dtype.is_floating and value.dtype.size == 1:
            value = tf.cast(value, tf.float16)
        if value.dtype.size in _BITS and not value.dtype.is_bool:
            # As floats, minus zero would be zero.
            value = tf.bitcast(value, _BITS[value.dtype.size])
        bits = _mixed(tf.cast(value, tf.int64))
        if bits.shape.rank > 2:
            bits = tf.reshape(bits, [-1, bits.shape[-1] or tf.shape(bits)[-1]])
        # Axis by axis, with few multipliers: TensorFlow keeps them.
        while bits.shape.rank:
            bits = tf.reduce_sum(bits * _multipliers(bits), -1)
        total = total * _ODD + bits
    return total


def _multipliers(bits):
    """A number for each place of the last axis, others for each number of axes."""
    first = 2**40 * bits.shape.rank
    count = bits.shape[-1]
    if count is not None and count < 2**16:
        places = np.arange(first, first + count)
    else:
        places = tf.range(first, first + tf.shape(bits, tf.int64)[-1])
    return _mixed(places)


def _mixed(numbers):
    """Odd numbers that look random: sums of the numbers themselves are often alike."""
    numbers = numbers * _ODD
    library = np if isinstance(numbers, np.ndarray) else tf.bitwise
    numbers = (numbers ^ library.right_shift(numbers, 29)) * _ODD
    # Even ones would lose the highest bits.
    return numbers | 1
