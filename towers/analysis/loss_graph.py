"""A compiled loss as a graph of its own, which takes totals of the whole batch.

A mean over what a mask leaves is a ratio of sums: sum(loss * mask) / sum(mask). The
local batches' ratios do not make the whole batch's. But if each tower divides its
numerator by the denominator of the whole batch, the towers' parts add up, and so do
their gradients. Denominators depend on the data alone, so they are added up before the
towers compute. Where a loss needs that is read from its graph (`dependence.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers.analysis.kinds import Dependence, Edge, Total
from towers.analysis.layer_calls import key
from towers.keras_adapter.graphs import GraphDef, add_copy, keep_functions


class LossGraph:
    """Some scalars that a loss computes, and the totals that they take.

    Attributes:
        rules: How the towers' scalars make the whole batch's.
        kinds: Of each total, how those of local batches make that of the whole batch,
            and the type of the operation that made it; see `dependence.Total`.
    """

    def __init__(
        self,
        values: Sequence[tf.Tensor],
        outputs: Any,
        others: Any,
        local_batch: Any,
        totals: Mapping[Edge, Total],
        rules: Sequence[Dependence],
        rows_of: Callable[[tf.Tensor], int | None],
    ):
        """Copies a part of the graph that is being traced.

        Args:
            values: The scalars.
            outputs: What the values are computed from: the model's outputs, a nest.
            others: What else they are computed from: a nest of tensors and of `None`.
            local_batch: What the totals are computed from: the same.
            totals: The totals, by what takes them; see `Reader.with_totals`.
            rules: How the scalars of all towers make the whole batch's.
            rows_of: Returns how many rows of a tensor each example has, `None` if that
                is not known.

        Raises:
            ValueError: The values need something else, or have a gradient of their own
                that cannot be copied, or a total needs another one, or the shape of
                outputs that is not known.
        """
        self.rules = rules
        found = {key(total.tensor): total for total in totals.values()}
        self.kinds = [(t.kind, t.tensor.op.type) for t in found.values()]
        place = {each: j for j, each in enumerate(found)}
        taken = {edge: f"{_TOTAL}{place[key(t.tensor)]}" for edge, t in totals.items()}
        tensors = [total.tensor for total in found.values()]
        self._values = _Cut(values, [outputs, others], taken, tensors)
        # Of outputs, a total takes the shape and nothing else.
        self._totals = _Cut(tensors, [local_batch, outputs], rows_of=rows_of)
        if self._totals.operations & {edge.operation for edge in taken}:
            raise ValueError("a total of the batch that another total takes")
        sizes = [t.shape[1:].is_fully_defined() for t in _flat(outputs)]
        if self._totals.takes_more_than(local_batch) and not all(sizes):
            raise ValueError("the shape of an output, which is not known")
        self._outputs = tf.nest.map_structure(tf.type_spec_from_value, outputs)

    def values(
        self, outputs: Any, others: Any, totals: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Adds the scalars to the graph that is being traced.

        Args:
            outputs: Such a nest as the graph was made with.
            others: The same.
            totals: Those of the whole batch.
        """
        return self._values([outputs, others], totals)

    def totals_of(self, local_batch: Any) -> list[tf.Tensor]:
        """Adds the totals of a local batch to the graph that is being traced."""
        rows = tf.shape(next(t for t in _flat(local_batch) if t is not None))[0]

        def as_large(spec):
            return tf.zeros([rows, *spec.shape[1:]], spec.dtype)

        outputs = self._outputs
        if self._totals.takes_more_than(local_batch):
            outputs = tf.nest.map_structure(as_large, outputs)
        return self._totals([local_batch, outputs], rows=rows)


_FEED, _TOTAL, _SHAPE = "towers_feed_", "towers_total_", "towers_shape_"


class _Cut:
    """A part of a graph, from what it is fed with to some tensors.

    What it is fed with has names, and no nodes: XLA could not compile a placeholder.

    Attributes:
        operations: The names of those that were copied.
    """

    def __init__(self, tensors, feeds, taken=None, totals=(), rows_of=lambda _: None):
        self._tensors = [tensor.name for tensor in tensors]
        self._graph = GraphDef()
        self._fed = {f"{_TOTAL}{j}" for j in range(len(totals))}
        # Shapes of what is not computed here: rows for each example, and all else.
        self._shapes = {}
        names = {
            key(feed): f"{_FEED}{i}"
            for i, feed in enumerate(_flat(feeds))
            if feed is not None
        }
        waiting, seen = [], set()
        self.operations = seen

        def source(tensor):
            if (name := names.get(key(tensor))) is not None:
                self._fed.add(name)
                return name
            if tensor.op.type == "Shape" and key(tensor.op.inputs[0]) not in names:
                (shaped,) = tensor.op.inputs
                rows, sizes = rows_of(shaped), shaped.shape[1:]
                if rows is not None and sizes.is_fully_defined():
                    name = f"{_SHAPE}{len(self._shapes)}"
                    self._shapes[name] = rows, sizes.as_list(), tensor.dtype
                    return name
            waiting.append(tensor.op)
            return tensor.name

        for tensor in tensors:
            source(tensor)
        while waiting:
            op = waiting.pop()
            if op.name in seen:
                continue
            seen.add(op.name)
            if op.type.startswith("Placeholder"):
                raise ValueError(f"'{op.name}', which is not a part of the loss")
            if "_gradient_op_type" in op.node_def.attr:
                # That function knows the tensors of this graph, and no copies.
                raise ValueError(f"'{op.name}' ({op.type}), with its own gradient")
            inputs = [
                (taken or {}).get(Edge(op.name, i)) or source(tensor)
                for i, tensor in enumerate(op.inputs)
            ]
            # Without what only had to come before.
            add_copy(self._graph, op, inputs).device = ""
        keep_functions(self._graph, tensors[0].graph)

    def takes_more_than(self, feeds):
        count = len(_flat(feeds))
        return any(
            int(name.removeprefix(_FEED)) >= count
            for name in self._fed
            if name.startswith(_FEED)
        )

    def __call__(self, feeds, totals=(), rows=None):
        given = {f"{_FEED}{i}": feed for i, feed in enumerate(_flat(feeds))}
        given |= {
            name: tf.cast(tf.stack([count * rows, *sizes]), dtype)
            for name, (count, sizes, dtype) in self._shapes.items()
        }
        given |= {f"{_TOTAL}{j}": total for j, total in enumerate(totals)}
        # TensorFlow cannot import into a scope of control dependencies.
        with tf.control_dependencies(None):
            return tf.graph_util.import_graph_def(
                self._graph,
                input_map={
                    f"{name}:0": given[name] for name in {*self._fed, *self._shapes}
                },
                return_elements=self._tensors,
                name="compiled_loss",
            )


def _flat(feeds):
    return tf.nest.flatten(feeds, expand_composites=True)
