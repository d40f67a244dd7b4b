"""Gathers sharded parameters: once a step (`gather_once`), or for each use.

With a gather for each use, an operation that takes a parameter takes the result of a
gather of its own from the shards on all devices. The full value exists only while it is
needed: the gradient of a layer gathers the layer's parameters again. A gather waits
until the result of the one before the last was used. Otherwise all gathers would begin
at once, and all parameters would be in memory. One parameter thus is sent while another
one is used.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.layer_calls import key
from towers.collectives import packing
from towers.keras_adapter.graphs import GraphDef, add_copy
from towers.layers.parameters import ShardedParameter

# The full parameters that a tower holds at once: one in use, and one that arrives.
_AT_ONCE = 2


def gather_once(
    parameters: Sequence[ShardedParameter],
    devices: Sequence[str],
    packs: Callable[[str], bool],
) -> list[list[tf.Tensor]]:
    """Gathers parameters on each of several devices.

    Args:
        parameters: The parameters.
        devices: The devices.
        packs: Returns whether values are sent packed to a device.

    Returns:
        For each device, the value of each parameter.
    """
    by_source = {}
    for parameter in parameters:
        for shard in parameter.shards:
            by_source.setdefault(shard.device, []).append(shard)
    values, buffers = {}, {}
    for source, shards in by_source.items():
        with tf.device(source), tf.name_scope("gather"):
            values[source] = [*map(tf.convert_to_tensor, shards)]
            if any(map(packs, devices)):
                buffers[source] = packing.pack(values[source])
    gathered = []
    for device in devices:
        with tf.device(device), tf.name_scope("gather"):
            received = {}
            for source, shards in by_source.items():
                arrived = values[source]
                if packs(device) and not source.endswith(device):
                    arrived = packing.unpack(buffers[source], arrived)
                received |= zip(map(id, shards), arrived, strict=True)
            gathered.append(
                [
                    parameter.joined(
                        [received[id(shard)] for shard in parameter.shards]
                    )
                    for parameter in parameters
                ]
            )
    return gathered


class _Gather(NamedTuple):
    """A gather in a graph.

    Attributes:
        of: The gathered value: the `id` of the parameter for a read, or the key of a
            tensor that was derived from one.
        output: The name of the resulting tensor.
        takers: The names of the operations that take the result.
    """

    of: Any
    output: str
    takers: list[str]


class Gathers:
    """The gathers of a part of a graph, in the order in which they run.

    Attributes:
        captured: The handle of each shard that is read, by the name of its feed.
        reads: The names of the operations that read shards.
    """

    def __init__(self, graph: GraphDef, feed: str):
        """Starts without gathers.

        Args:
            graph: The part of a graph to which gathers are added.
            feed: The prefix of the names of feeds.
        """
        self._graph, self._feed = graph, feed
        self.captured: dict[str, tf.Tensor] = {}
        self.reads: list[str] = []
        self._feeds: dict[int, str] = {}
        self._last: list[_Gather] = []
        # The results that the current operation takes, by what they are of.
        self._taker, self._taken = "", {}

    def add(
        self, taker: tf.Operation, tensor: tf.Tensor, parameter: ShardedParameter
    ) -> str:
        """Adds a gather for an operation; returns the name of the resulting tensor.

        An operation that takes the value of one of the last gathers shares that gather,
        as do all inputs of one operation that have the same value. Call this for all
        inputs of an operation in turn.

        Args:
            taker: The operation that takes the value.
            tensor: The value in the traced function: a read of the stand-in, or the
                result of operations such as casts on the read value.
            parameter: The parameter.
        """
        is_read = tensor.op.type == "ReadVariableOp"
        of = id(parameter) if is_read else key(tensor)
        if taker.name != self._taker:
            self._taker, self._taken = taker.name, {}
        if of in self._taken:
            return self._taken[of]
        self._taken[of] = self._of_taker(of, taker, tensor, parameter)
        return self._taken[of]

    def _of_taker(self, of, taker, tensor, parameter):
        """Returns the name of a value that an operation has not taken before."""
        for gather in self._last:
            if gather.of == of:
                gather.takers.append(taker.name)
                return gather.output
        ended = []
        if len(self._last) == _AT_ONCE:
            # One operation, such as a loop, may take more parameters than `_AT_ONCE`.
            takers = [name for name in self._last.pop(0).takers if name != taker.name]
            ended = [f"^{name}" for name in takers]
        scope = f"gather/{taker.name}/{tensor.op.name}"
        output = self._behind(tensor, scope, self._read(parameter, scope, ended))
        self._last.append(_Gather(of, output, [taker.name]))
        return output

    def _read(self, parameter, scope, ended):
        """Reads and concatenates all shards; returns the name of the value."""
        reads = []
        for k, shard in enumerate(parameter.shards):
            read = self._node(f"{scope}/read_{k}", "ReadVariableOp", shard.dtype)
            read.attr["dtype"].type = read.attr.pop("T").type
            read.input.extend([self._handle(shard), *ended])
            reads.append(f"{read.name}:0")
            self.reads.append(read.name)
        value = reads[0]
        if len(reads) > 1:
            joined = self._node(f"{scope}/concat", "ConcatV2", parameter.dtype)
            joined.input.extend([*reads, self._constant(f"{scope}/axis", 0)])
            joined.attr["N"].i = len(reads)
            joined.attr["Tidx"].type = tf.int32.as_datatype_enum
            value = f"{joined.name}:0"
        if parameter.axis is None:
            shaped = self._node(f"{scope}/reshape", "Reshape", parameter.dtype)
            shape = self._constant(f"{scope}/shape", parameter.shape.as_list())
            shaped.input.extend([value, shape])
            shaped.attr["Tshape"].type = tf.int32.as_datatype_enum
            value = f"{shaped.name}:0"
        return value

    def _behind(self, tensor, scope, value):
        """Copies the operations between the read and a tensor, such as casts."""
        chain = []
        while tensor.op.type != "ReadVariableOp":
            chain.append(tensor.op)
            tensor = tensor.op.inputs[0]
        for op in reversed(chain):
            others = [
                self._constant(
                    f"{scope}/{op.name}/{i}",
                    tf.get_static_value(operand),
                    operand.dtype,
                )
                for i, operand in enumerate(op.inputs[1:], start=1)
            ]
            node = add_copy(self._graph, op, [value, *others])
            node.name, node.device = f"{scope}/{op.name}", ""
            value = f"{node.name}:0"
        return value

    def _handle(self, shard):
        """Returns the name of the feed of a shard's handle."""
        if id(shard.handle) not in self._feeds:
            feed = f"{self._feed}shard_{len(self._feeds)}:0"
            self._feeds[id(shard.handle)] = feed
            self.captured[feed] = shard.handle
        return self._feeds[id(shard.handle)]

    def _node(self, name, kind, dtype):
        node = self._graph.node.add(name=name, op=kind)
        node.attr["T"].type = dtype.as_datatype_enum
        return node

    def _constant(self, name, value, dtype=tf.int32):
        node = self._graph.node.add(name=name, op="Const")
        # Without a type, an empty shape would become a float tensor.
        proto = tf.make_tensor_proto(value, dtype)
        node.attr["dtype"].type = proto.dtype
        node.attr["value"].tensor.CopyFrom(proto)
        return f"{name}:0"
