"""Finds the operations that run on each copy of the variables, if towers have some."""

from collections.abc import Callable, Collection, Sequence

import tensorflow as tf

from towers.analysis.layer_calls import key
from towers.keras_adapter.graphs import is_stateful, may_change
from towers.tower.errors import where


def on_each(
    at_home: Sequence[tf.Operation],
    gathered: Collection[str],
    is_copied: Callable[[tf.Tensor], bool],
) -> tuple[set[str], list[str]]:
    """Returns the names of operations that each copy's device runs by itself.

    They read or change a variable that has copies, or make what those take. All get the
    same, so that the copies stay equal.

    Args:
        at_home: What does not run with a tower's rows, in order.
        gathered: The names of those that take the rows of all towers, and run once.
        is_copied: Tells of a handle whether its variable has copies.

    Returns:
        The names; and a sentence for each operation that changes variables with copies
        and others in one go, which no device can run.
    """
    names, wanted, mixed = set(), set(), []
    for op in reversed(at_home):
        handles = [t for t in may_change(op) if t.dtype == tf.resource]
        copied = [*map(is_copied, handles)]
        if any(copied) and not all(copied):
            mixed.append(
                f"Operation '{op.name}' ({op.type}){where(op)} changes variables of "
                "which towers have copies, and others in one go; expected variables "
                "of the model's `add_weight`, or "
                "variable_update='parameter_server'."
            )
        # What may give another result at each call runs once.
        alike = op.name not in gathered and not handles and not is_stateful(op)
        if any(copied) or (op.name in wanted and alike and op.type != "Const"):
            names.add(op.name)
            wanted |= {tensor.op.name for tensor in op.inputs}
    return names, mixed


def together(
    graph: tf.Graph, handles: Collection[int], others: Collection[int]
) -> set[int]:
    """Adds to handles those that a function's operations take together with them.

    A branch that changes a variable with copies may change others in one go.

    Args:
        graph: The function's.
        handles: The `id`s of handles from outside of it.
        others: Those that may be added.
    """
    outside = {key(inside): id(handle) for handle, inside in graph.captures}
    groups = [
        {outside[key(t)] for t in op.inputs if key(t) in outside}
        for op in graph.get_operations()
    ]
    together, others = {*handles}, {*others}
    while more := [g for g in groups if g & together and (g - together) & others]:
        together |= set().union(*more) & others
    return together
