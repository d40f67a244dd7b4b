"""Finds the operations of a traced function that have a side effect.

A tower runs once on each device, for its local batch. A change behind Keras's back then
happens once on each tower, and each tower draws its own random numbers. TensorFlow
marks operations that are more than a function of their inputs as stateful. All of them
count except the ones listed here, which only read, check, or keep a value while the
function runs. Branches, loops and calls are searched, too.
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

# They only read.
_READS = set(
    """ReadVariableOp ResourceGather ResourceGatherNd VariableShape VarIsInitializedOp
    DisableCopyOnRead LookupTableFindV2 LookupTableSizeV2 LookupTableExportV2
    DeviceIndex GuaranteeConst StatelessRandomGetAlg Timestamp""".split()
)
_CHECKS = {"Assert", "CheckNumerics", "CheckNumericsV2"}
# They are as harmless as the functions that they call.
_CALLS = {"Case", "If", "StatefulPartitionedCall", "While"}
# Their state ends with the call. cuDNN's are functions of their inputs.
_OF_THE_CALL = set(
    """CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackprop CudnnRNNBackpropV2
    CudnnRNNBackpropV3 DeepCopy Empty StackCloseV2 StackPopV2 StackPushV2 StackV2
    TensorArrayCloseV3 TensorArrayConcatV3 TensorArrayGatherV3 TensorArrayGradV3
    TensorArrayGradWithShape TensorArrayReadV3 TensorArrayScatterV3 TensorArraySizeV3
    TensorArraySplitV3 TensorArrayV3 TensorArrayWriteV3""".split()
)
HARMLESS = _READS | _CHECKS | _CALLS | _OF_THE_CALL

# Each tower repeats them, and they change no number.
REPEATED = set(
    """EagerPyFunc Print PrintV2 PyFunc WriteAudioSummary WriteGraphSummary
    WriteHistogramSummary WriteImageSummary WriteRawProtoSummary WriteScalarSummary
    WriteSummary""".split()
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
# Their draws change a variable, the state of a `tf.random.Generator`.
OF_GENERATORS = set(
    """RngReadAndSkip RngSkip StatefulRandomBinomial StatefulStandardNormal
    StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform
    StatefulUniformFullInt StatefulUniformInt""".split()
)


class Effect(NamedTuple):
    """An operation that does more than compute.

    Attributes:
        name: The name of the operation, or of the operation in the graph that runs it.
        type: The type of the operation.
    """

    name: str
    type: str

    def __str__(self) -> str:
        return f"'{self.name}' ({self.type})"


def of(operations: Iterable[tf.Operation]) -> Iterator[Effect]:
    """Yields the effects of operations, and of all functions that they call.

    Args:
        operations: The operations of a graph, or some of them.
    """
    seen = set()
    for op in operations:
        stateful, calls = _kind(op.type)
        if stateful and op.type not in HARMLESS:
            yield Effect(op.name, op.type)
        # Most operations call no function, and looking up a definition takes long.
        for type_ in _of_functions(op.node_def, calls, seen) if calls else ():
            if type_ not in HARMLESS:
                yield Effect(op.name, type_)


def changed(graph: tf.Graph) -> set[int]:
    """Returns the `id`s of handles of variables that a function's graph may change."""
    outside = {key(inside): id(handle) for handle, inside in graph.captures}
    names = {effect.name for effect in of(graph.get_operations())}
    operations = map(graph.get_operation_by_name, names)
    taken = [tensor for op in operations for tensor in may_change(op)]
    return {outside[key(tensor)] for tensor in taken if key(tensor) in outside}


def checks(operation: tf.Operation) -> bool:
    """Tells whether an operation stops the program if a check fails."""
    _, calls = _kind(operation.type)
    types = _of_functions(operation.node_def, calls, set()) if calls else ()
    return operation.type in _CHECKS or any(type_ in _CHECKS for type_ in types)


def only_checks(operation: tf.Operation) -> bool:
    """Tells whether an operation only checks, and no operation takes its result.

    `tf.debugging.assert_*` make such branches, which return that they have passed.
    """
    taken = [consumer for t in operation.outputs for consumer in t.consumers()]
    branch = operation.type in ("If", "StatelessIf") and len(operation.outputs) == 1
    passed_on = any(
        consumer.type != "Identity" or consumer.outputs[0].consumers()
        for consumer in taken
    )
    return operation.type == "Assert" or (
        branch and checks(operation) and not passed_on
    )


def _of_functions(node, calls, seen):
    """Yields the types of stateful operations in the functions that a node calls."""
    waiting = list(_called(node, calls))
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for inner in function_definition(name).node_def:
            stateful, calls = _kind(inner.op)
            if stateful:
                yield inner.op
            waiting += _called(inner, calls)


def _called(node, calls):
    """Yields the names of the functions that a node calls."""
    for attribute in calls:
        value = node.attr[attribute]
        if value.HasField("func"):
            yield value.func.name
        yield from (function.name for function in value.list.func)


@functools.cache
def _kind(type_):
    """Returns whether a type of operation is stateful, and its function attributes."""
    definition = operation_definition(type_)
    if definition is None:  # the name of a function, which is called
        return False, ()
    calls = [a.name for a in definition.attr if a.type in ("func", "list(func)")]
    return definition.is_stateful, calls
