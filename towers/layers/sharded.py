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
which `why_not_cut` checks, and for norms of gradients, which are those of all shards.

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
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.devices.names import HOST
from towers.keras_adapter import optimizers
from towers.keras_adapter.layers import is_keras_own
from towers.keras_adapter.optimizers import ADD_SLOT
from towers.keras_adapter.patching import patched
from towers.keras_adapter.variables import (
    put_behind,
    swapped_values,
    take_identity,
    value_behind,
    variable_like,
)

# The scope of what puts a whole value together in a graph.
WHOLE_SCOPE = "whole_of_shards"


class ShardedVariable:
    """What stands behind a `keras.Variable`: its value in shards, on several devices.

    Attributes:
        shards: A `tf.Variable` for each device, in order.
        shape: That of the whole value.
        axis: How it is cut: 0 into rows, 1 into columns, `None` into ranges of the
            flattened value, each a shard of rank 1.
        ends: Where each shard ends on that axis, or in the flattened value.
        elsewhere: Whether other hosts update shards of it, too, whose gradients
            something stands in for here; see `sharded.targets`.
        across_hosts: Whether several hosts have shards of it; it is a `SpreadVariable`.
        stands_in: Whether a step is traced with a `stand_in` in its place.
        updated_once: Whether each host of several applies the optimizer once in a step,
            not once for each of its copies of other variables.
    """

    elsewhere = across_hosts = stands_in = updated_once = False

    def __init__(
        self, shards: Sequence[tf.Variable], shape: Sequence[int], axis: int | None
    ):
        self.shards, self.axis = tuple(shards), axis
        self.shape = tf.TensorShape(shape)
        sizes = [shard.shape[axis or 0] for shard in self.shards]
        self.ends = tuple(itertools.accumulate(sizes))
        first = self.shards[0]
        self.dtype, self.name, self.trainable = first.dtype, first.name, first.trainable
        # An optimizer knows the variable, and each shard, by the same.
        take_identity(self, first)

    @property
    def updated(self) -> Sequence[tf.Variable]:
        """The shards that this host updates."""
        return self.shards

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each shard begins; see `ends`."""
        return (0, *self.ends[:-1])

    @property
    def device(self) -> str:
        """The device of the first shard."""
        return self.shards[0].device

    @property
    def _shared_name(self) -> str:
        # TensorFlow's checkpoints ask for it, and Keras for that of what is behind.
        return self.name.partition(":")[0]

    def split(self, value: Any) -> list[Any]:
        """Cuts a whole value, or a gradient, into those of the shards, where it is.

        Args:
            value: An array, a tensor, or `tf.IndexedSlices`, of which each shard's have
                rows as the shard counts them, or flat numbers.
        """
        if isinstance(value, tf.IndexedSlices):
            return self._split_rows(value)
        if self.axis is None:
            value = value.reshape(-1) if _is_array(value) else tf.reshape(value, [-1])
        bounds = zip(self.starts, self.ends, strict=True)
        columns = (slice(None),) * (self.axis or 0)
        return [value[(*columns, slice(start, end))] for start, end in bounds]

    def _split_rows(self, gradient):
        # Duplicates stay apart, as optimizers square each by itself.
        values, places = gradient.values, gradient.indices
        if self.axis is None:
            row = math.prod(self.shape[1:])
            places = places[:, tf.newaxis] * row + tf.range(row, dtype=places.dtype)
            values, places = tf.reshape(values, [-1]), tf.reshape(places, [-1])
        if self.axis == 1:
            return [
                _slices(part, places, shard)
                for part, shard in zip(self.split(values), self.shards, strict=True)
            ]
        owners, count = self.owners(places), len(self.shards)
        values = tf.dynamic_partition(values, owners, count)
        places = tf.dynamic_partition(places, owners, count)
        return [
            _slices(*mine, shard)
            for *mine, shard in zip(
                values,
                (each - start for each, start in zip(places, self.starts, strict=True)),
                self.shards,
                strict=True,
            )
        ]

    def whole_gradient(self, parts: Sequence[Any]) -> Any:
        """Makes a gradient of the whole value of the shards', where it is called.

        Args:
            parts: What `gradients_of` returns of a gradient, or of several that were
                added.
        """
        if self.axis is None or not isinstance(parts[0], tf.IndexedSlices):
            whole = tf.concat([*map(tf.convert_to_tensor, parts)], self.axis or 0)
            return whole if self.axis is not None else tf.reshape(whole, self.shape)
        values = tf.concat([part.values for part in parts], self.axis)
        places = parts[0].indices
        if self.axis == 0:
            starts = zip(parts, self.starts, strict=True)
            places = tf.concat([part.indices + start for part, start in starts], 0)
        shape = tf.constant(self.shape.as_list(), places.dtype)
        return tf.IndexedSlices(values, places, shape)

    def gradients_of(self, gradient: Any) -> list[Any]:
        """Makes of a gradient of the whole value one for each of `sharded.targets`."""
        return self.split(gradient)

    def alike(self, shards: Sequence[tf.Variable], like: Any) -> "ShardedVariable":
        """Returns a variable that is cut as this one is, and updated with it.

        Args:
            shards: Its shards: one for each of `updated`.
            like: A variable that has its name and type.
        """
        del like
        return ShardedVariable(shards, self.shape, self.axis)

    def look_up(self, ids: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Looks up rows where the shards lie.

        Args:
            ids: A vector of numbers of rows, from 0.

        Returns:
            For each shard, the rows that it has, or its columns of all rows, and their
            numbers as it counts them. `join` puts them together.
        """
        each = [ids] * len(self.shards)
        if self.axis == 0 and len(self.shards) > 1:
            each = tf.dynamic_partition(ids, self.owners(ids), len(self.shards))
        found = []
        for shard, mine, start in zip(self.shards, each, self.starts, strict=True):
            with tf.device(shard.device):
                mine = mine - start if self.axis == 0 and start else tf.identity(mine)
                found.append((tf.gather(shard, mine), mine))
        return found

    def join(self, ids: tf.Tensor, rows: Sequence[tf.Tensor]) -> tf.Tensor:
        """Puts rows that were looked up in the order of their ids, where it is called.

        Args:
            ids: What `look_up` was given.
            rows: What it has found.
        """
        if len(rows) == 1:
            return rows[0]
        if self.axis == 1:
            return tf.concat(rows, axis=1)
        places = tf.range(tf.size(ids))
        return tf.dynamic_stitch(
            tf.dynamic_partition(places, self.owners(ids), len(self.shards)), rows
        )

    def look_up_alike(self, ids: tf.Tensor) -> tf.Tensor:
        """Looks up rows, where no shape may depend on the ids.

        So each shard looks up a row for each id, and that of the owner is taken.

        Args:
            ids: A vector of numbers of rows, from 0.
        """
        owners, last, rows = self.owners(ids), len(self.shards) - 1, None
        for i, (shard, start, end) in enumerate(
            zip(self.shards, self.starts, self.ends, strict=True)
        ):
            with tf.device(shard.device):
                own = ids - start
                # An id that no shard has is still an error.
                own = tf.maximum(own, 0) if i > 0 else own
                own = tf.minimum(own, end - start - 1) if i < last else own
                found = tf.gather(shard, own)
            rows = found if i == 0 else tf.where((owners == i)[:, None], found, rows)
        return rows

    def owners(self, rows: tf.Tensor) -> tf.Tensor:
        """Tells, in int32, which shard has each row."""
        beyond = [tf.cast(rows >= end, tf.int32) for end in self.ends[:-1]]
        return functools.reduce(tf.add, beyond or [tf.zeros_like(rows, tf.int32)])

    def assign(self, value: Any, **_: Any) -> None:
        """Gives each shard its part of a whole value."""
        _change(self, "assign", value)

    def assign_add(self, value: Any) -> None:
        """Adds to each shard its part of a value, which may be cut alike."""
        self.assign(_whole(self) + _whole(value))

    def assign_sub(self, value: Any) -> None:
        """Takes from each shard its part of a value."""
        self.assign(_whole(self) - _whole(value))

    def numpy(self) -> np.ndarray:
        """Returns the whole value."""
        whole = np.concatenate([each.numpy() for each in self.shards], self.axis or 0)
        return whole.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().astype(dtype or self.dtype.as_numpy_dtype, copy=False)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        # The whole value may not fit where it is wanted.
        with tf.device(HOST), tf.name_scope(WHOLE_SCOPE):
            whole = self.joined([*map(tf.convert_to_tensor, self.shards)])
            return tf.cast(whole, dtype or self.dtype)

    def joined(self, values: Sequence[Any]) -> tf.Tensor:
        """Puts the values of all shards together, where it is called."""
        whole = values[0]
        if len(values) > 1:
            whole = tf.concat([*values], axis=self.axis or 0)
        return tf.reshape(whole, self.shape) if self.axis is None else whole

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": tf.convert_to_tensor(self)}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored["VARIABLE_VALUE"])


def _slices(values, places, shard):
    shape = tf.constant(shard.shape.as_list(), places.dtype)
    return tf.IndexedSlices(values, places, shape)


def _change(variable, name, value):
    """Changes each shard by its part of a whole value, where it lies."""
    with tf.device(HOST):
        parts = variable.split(value)
    for shard, part in zip(variable.shards, parts, strict=True):
        with tf.device(shard.device):
            getattr(shard, name)(part)


# By which Keras changes rows.
for _name in ("scatter_add", "scatter_sub", "scatter_update"):
    setattr(ShardedVariable, _name, functools.partialmethod(_change, _name))


def _operator(name):
    def of_value(self, *others):
        return getattr(tf.convert_to_tensor(self), name)(*others)

    return of_value


# Keras's own have `value` compute these.
for _name in ("__getitem__", "__neg__", "__abs__", "__mul__", "__add__", "__sub__"):
    setattr(ShardedVariable, _name, _operator(_name))


def _whole(value):
    """A value in the host's memory."""
    with tf.device(HOST):
        return tf.convert_to_tensor(value)


def _is_array(value):
    return isinstance(value, np.ndarray)


# Methods that a user's optimizer may define: each sees one variable, or no gradient.
_OF_ONE_VARIABLE = {"build", "from_config", "get_config", "update_step", "variables"}


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


def updated_places(variable: keras.Variable) -> Sequence[tf.Variable]:
    """Returns those of `places` that this host updates."""
    parts = of(variable)
    return places(variable) if parts is None else parts.updated


def across_hosts(variable: keras.Variable) -> bool:
    """Tells whether several hosts have parts of a variable."""
    found = of(variable)
    return found is not None and found.across_hosts


def updated_by_hosts(variables: Sequence[keras.Variable]) -> dict[int, Any]:
    """Returns the parts of variables that other hosts update, too, by their places."""
    every = enumerate(map(of, variables))
    return {i: parts for i, parts in every if parts is not None and parts.elsewhere}


def stand_ins(variables: Sequence[keras.Variable]) -> dict[int, ShardedVariable]:
    """Returns the parts of variables that a step reads by stand-ins.

    They are by the `id` of the handle of their stand-in.
    """
    parts = [part for part in map(of, variables) if part is not None and part.stands_in]
    return {id(part.stand_in.handle): part for part in parts}


@contextlib.contextmanager
def standing_in(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Inside, the stand-in is behind each of some variables that have one."""
    chosen = [v for v in variables if (parts := of(v)) is not None and parts.stands_in]
    with swapped_values(chosen, [of(variable).stand_in for variable in chosen]):
        yield


def cut(
    variable: keras.Variable,
    devices: Sequence[str],
    axis: int | None,
    sizes: Sequence[int] = (),
) -> None:
    """Cuts a variable, or a slot of an optimizer's, into shards.

    The value is read on the host, and only its parts go to devices.

    Args:
        variable: A variable that has a value.
        devices: Where the shards are to lie, in order. A variable with less rows, or
            columns, has so many shards.
        axis: See `ShardedVariable`.
        sizes: How many rows, columns or numbers each shard has; by default all have as
            many.
    """
    old = value_behind(variable)
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
    put_behind(variable, ShardedVariable(shards, whole.shape, axis))


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
    # A host may update none.
    first, *others = sharded.updated or sharded.shards[:1]
    # Keras makes the first shard, with the name of the whole.
    with swapped_values([reference], [first]), tf.device(first.device):
        slot = keras_add(optimizer, reference, name=name, initializer=initializer)
    made, fill = value_behind(slot), keras.initializers.get(initializer)
    shards = [made] if sharded.updated else []
    for shard in others:
        make = functools.partial(fill, shard.shape, dtype=slot.dtype)
        shards.append(variable_like(make, shard.device, made))
    put_behind(slot, sharded.alike(shards, made))
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
    return 1 if sharded is None else len(sharded.updated) + sharded.elsewhere


def devices(variables: Sequence[keras.Variable]) -> dict[int, str]:
    """Returns the device of each of `targets` that is a shard, by its place there."""
    found, i = {}, 0
    for variable in variables:
        if (sharded := of(variable)) is not None:
            places = [shard.device for shard in sharded.updated]
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
    gradients, variables = each_missing_once(gradients, targets(variables))
    with optimizers.taking(optimizer, len(gradients)):
        optimizer.apply(gradients, variables)


def each_missing_once(
    gradients: Sequence[Any], variables: Sequence[keras.Variable]
) -> tuple[list[Any], list[keras.Variable]]:
    """Leaves one `None` for each variable without a gradient, not one for each shard.

    Keras warns of these variables by name.

    Args:
        gradients: One for each of `targets`.
        variables: Those targets.

    Returns:
        The gradients that are left, and their variables.
    """
    pairs = [*zip(gradients, variables, strict=True)]
    given = {id(variable) for gradient, variable in pairs if gradient is not None}
    left, missing = [], set()
    for gradient, variable in pairs:
        if id(variable) in given or id(variable) not in missing:
            left.append((gradient, variable))
        missing.add(id(variable))
    return [gradient for gradient, _ in left], [variable for _, variable in left]


def by_device(
    keras_apply_gradients: Callable[..., None],
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
) -> None:
    """Stands in for Keras's `_backend_apply_gradients`, and calls it for each device.

    Whole variables come first, then the first shard of each variable, and so on.
    """
    if all(of(variable) is None for variable in variables):
        keras_apply_gradients(optimizer, gradients, variables)
        return
    groups = collections.defaultdict(list)
    for i, (variable, k) in enumerate(_numbered(variables)):
        place = None
        if (sharded := of(variable)) is not None:
            here = sharded.updated[k : k + 1]
            if not here or not here[0].shape.num_elements():
                continue  # It is updated elsewhere, or has no rows.
            place = k, here[0].device
        groups[place].append(i)
    with _clipped(optimizer, gradients, variables) as gradients:
        groups = {
            place: members
            for place, members in groups.items()
            # The norm of what is updated elsewhere stands in for a gradient.
            if place is None or gradients[members[0]].shape.rank > 0
        }
        scalars = optimizers.scalars(optimizer)
        before = [tf.identity(scalar.value) for scalar in scalars]
        for number, (place, members) in enumerate(groups.items()):
            if number > 0:
                # Each group changes them alike, such as Nadam's product.
                for scalar, value in zip(scalars, before, strict=True):
                    scalar.assign(value)
            members = [gradients[i] for i in members], [variables[i] for i in members]
            with (
                _shards_behind(optimizer, members[1], place),
                optimizers.only_for(optimizer, members[1]),
            ):
                keras_apply_gradients(optimizer, *members)
    _average_idle(optimizer, {*map(id, variables)})


@contextlib.contextmanager
def _clipped(optimizer, gradients, variables):
    """Inside, an optimizer clips the norm of all gradients, not of each device's.

    Yields the gradients to apply.
    """
    accumulates, norm = bool(optimizer.gradient_accumulation_steps), None
    if optimizer.global_clipnorm:
        norm_of = _norm_of_accumulated if accumulates else _norm_of_these
        norm = _of_first_host(norm_of(optimizer, gradients, variables), variables)
    if not accumulates:
        about = optimizer, gradients, variables, norm
        with optimizers.gradients_clipped(*about) as clipped:
            yield clipped
    elif norm is not None:
        # Keras clips what it has accumulated.
        with patched(optimizers.GLOBAL_NORM, lambda *_: norm):
            yield gradients
    else:
        yield gradients


def _of_first_host(norm, variables):
    """Returns the norm that the first host has, where hosts update parts.

    Each host adds in another order. Variables that all hosts update would come to
    differ in their last bits.
    """
    every = updated_by_hosts(variables).values()
    hosts = next((parts.hosts for parts in every if parts.updated_once), None)
    if hosts is None:
        return norm
    with tf.device(HOST):
        return hosts.broadcast([norm], "norm of all gradients")[0]


def _norm_of_these(optimizer, gradients, variables):
    """Returns the norm of all gradients."""
    del optimizer, variables
    return tf.linalg.global_norm(gradients)


def _norm_of_accumulated(optimizer, gradients, variables):
    """Returns the norm of all that an optimizer has accumulated with gradients."""
    squares = []
    for gradient, (variable, k) in zip(gradients, _numbered(variables), strict=True):
        sums, steps = optimizers.accumulated(optimizer, variable)
        shard = updated_places(sums)[k]
        with tf.device(shard.device):
            squares.append(tf.reduce_sum(tf.square((gradient + shard) / steps)))
    with tf.device(HOST):
        return tf.sqrt(tf.add_n(squares))


def _numbered(targets):
    """Yields each target, and which of its variable's shards it is; see `targets`."""
    seen = collections.Counter()
    for variable in targets:
        yield variable, seen[id(variable)]
        seen[id(variable)] += 1


def _average_idle(optimizer, updated):
    """Keeps averages of variables without a gradient, which stay as they are.

    Keras averages all variables together; here each device averages those it updates.
    """
    for variable in optimizers.known_variables(optimizer):
        average = optimizers.average(optimizer, variable)
        if average is None or id(variable) in updated:
            continue
        shards = places(average), updated_places(variable)
        for kept, place in zip(*shards, strict=True):
            with tf.device(kept.device):
                kept.assign(place)


@contextlib.contextmanager
def _shards_behind(optimizer, variables, place):
    """Inside, variables and their slots are a device's shards of them."""
    if place is None:
        yield
        return
    index, device = place
    slots = [optimizers.slots_of(optimizer, v, of_any_shape=True) for v in variables]
    swapped = [*variables, *(s for s in itertools.chain(*slots) if of(s) is not None)]
    values = [of(variable).updated[index] for variable in swapped]
    with tf.device(device), swapped_values(swapped, values):
        yield


def why_not_cut(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Says, in words, why an optimizer needs a variable whole, if it does."""
    for leaf in optimizers.updating(optimizer):
        if not optimizers.is_elementwise(leaf):
            return f"{type(leaf).__name__}, which looks at whole variables"
        if clips_accumulated(leaf):
            return "an optimizer that clips the norm of gradients that it accumulates"
    return None


def clips_accumulated(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tells whether an optimizer clips norms of gradients that it has accumulated."""
    leaves = optimizers.updating(optimizer)
    return any(
        leaf.gradient_accumulation_steps and (leaf.clipnorm or leaf.global_clipnorm)
        for leaf in leaves
    )


def why_not_distributed(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Says why no device can update some variables alone, if it cannot.

    An optimizer of the user's may look at all variables at once.
    """
    for leaf in optimizers.updating(optimizer):
        name = type(leaf).__name__
        if is_keras_own(type(leaf)):
            continue
        others = [m for m in optimizers.overridden(leaf) if m not in _OF_ONE_VARIABLE]
        if others:
            return (
                f"optimizer '{name}' has a `{others[0]}` of its own, which may look at "
                "all variables at once"
            )
        known = {id(slot) for of_one in optimizers.slots(leaf) for slot in of_one}
        known |= {id(optimizers.iterations_variable(leaf))}
        known |= {id(optimizers.learning_rate_variable(leaf))}
        for variable in optimizers.all_variables(leaf):
            if id(variable) not in known:
                return (
                    f"optimizer '{name}' has a variable '{variable.name}', and it is "
                    "unknown to which of the model's variables it belongs"
                )
    return None
