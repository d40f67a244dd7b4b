"""Where operations run: looked up in the graphs that TensorFlow executed."""

import collections
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from towers import multi_gpu_model

TOWERS = ["/device:CPU:0", "/device:CPU:1"]
HOME = "/device:CPU:2"
_numbers = itertools.count(1000)


def _executed(function, name):
    """Runs `function` and returns what ran: for each device, its nodes.

    TensorFlow also tells of graphs that earlier tests ran; ours is the one in which
    `name` occurs.
    """
    context.context().enable_graph_collection()
    try:
        function()
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_graph_collection()
    nodes = collections.defaultdict(list)
    partitions = [
        partition
        for graph in metadata.function_graphs
        if name in str(graph.partition_graphs)
        for partition in graph.partition_graphs
    ]
    for partition in partitions:
        for node in partition.node:
            nodes[node.device[node.device.index("/device") :]].append(node)
    return nodes


def _step(towers, home, cpu_merge=True, rows=8):
    name = f"model_{next(_numbers)}"
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(3)],
        name=name,
    )
    parallel = multi_gpu_model(model, gpus=towers, home=home, cpu_merge=cpu_merge)
    parallel.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["accuracy"]
    )
    x, y = np.ones((rows, 6), "float32"), np.ones((rows, 3), "float32")
    # TensorFlow tells of a graph when it first runs it.
    return model, _executed(lambda: parallel.train_on_batch(x, y), name)


def _on(nodes, *kinds):
    """The devices that hold operations of these kinds, by number of operations."""
    counts = {
        device: sum(any(kind in node.op for kind in kinds) for node in found)
        for device, found in nodes.items()
    }
    return {device: count for device, count in counts.items() if count}


def test_towers_compute_and_home_keeps():
    model, nodes = _step(TOWERS, HOME)
    # Two layers forward, and three products backward: the inputs need no gradient.
    assert _on(nodes, "MatMul") == dict.fromkeys(TOWERS, 5)
    scopes = {
        device: {
            node.name.split("/")[0] for node in nodes[device] if "MatMul" in node.op
        }
        for device in TOWERS
    }
    assert scopes == {TOWERS[0]: {"tower_0"}, TOWERS[1]: {"tower_1"}}
    assert _on(nodes, "ReadVariableOp") == {HOME: _on(nodes, "ReadVariableOp")[HOME]}
    assert set(_on(nodes, "Assign", "ResourceApply")) == {HOME}
    for variable in [*model.variables, *model.optimizer.variables]:
        assert variable.value.device.endswith(HOME), variable.path


@pytest.mark.parametrize(("cpu_merge", "merge"), [(True, HOME), (False, TOWERS[0])])
def test_gradients_are_added_where_asked(cpu_merge, merge):
    _, nodes = _step(TOWERS, HOME, cpu_merge)
    reduced = {
        device
        for device, found in nodes.items()
        for node in found
        if node.name.startswith("reduce") and node.op not in ("_Send", "_Recv")
    }
    assert reduced == {merge}


def test_an_idle_tower_computes_nothing():
    _, nodes = _step(["/device:CPU:1", "/device:CPU:2"], "/device:CPU:0", rows=1)
    assert set(_on(nodes, "MatMul")) == {"/device:CPU:1"}


def test_nothing_is_left_to_chance():
    """On a machine with GPUs, an operation without a device would run on the first."""
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    )
    parallel = multi_gpu_model(model, gpus=TOWERS, home=HOME)
    parallel.compile("adam", "mse", metrics=["accuracy"])
    spec = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 3])
    graph = tf.function(parallel.train_step).get_concrete_function(spec).graph
    # A variable is read where it is; constants go where they are used.
    free = {"ReadVariableOp", "Placeholder", "Const", "NoOp", "Identity"}
    assert not {op.type for op in graph.get_operations() if not op.device} - free
