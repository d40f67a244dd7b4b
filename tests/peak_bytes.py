"""Counts the bytes that a step holds on each device at its peak, from what ran.

Each device runs one operation at a time, in the order in which they become ready, as
TensorFlow's executor does. An operation takes as long as it has bytes to write, and a
tensor is held from the moment its operation starts until all that take it have ended.
So the numbers are the same in each run. Tensors of unknown shape, such as activations
of any number of rows, are not counted: parameters and gradients are.
"""

import collections
import heapq
from collections.abc import Mapping

from tests.executed import SENDS, Nodes

# They hand on the buffer that they get.
_SAME_BUFFER = {
    *("EnsureShape", "ExpandDims", "Identity", "IdentityN", "PreventGradient"),
    *("Reshape", "Squeeze", "StopGradient", "_DeviceRetval", "_Retval"),
}
# A variable's own buffer, or one that belongs to the caller.
_NO_BUFFER = {"ReadVariableOp", "Const", "_Arg", "_DeviceArg", "VarHandleOp"}


def peak_bytes(
    nodes: Nodes, sizes: Mapping[str, int], held: Mapping[str, int]
) -> dict[str, int]:
    """Returns the bytes of tensors and variables on each device at its peak.

    Args:
        nodes: What ran; see `executed.run`.
        sizes: The bytes of each output; see `executed.sizes`.
        held: The bytes of variables on each device, by the names in `nodes`.
    """
    device_of = {node.name: device for device, each in nodes.items() for node in each}
    by_name = {node.name: node for each in nodes.values() for node in each}
    receivers = {
        node.attr["tensor_name"].s: node.name
        for node in by_name.values()
        if node.op == "_Recv"
    }
    takers = collections.defaultdict(list)
    missing: dict[str, int] = collections.Counter()
    for node in by_name.values():
        sources = [name.lstrip("^").split(":")[0] for name in node.input]
        if node.op == "Merge":
            sources = sources[:1]  # Of a loop, the way in.
        for source in sources:
            takers[source].append(node.name)
            missing[node.name] += 1
        if node.op in SENDS:
            target = receivers[node.attr["tensor_name"].s]
            takers[node.name].append(target)
            missing[target] += 1
    # Buffers: by the name of an output, the output whose buffer it has.
    live, peak = collections.Counter(held), collections.Counter(held)
    buffer_of: dict[str, str | None] = {}
    left: dict[str, int] = collections.Counter()
    for node in by_name.values():
        for name in node.input:
            if not name.startswith("^"):
                left[name.removesuffix(":0")] += 1
    users: dict[str, int] = collections.Counter()
    names = collections.defaultdict(list)
    for name in left:
        names[name.split(":")[0]].append(name)

    def start(node):
        for output in names[node.name]:
            if node.op in _NO_BUFFER:
                buffer_of[output] = None
                continue
            if node.op in _SAME_BUFFER and node.input:
                source = node.input[0].removesuffix(":0")
                buffer_of[output] = buffer_of.get(source)
            else:
                buffer_of[output] = output
                live[device_of[node.name]] += sizes.get(output, 0)
            if (buffer := buffer_of[output]) is not None:
                users[buffer] += left[output]
        device = device_of[node.name]
        peak[device] = max(peak[device], live[device])

    def end(node):
        for name in node.input:
            if name.startswith("^"):
                continue
            buffer = buffer_of.get(name.removesuffix(":0"))
            if buffer is not None:
                users[buffer] -= 1
                if users[buffer] == 0:
                    live[device_of[buffer.split(":")[0]]] -= sizes.get(buffer, 0)

    time: dict[str, int] = collections.Counter()
    order = {name: i for i, name in enumerate(by_name)}
    ready = collections.defaultdict(list)
    for name in by_name:
        if not missing[name]:
            heapq.heappush(ready[device_of[name]], (0, order[name], name))
    running: list[tuple[int, int, str]] = []
    busy: set[str] = set()
    clock = 0
    while running or any(ready.values()):
        for device, waiting in ready.items():
            if waiting and device not in busy:
                _, _, name = heapq.heappop(waiting)
                node = by_name[name]
                start(node)
                written = sum(sizes.get(each, 100_000) for each in names[name])
                heapq.heappush(running, (clock + 1 + written, order[name], name))
                busy.add(device)
        clock, _, name = heapq.heappop(running)
        busy.discard(device_of[name])
        end(by_name[name])
        for taker in takers[name]:
            missing[taker] -= 1
            if not missing[taker]:
                time[taker] = clock
                heapq.heappush(ready[device_of[taker]], (clock, order[taker], taker))
    return dict(peak)
