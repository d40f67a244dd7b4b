"""Sharded variables: one variable to Keras, in parts on several devices.

A `ShardedVariable` stands behind a `keras.Variable` in the place of its `tf.Variable`:
`cut` puts it there, also behind the slots that an optimizer has for the variable.
Whoever reads it gets the whole value, in the host's memory; whoever assigns it has each
shard get its part. So files and checkpoints are as always. The name and the idea are
those of TensorFlow's `ShardedVariable`, which Keras does not take.

The optimizer is the user's own, and is applied to shards (`apply`): each is a variable
of its own to it, with a gradient of its own. While a device's shards are updated, they
stand behind the `keras.Variable`s, as do those of their slots. So each operation runs
where the shard lies. That is right for optimizers that look at each number by itself,
which `refuse_others` checks, and for norms of gradients, which are those of all shards.

    cut(table, ["/device:CPU:0", "/device:CPU:1"], axis=0)
    with slots_like_variables():
        optimizer.build(variables)           # slots are created in shards
    gradients = [first, second, of_bias]     # of each of `targets([table, bias])`
    apply(optimizer, gradients, [table, bias])

New `tf.Variable`s stand behind the `keras.Variable`s after `cut`: what was traced
before refers to the old ones.

To a tape, a table in shards is its shards: rows go straight to the device that has
them. Where the user is handed a gradient, it is joined, and cut again for the optimizer
(`gradient`).
"""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.devices.names import HOST
from towers.keras_adapter import optimizers
from towers.keras_adapter.optimizers import ADD_SLOT
from towers.keras_adapter.patching import patched
from towers.keras_adapter.variables import (
    put_behind,
    swapped_values,
    value_behind,
    variable_like,
)
from towers.layers.sharded_variable import ShardedVariable


def of(variable: keras.Variable) -> ShardedVariable | None:
    """Returns what a variable is made of, if it is cut."""
    if isinstance(variable, tf.Variable):
        # Of a loop without Keras's layers.
        return None
    found = value_behind(variable)
    return found if isinstance(found, ShardedVariable) else None


def places(variable: keras.Variable) -> list[tf.Variable]:
    """Returns the `tf.Variable`s behind a variable: one, or its shards."""
    if isinstance(variable, tf.Variable):
        # Of a loop without Keras's layers.
        return [variable]
    sharded = of(variable)
    return [value_behind(variable)] if sharded is None else [*sharded.shards]


def across_hosts(variable: keras.Variable) -> bool:
    """Tells whether several hosts have parts of a variable."""
    found = of(variable)
    return found is not None and found.across_hosts


def tables_across_hosts(variables: Sequence[keras.Variable]) -> dict[int, Any]:
    """Returns the tables that hosts divide, `SpreadTable`s, by their places."""
    found = {i: of(variable) for i, variable in enumerate(variables)}
    return {i: each for i, each in found.items() if each is not None and each.elsewhere}


@contextlib.contextmanager
def standing_in(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Inside, a stand-in is behind each of some tables that hosts divide."""
    found = tables_across_hosts(variables)
    tables = [variables[i] for i in found]
    with swapped_values(tables, [table.stand_in for table in found.values()]):
        yield


def cut(
    variable: keras.Variable,
    devices: Sequence[str],
    axis: int | None,
    optimizer: keras.optimizers.Optimizer | None = None,
    sizes: Sequence[int] = (),
) -> None:
    """Cuts a variable, and the slots that an optimizer has for it, into shards.

    The value is read on the host, and only its parts go to devices.

    Args:
        variable: A variable that has a value.
        devices: Where the shards are to lie, in order. A variable with less rows, or
            columns, has so many shards.
        axis: See `ShardedVariable`.
        optimizer: The optimizer, if it may have slots already.
        sizes: How many rows, columns or numbers each shard has; by default all have as
            many.
    """
    cuts = [variable]
    if optimizer is not None:
        cuts += optimizers.slots_of(optimizer, variable)
    for each in cuts:
        old = value_behind(each)
        whole = old.numpy()
        size = whole.size if axis is None else whole.shape[axis]
        parts = np.array_split(
            whole.reshape(-1) if axis is None else whole,
            [*itertools.accumulate(sizes)][:-1] if sizes else min(len(devices), size),
            axis=axis or 0,
        )
        shards = [
            variable_like(part, device, old)
            for part, device in zip(parts, devices, strict=False)
        ]
        put_behind(each, ShardedVariable(shards, whole.shape, axis))


def join(variable: keras.Variable, device: str) -> None:
    """Has a variable that is cut be a `tf.Variable` again, on a device."""
    cut_up = value_behind(variable)
    put_behind(variable, variable_like(cut_up.numpy(), device, cut_up))


def join_slots(
    optimizer: keras.optimizers.Optimizer, home_of: Callable[[keras.Variable], str]
) -> None:
    """Has slots that are cut be whole again, unless their variable is cut as well."""
    for leaf in optimizers.updating(optimizer):
        known = optimizers.known_variables(leaf)
        for variable, slots in zip(known, optimizers.slots(leaf), strict=True):
            for slot in slots if of(variable) is None else ():
                if of(slot) is not None:
                    join(slot, home_of(slot))


@contextlib.contextmanager
def slots_like_variables() -> Iterator[None]:
    """Inside, an optimizer that is built creates the slots of cut variables in shards.

    Each shard is created where the variable's is. So a slot is nowhere whole.
    """
    with patched(ADD_SLOT, _add_slot):
        yield


def _add_slot(keras_add, optimizer, reference_variable, name=None, initializer="zeros"):
    # Some of Keras's optimizers name it.
    reference = reference_variable
    sharded = isinstance(reference, keras.Variable) and of(reference)
    if not sharded:
        return keras_add(optimizer, reference, name=name, initializer=initializer)
    first, *others = sharded.shards
    # Keras makes the first shard, with the name of the whole.
    with swapped_values([reference], [first]), tf.device(first.device):
        slot = keras_add(optimizer, reference, name=name, initializer=initializer)
    made, fill = value_behind(slot), keras.initializers.get(initializer)
    shards = [made]
    for shard in others:
        make = functools.partial(fill, shard.shape, dtype=slot.dtype)
        shards.append(variable_like(make, shard.device, made))
    put_behind(slot, sharded.alike(shards))
    return slot


def targets(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Returns what has a gradient of its own: each variable, a cut one for each shard.

    It stands there as many times, in the order of its shards, and once more if other
    hosts have shards, too. Up to the sum of all hosts, that last one has the gradient
    of the whole variable; then the norm of what is updated elsewhere.
    """
    return [variable for variable in variables for _ in range(_count(variable))]


def _count(variable):
    sharded = of(variable)
    return 1 if sharded is None else len(sharded.shards) + sharded.elsewhere


def devices(variables: Sequence[keras.Variable]) -> dict[int, str]:
    """Returns the device of each of `targets` that is a shard, by its place there."""
    found, i = {}, 0
    for variable in variables:
        if (sharded := of(variable)) is not None:
            places = [shard.device for shard in sharded.shards]
            places += [HOST] * sharded.elsewhere
            found |= enumerate(places, start=i)
        i += _count(variable)
    return found


def expand(variables: Sequence[keras.Variable], gradients: Sequence[Any]) -> list[Any]:
    """Makes gradients of `targets` of those of whole variables."""
    expanded = []
    for variable, gradient in zip(variables, gradients, strict=True):
        sharded = of(variable)
        if sharded is None or gradient is None:
            expanded += [gradient] * _count(variable)
        else:
            expanded += sharded.gradients_of(gradient)
    return expanded


def whole(variables: Sequence[keras.Variable], gradients: Sequence[Any]) -> list[Any]:
    """Makes gradients of whole variables of those of `targets`; see `expand`."""
    rest, found = iter(gradients), []
    for variable in variables:
        parts = [next(rest) for _ in range(_count(variable))]
        sharded = of(variable)
        if sharded is None or parts[-1] is None:
            found.append(parts[-1])
        else:
            found.append(sharded.whole_gradient(parts))
    return found


def gradient(
    taken: Callable[..., Any],
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    *others: Any,
    **options: Any,
) -> Any:
    """Takes a gradient for variables of which some are cut, by `taken`.

    Args:
        taken: Takes it for variables that are not.
        tape: The tape.
        target: What to differentiate.
        sources: For what: a nest of variables and tensors.
        *others: As `taken` has them.
        **options: The same.
    """
    flat = tf.nest.flatten(sources)
    cuts = [*map(_cut_of, flat)]
    if not any(cuts):
        return taken(tape, target, sources, *others, **options)
    parts = [
        [source] if cut is None else [*cut.shards]
        for source, cut in zip(flat, cuts, strict=True)
    ]
    found = taken(tape, target, parts, *others, **options)
    joined = [
        mine[0] if cut is None else None if None in mine else cut.whole_gradient(mine)
        for mine, cut in zip(found, cuts, strict=True)
    ]
    return tf.nest.pack_sequence_as(sources, joined)


def _cut_of(source):
    if isinstance(source, ShardedVariable):
        # What stands behind a variable, which a user may ask for by its `value`.
        return source
    return of(source) if isinstance(source, keras.Variable) else None


def sources_of(sources: Sequence[Any]) -> Iterator[Any]:
    """Yields what a gradient is taken for: variables' shards, and all else as it is."""
    for source in sources:
        cut = _cut_of(source)
        yield from [source] if cut is None else cut.shards


def norm(gradient: tf.Tensor | tf.IndexedSlices | None) -> tf.Tensor | None:
    """Returns what stands in for a shard's gradient elsewhere: its norm, a scalar.

    It is finite if the gradient is, as the largest number is taken out before others
    are squared.
    """
    if gradient is None:
        return None
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    with tf.device(values.device):
        values = tf.cast(values, tf.float32)
        largest = tf.maximum(tf.reduce_max(tf.abs(values)), 1e-30)
        return largest * tf.norm(values / largest)


def apply(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
) -> None:
    """Applies an optimizer to variables of which some are cut.

    Call it within `fused.updates()`, which has Keras call `by_device`.

    Args:
        optimizer: The user's, built with these variables.
        gradients: One for each of `targets`: dense, sparse or `None`. For a shard that
            is updated elsewhere, the gradient's `norm`.
        variables: Trainable variables.
    """
    optimizer.apply(gradients, targets(variables))


# The norms of all gradients of optimizers, by the `id` of each.
_norms: dict[int, tf.Tensor] = {}


@contextlib.contextmanager
def clipping_by(norms: Mapping[int, tf.Tensor]) -> Iterator[None]:
    """Inside, optimizers that clip a norm of all gradients are told what it is.

    `norms` has it by the `id` of each. Else it is that of what is applied together.
    """
    _norms.update(norms)
    try:
        yield
    finally:
        for key in norms:
            del _norms[key]


def by_device(
    keras_apply_gradients: Callable[..., None],
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
) -> None:
    """Stands in for Keras's `_backend_apply_gradients`, and calls it for each device.

    Whole variables come first, then the first shard of each variable, and so on.
    """
    groups, seen = collections.defaultdict(list), collections.Counter()
    for i, variable in enumerate(variables):
        place = None
        if (sharded := of(variable)) is not None:
            k, seen[id(variable)] = seen[id(variable)], seen[id(variable)] + 1
            here = sharded.shards[k : k + 1]
            if not here or not here[0].shape.num_elements():
                continue  # It is updated elsewhere, or has no rows.
            place = k, here[0].device
        groups[place].append(i)
    if not seen:
        keras_apply_gradients(optimizer, gradients, variables)
        return
    mine, norm = (optimizer, gradients, variables), _norms.get(id(optimizer))
    with optimizers.gradients_clipped(*mine, norm) as gradients:
        for place, members in groups.items():
            if place is not None and gradients[members[0]].shape.rank == 0:
                continue  # It is updated elsewhere.
            mine = [gradients[i] for i in members], [variables[i] for i in members]
            with (
                _shards_behind(optimizer, mine[1], place),
                optimizers.only_for(optimizer, mine[1]),
            ):
                keras_apply_gradients(optimizer, *mine)
    _average_idle(optimizer, {*map(id, variables)})


def _average_idle(optimizer, updated):
    """Keeps averages of variables without a gradient, which stay as they are.

    Keras averages all variables together; here each device averages those it updates.
    """
    for variable in optimizers.known_variables(optimizer):
        average = optimizers.average(optimizer, variable)
        if average is None or id(variable) in updated:
            continue
        for kept, place in zip(places(average), places(variable), strict=True):
            with tf.device(kept.device):
                kept.assign(place)


@contextlib.contextmanager
def _shards_behind(optimizer, variables, place):
    """Inside, variables and their slots are a device's shards of them."""
    if place is None:
        yield
        return
    index, device = place
    slots = [optimizers.slots_of(optimizer, variable) for variable in variables]
    swapped = [*variables, *itertools.chain(*slots)]
    values = [of(variable).shards[index] for variable in swapped]
    with tf.device(device), swapped_values(swapped, values):
        yield


def refuse_others(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Says, in words, why an optimizer cannot be applied to shards, if it cannot."""
    inner = optimizers.innermost(optimizer)
    if not optimizers.is_elementwise(inner):
        return f"{type(inner).__name__}, which looks at whole variables"
    if isinstance(inner, keras.optimizers.Nadam):
        return "Nadam, which counts how often it is applied, not the steps"
    if inner.gradient_accumulation_steps and (inner.clipnorm or inner.global_clipnorm):
        return "an optimizer that clips the norm of gradients that it accumulates"
    return None
