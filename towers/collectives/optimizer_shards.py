"""Optimizer state in shards: which tower has which slots, and what it updates.

The towers are those of all hosts. Each host knows who owns what, and has what its own
towers own.

Every tower has a copy of the parameters, and owns a part of them: it alone has the
optimizer's slots of that part (`partition.py`). Where a border cuts a variable, its
slots are cut as well. Where an optimizer looks at whole variables, none is cut.

While an owner's part is updated, its slots and a slice of each cut variable stand
behind the `keras.Variable`s (`behind`), and the user's own optimizer is applied to
them. The slice is empty between steps.

Optimizers assign within branches, so a slice has to be a variable. What they look at
across variables, such as norms, is computed before, over all owners.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.collectives import packing
from towers.collectives.partition import Extent, partition
from towers.collectives.parts import Part
from towers.collectives.world import ALONE, World
from towers.devices.names import HOST
from towers.hosts import group
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
from towers.program.features import feature

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
    """The shards of an optimizer's state, and who owns them.

    Attributes:
        hosts: The hosts among whose towers it is divided.
        with_gradients: Which of `sharded.targets` have a gradient, on any tower; known
            once the gradients of several hosts are added.
    """

    def __init__(
        self,
        model: keras.Model,
        by_stage: Callable[[Sequence[Any]], Any],
        hosts: World = ALONE,
        copies: Sequence[int] = (),
    ):
        """Creates nothing yet.

        Args:
            model: The user's model, compiled.
            by_stage: Yields, of some variables, the places of those of each stage, and
                the devices of this host's copies, the model's own first.
            hosts: See the attributes.
            copies: How many copies each host has, if there are several hosts.
        """
        self._model, self._by_stage = model, by_stage
        self.hosts, self.with_gradients = hosts, frozenset()
        # Where the copies of each host begin, among those of all.
        self._first = [0, *itertools.accumulate(copies)]
        # By variable and copy; and by owner, a copy of each of `shared`.
        self._slices: dict[tuple[int, int], tf.Variable] = {}
        self._scalars: dict[int, list[tf.Variable]] = {}

    @property
    def targets(self) -> list[keras.Variable]:
        """What has a gradient of its own, and a place here; see `sharded.targets`."""
        return sharded.targets(self._model.trainable_variables)

    @functools.cached_property
    def stages(self) -> list[tuple[Sequence[int], Sequence[str]]]:
        """The places of each stage's variables, and the devices of their copies."""
        return [*self._by_stage(self.targets)]

    @property
    def across_hosts(self) -> bool:
        """Whether this host has a part of the state only."""
        return self.hosts.count > 1

    @functools.cached_property
    def parts(self) -> list[Mapping[int, Part]]:
        """This host's parts of each trainable variable, in order, by owner's copy."""
        first = self._first[self.hosts.index]
        return [
            {part.owner - first: part for part in of_hosts[self.hosts.index]}
            for of_hosts in self.parts_of_hosts
        ]

    @functools.cached_property
    def parts_of_hosts(self) -> list[list[list[Part]]]:
        """The parts of each trainable variable that each host has, in order."""
        variables, tables = (
            self.targets,
            embeddings.tables(self._model),
        )
        found = {}
        for places, devices in self.stages:
            # Tables that are cut have their slots beside them.
            places = [i for i in places if sharded.of(variables[i]) is None]
            optimizer = self._model.optimizer
            extents = [_extent(variables[i], optimizer, tables) for i in places]
            first = self._first if self.across_hosts else [0, len(devices)]
            every = partition(extents, first[-1])
            for i, parts in zip(places, every, strict=True):
                found[i] = [
                    [part for part in parts if begin <= part.owner < end]
                    for begin, end in itertools.pairwise(first)
                ]
        nowhere = [[] for _ in range(self.hosts.count)]
        return [found.get(i, nowhere) for i in range(len(variables))]

    @functools.cached_property
    def owners(self) -> list[Owner]:
        """This host's owners. The first uses the optimizer's scalars, others copies.

        The last has all tables that are cut, if there are some.
        """
        owners = [
            Owner(
                copy,
                device,
                tuple(i for i in places if copy in self.parts[i]),
                tuple(devices),
            )
            # What belongs to no layer is on the last stage.
            for places, devices in reversed(self.stages)
            for copy, device in enumerate(devices)
        ]
        if tables := tuple(sharded.devices(self._model.trainable_variables)):
            owners.append(Owner(0, owners[0].device, tables, ()))
        return owners

    @property
    def shared(self) -> list[keras.Variable]:
        """What the optimizer has besides slots, such as its count of steps."""
        slots = self.slot_ids()
        every = optimizers.all_variables(self._model.optimizer)
        return [each for each in every if id(each) not in slots]

    def slot_ids(self) -> set[int]:
        """Returns the `id` of each slot. Slots are where their owners are."""
        return slot_ids(self._model)

    def _slots(self):
        return _slots(self._model)

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """Inside, an optimizer that is built creates its slots with their owners.

        Where hosts come and go, it creates them whole, in the host's memory: those that
        have trained have them so, and all hosts `create` the same.
        """
        with patched(optimizers.ADD_SLOT, self._add_slot):
            yield

    def _add_slot(self, add_slot, optimizer, reference_variable, *args, **options):
        reference = reference_variable
        if sharded.of(reference) is not None:
            return add_slot(optimizer, reference, *args, **options)
        # It would be created where the variable is, whole.
        with tf.device(HOST):
            slot = optimizers.add_slot_here(optimizer, reference, *args, **options)
        if group.member() is not None:
            return slot
        for i, variable in enumerate(self.targets):
            if variable is reference:
                self._place(slot, i)
        return slot

    def create(self) -> None:
        """Moves slots that exist to their owners, and creates what these need."""
        for layout in ("stages", "parts_of_hosts", "parts", "owners"):
            # Stages may have been divided anew since slots were created.
            vars(self).pop(layout, None)
        indices = {id(v): i for i, v in enumerate(self.targets)}
        for variable, slots in self._slots():
            whole = sharded.of(variable) is None
            for slot in slots if whole and id(variable) in indices else ():
                with tf.init_scope():
                    self._place(slot, indices[id(variable)], by_first_host=True)
        for places, devices in self.stages:
            for i in places:
                old = value_behind(self.targets[i])
                for copy, part in self.parts[i].items():
                    if not part.whole:
                        self._slices[i, copy] = _slice(old, devices[copy], part)
        for k, owner in enumerate(self.owners[1:], start=1):
            shared = map(value_behind, self.shared)
            copies = [variable_like(old, owner.device, old) for old in shared]
            self._scalars[k] = copies

    def _place(self, slot, i, by_first_host=False):
        """Cuts a slot as its variable is, and puts the parts where these are."""
        parts = self.parts[i]
        every = next(devices for places, devices in self.stages if i in places)
        devices = [every[copy] for copy in parts]
        before, old = sharded.places(slot), value_behind(slot)
        # One that is not of the variable's shape is nowhere cut.
        shapes = [slot.shape if part.whole else part.shape for part in parts.values()]
        if (
            getattr(old, "across_hosts", False) == self.across_hosts
            and len(before) == len(parts)
            and all(
                old.device.endswith(device) and tuple(old.shape) == tuple(shape)
                for old, device, shape in zip(before, devices, shapes, strict=True)
            )
        ):
            return
        whole = old.numpy()
        if by_first_host and self.across_hosts:
            (whole,) = self.hosts.broadcast([tf.constant(whole)], "optimizer state")
            whole = whole.numpy()
        flat = whole.reshape(-1)
        cuts = zip(parts.values(), shapes, devices, strict=True)
        shards = [
            variable_like(
                (whole if part.whole else flat[part.start : part.stop]).reshape(shape),
                *(device, old),
            )
            for part, shape, device in cuts
        ]
        of_hosts = self.parts_of_hosts[i]
        if self.across_hosts:
            spread = feature("collectives.spread.variable").SpreadVariable
            new = spread(shards, old.shape, of_hosts, self.hosts, old)
        else:
            new = _joined(shards, *of_hosts, old.shape)
        put_behind(slot, new)

    def variables(self) -> list[tf.Variable]:
        """Returns what there is besides what stands behind the optimizer's own."""
        return [*self._slices.values(), *itertools.chain(*self._scalars.values())]

    def slice_of(self, i: int, copy: int) -> tf.Variable | None:
        """Returns what the owner with a copy updates of a variable, if that is cut."""
        return self._slices.get((i, copy))

    def scalars(self, k: int) -> list[tf.Variable]:
        """Returns what the k-th owner uses in the place of `shared`."""
        return self._scalars.get(k) or [value_behind(each) for each in self.shared]

    @contextlib.contextmanager
    def behind(self, k: int, copy: Sequence[tf.Variable]) -> Iterator[None]:
        """Inside, what the k-th owner updates stands behind the `keras.Variable`s.

        `copy` is the owner's copy of the trainable variables.
        """
        variables, owner = self.targets, self.owners[k]
        # Shards of tables come to stand there one after another.
        whole = [i for i in owner.owned if sharded.of(variables[i]) is None]
        mine = {id(variables[i]): i for i in whole}
        swaps = [*zip(self.shared, self.scalars(k), strict=True)]
        for i in mine.values():
            swaps.append((variables[i], self._slices.get((i, owner.copy), copy[i])))
        for variable, slots in self._slots():
            for slot in slots if id(variable) in mine else ():
                at = [*self.parts[mine[id(variable)]]].index(owner.copy)
                swaps.append((slot, sharded.places(slot)[at]))
        with swapped_values(*zip(*swaps, strict=True)):
            yield


def slot_ids(model: keras.Model) -> set[int]:
    """Returns the `id` of each slot of a model's optimizer."""
    return {id(slot) for _, of_one in _slots(model) for slot in of_one}


def _slots(model):
    """Yields each variable that the optimizer knows, and its slots."""
    if getattr(model, "optimizer", None) is None:
        return
    for leaf in optimizers.updating(model.optimizer):
        known = optimizers.known_variables(leaf)
        yield from zip(known, optimizers.slots(leaf), strict=True)


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


def _extent(variable, optimizer, tables):
    shape, unit = tuple(variable.shape), 0
    if _may_be_cut(optimizer, variable):
        unit = packing.aligned(tf.as_dtype(variable.dtype))
        if id(variable) in tables:
            # Its gradient consists of rows, each of which goes to one owner.
            unit = shape[-1]
    return Extent(shape, bytes_of(variable), unit)


def _joined(shards, parts, shape):
    """What stands behind a slot on one host, made of shards for these parts."""
    if len(shards) == 1:
        return shards[0]
    return sharded.ShardedVariable(shards, shape, 0 if parts[0].has_rows else None)


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
