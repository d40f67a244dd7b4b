"""The sizes of local batches that towers are traced for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.builders.context import Context
from towers.collectives import batch
from towers.tower.traced import Sized, Traced

# Traces a tower for so many rows, `None` for any; and for XLA to compile, or not.
Trace = Callable[[int | None, bool], Traced]


class TraceSizes(NamedTuple):
    """The sizes that towers are traced for.

    On a GPU, a tower that knows no size computes shapes, and the host waits for the GPU
    to read them. XLA compiles for one size at a time, which takes as long for the last
    batch as for the first.

    Attributes:
        known: The usual size of each tower's local batch; `None` for any.
        size: The size of this batch: an int, or a scalar tensor.
        xla: Whether XLA compiles the towers.
        only: Whether a single tower has a batch of known size, so that one trace does.
    """

    known: Sequence[int | None]
    size: int | tf.Tensor
    xla: bool
    only: bool

    @classmethod
    def of(
        cls, context: Context, data: Any, size: int | tf.Tensor, xla: bool
    ) -> "TraceSizes":
        """Finds the sizes for towers of a plan.

        `data` is a batch, or a local one; `size` is that of the whole batch.
        """
        plan = context.plan
        fixed = isinstance(size, int)
        if plan.count == 1 and fixed:
            return cls([size], size, xla, only=True)
        usual = size if fixed else context.usual_rows
        known = [None] * len(plan.towers)
        if usual is not None and batch.is_dense(data) and (xla or plan.on_gpus):
            known = [rows or None for rows in plan.sizes(usual)]
        return cls(known, size, xla, only=False)

    def of_tower(self, k: int) -> "TraceSizes":
        """Returns the sizes for tower `k` alone, as the others differ from it."""
        return self._replace(known=self.known[k : k + 1])

    def any_size(self) -> "TraceSizes":
        """Returns the same for towers that are traced once, for any size."""
        return self._replace(known=[None] * len(self.known))

    def trace_first(self, trace: Trace) -> Traced:
        """Traces a tower for any size, unless there is only one.

        Rules are read from it: a graph must not know the number of examples for that.
        """
        if self.only:
            return trace(self.size, self.xla)
        return trace(None, self.xla and not any(self.known))

    def trace_all(self, trace: Trace, first: Traced) -> list[Traced | Sized]:
        """Traces towers for the sizes that are known; `first` is for all others."""
        if self.only or not any(self.known):
            return [first] * len(self.known)
        rows = dict.fromkeys(filter(None, self.known))
        usual = {size: trace(size, self.xla) for size in rows}
        if isinstance(self.size, int):
            return [usual.get(rows, first) for rows in self.known]
        return [
            Sized(usual[rows], first, rows) if rows else first for rows in self.known
        ]


def usual_rows_of(context: Context, local: Any) -> int | None:
    """Returns the size of a local batch if towers are traced for it, else `None`."""
    plan, size = context.plan, batch.batch_size(local)
    usual = plan.sizes(context.usual_rows or 0)
    return size if plan.on_gpus and batch.is_dense(local) and size in usual else None
