"""Says which stage of a tf.data pipeline is the slowest, by tf.data's own statistics.

tf.data counts, for each of its iterators, the elements it has made and the time that
its threads spent in it: `tf.data.experimental.get_model_proto`. That is a tree of
counters, with a branch for each file that is open; here it becomes a list of stages.
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

# What does no work of its own that anybody could save.
_NO_STAGES = {"root", "assert_cardinality", "options", "model", "finite_skip"}
# Their functions make data sets.
_NESTED = {"flat_map", "interleave"}
_JOINS = {"zip", "concatenate", "directed_interleave"}


class Stage(NamedTuple):
    """A stage of a pipeline.

    Attributes:
        kind: What tf.data calls it, such as "map", "batch", "TFRecord".
        label: What the user calls it: the `name=` of the transformation, or the name of
            its function; "read" for where data come from; else empty.
        ms_per_batch: Time of one thread, for each batch that leaves the pipeline.
        threads: How many share that work.
        segment: Stages of one number run in the same threads, one after the other; the
            towers themselves wait for those of segment 0.
        ahead: Elements that it may have ready before they are asked for.
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
        """Time for each batch, if its threads work all the time."""
        return self.ms_per_batch / self.threads


# The names of functions in a data set, from its end: of a stage whose function makes
# data sets, those in there.
Labels = Sequence["str | Labels"]


@dataclasses.dataclass(frozen=True)
class Reading:
    """The counters of an iterator, since it was made.

    Attributes:
        nodes: The counters of its stages, by number.
        root: Number of the last stage.
        dataset: What it iterates over.
        labels: The stages' names.
    """

    nodes: Mapping[int, ModelProto.Node]
    root: int
    dataset: tf.data.Dataset | None = None
    labels: Labels = ()

    def stages(self, since: "Reading | None" = None) -> list[Stage]:
        """The stages, the last one first.

        Args:
            since: An earlier reading of the same iterator, to count only what came
                after it.
        """
        walk = _Walk(self.nodes, since.nodes if since else {})
        return [*walk.down([self.nodes[self.root]], 1.0, iter(self.labels), 0, 1)]


def read(iterator: tf.data.Iterator, before: Reading | None = None) -> Reading | None:
    """Reads the counters of an iterator, which takes less than 0.1 ms.

    Args:
        iterator: One of tf.data, read eagerly or in a graph.
        before: An earlier reading; of the same data set, its labels are taken: to look
            for them takes some milliseconds.

    Returns:
        The counters, or None if there are none: with tf.data's autotuning turned off.
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
    """The stage that a batch takes most time in, of the segment that sets the pace."""
    segment = max(stages, key=lambda stage: _segment_ms(stages, stage), default=None)
    if segment is None:
        return None
    same = [stage for stage in stages if stage.segment == segment.segment]
    return max(same, key=lambda stage: stage.ms_per_batch)


def pace_ms(stages: Sequence[Stage]) -> float:
    """Milliseconds a batch takes, if towers never wait for anything else."""
    return max((_segment_ms(stages, stage) for stage in stages), default=0.0)


def _segment_ms(stages, of):
    return sum(stage.busy_ms for stage in stages if stage.segment == of.segment)


class _Walk:
    """Goes over a tree of counters, from the last stage to where data come from."""

    def __init__(self, nodes: Mapping[int, Any], before: Mapping[int, Any]):
        self._nodes, self._before = nodes, before
        self._segments = itertools.count(1)

    def down(
        self, nodes: Sequence[Any], per_batch: float, labels: Iterator, segment, threads
    ) -> Iterable[Stage]:
        """The stage that some nodes are, and those before it.

        Args:
            nodes: The same stage, in each branch of a stage behind it.
            per_batch: Elements it makes for each batch.
            labels: The names of this stage and those before it.
            segment: The number of the segment that asks for its elements.
            threads: Of that segment.
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
                # Its function runs in many threads, and one feeds them.
                below = next(self._segments), 1
        if kind not in _NO_STAGES:
            ms = self._ms_per_element(nodes) * per_batch
            yield Stage(kind, label, ms, threads, segment, _ahead(nodes, threads))
        for branch, several in self._branches(nodes, kind):
            elements = per_batch * self._ratio(nodes, branch, several)
            names = iter(inner) if several else labels
            yield from self.down(branch, elements, names, *below)

    def _branches(self, nodes, kind):
        """The nodes before some: what comes from a nested data set, then the inputs."""
        inputs = [[self._nodes[i] for i in node.inputs] for node in nodes]
        if kind in _NESTED:
            nested = [each for some in inputs for each in some[1:]]
            # With most elements first: the others may just have been opened.
            nested.sort(key=lambda node: -node.num_elements)
            if nested:
                yield nested, True
            inputs = [some[:1] for some in inputs]
        for branch in itertools.zip_longest(*inputs):
            yield [node for node in branch if node is not None], False

    def _ratio(self, nodes, branch, nested):
        """Elements of a branch for one of these nodes'."""
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
    """Returns tf.data's word for a class.

    'ParallelMapV2' and '_MapDataset' are "map", as is 'MapAndBatch', which
    TensorFlow makes of a map and a batch.
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


# Names. tf.data's counters have none, so they are looked for in the data set itself.


def _labels(dataset: tf.data.Dataset | None) -> Labels:
    try:
        return _labels_from(dataset)
    except (AttributeError, tf.errors.NotFoundError):
        # A data set of some other making; a name is not worth a run.
        return []


def _labels_from(dataset):
    found = []
    while dataset is not None:
        functions, inputs = functions_of(dataset), inputs_of(dataset)
        if len(functions) == 1:
            function = functions[0].function.name.decode()
            metadata = metadata_of(dataset)
            found += _labels_of(_kind(type(dataset).__name__), metadata, function)
        dataset = inputs[0] if len(inputs) == 1 else None
    return found


def _inner_labels(function: str) -> Labels:
    """Those of the data set that a function makes."""
    found = []
    for op in reversed(function_definition(function).node_def):
        kind = _kind(op.op)
        if kind in _JOINS:
            break
        metadata = Metadata.FromString(op.attr["metadata"].s)
        found += _labels_of(kind, metadata, op.attr["f"].func.name)
    return found


def _labels_of(kind, metadata, function):
    """What one transformation adds to a list of labels."""
    if kind in _NESTED:
        return [_inner_labels(function)]
    if kind != "map" or _does_nothing(function):
        return []
    if metadata.name:
        return [metadata.name.decode()]
    name = re.sub(r"^__inference_Dataset_map_|_\d+$", "", function)
    return ["" if name == "lambda" or name.startswith("class") else name]


def _does_nothing(function):
    # Such as that in front of `unbatch`; TensorFlow leaves it out.
    body = function_definition(function)
    arguments, results = body.signature.input_arg, body.signature.output_arg
    same = {op.op for op in body.node_def} <= {"Identity", "NoOp"}
    return same and len(arguments) == len(results)
