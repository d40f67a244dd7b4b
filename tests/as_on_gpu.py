"""Reads executed graphs as if some of the devices were GPUs.

TensorFlow's wheel registers the kernels that GPUs have, and says which of their inputs
and outputs lie in the host's memory. So a graph that ran on logical CPUs tells what
would run on GPUs, what would not, and where the host would have to wait for a GPU.
"""

import contextlib
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.kernels import get_registered_kernels_for_op

from tests.executed import Nodes
from towers import devices
from towers.model import auto

_KINDS = "GPU", "DEFAULT"
# What the executor and not a kernel does, or has on each kind of device.
_PASSES = {"_Arg", "_Retval", "_DeviceArg", "_DeviceRetval", "_Send", "_Recv"}
# What TensorFlow makes of operations that are on a CPU only.
_OF_CPUS = {"_UnaryOpsComposition"}


@contextlib.contextmanager
def made_up_gpus(*gpus: str, measures: bool = False) -> Iterator[None]:
    """Inside, Towers takes these devices, such as "/device:CPU:1", for GPUs.

    Unless it `measures`, it keeps the first way to update variables: which one is
    faster on a CPU is chance.
    """
    real = devices.is_gpu

    def is_gpu(device):
        return device.endswith(gpus)

    with contextlib.ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("towers") and getattr(module, "is_gpu", None) is real:
                patches.enter_context(mock.patch.object(module, "is_gpu", is_gpu))
        if not measures:
            no_time = {"BUDGET_S": -1.0, "BUDGET": 0.0}
            patches.enter_context(mock.patch.multiple(auto, **no_time))
        yield


def without_kernel(nodes: Nodes, gpus: Sequence[str]) -> list[str]:
    """Returns the operations on these devices that have no kernel for GPUs."""
    return sorted(
        f"{node.op} {node.name}"
        for gpu in gpus
        for node in nodes.get(gpu, ())
        if _name(node) not in _PASSES | _OF_CPUS and kernel(node) is None
    )


def waits(nodes: Nodes, gpu: str) -> list[str]:
    """Returns the edges by which the host reads what a GPU has computed.

    At each of them, the host waits until the GPU has done all that it was given, and
    then the GPU waits until the host gives it more.
    """
    by_name = {node.name: node for node in nodes.get(gpu, ())}
    found = []
    for node in by_name.values():
        for source, output in _host_inputs(node):
            maker = by_name.get(source)
            if maker is not None and not _on_host(maker, output):
                found.append(f"{maker.op} {source} -> {node.op} {node.name}")
    return sorted(found)


def kernel(node: Any) -> Any | None:
    """Returns the kernel that a GPU has for an operation, `None` if it has none."""
    for kind in _KINDS:
        for each in _kernels(_name(node)):
            if each.device_type == kind and not each.label and _fits(each, node):
                return each
    return None


def _name(node):
    """Returns the name of an operation, before oneDNN took its place on a CPU.

    That of a fused one begins with an underscore.
    """
    before = re.sub("^_Mkl(Native)?", "", node.op)
    is_known = before == node.op or _kernels(before)
    return before if is_known else f"_{before}"


@functools.cache
def _kernels(op):
    return list(get_registered_kernels_for_op(op).kernel)


def _fits(each, node):
    for constraint in each.constraint:
        attr = node.attr[constraint.name]
        types = list(attr.list.type) or [attr.type]
        if not set(types) <= set(constraint.allowed_values.list.type):
            return False
    return True


def _host_inputs(node):
    """The inputs of an operation that it reads in the host's memory."""
    found = None if _name(node) in _PASSES else kernel(node)
    if found is None or not found.host_memory_arg:
        return
    names = _names(node, op_def_registry.get(_name(node)).input_arg)
    data = [name for name in node.input if not name.startswith("^")]
    for name, text in zip(names, data, strict=True):
        if name in found.host_memory_arg:
            source, _, output = text.partition(":")
            yield source, int(output or 0)


def _on_host(node, output):
    """Whether an output of an operation lies in the host's memory."""
    if node.op in ("_Recv", "_Arg", "_DeviceArg"):
        # It comes from the host, or from another device by way of it; what it is of
        # this device's own making is looked at where it is made.
        return True
    found = kernel(node)
    if found is None:
        return True
    names = _names(node, op_def_registry.get(_name(node)).output_arg)
    return names[output] in found.host_memory_arg


def _names(node, args):
    """The name of the argument that each tensor of an operation belongs to."""
    names = []
    for arg in args:
        count = 1
        if arg.number_attr:
            count = node.attr[arg.number_attr].i
        elif arg.type_list_attr:
            count = len(node.attr[arg.type_list_attr].list.type)
        names += [arg.name] * count
    return names
