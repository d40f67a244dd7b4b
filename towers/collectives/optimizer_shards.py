"""Optimizer state in shards: which tower has which slots, and what it updates.

Every tower has a copy of the parameters, and owns a part of them: it alone has the
optimizer's slots of that part (`partition.py`). Where a border cuts a variable, its
slots are cut as well. Where an optimizer looks at whole variables, none is cut.

While an owner's part is updated, its slots and a slice of each cut variable stand
behind the `keras.Variable`s (`behind`), and the user's own optimizer is applied to
them. The slice is empty between steps.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.collectives.partition import Extent, Part, partition
from towers.devices import HOST
from towers.keras_adapter import optimizers
from towers.keras_adapter.layers import is_keras_own
from towers.keras_adapter.patching import patched
from towers.keras_adapter.variables import (
    bytes_of,
    put_behind,
    swapped_values,
    value_behind,
    variable_like,
)
from towers.layers import embeddings, sharded

# TensorFlow copies a slice of a tensor unless it begins and ends at such a place.
_ALIGNED_BYTES = 64
# What a user's class may have of its own: each sees one variable, or no gradient.
_OF_ONE_VARIABLE = {"build", "from_config", "get_config", "update_step", "variables"}


class Owner(NamedTuple):
    """A tower, or a stage of it, that updates a part of the parameters.

    Attributes:
        copy: Which copy of the parameters it updates, 0 for the model's own.
        device: Where that is.
        owned: Which trainable variables it has a part of.
        others: The devices of the same part of all copies, its own among them.
    """

    copy: int
    device: str
    owned: tuple[int, ...]
    others: tuple[str, ...]


class OptimizerShards:
    """The shards of an optimizer's state, and who owns them."""

    def __init__(self, model: keras.Model, by_stage: Callable[[Sequence[Any]], Any]):
        """Creates nothing yet.

        Args:
            model: The user's model, compiled.
            by_stage: Yields, of some variables, the places of those of each stage, and
                the devices of their copies, the model's own first.
        """
        self._model, self._by_stage = model, by_stage
        # By variable and copy; and by owner, a copy of each of `shared`.
        self._slices: dict[tuple[int, int], tf.Variable] = {}
        self._scalars: dict[int, list[tf.Variable]] = {}

    @functools.cached_property
    def _stages(self):
        """The places of each stage's variables, and the devices of their copies."""
        return [*self._by_stage(self._model.trainable_variables)]

    @functools.cached_property
    def parts(self) -> list[Mapping[int, Part]]:
        """The parts of each trainable variable, in order, by the copy of the owner."""
        variables, tables = (
            self._model.trainable_variables,
            embeddings.tables(self._model),
        )
        found = {}
        for places, devices in self._stages:
            extents = [self._extent(variables[i], tables) for i in places]
            every = partition(extents, len(devices))
            for i, parts in zip(places, every, strict=True):
                found[i] = {part.owner: part for part in parts}
        return [found[i] for i in range(len(variables))]

    @functools.cached_property
    def owners(self) -> list[Owner]:
        """The owners. The first uses the optimizer's own scalars, others copies."""
        return [
            Owner(
                copy,
                device,
                tuple(i for i in places if copy in self.parts[i]),
                tuple(devices),
            )
            # What belongs to no layer is on the last stage.
            for places, devices in reversed(self._stages)
            for copy, device in enumerate(devices)
        ]

    def _extent(self, variable, tables):
        shape, unit = tuple(variable.shape), 0
        if _may_be_cut(self._model.optimizer, variable):
            unit = _ALIGNED_BYTES // tf.as_dtype(variable.dtype).size
            if id(variable) in tables:
                # Its gradient consists of rows, each of which goes to one owner.
                unit = shape[-1]
        return Extent(shape, bytes_of(variable), unit)

    @property
    def shared(self) -> list[keras.Variable]:
        """What the optimizer has besides slots, such as its count of steps."""
        slots = self.slot_ids()
        every = optimizers.all_variables(self._model.optimizer)
        return [each for each in every if id(each) not in slots]

    def slot_ids(self) -> set[int]:
        """Returns the `id` of each slot. Slots are where their owners are."""
        return {id(slot) for _, of_one in self._slots() for slot in of_one}

    def _slots(self):
        """Yields each variable that the optimizer knows, and its slots."""
        if getattr(self._model, "optimizer", None) is None:
            return
        for leaf in optimizers.updating(self._model.optimizer):
            known = optimizers.known_variables(leaf)
            yield from zip(known, optimizers.slots(leaf), strict=True)

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """Inside, an optimizer that is built creates its slots with their owners."""
        with patched(optimizers.ADD_SLOT, self._add_slot):
            yield

    def _add_slot(self, _, optimizer, reference_variable, *args, **options):
        # It would be created where the variable is, whole.
        reference = reference_variable
        with tf.device(HOST):
            slot = optimizers.add_slot_here(optimizer, reference, *args, **options)
        for i, variable in enumerate(self._model.trainable_variables):
            if variable is reference:
                self._place(slot, i)
        return slot

    def create(self) -> None:
        """Moves slots that exist to their owners, and creates what these need."""
        for layout in ("_stages", "parts", "owners"):
            # Stages may have been divided anew since slots were created.
            vars(self).pop(layout, None)
        indices = {id(v): i for i, v in enumerate(self._model.trainable_variables)}
        for variable, slots in self._slots():
            for slot in slots if id(variable) in indices else ():
                self._place(slot, indices[id(variable)])
        for places, devices in self._stages:
            for i in places:
                old = value_behind(self._model.trainable_variables[i])
                parts = self.parts[i] if len(self.parts[i]) > 1 else {}
                for copy, part in parts.items():
                    self._slices[i, copy] = _slice(old, devices[copy], part)
        for k, owner in enumerate(self.owners[1:], start=1):
            shared = map(value_behind, self.shared)
            copies = [variable_like(old, owner.device, old) for old in shared]
            self._scalars[k] = copies

    def _place(self, slot, i):
        """Cuts a slot as its variable is, and puts the parts where these are."""
        parts = self.parts[i]
        every = next(devices for places, devices in self._stages if i in places)
        devices = [every[copy] for copy in parts]
        before = sharded.places(slot)
        shapes = [
            part.shape if len(parts) > 1 else slot.shape for part in parts.values()
        ]
        if len(before) == len(parts) and all(
            old.device.endswith(device) and tuple(old.shape) == tuple(shape)
            for old, device, shape in zip(before, devices, shapes, strict=True)
        ):
            return
        old = value_behind(slot)
        whole = old.numpy()
        if len(parts) == 1:
            put_behind(slot, variable_like(whole, *devices, old))
            return
        flat = whole.reshape(-1)
        shards = [
            variable_like(flat[part.start : part.stop].reshape(part.shape), device, old)
            for part, device in zip(parts.values(), devices, strict=True)
        ]
        axis = 0 if next(iter(parts.values())).has_rows else None
        cut = sharded.ShardedVariable(shards, whole.shape, axis)
        put_behind(slot, cut)

    def variables(self) -> list[tf.Variable]:
        """Returns what there is besides what stands behind the optimizer's own."""
        return [*self._slices.values(), *itertools.chain(*self._scalars.values())]

    def slice_of(self, i: int, owner: Owner) -> tf.Variable | None:
        """Returns what an owner updates of a trainable variable, if that is cut."""
        return self._slices.get((i, owner.copy))

    def scalars(self, k: int) -> list[tf.Variable]:
        """Returns what the k-th owner uses in the place of `shared`."""
        return self._scalars.get(k) or [value_behind(each) for each in self.shared]

    @contextlib.contextmanager
    def behind(self, k: int, copy: Sequence[tf.Variable]) -> Iterator[None]:
        """Inside, what the k-th owner updates stands behind the `keras.Variable`s.

        `copy` is the owner's copy of the trainable variables.
        """
        variables, owner = self._model.trainable_variables, self.owners[k]
        mine = {id(variables[i]): i for i in owner.owned}
        swaps = [*zip(self.shared, self.scalars(k), strict=True)]
        for i in owner.owned:
            swaps.append((variables[i], self._slices.get((i, owner.copy), copy[i])))
        for variable, slots in self._slots():
            for slot in slots if id(variable) in mine else ():
                at = [*self.parts[mine[id(variable)]]].index(owner.copy)
                swaps.append((slot, sharded.places(slot)[at]))
        with swapped_values(*zip(*swaps, strict=True)):
            yield


def join(
    optimizer: keras.optimizers.Optimizer, home_of: Callable[[keras.Variable], str]
) -> None:
    """Has slots that are cut be whole again, unless their variable is cut as well."""
    for leaf in optimizers.updating(optimizer):
        known = optimizers.known_variables(leaf)
        for variable, slots in zip(known, optimizers.slots(leaf), strict=True):
            for slot in slots if sharded.of(variable) is None else ():
                if sharded.of(slot) is not None:
                    sharded.join(slot, home_of(slot))


def part_of(value: tf.Tensor | tf.IndexedSlices, part: Part) -> Any:
    """Takes a part of a variable's value, or of its gradient."""
    if part.whole:
        return value
    first, end = part.start, part.stop
    if part.has_rows:
        row = math.prod(part.shape[1:])
        first, end = first // row, end // row
    elif not isinstance(value, tf.IndexedSlices):
        value = tf.reshape(value, [-1])
    if not isinstance(value, tf.IndexedSlices):
        return value[first:end]
    # Duplicates stay apart, as optimizers square each by itself.
    values, places = value.values, value.indices
    if not part.has_rows:
        row = math.prod(values.shape[1:])
        places = places[:, tf.newaxis] * row + tf.range(row, dtype=places.dtype)
        values, places = tf.reshape(values, [-1]), tf.reshape(places, [-1])
    inside = (places >= first) & (places < end)
    return tf.IndexedSlices(
        tf.boolean_mask(values, inside),
        tf.boolean_mask(places, inside) - first,
        tf.constant(part.shape, places.dtype),
    )


def whole_of(parts: Sequence[tf.Tensor], shape: Sequence[int]) -> tf.Tensor:
    """Puts together what `part_of` has taken apart."""
    return parts[0] if len(parts) == 1 else tf.reshape(tf.concat(parts, 0), shape)


def refusal(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Says what keeps an optimizer's state from being sharded, if anything does."""
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


def _may_be_cut(optimizer, variable):
    """Whether an optimizer updates each number of a variable by itself."""
    leaf = optimizers.updating_one(optimizer, variable)
    return (
        optimizers.is_elementwise(leaf)
        and not leaf.clipnorm
        and variable.constraint is None
        and not variable.overwrite_with_gradient
        and tf.as_dtype(variable.dtype).is_floating
    )


def _slice(old, device, part):
    """A variable for a slice of another; without a value, it has no rows."""
    with tf.init_scope():
        empty = tf.zeros([0, *part.shape[1:]], old.dtype)
    return variable_like(empty, device, old, tf.TensorShape([None, *part.shape[1:]]))
