"""Makes a step's graph readable: opens calls, and sets other nodes apart.

TensorFlow keeps a tower as a function that is called once for each device, and
TensorBoard shows a call as a box that cannot be opened.
"""

import posixpath
import re
from collections.abc import Iterable, Mapping

from towers.keras_adapter.graphs import FunctionDef, GraphDef, NodeDef

# With more nodes, browsers take minutes to draw the graph.
_MOST_NODES = 20_000
# The parts that readers look for: name scopes of a step, and sources of batches.
_PARTS = re.compile(
    r"(place|read|home|preprocess|exchange|tower|reduce|apply)"
    r"(_\d+)*(/|$)|iterator$|IteratorGetNext$"
)
_REST = "rest"

_Functions = Mapping[str, FunctionDef]


def readable(graph: GraphDef) -> GraphDef:
    """Returns a graph in which functions' nodes replace their calls.

    They are in the call's name scope, such as `tower_0`. Of two branches, such as
    whether a tower has any examples, the first is opened. Calls stay as they are once
    there are too many nodes to look at. Nodes in no part's name scope, such as the
    arithmetic of batch sizes, are in `rest`. The graph is for looking at: it does not
    always show which of a node's outputs is used.
    """
    functions = {
        function.signature.name: function for function in graph.library.function
    }
    nodes, sources = _opened(graph.node, functions, _MOST_NODES, inner=False)
    for node in nodes:
        inputs = [_in_part(_follow(sources, tensor)) for tensor in node.input]
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
        most: The largest number of nodes.
        inner: Whether the nodes are a function's: its identities are left out.

    Returns:
        The nodes; and for each removed node, by name and index of output, the tensor
        that replaces it.
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
            parameters = [argument.name for argument in function.signature.input_arg]
            placed = dict(zip(parameters, arguments, strict=True))
            scope, call = posixpath.split(node.name)
            for inner_node in body:
                # A branch's nodes repeat the name of the choice.
                name = posixpath.join(scope, inner_node.name.removeprefix(f"{call}/"))
                placed[inner_node.name] = _unique(name, names)
            for inner_node in body:
                inner_node.input[:] = [
                    _placed(placed, passed, name) for name in inner_node.input
                ]
                inner_node.name = placed[inner_node.name]
            opened += body
            if not function.signature.output_arg and body:
                # Other nodes may wait for a call that returns nothing.
                sources[node.name, 0] = body[-1].name
            for index, result in enumerate(function.signature.output_arg):
                tensor = function.ret[result.name]
                sources[node.name, index] = _placed(placed, passed, tensor)
    return opened, sources


def _call(node, functions):
    """Returns the function that a node calls, if any, and its arguments."""
    arguments = [tensor for tensor in node.input if not tensor.startswith("^")]
    if node.op in ("If", "StatelessIf"):
        # The first input is the condition.
        return functions.get(node.attr["then_branch"].func.name), arguments[1:]
    if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
        return functions.get(node.attr["f"].func.name), arguments
    return None, arguments


def _without_functions(node):
    """Copies a node without function names, as functions are not in the result."""
    copy = NodeDef()
    copy.CopyFrom(node)
    for key, value in node.attr.items():
        if value.HasField("func") or value.list.func:
            del copy.attr[key]
    return copy


def _unique(name, names):
    unique, number = name, 0
    while unique in names:
        number += 1
        unique = f"{name}_{number}"
    names.add(unique)
    return unique


def _placed(placed, passed, tensor):
    """Returns the outer name of a function's tensor where the function is opened."""
    tensor = _follow(passed, tensor)
    waits = "^" if tensor.startswith("^") else ""
    outer = placed[_node(tensor)]
    return waits + _node(outer) if waits else outer


def _follow(sources, tensor):
    """Returns the tensor that replaces another one, which is gone."""
    waits = "^" if tensor.startswith("^") else ""
    # Its results have replaced the call that a node waits for.
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
