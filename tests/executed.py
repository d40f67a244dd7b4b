"""What TensorFlow executed: the graphs after placing, optimising and partitioning."""

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

# What sends a tensor to another device, or to the host for one.
SENDS = "_Send", "_HostSend"

# What TensorFlow runs to create a variable, as a graph of its own.
CREATION = {"VarHandleOp", "_Retval", "_DeviceRetval"}

Nodes = Mapping[str, Sequence[Any]]


def run(function: Callable[[], Any], name: str) -> Nodes:
    """Runs `function` and returns what ran: for each device, its nodes.

    TensorFlow tells of a graph when it first runs it. It also tells of graphs that
    earlier tests ran, and mixes those that several threads start at once. Ours are
    those in which `name` occurs, except that the creation of a variable is none.
    """
    context.context().enable_graph_collection()
    try:
        function()
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_graph_collection()
    nodes = collections.defaultdict(list)
    for reported in metadata.function_graphs:
        for graph in _connected(reported.partition_graphs):
            if any(name.encode() in each.SerializeToString() for each in graph):
                ran = [*itertools.chain(*(each.node for each in graph))]
                if {node.op for node in ran} <= CREATION:
                    continue
                for node in ran:
                    nodes[node.device[node.device.index("/device") :]].append(node)
    return nodes


def _connected(partitions):
    """Returns groups of partitions between which tensors travel: a graph is a group.

    The graphs of two towers may name a tensor alike. Where it goes tells them apart.
    """
    ends = ("tensor_name", "send_device", "recv_device")
    groups = []  # of partitions, and the tensors that they exchange
    for partition in partitions:
        members = [partition]
        exchanged = {
            tuple(node.attr[end].s for end in ends)
            for node in partition.node
            if node.op in (*SENDS, "_Recv")
        }
        for group in [group for group in groups if group[1] & exchanged]:
            groups.remove(group)
            members, exchanged = group[0] + members, group[1] | exchanged
        groups.append((members, exchanged))
    return [members for members, _ in groups]


def transfers(nodes: Nodes) -> list[tuple[str, str, tf.DType, str]]:
    """Returns the tensors that go from one device to another.

    Returns:
        For each: the two devices, its type, and the name of the node that made it.
        What only tells that something is done is left out, and so are numbers of a loop
        whether to go on.
    """
    found = []
    for source, each in nodes.items():
        for node in each:
            if node.op not in SENDS or "/ctrl/" in node.input[0]:
                continue
            target = node.attr["recv_device"].s.decode()
            target = target[target.index("/device") :]
            dtype = tf.as_dtype(node.attr["T"].type)
            if "LoopCond" not in node.input[0]:
                found.append((source, target, dtype, node.input[0]))
    return found


def behind(nodes: Nodes, node: Any) -> set[str]:
    """Returns the names of all nodes that have to be done before a node can begin.

    What a device receives comes from its sender. The way ends where a loop goes round.
    """
    by_name = {n.name: n for each in nodes.values() for n in each}
    senders = {
        n.attr["tensor_name"].s: n
        for each in nodes.values()
        for n in each
        if n.op in SENDS
    }
    seen, left = set(), [node]
    while left:
        node = left.pop()
        if node.op == "NextIteration":
            continue
        names = [name.lstrip("^").split(":")[0] for name in node.input]
        before = [by_name[name] for name in names]
        if node.op == "_Recv":
            before.append(senders[node.attr["tensor_name"].s])
        left += [n for n in before if n.name not in seen]
        seen |= {n.name for n in before}
    return seen


def sizes(nodes: Nodes, traced: tf.Graph | None) -> Mapping[str, int]:
    """Returns how many bytes each output has, by its name, where that is known.

    What ran carries no shapes, so TensorFlow infers them from those of the arguments.
    A loop hides them; what it returned was given its shape when it was traced.

    Args:
        nodes: What ran.
        traced: The graph that it was made of.
    """
    senders = {
        n.attr["tensor_name"].s: n
        for each in nodes.values()
        for n in each
        if n.op in SENDS
    }
    every = list(itertools.chain.from_iterable(nodes.values()))
    handles = {node.name: node.attr["_handle_shapes"] for node in every}
    whole = tf.compat.v1.GraphDef()
    for node in every:
        if node.op in (*SENDS, "_Retval", "_DeviceRetval"):
            continue
        made = whole.node.add()
        made.CopyFrom(node)
        made.device = ""
        made.attr.pop("_class", None)
        if node.op in ("_Arg", "_DeviceArg"):
            _as_placeholder(made, node.attr["T"].type, node.attr["_output_shapes"])
        elif node.op == "_Recv":
            sender = senders[node.attr["tensor_name"].s]
            made.Clear()
            made.name, made.op = node.name, "Identity"
            made.input.append(sender.input[0])
            made.attr["T"].type = sender.attr["T"].type
        elif node.op == "ReadVariableOp":
            # Behind a branch, it is not known of which variable.
            handle = handles.get(node.input[0], tf.compat.v1.AttrValue())
            _as_placeholder(made, node.attr["dtype"].type, handle)
        elif node.op == "ResourceGather":
            table = whole.node.add()
            table.name = f"{node.name}/table"
            _as_placeholder(table, node.attr["dtype"].type, handles[node.input[0]])
            ids = node.input[1]
            made.Clear()
            made.name, made.op = node.name, "Gather"
            made.input.extend([table.name, ids])
            made.attr["Tparams"].type = node.attr["dtype"].type
            made.attr["Tindices"].type = node.attr["Tindices"].type
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(whole, name="")
    found = {}
    for op in [*graph.get_operations(), *(traced.get_operations() if traced else ())]:
        for i, output in enumerate(op.outputs):
            if (count := output.shape.num_elements()) is not None:
                size = count * output.dtype.size
                found[f"{op.name}:{i}" if i else op.name] = size
                # What a function that was called in place returns.
                found.setdefault(f"{op.name}/Identity{f'_{i}' if i else ''}", size)
    return found


def _as_placeholder(node, dtype, shapes):
    name = node.name
    node.Clear()
    node.name, node.op = name, "Placeholder"
    node.attr["dtype"].type = dtype
    shape = node.attr["shape"].shape
    if shapes.list.shape:
        shape.CopyFrom(shapes.list.shape[0])
    else:
        shape.unknown_rank = True
