"""Finds the slowest stage of a tf.data pipeline, from tf.data's own statistics.

For each of its iterators, tf.data counts the elements, and the time that its threads
have spent: `tf.data.experimental.get_model_proto`. The counters form a tree, with a
branch for each open file; this module makes a list of stages of it.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.keras_adapter.datasets import (
    Metadata,
    ModelProto,
    NodeClass,
    dataset_of,
    functions_of,
    inputs_of,
    metadata_of,
)
from towers.keras_adapter.graphs import function_definition

_ASYNCHRONOUS = {
    NodeClass.ASYNC_INTERLEAVE_MANY,
    NodeClass.ASYNC_KNOWN_RATIO,
    NodeClass.ASYNC_UNKNOWN_RATIO,
}

# These do no work that anybody could save.
_NO_STAGES = {"root", "assert_cardinality", "options", "model", "finite_skip"}
# The functions of these make data sets.
_NESTED = {"flat_map", "interleave"}
_JOINS = {"zip", "concatenate", "directed_interleave"}


class Stage(NamedTuple):
    """A stage of a pipeline.

    Attributes:
        kind: The name that tf.data gives it, such as "map", "batch", "TFRecord".
        label: The name that the user gives it: the `name=` of the transformation, or
            the name of its function; "read" for the source of the data; else empty.
        ms_per_batch: Time of one thread, for each batch that leaves the pipeline.
        threads: The number of threads that share that work.
        segment: Stages with the same number run in the same threads, one after the
            other; the towers themselves wait for segment 0.
        ahead: The number of elements that it may prepare before they are needed.
    """

    kind: str
    label: str
    ms_per_batch: float
    threads: int
    segment: int
    ahead: int

    def __str__(self) -> str:
        return f"`{self.kind}` ({self.label})" if self.label else f"`{self.kind}`"

    @property
    def busy_ms(self) -> float:
        """Time for each batch, if all its threads work all the time."""
        return self.ms_per_batch / self.threads


# The names of functions in a data set, from its end; for a stage whose function makes
# data sets, the names in these.
Labels = Sequence["str | Labels"]


@dataclasses.dataclass(frozen=True)
class Reading:
    """The counters of an iterator, since it was made.

    Attributes:
        nodes: The counters of its stages, by number.
        root: The number of the last stage.
        dataset: The data set of the iterator.
        labels: The names of the stages.
    """

    nodes: Mapping[int, ModelProto.Node]
    root: int
    dataset: tf.data.Dataset | None = None
    labels: Labels = ()

    def stages(self, since: "Reading | None" = None) -> list[Stage]:
        """Returns the stages, the last one first.

        Args:
            since: An earlier reading of the same iterator, to count only later
                elements.
        """
        walk = _Walk(self.nodes, since.nodes if since else {})
        return [*walk.down([self.nodes[self.root]], 1.0, iter(self.labels), 0, 1)]


def read(iterator: tf.data.Iterator, before: Reading | None = None) -> Reading | None:
    """Reads the counters of an iterator, which takes less than 0.1 ms.

    Args:
        iterator: An iterator of tf.data, read eagerly or in a graph.
        before: An earlier reading. For the same data set, its labels are used: finding
            them takes some milliseconds.

    Returns:
        The counters, or None if there are none, as tf.data's autotuning is turned off.
    """
    try:
        proto = tf.data.experimental.get_model_proto(iterator)
    except (tf.errors.NotFoundError, ValueError):
        return None
    if proto.output not in proto.nodes:
        return None
    dataset = dataset_of(iterator)
    if before is not None and before.dataset is dataset:
        labels = before.labels
    else:
        labels = _labels(dataset)
    return Reading(proto.nodes, proto.output, dataset, labels)


def slowest(stages: Sequence[Stage]) -> Stage | None:
    """Returns the stage in which a batch takes longest, in the slowest segment."""
    segment = max(stages, key=lambda stage: _segment_ms(stages, stage), default=None)
    if segment is None:
        return None
    same = [stage for stage in stages if stage.segment == segment.segment]
    return max(same, key=lambda stage: stage.ms_per_batch)


def pace_ms(stages: Sequence[Stage]) -> float:
    """Returns the time of a batch in milliseconds if towers wait for nothing else."""
    return max((_segment_ms(stages, stage) for stage in stages), default=0.0)


def _segment_ms(stages, of):
    return sum(stage.busy_ms for stage in stages if stage.segment == of.segment)


class _Walk:
    """Walks down a tree of counters, from the last stage to the source of the data."""

    def __init__(self, nodes: Mapping[int, Any], before: Mapping[int, Any]):
        self._nodes, self._before = nodes, before
        self._segments = itertools.count(1)

    def down(
        self, nodes: Sequence[Any], per_batch: float, labels: Iterator, segment, threads
    ) -> Iterable[Stage]:
        """Yields the stage of some nodes, and the stages before it.

        Args:
            nodes: The same stage, in each branch of the stage after it.
            per_batch: The number of elements that it makes for each batch.
            labels: The names of this stage and of the stages before it.
            segment: The number of the segment that requests its elements.
            threads: The threads of that segment.
        """
        first, kind = nodes[0], _kind(nodes[0].name)
        label = inner = ""
        if kind == "map":
            label = _next(labels, str)
        elif kind in _NESTED:
            inner = _next(labels, list)
        elif kind in _JOINS:
            labels = iter(())
        elif not any(node.inputs for node in nodes) and first.ratio == 0:
            label, kind = "read", first.name
        below = segment, threads
        if first.node_class in _ASYNCHRONOUS:
            segment, threads = next(self._segments), _parallelism(nodes)
            below = segment, threads
            if kind == "map":
                # Its function runs in many threads, and one thread feeds them.
                below = next(self._segments), 1
        if kind not in _NO_STAGES:
            ms = self._ms_per_element(nodes) * per_batch
            yield Stage(kind, label, ms, threads, segment, _ahead(nodes, threads))
        for branch, several in self._branches(nodes, kind):
            elements = per_batch * self._ratio(nodes, branch, several)
            names = iter(inner) if several else labels
            yield from self.down(branch, elements, names, *below)

    def _branches(self, nodes, kind):
        """Yields the branches before some nodes: nested data sets, then inputs."""
        inputs = [[self._nodes[i] for i in node.inputs] for node in nodes]
        if kind in _NESTED:
            nested = [node for some in inputs for node in some[1:]]
            # Most elements first: the other data sets may just have been opened.
            nested.sort(key=lambda node: -node.num_elements)
            if nested:
                yield nested, True
            inputs = [some[:1] for some in inputs]
        for branch in itertools.zip_longest(*inputs):
            yield [node for node in branch if node is not None], False

    def _ratio(self, nodes, branch, nested):
        """Returns the elements of a branch for each element of these nodes."""
        if nested:
            return 1.0
        if nodes[0].ratio > 0:
            return nodes[0].ratio
        made = sum(node.num_elements for node in nodes)
        return sum(node.num_elements for node in branch) / made if made else 1.0

    def _ms_per_element(self, nodes):
        for before in (self._before, {}):
            elements = time_ns = 0
            for node in nodes:
                old = before.get(node.id, ModelProto.Node())
                elements += _elements(node) - _elements(old)
                time_ns += node.processing_time - old.processing_time
            if elements > 0:
                return time_ns / elements / 1e6
        return 0.0


def _elements(node):
    return node.num_elements + node.buffered_elements


def _kind(name):
    """Returns tf.data's name for a class.

    'ParallelMapV2' and '_MapDataset' are "map", as is 'MapAndBatch', which TensorFlow
    makes of a map and a batch.
    """
    name = re.sub(r"^_?(Parallel)?|AndBatch|Dataset|V\d+$", "", name)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _parallelism(nodes):
    values = [
        p.state_value for n in nodes for p in n.parameters if p.name == "parallelism"
    ]
    return max(1, round(max(values, default=1)))


def _ahead(nodes, threads):
    if nodes[0].node_class not in _ASYNCHRONOUS:
        return 0
    sizes = [
        p.state_value for n in nodes for p in n.parameters if p.name == "buffer_size"
    ]
    return round(max(sizes, default=threads))


def _next(labels, type_):
    label = next(labels, None)
    return label if isinstance(label, type_) else type_()


# Names. tf.data's counters have none, so the data set itself is searched.


def _labels(dataset: tf.data.Dataset | None) -> Labels:
    try:
        return _labels_from(dataset)
    except (AttributeError, tf.errors.NotFoundError):
        # A data set of an unknown kind; a name is not worth failing a run.
        return []


def _labels_from(dataset):
    labels = []
    while dataset is not None:
        functions, inputs = functions_of(dataset), inputs_of(dataset)
        if len(functions) == 1:
            function = functions[0].function.name.decode()
            metadata = metadata_of(dataset)
            labels += _labels_of(_kind(type(dataset).__name__), metadata, function)
        dataset = inputs[0] if len(inputs) == 1 else None
    return labels


def _inner_labels(function: str) -> Labels:
    """Returns the labels of the data set that a function makes."""
    labels = []
    for op in reversed(function_definition(function).node_def):
        kind = _kind(op.op)
        if kind in _JOINS:
            break
        metadata = Metadata.FromString(op.attr["metadata"].s)
        labels += _labels_of(kind, metadata, op.attr["f"].func.name)
    return labels


def _labels_of(kind, metadata, function):
    """Returns the labels that one transformation adds."""
    if kind in _NESTED:
        return [_inner_labels(function)]
    if kind != "map" or _does_nothing(function):
        return []
    if metadata.name:
        return [metadata.name.decode()]
    name = re.sub(r"^__inference_Dataset_map_|_\d+$", "", function)
    return ["" if name == "lambda" or name.startswith("class") else name]


def _does_nothing(function):
    # For example, the map in front of `unbatch`, which TensorFlow leaves out.
    body = function_definition(function)
    arguments, results = body.signature.input_arg, body.signature.output_arg
    same = {op.op for op in body.node_def} <= {"Identity", "NoOp"}
    return same and len(arguments) == len(results)
