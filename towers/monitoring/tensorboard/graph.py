"""Makes a step's graph readable: calls are opened, and what is in no part set aside.

TensorFlow keeps a tower as a function that is called once for each device, and
TensorBoard shows a call as a box that cannot be opened.
"""

import posixpath
import re
from collections.abc import Iterable, Mapping

from towers.keras_adapter.graphs import FunctionDef, GraphDef, NodeDef

# More than that, and browsers take minutes to draw it.
_MOST_NODES = 20_000
# What a reader looks for: the name scopes of a step, and where batches come from.
_PARTS = re.compile(
    r"(place|read|home|preprocess|exchange|tower|reduce|apply)"
    r"(_\d+)*(/|$)|iterator$|IteratorGetNext$"
)
_REST = "rest"

_Functions = Mapping[str, FunctionDef]


def readable(graph: GraphDef) -> GraphDef:
    """Returns a graph in which functions' nodes stand in place of their calls.

    They are in the call's name scope, such as `tower_0`. Of a choice between two, such
    as whether a tower has any examples, the first is opened. Calls are left as they are
    once there are too many nodes to look at. What is in no part's name scope, such as
    the arithmetic of batch sizes, is in `rest`. The graph is for looking at: it does
    not always say which of a node's outputs is used.
    """
    functions = {each.signature.name: each for each in graph.library.function}
    nodes, sources = _opened(graph.node, functions, _MOST_NODES, inner=False)
    for node in nodes:
        inputs = [_in_part(_follow(sources, each)) for each in node.input]
        node.input[:] = list(dict.fromkeys(inputs))
        node.name = _in_part(node.name)
    return GraphDef(node=nodes, versions=graph.versions)


def _opened(
    nodes: Iterable[NodeDef],
    functions: _Functions,
    most: int,
    inner: bool,
) -> tuple[list[NodeDef], dict[tuple[str, int], str]]:
    """Opens the calls among some nodes.

    Args:
        nodes: The nodes of a graph, or of a function.
        functions: All functions by name.
        most: How many nodes there may be.
        inner: Whether it is a function's: those pass on what they return.

    Returns:
        The nodes, and of what is not among them any more, by name and index of output,
        the tensor that it is.
    """
    opened, sources = [], {}
    names = {node.name for node in nodes}
    for node in nodes:
        function, arguments = _call(node, functions)
        if inner and node.op == "Identity":
            sources[node.name, 0] = node.input[0]
        elif function is None or len(opened) + len(function.node_def) > most:
            opened.append(_without_functions(node))
        else:
            most_inner = most - len(opened)
            body, passed = _opened(function.node_def, functions, most_inner, True)
            parameters = [each.name for each in function.signature.input_arg]
            placed = dict(zip(parameters, arguments, strict=True))
            scope, call = posixpath.split(node.name)
            for each in body:
                # A branch's nodes have the choice's name once more.
                name = posixpath.join(scope, each.name.removeprefix(f"{call}/"))
                placed[each.name] = _unique(name, names)
            for each in body:
                each.input[:] = [_placed(placed, passed, name) for name in each.input]
                each.name = placed[each.name]
            opened += body
            if not function.signature.output_arg and body:
                # Others may wait for a call that returns nothing.
                sources[node.name, 0] = body[-1].name
            for index, result in enumerate(function.signature.output_arg):
                tensor = function.ret[result.name]
                sources[node.name, index] = _placed(placed, passed, tensor)
    return opened, sources


def _call(node, functions):
    """The function that a node calls, if any, and the tensors that it gives it."""
    arguments = [each for each in node.input if not each.startswith("^")]
    if node.op in ("If", "StatelessIf"):
        # The first input is what it depends on.
        return functions.get(node.attr["then_branch"].func.name), arguments[1:]
    if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
        return functions.get(node.attr["f"].func.name), arguments
    return None, arguments


def _without_functions(node):
    """A copy of a node that names no function: those are not part of the result."""
    copy = NodeDef()
    copy.CopyFrom(node)
    for key, value in node.attr.items():
        if value.HasField("func") or value.list.func:
            del copy.attr[key]
    return copy


def _unique(name, names):
    found, number = name, 0
    while found in names:
        number += 1
        found = f"{name}_{number}"
    names.add(found)
    return found


def _placed(placed, passed, tensor):
    """A function's tensor, as it is called where the function has been opened."""
    tensor = _follow(passed, tensor)
    waits = "^" if tensor.startswith("^") else ""
    outer = placed[_node(tensor)]
    return waits + _node(outer) if waits else outer


def _follow(sources, tensor):
    """The tensor that one is which is not there any more."""
    waits = "^" if tensor.startswith("^") else ""
    # A call that is waited for has been replaced by what it returns.
    while (key := (_node(tensor), _index(tensor))) in sources:
        tensor = sources[key]
    return waits + _node(tensor) if waits else tensor


def _node(tensor: str) -> str:
    return tensor.lstrip("^").partition(":")[0]


def _index(tensor: str) -> int:
    # `node:1` in a graph, `node:output:1` in a function.
    last = tensor.rpartition(":")[2]
    return int(last) if ":" in tensor and last.isdecimal() else 0


def _in_part(name: str) -> str:
    waits = "^" if name.startswith("^") else ""
    name = name.lstrip("^")
    part = _PARTS.match(name.partition(":")[0])
    return waits + (name if part else f"{_REST}/{name}")
