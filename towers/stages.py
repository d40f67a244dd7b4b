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
from tensorflow.core.framework import dataset_metadata_pb2, model_pb2
from tensorflow.python.eager import context

STARVED = 0.05
"""From this share of waiting on, a run is called input-bound."""

# Of the time of a step: a stage that takes so much has nothing to spare for a hiccup.
_AS_SLOW = 0.9

# To hand over a batch that is ready takes less.
_HANDED_MS = 1.0

_ADVICE = {
    "map": "pass it num_parallel_calls=tf.data.AUTOTUNE, .cache() what it makes, or do "
    "less in it",
    "map in parallel": "do less in it, .cache() what it makes, or give the input more "
    "CPU cores, here or by tf.data's service",
    "batch": "make the examples smaller, or pass it num_parallel_calls",
    "shuffle": "take a smaller buffer, and shuffle before decoding",
    "data_service": "start more workers",
    "read": "keep the data on a faster disk or in memory (.cache()), in fewer and "
    "larger files, or .interleave() several with num_parallel_calls",
    "read in parallel": "keep the data on a faster disk or in memory (.cache()), or in "
    "fewer and larger files",
    "generator": "give it workers (keras.utils.PyDataset has them), or write its "
    "data to TFRecord files once and for all",
    "interleave": "begin fewer data sets in it, of larger files or longer epochs",
    "flat_map": "begin fewer data sets in it, of larger files or longer epochs",
    "": "do less in it, or .cache() what it makes",
}

_ASYNCHRONOUS = {
    model_pb2.NodeClass.ASYNC_INTERLEAVE_MANY,
    model_pb2.NodeClass.ASYNC_KNOWN_RATIO,
    model_pb2.NodeClass.ASYNC_UNKNOWN_RATIO,
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

    nodes: Mapping[int, model_pb2.ModelProto.Node]
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
    dataset = iterator._dataset
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


def verdict(
    waiting: float,
    step_ms: float,
    stages: Sequence[Stage],
    advice: Mapping[str, str] | None = None,
) -> str:
    """Says in a sentence whether the towers starve, and what to do.

    Args:
        waiting: Share of the time in which the towers waited for input.
        step_ms: Milliseconds a step takes without that.
        stages: Of the input, the last one first; none if nothing is known.
        advice: What to do about a stage, by its label, where there is more to say than
            of tf.data in general.
    """
    waited = f"towers waited {waiting:.0%} of the time"
    if waiting < STARVED:
        return f"compute-bound: {waited}"
    return f"input-bound: {waited}; {_cause(waiting, step_ms, stages, advice or {})}"


def _cause(waiting, step_ms, stages, advice):
    if not stages:
        return (
            "tf.data has no statistics of this input, so the slowest stage is unknown; "
            "try a tf.data.Dataset, with options.autotune left on"
        )
    if pace_ms(stages) >= _AS_SLOW * step_ms:
        stage = slowest(stages)
        found = advice.get(stage.label) or _advice(stage)
        return f"the slowest stage is {stage}; try this: {found}"
    wait_ms = step_ms * waiting / max(1 - waiting, 1e-9)
    if wait_ms < _HANDED_MS:
        return (
            f"no stage is slower than a step, but to hand over a batch takes "
            f"{wait_ms:.1f} ms, and a step only {step_ms:.1f}; try larger batches, or "
            "more steps in a call"
        )
    ahead = next((s.ahead for s in stages if s.ahead and s.segment == 1), 0)
    found = f".prefetch({max(8, 4 * ahead)}) at its end"
    runs = f"no more than {ahead} ahead of the towers" if ahead else "no batch ahead"
    return (
        f"no stage is slower than a step, but the input runs {runs}; "
        f"try {advice.get('prefetch', found)}"
    )


def _advice(stage):
    if "generator" in stage.kind.lower():
        kind = "generator"
    elif stage.label == "read":
        kind = "read"
    else:
        kind = next((kind for kind in _ADVICE if kind and kind in stage.kind), "")
    parallel = f"{kind} in parallel"
    return _ADVICE[parallel if stage.threads > 1 and parallel in _ADVICE else kind]


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
                old = before.get(node.id, model_pb2.ModelProto.Node())
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
        functions, inputs = dataset._functions(), dataset._inputs()
        if len(functions) == 1:
            function = functions[0].function.name.decode()
            metadata = dataset._metadata
            found += _labels_of(_kind(type(dataset).__name__), metadata, function)
        dataset = inputs[0] if len(inputs) == 1 else None
    return found


def _inner_labels(function: str) -> Labels:
    """Those of the data set that a function makes."""
    found = []
    for op in reversed(context.context().get_function_def(function).node_def):
        kind = _kind(op.op)
        if kind in _JOINS:
            break
        metadata = dataset_metadata_pb2.Metadata.FromString(op.attr["metadata"].s)
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
    body = context.context().get_function_def(function)
    arguments, results = body.signature.input_arg, body.signature.output_arg
    same = {op.op for op in body.node_def} <= {"Identity", "NoOp"}
    return same and len(arguments) == len(results)
