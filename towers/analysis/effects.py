"""Finds the operations of a traced function that have side effects.

Each tower runs the function for its local batch. A side effect that Keras does not
control then happens once on each tower, and each tower draws its own random numbers.
TensorFlow marks operations that are not functions of their inputs as stateful. Every
stateful operation counts as a side effect, except for those listed here, which only
read, check, or keep a value while the function runs. The search includes branches,
loops and called functions.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import tensorflow as tf

from towers.analysis.layer_calls import key
from towers.keras_adapter.graphs import (
    function_definition,
    may_change,
    operation_definition,
)

# These operations only read.
_READS = set(
    """ReadVariableOp ResourceGather ResourceGatherNd VariableShape VarIsInitializedOp
    DisableCopyOnRead LookupTableFindV2 LookupTableSizeV2 LookupTableExportV2
    DeviceIndex GuaranteeConst StatelessRandomGetAlg Timestamp""".split()
)
_CHECKS = {"Assert", "CheckNumerics", "CheckNumericsV2"}
# These operations call functions, and have the side effects of these functions.
_CALLS = {"Case", "If", "StatefulPartitionedCall", "While"}
# The state of these operations ends with the call. The cuDNN operations are functions
# of their inputs.
_OF_THE_CALL = set(
    """CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackprop CudnnRNNBackpropV2
    CudnnRNNBackpropV3 DeepCopy Empty StackCloseV2 StackPopV2 StackPushV2 StackV2
    TensorArrayCloseV3 TensorArrayConcatV3 TensorArrayGatherV3 TensorArrayGradV3
    TensorArrayGradWithShape TensorArrayReadV3 TensorArrayScatterV3 TensorArraySizeV3
    TensorArraySplitV3 TensorArrayV3 TensorArrayWriteV3""".split()
)
HARMLESS = _READS | _CHECKS | _CALLS | _OF_THE_CALL

# These operations call functions of Python.
PYTHON = {"EagerPyFunc", "PyFunc"}
# Every tower repeats these operations, and no number changes.
REPEATED = PYTHON | set(
    """Print PrintV2 WriteAudioSummary WriteGraphSummary WriteHistogramSummary
    WriteImageSummary WriteRawProtoSummary WriteScalarSummary WriteSummary""".split()
)
RANDOM = set(
    """AllCandidateSampler FixedUnigramCandidateSampler LearnedUnigramCandidateSampler
    LogUniformCandidateSampler Multinomial NonDeterministicInts
    ParameterizedTruncatedNormal RandomCrop RandomGamma RandomPoisson RandomPoissonV2
    RandomShuffle RandomStandardNormal RandomUniform RandomUniformInt RngReadAndSkip
    RngSkip SampleDistortedBoundingBox SampleDistortedBoundingBoxV2
    StatefulRandomBinomial StatefulStandardNormal StatefulStandardNormalV2
    StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt StatefulUniformInt
    ThreadUnsafeUnigramCandidateSampler TruncatedNormal
    UniformCandidateSampler""".split()
)
# These operations advance the state of a `tf.random.Generator`, a variable.
OF_GENERATORS = set(
    """RngReadAndSkip RngSkip StatefulRandomBinomial StatefulStandardNormal
    StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform
    StatefulUniformFullInt StatefulUniformInt""".split()
)


class Effect(NamedTuple):
    """A side effect of an operation.

    Attributes:
        name: The name of the operation in the graph that has or calls the side effect.
        type: The type of the operation with the side effect.
    """

    name: str
    type: str

    def __str__(self) -> str:
        return f"'{self.name}' ({self.type})"


def of(operations: Iterable[tf.Operation]) -> Iterator[Effect]:
    """Yields the side effects of operations and of the functions that they call.

    Args:
        operations: Operations of one graph.
    """
    known: dict[str, dict[str, None]] = {}
    for op in operations:
        stateful, calls = _kind(op.type)
        if stateful and op.type not in HARMLESS:
            yield Effect(op.name, op.type)
        # Most operations call no function, and looking up a definition is slow.
        for type_ in _of_functions(op.node_def, calls, known) if calls else ():
            if type_ not in HARMLESS:
                yield Effect(op.name, type_)


def changed(graph: tf.Graph) -> set[int]:
    """Returns the `id`s of the variable handles that a function's graph may change."""
    outside = {key(inside): id(handle) for handle, inside in graph.captures}
    names = {effect.name for effect in of(graph.get_operations())}
    operations = map(graph.get_operation_by_name, names)
    handles = [tensor for op in operations for tensor in may_change(op)]
    return {outside[key(tensor)] for tensor in handles if key(tensor) in outside}


def checks(operation: tf.Operation) -> bool:
    """Checks whether an operation can stop the program by a failed check."""
    _, calls = _kind(operation.type)
    types = _of_functions(operation.node_def, calls, {}) if calls else ()
    return operation.type in _CHECKS or any(type_ in _CHECKS for type_ in types)


def only_checks(operation: tf.Operation) -> bool:
    """Checks whether an operation only checks, and its result is unused.

    `tf.debugging.assert_*` create such branches, whose result says that the check
    passed.
    """
    consumers = [consumer for t in operation.outputs for consumer in t.consumers()]
    branch = operation.type in ("If", "StatelessIf") and len(operation.outputs) == 1
    passed_on = any(
        consumer.type != "Identity" or consumer.outputs[0].consumers()
        for consumer in consumers
    )
    return operation.type == "Assert" or (
        branch and checks(operation) and not passed_on
    )


def _of_functions(node, calls, known):
    """Returns the types of stateful operations in the functions that a node calls.

    `known` has the types of each function, by its name, once the function was read.
    """
    return dict.fromkeys(
        type_ for name in _called(node, calls) for type_ in _of_function(name, known)
    )


def _of_function(name, known):
    if name in known:
        return known[name]
    types, waiting, seen = {}, [name], set()
    # A function may call itself.
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        for inner in function_definition(function).node_def:
            stateful, calls = _kind(inner.op)
            if stateful:
                types[inner.op] = None
            waiting += _called(inner, calls)
    known[name] = types
    return types


def _called(node, calls):
    """Yields the names of the functions that a node calls directly."""
    for attribute in calls:
        value = node.attr[attribute]
        if value.HasField("func"):
            yield value.func.name
        yield from (function.name for function in value.list.func)


@functools.cache
def _kind(type_):
    """Returns whether an operation type is stateful, and its function attributes."""
    definition = operation_definition(type_)
    if definition is None:  # the name of a called function
        return False, ()
    calls = [a.name for a in definition.attr if a.type in ("func", "list(func)")]
    return definition.is_stateful, calls
