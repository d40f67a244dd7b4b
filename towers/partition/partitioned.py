"""Runs a function of a batch on several towers, as one device would."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.axes.own import Decided
from towers.analysis.kinds import ROWS, SUM
from towers.analysis.layer_calls import key
from towers.collectives import batch, packing, reduce
from towers.partition.combined import Combination
from towers.partition.errors import PartitionError, where
from towers.partition.phases import Phase, phases
from towers.partition.placement.placement import STATEFUL_DRAWS, Placement
from towers.partition.trace import Trace
from towers.plan import Plan

# Most functions need one, and those with totals behind what is own some more.
_TRACES = 9


class Observer(NamedTuple):
    """What looks at a call of a partitioned function.

    Attributes:
        computed: Is told what each tower has computed last: a list for each tower.
        gradients: Makes the context in which gradients of variables are used. It takes
            each tower's parts of them, a list for each tower, and their sums.
    """

    computed: Callable[[Sequence[Sequence[tf.Tensor]]], None]
    gradients: Callable[..., AbstractContextManager]


class Copied(NamedTuple):
    """The variables of which each tower has a copy.

    Attributes:
        handles: For each tower, by the `id` of a variable's handle, that of its copy.
            The first tower's copy is the variable itself.
        all_reduce_alg: How gradients are added for all; see `reduce.all_reduce`.
    """

    handles: Sequence[Mapping[int, tf.Tensor]]
    all_reduce_alg: str


class Partitioned:
    """A function of a batch, traced and divided among home and towers.

    Attributes:
        trace: The function as it was traced.
        placement: Where its operations run.
        copied: The variables that towers have copies of, if they have some.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        spec: Any,
        copied: Callable[[Trace], Copied | None] = lambda trace: None,
        loss_placement: str = "auto",
    ):
        """Traces a function of a batch.

        Args:
            function: Takes a batch; see `Trace`.
            spec: As for `Trace`.
            copied: Is called when variables that the function creates are there.
            loss_placement: Where examples meet: "auto" is at home, on the rows of all
                towers. "tower" is on each tower, which takes its rows for the batch.

        Raises:
            PartitionError: Towers cannot compute it.
        """
        self._copied = copied
        own = Decided() if loss_placement == "tower" else None
        trace = functools.partial(Trace, function, spec)
        try:
            self._place(functools.partial(trace, True), own)
        except PartitionError:
            # Operations within a layer are needed outside: all are read one by one.
            self._place(functools.partial(trace, False), own)

    @functools.cached_property
    def phases(self) -> list[list[Phase]]:
        """What runs in one go, in order: for each tower's copies."""
        found = phases(self.trace, self.placement)
        return [[phase.of_copy(each) for each in self.handles] for phase in found]

    def _place(self, trace, decided):
        """Traces and places, again where one trace decides for the next."""
        for _ in range(_TRACES):
            self.trace, error = trace(decided), None
            self.copied = self._copied(self.trace)
            known = self.handles[-1]
            try:
                self.placement = Placement(
                    self.trace, lambda each, known=known: id(each) in known
                )
            except PartitionError as found:
                error = found
            before, decided = decided, self.trace.decide()
            if before == decided and error is not None:
                raise error
            if before == decided:
                return
        raise PartitionError(
            "Towers find no end of what is each tower's own, as loss_placement='tower' "
            "asks; use 'auto'."
        )

    @property
    def handles(self) -> Sequence[Mapping[int, tf.Tensor]]:
        """See `Copied`; without copies, that of home alone."""
        return [{}] if self.copied is None else self.copied.handles

    def lines(self, name: str) -> Sequence[str]:
        """Says what the function, of some name, cannot compute on towers."""
        return [*self.placement.lines(name), *self.compiled(name)]

    def compiled(self, name: str) -> Sequence[str]:
        """Says what the function, of some name, does without XLA."""
        if not self.trace.compiled:
            return []
        return [
            f"{name} calls a tf.function with jit_compile=True, which towers trace "
            "without XLA. Layers such as Dropout then draw what they draw without."
        ]

    @property
    def stateful_draws(self) -> list[str]:
        """Where random numbers are drawn whose state is no variable, as phrases."""
        return [where(op) for op in self.placement.order if op.type in STATEFUL_DRAWS]

    def __call__(
        self,
        plan: Plan,
        local_batches: Sequence[Any],
        size: int | tf.Tensor,
        observer: Observer | None = None,
    ) -> Any:
        """Adds a call to the graph being built.

        Args:
            plan: Which towers compute, and where home is.
            local_batches: What each tower has of the batch, on its device.
            size: Number of examples of the batch.
            observer: What looks at it, if anything does.

        Returns:
            What the function returns for the whole batch, at home.
        """
        return self.on_copies(plan, local_batches, size, observer)[0]

    def on_copies(
        self,
        plan: Plan,
        local_batches: Sequence[Any],
        size: int | tf.Tensor,
        observer: Observer | None = None,
    ) -> list[Any]:
        """Adds a call to the graph being built; see `__call__`.

        Returns:
            What the function returns, at home; then what of it the device of each other
            copy has, in the same structure: sums that were all-reduced, `None` for all
            else.
        """
        call = _Call(self, plan, local_batches, size, observer)
        for phase in self.phases:
            call.run(phase)
        if observer is not None and call.computed:
            observer.computed(call.computed)
        with tf.device(plan.home):
            return [*map(self.trace.packed, call.returned(self.trace.returned))]


class _Call:
    """One call of a partitioned function: what home and towers have made so far.

    Attributes:
        computed: What each tower has made in its last phase.
    """

    def __init__(self, partitioned, plan, local_batches, size, observer):
        self._partitioned, self._plan, self._observer = partitioned, plan, observer
        self.computed: list[Sequence[tf.Tensor]] = []
        self._placement = partitioned.placement
        self._bounds = plan.bounds(size)
        self._sizes = plan.sizes(size)
        fractions = plan.fractions(self._sizes, size)
        self._combined = Combination(
            plan.hosts, self._placement, self._sizes, fractions
        )
        trace = partitioned.trace
        # What the device of each copy has of the whole batch. The first one is home.
        self._copies: list[dict[Any, tf.Tensor]] = [{} for _ in partitioned.handles]
        self._home = self._copies[0]
        self._towers: list[dict[Any, tf.Tensor]] = []
        for local, fraction in zip(local_batches, fractions, strict=True):
            given = tf.nest.flatten([trace.batch], expand_composites=True)
            values = tf.nest.flatten([local], expand_composites=True)
            pairs = zip(given, values, strict=True)
            mine = {key(t): value for t, value in pairs if t is not None}
            self._towers.append({**mine, key(trace.fraction): fraction})
        # What has been sent to a tower.
        self._sent: list[dict[Any, tf.Tensor]] = [{} for _ in local_batches]

    def run(self, of_copies):
        """Runs a phase, which is given for each copy: at home, or wherever it runs."""
        phase, plan = of_copies[0], self._plan
        if phase.place.on_towers:
            self._run_on_towers(of_copies)
            return
        takes = [taken.tensor for taken in phase.takes]
        with tf.device(plan.home), tf.name_scope("home"):
            if phase.place.on_copies:
                self._all_reduce(takes)
            self.at_home(takes)
            with self._observed(phase):
                self._run_on_copies(of_copies if phase.place.on_copies else [phase])

    def returned(self, tensors):
        """What each copy's device has of what the function returns."""
        self._all_reduce(tensors)
        others = [[mine.get(key(t)) for t in tensors] for mine in self._copies[1:]]
        return [self.at_home(tensors), *others]

    def _run_on_copies(self, of_copies):
        for k, phase in enumerate(of_copies):
            with tf.device(self._plan.towers[k].device if k else self._plan.home):
                made = phase([self._of_copy(k, taken.tensor) for taken in phase.takes])
            self._copies[k].update(zip(map(key, phase.makes), made, strict=True))

    def _run_on_towers(self, of_copies):
        phase = of_copies[0]
        with tf.device(self._plan.home):
            self.at_home([taken.tensor for taken in phase.takes if taken.whole])
        self.computed = []
        for k, tower in enumerate(self._plan.towers):
            phase = of_copies[k % len(of_copies)]
            # The first of all towers always has an example, unless there is none.
            known = isinstance(self._sizes[k], int) and self._sizes[k] > 0
            guard = None if known or tower.index == 0 else self._sizes[k]
            with tf.device(tower.device), tf.name_scope(f"tower_{k}"):
                values = [self._on_tower(k, *taken) for taken in phase.takes]
                if phase.draws:
                    rows = [self._bounds[k][0], self._sizes[k]]
                    values.append(tf.cast(tf.stack(rows), tf.int64))
                if guard is not None:
                    guard = tf.convert_to_tensor(guard)
                made = phase(values, guard)
            self._towers[k].update(zip(map(key, phase.makes), made, strict=True))
            self.computed.append(made)

    def _all_reduce(self, tensors):
        """Adds gradients for all copies, and keeps the sums on the device of each."""
        gradients = [
            tensor
            for tensor in tensors
            if key(tensor) not in self._home
            and self._placement.is_on_towers(tensor)
            and self._placement.kind(tensor) is SUM
            and tensor.dtype.is_floating
            and tensor.shape.is_fully_defined()
        ]
        if not gradients or len(self._copies) == 1 or self._plan.hosts.count > 1:
            # What hosts add is sent to the copies of each.
            return
        devices, keys = self._plan.devices, [*map(key, gradients)]
        parts = [[made[each] for each in keys] for made in self._towers]
        algorithm = self._partitioned.copied.all_reduce_alg
        sums = reduce.all_reduce(parts, devices, devices, algorithm)
        for mine, each in zip(self._copies, sums, strict=True):
            mine.update(zip(keys, each, strict=True))

    def _of_copy(self, k, tensor):
        """The whole batch's value of a tensor, on the device of a copy."""
        mine = self._copies[k]
        if key(tensor) not in mine:
            mine[key(tensor)] = packing.copy(self._home[key(tensor)])
        return mine[key(tensor)]

    def _observed(self, phase):
        """The context of a phase at home, in which it takes gradients of towers."""
        wanted = self._partitioned.trace.gradients
        found = {key(t): t for t, _ in phase.takes if key(t) in wanted}
        if self._observer is None or not found:
            return nullcontext()
        parts = [[made[each] for each in found] for made in self._towers]
        return self._observer.gradients(parts, self.at_home([*found.values()]))

    def at_home(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the whole batch's values of tensors, at home."""
        missing = {
            key(tensor): tensor
            for tensor in tensors
            if tensor.op.type != "Const"
            and not self._placement.is_captured(tensor)
            and key(tensor) not in self._home
        }
        parts = [[made[each] for made in self._towers] for each in missing]
        found = self._combined([*missing.values()], parts)
        self._home.update(zip(missing, found, strict=True))
        return [*map(self._whole, tensors)]

    def _whole(self, tensor):
        if tensor.op.type == "Const":
            return tf.constant(tf.get_static_value(tensor), tensor.dtype)
        if self._placement.is_captured(tensor):
            return self._placement.outside(tensor)
        return self._home[key(tensor)]

    def _on_tower(self, k, tensor, whole):
        """A tensor as a tower takes it: its own, or what home sends."""
        if not whole and key(tensor) in self._towers[k]:
            return self._towers[k][key(tensor)]
        if key(tensor) not in self._sent[k]:
            # Where there are no copies, home has the only one.
            value = self._copies[k % len(self._copies)].get(key(tensor))
            value = self._home[key(tensor)] if value is None else value
            if not whole and self._placement.kind(tensor) is ROWS:
                value = self._cut(k, value, self._placement.blocks(tensor))
            self._sent[k][key(tensor)] = packing.copy(value)
        return self._sent[k][key(tensor)]

    def _cut(self, k, value, blocks):
        """A tower's rows of a tensor of the whole batch."""
        if blocks is None:
            return batch.take(value, *self._bounds[k])
        total = batch.batch_size(value) // sum(blocks)
        parts = tf.split(value, [count * total for count in blocks])
        start, end = self._bounds[k]
        mine = [
            batch.take(part, count * start, count * end)
            for part, count in zip(parts, blocks, strict=True)
        ]
        return tf.concat(mine, axis=0)
