"""What travels between devices in a step of a language model on two towers, by bytes.

    python -m scripts.bench_bytes --vocabulary=32000 --tokens=128 --rows=8

The model is `transformer_lm`, with an accuracy as metric. What ran is read from the
graphs that TensorFlow executed, so that nothing is measured twice or left out.
"""

import argparse
import collections
import os

import keras
import numpy as np
import tensorflow as tf

import towers
from models.text import transformer_lm
from tests import executed

TOWERS, HOME = ("/device:CPU:1", "/device:CPU:2"), "/device:CPU:3"


def kind(node: str, size: int, variables: set[int], batch: int) -> str:
    """Tells what a node's tensor is, by its name and its size in bytes.

    Args:
        node: The name of the node that made it.
        size: Bytes.
        variables: Bytes of each variable.
        batch: Bytes of a tower's part of x, and of y.
    """
    if "read/" in node or (node.startswith("Func/tower") and size in variables):
        return "parameters"
    if "gradient" in node or node.startswith("reduce") or "AddN" in node:
        return "gradients" if size in variables else "larger than any variable"
    if size == batch:
        return "batch"
    return "scalars" if size < 1024 else "outputs"


def main() -> None:
    """Prints bytes by kind, and in all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--variable_update", default="parameter_server")
    flags = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(4)]
    tf.config.set_logical_device_configuration(cpu, logical)
    network = transformer_lm.build(flags.vocabulary, flags.tokens)
    model = keras.Model(network.inputs, network.outputs, name="bench_bytes")
    update = flags.variable_update
    if update == "parameter_server":
        update = towers.ParameterServer(HOME)
    parallel = towers.multi_gpu_model(model, TOWERS, variable_update=update)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parallel.compile("sgd", loss, metrics=["accuracy"])
    size = flags.rows, flags.tokens + 1
    ids = np.random.default_rng(0).integers(0, flags.vocabulary, size, "int32")
    x, y = ids[:, :-1], ids[:, 1:]
    nodes = executed.run(lambda: parallel.train_on_batch(x, y), "bench_bytes")
    sizes = executed.sizes(nodes, parallel.builder.graph)
    variables = {variable.numpy().nbytes for variable in model.variables}
    found = collections.Counter()
    for *_, node in executed.transfers(nodes):
        size = sizes.get(node, 8)
        found[kind(node, size, variables, x.nbytes // 2)] += size
    for name, size in found.most_common():
        print(f"{name}: {size:,} bytes")
    print(f"in all: {sum(found.values()):,} bytes")
    print(f"variables: {sum(v.numpy().nbytes for v in model.variables):,} bytes")


if __name__ == "__main__":
    main()
