"""What travels between devices in a step, by bytes: nothing as large as outputs."""

import itertools

import keras
import numpy as np
import pytest

from models.images import unet
from models.text import transformer_lm
from tests import executed
from tests.valued import valued
from tests.variants import slow
from towers import multi_gpu_model

pytestmark = pytest.mark.quick_one_in(2)

HOST, HOME = "/device:CPU:0", "/device:CPU:3"
TOWERS = "/device:CPU:1", "/device:CPU:2"
# No parameter, batch or activation has as many elements as the outputs.
ROWS, STEPS, VOCABULARY, SIDE, CLASSES = 4, 48, 89, 16, 7
# Seeds, totals, sizes, losses, and changes of metrics.
SCALARS = 400
# Between tensors that travel in one piece.
PADDING = 64
_numbers = itertools.count(1)


def _language_model():
    network = transformer_lm.build(VOCABULARY, STEPS, layers=1, width=8, heads=2)
    ids = np.random.default_rng(0).integers(1, VOCABULARY, (ROWS, STEPS + 1))
    return network, ids[:, :-1].astype("int32"), ids[:, 1:].astype("int32")


def _segmentation():
    network = unet.build((SIDE, SIDE, 3), CLASSES, layers=1, width=2)
    random = np.random.default_rng(0)
    pictures = random.normal(size=(ROWS, SIDE, SIDE, 3)).astype("float32")
    masks = random.integers(0, CLASSES, (ROWS, SIDE, SIDE)).astype("int32")
    return network, pictures, masks


NETWORKS = {"language model": _language_model, "segmentation": _segmentation}


def _sent(kind, step, builder):
    """Runs a step; returns the model, the batch's bytes and targets, and what was sent.

    The last is a list of devices, bytes and names of nodes.
    """
    network, x, y = NETWORKS[kind]()
    name = f"bytes_{next(_numbers)}"
    model = keras.Model(network.inputs, network.outputs, name=name)
    home = HOME if builder == "parameter_server" else None
    parallel = multi_gpu_model(model, TOWERS, **valued(builder, device=home))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parallel.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    call = {"train": parallel.train_on_batch, "test": parallel.test_on_batch}[step]
    nodes = executed.run(lambda: call(x, y), name)
    sizes = executed.sizes(nodes, parallel.builder.graph)
    # A scalar's shape is not always known: that of a result, or of an identity.
    sent = [
        (source, target, _known(sizes, node), node)
        for source, target, _, node in executed.transfers(nodes)
    ]
    return model, x.nbytes + y.nbytes, y.size, sent


def _known(sizes, node):
    if node in sizes:
        return sizes[node]
    assert node.startswith(("home", "Identity", "apply")), node
    return 8


@pytest.mark.parametrize(
    ("kind", "step", "builder"),
    [
        ("language model", "train", "parameter_server"),
        slow("language model", "train", "replicated"),
        slow("segmentation", "train", "parameter_server"),
        slow("segmentation", "train", "replicated"),
        slow("language model", "test", "parameter_server"),
        slow("segmentation", "test", "parameter_server"),
    ],
)
def test_parameters_gradients_and_the_batch_travel_and_nothing_else(
    kind, step, builder
):
    model, batch, values, sent = _sent(kind, step, builder)
    # Out to each tower, and in training back; replicas send gradients and get sums.
    there = sum(variable.numpy().nbytes for variable in model.variables)
    free = SCALARS
    if builder == "replicated":
        free += 4 * PADDING * len(model.variables)
    explained = batch + len(TOWERS) * there * (2 if step == "train" else 1)
    total = sum(size for *_, size, _ in sent)
    assert explained - SCALARS <= total <= explained + free, (explained, sent)
    outputs = 4 * values * model.outputs[0].shape[-1]
    largest = max(size for *_, size, _ in sent)
    assert largest < outputs / len(TOWERS), (largest, outputs)
