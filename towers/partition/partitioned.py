"""Runs a function of a batch on several towers, as one device would."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.axes.own import Decided
from towers.analysis.kinds import ROWS
from towers.analysis.layer_calls import key
from towers.collectives import batch, packing
from towers.partition.combined import Combination
from towers.partition.errors import PartitionError, where
from towers.partition.phases import phases
from towers.partition.placement import STATEFUL_DRAWS, Placement
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


class Partitioned:
    """A function of a batch, traced and divided among home and towers.

    Attributes:
        trace: The function as it was traced.
        placement: Where its operations run.
        phases: What runs in one go, in order.
    """

    def __init__(
        self, function: Callable[[Any], Any], spec: Any, loss_placement: str = "auto"
    ):
        """Traces a function of a batch.

        Args:
            function: Takes a batch; see `Trace`.
            spec: As for `Trace`.
            loss_placement: Where examples meet: "auto" is at home, on the rows of all
                towers. "tower" is on each tower, which takes its rows for the batch.

        Raises:
            PartitionError: Towers cannot compute it.
        """
        own = Decided() if loss_placement == "tower" else None
        try:
            self.trace, self.placement = _placed(function, spec, True, own)
        except PartitionError:
            # Operations within a layer are needed outside: all are read one by one.
            self.trace, self.placement = _placed(function, spec, False, own)
        self.phases = phases(self.trace, self.placement)

    def lines(self, name: str) -> Sequence[str]:
        """Says what the function, of some name, cannot compute on towers."""
        lines = [*self.placement.lines(name)]
        if self.trace.compiled:
            lines.append(
                f"{name} calls a tf.function with jit_compile=True, which towers trace "
                "without XLA. Layers such as Dropout then draw what they draw without."
            )
        return lines

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
        call = _Call(self, plan, local_batches, size, observer)
        for phase in self.phases:
            call.run(phase)
        if observer is not None and call.computed:
            observer.computed(call.computed)
        with tf.device(plan.home):
            flat = call.at_home(self.trace.returned)
        return self.trace.packed(flat)


def _placed(function, spec, knows_regions, decided):
    """Traces and places a function, again where one trace decides for the next."""
    for _ in range(_TRACES):
        trace, error = Trace(function, spec, knows_regions, decided), None
        try:
            placement = Placement(trace)
        except PartitionError as found:
            error = found
        before, decided = decided, trace.decide()
        if before == decided and error is not None:
            raise error
        if before == decided:
            return trace, placement
    raise PartitionError(
        "Towers find no end of what is each tower's own, as loss_placement='tower' "
        "asks; use 'auto'."
    )


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
        self._combined = Combination(plan, self._placement, size)
        trace = partitioned.trace
        self._home: dict[Any, tf.Tensor] = {}
        self._towers: list[dict[Any, tf.Tensor]] = []
        for local, fraction in zip(local_batches, fractions, strict=True):
            given = tf.nest.flatten([trace.batch], expand_composites=True)
            values = tf.nest.flatten([local], expand_composites=True)
            pairs = zip(given, values, strict=True)
            mine = {key(t): value for t, value in pairs if t is not None}
            self._towers.append({**mine, key(trace.fraction): fraction})
        # What has been sent to a tower.
        self._sent: list[dict[Any, tf.Tensor]] = [{} for _ in local_batches]

    def run(self, phase):
        """Runs a phase, at home or on each tower."""
        if not phase.place.on_towers:
            with tf.device(self._plan.home), tf.name_scope("home"):
                values = self.at_home([taken.tensor for taken in phase.takes])
                with self._observed(phase):
                    made = phase(values)
            self._home.update(zip(map(key, phase.makes), made, strict=True))
            return
        with tf.device(self._plan.home):
            self.at_home([taken.tensor for taken in phase.takes if taken.whole])
        self.computed = []
        for k, tower in enumerate(self._plan.towers):
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
            value = self._home[key(tensor)]
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
