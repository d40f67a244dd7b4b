"""Gathers parameters in parts: once in a step (`gather_once`), or for each use.

For each use, an operation that takes a parameter takes what a gather of its own makes
of the parts on all devices. So the whole value is there while it is needed, and no
longer: the gradient of a layer gathers its parameters again. A gather begins when the
one before the last was used up, as otherwise all would begin at once, and all
parameters would be there. So one parameter travels while another one is used.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.layer_calls import key
from towers.collectives import packing
from towers.keras_adapter.graphs import GraphDef, add_copy
from towers.layers.parameters import ShardedParameter

# How many whole parameters a tower has at once: one in use, and one that arrives.
_AT_ONCE = 2


def gather_once(
    parameters: Sequence[ShardedParameter],
    devices: Sequence[str],
    packs: Callable[[str], bool],
) -> list[list[tf.Tensor]]:
    """Puts parameters together on each of several devices.

    Args:
        parameters: The parameters.
        devices: The devices.
        packs: Tells whether values travel packed to a device.

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
        of: What it stands for: a parameter, however often the function reads it, or a
            tensor that was made of one, by its key.
        output: The name of the tensor that it makes.
        takers: The names of the operations that take it.
    """

    of: Any
    output: str
    takers: list[str]


class Gathers:
    """The gathers of a part of a graph, in the order in which they run.

    Attributes:
        captured: By the name of its feed, the handle of each shard that is read.
        reads: The names of the operations that read shards.
    """

    def __init__(self, graph: GraphDef, feed: str):
        """Adds nothing yet.

        Args:
            graph: The part of a graph to which gathers are added.
            feed: How the names of its feeds begin.
        """
        self._graph, self._feed = graph, feed
        self.captured: dict[str, tf.Tensor] = {}
        self.reads: list[str] = []
        self._feeds: dict[int, str] = {}
        self._last: list[_Gather] = []

    def add(
        self, taker: tf.Operation, tensor: tf.Tensor, parameter: ShardedParameter
    ) -> str:
        """Adds a gather for an operation; returns the name of the tensor it makes.

        An operation that takes what one of the last gathers has made shares that.

        Args:
            taker: The operation that takes the value.
            tensor: The value in the traced function: that of a read of the stand-in, or
                of operations such as casts behind it.
            parameter: The parameter.
        """
        is_read = tensor.op.type == "ReadVariableOp"
        of = id(parameter) if is_read else key(tensor)
        for gather in self._last:
            if gather.of == of:
                gather.takers.append(taker.name)
                return gather.output
        ended = []
        if len(self._last) == _AT_ONCE:
            # An operation may take more parameters than that, such as a loop.
            takers = [name for name in self._last.pop(0).takers if name != taker.name]
            ended = [f"^{name}" for name in takers]
        scope = f"gather/{taker.name}/{tensor.op.name}"
        output = self._behind(tensor, scope, self._read(parameter, scope, ended))
        self._last.append(_Gather(of, output, [taker.name]))
        return output

    def _read(self, parameter, scope, ended):
        """Reads all shards, and puts them together; returns the name of the value."""
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
        """Copies what stands between the read and a tensor, such as casts."""
        chain = []
        while tensor.op.type != "ReadVariableOp":
            chain.append(tensor.op)
            tensor = tensor.op.inputs[0]
        for op in reversed(chain):
            others = [
                self._constant(
                    f"{scope}/{op.name}/{i}", tf.get_static_value(each), each.dtype
                )
                for i, each in enumerate(op.inputs[1:], start=1)
            ]
            node = add_copy(self._graph, op, [value, *others])
            node.name, node.device = f"{scope}/{op.name}", ""
            value = f"{node.name}:0"
        return value

    def _handle(self, shard):
        """The name of the feed of a shard's handle."""
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
        # Without a type, an empty shape would be of floats.
        proto = tf.make_tensor_proto(value, dtype)
        node.attr["dtype"].type = proto.dtype
        node.attr["value"].tensor.CopyFrom(proto)
        return f"{name}:0"
