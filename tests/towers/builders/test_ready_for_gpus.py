"""What would run on GPUs: read from graphs that logical CPUs executed in their place.

No operation of a tower may lack a kernel for GPUs; the host must not wait for a GPU in
the middle of a tower; and what travels must not be more pieces for more layers.
"""

import collections
import functools
import importlib
import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import as_on_gpu, executed
from tests.variants import slow
from towers import Asynchronous, ParameterServer, Replicated, multi_gpu_model
from towers.builders import pieces
from towers.models.images import resnet_cifar
from towers.partition.partitioned import Partitioned, judge

pytestmark = pytest.mark.quick_one_in(2)

HOST, *GPUS = [f"/device:CPU:{k}" for k in range(3)]
_numbers = itertools.count(5000)
_RESULT = r"home(_\d+)?/StatefulPartitionedCall/towers_made_\d+_copy"
_L = keras.layers


def _mlp(x, depth):
    for _ in range(depth):
        x = _L.Dropout(0.1)(_L.Dense(8, "relu")(x))
    return x


def _cnn(x, depth):
    for _ in range(depth):
        x = _L.Conv2D(4, 3, padding="same", use_bias=False)(x)
        x = _L.ReLU()(_L.BatchNormalization()(x))
    return _L.GlobalAveragePooling2D()(x)


def _resnet(x, depth):
    # Of 6 n + 2 layers, as in He et al. 2016.
    return resnet_cifar.build(x.shape[1:], 8, depth=6 * depth + 2)(x)


def _transformer(x, depth, dropout=0.1):
    x = _L.Embedding(11, 8)(x)
    for _ in range(depth):
        y = _L.LayerNormalization()(x)
        y = _L.MultiHeadAttention(2, 4, dropout=dropout)(y, y, use_causal_mask=True)
        x = _L.Add()([x, y])
        y = _L.Dense(16, "gelu")(_L.LayerNormalization()(x))
        x = _L.Add()([x, _L.Dropout(dropout)(_L.Dense(8)(y))])
    return _L.Flatten()(x)


def _embedding(x, depth):
    x = _L.Flatten()(_L.Embedding(11, 4)(x))
    for _ in range(depth):
        x = _L.Dense(8, "relu")(x)
    return x


def _lstm(x, depth):
    for _ in range(depth):
        x = _L.LSTM(6, return_sequences=True)(x)
    return _L.Flatten()(x)


_FEATURES, _IMAGES = ((6,), "float32"), ((8, 8, 3), "float32")
_SERIES, _TOKENS = ((5, 4), "float32"), ((5,), "int32")
MODELS = {
    "mlp, dropout": (_mlp, _FEATURES),
    "cnn": (_cnn, _IMAGES),
    "cnn, mixed_float16": (_cnn, _IMAGES),
    "resnet": (_resnet, _IMAGES),
    "transformer": (_transformer, _TOKENS),
    "embedding": (_embedding, _TOKENS),
    "lstm": (_lstm, _SERIES),
}
_STEADY = {
    "transformer, no dropout": (functools.partial(_transformer, dropout=0), _TOKENS)
}
WAYS = {
    "parameter_server, home on a GPU": {"variable_update": ParameterServer(GPUS[0])},
    "parameter_server, home on the host": {"variable_update": ParameterServer(HOST)},
    "replicated, device": {"variable_update": Replicated("device")},
    "replicated, ring": {"variable_update": Replicated("ring")},
}


class _OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def _model(kind, depth, name, model=keras.Model):
    body, (shape, dtype) = (MODELS | _STEADY)[kind]
    inputs = keras.Input(shape, dtype=dtype)
    outputs = _L.Dense(3, dtype="float32")(body(inputs, depth))
    return model(inputs, outputs, name=name)


def _data(kind, batches, known):
    _, (shape, dtype) = (MODELS | _STEADY)[kind]
    x = np.random.default_rng(0).integers(0, 11, (8 * batches, *shape)).astype(dtype)
    y = np.zeros(len(x), "int32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=known)


def _ran(kind, depth=1, steps=1, known=True, model=keras.Model, **options):
    """What ran in a `fit` of two steps, and the graph that it was made of."""
    name = f"model_{next(_numbers)}"
    _, _, policy = kind.partition(", mixed")
    keras.config.set_dtype_policy(f"mixed{policy}" if policy else "float32")
    with as_on_gpu.made_up_gpus(*GPUS):
        options = {"check_numerics": True, "prefetch": 0, **options}
        model = _model(kind, depth, name, model)
        parallel = multi_gpu_model(model, GPUS, **options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        how = {"steps_per_execution": steps, "jit_compile": False}
        parallel.compile("adam", loss, metrics=["accuracy"], **how)
        data = _data(kind, 2 * steps, known)
        nodes = executed.run(lambda: parallel.fit(data, verbose=0), name)
    return nodes, parallel.builder.graph


def _in_towers(names):
    """What belongs to a tower, traced for the size that its share usually has."""
    # What a branch takes, such as the guard's, is named by who has made it.
    own = {name: re.sub(r"/Func/\S*", "", name) for name in names}
    return [k for k, v in own.items() if "tower_" in v and "/cond/else/" not in v]


def _sends(nodes):
    """How many tensors go from where to where; also those that only say: done."""
    return collections.Counter(
        (source, node.attr["recv_device"].s.decode().rpartition("/")[2])
        for source, each in nodes.items()
        for node in each
        if node.op == "_Send"
        and "LoopCond" not in node.input[0]
        and not _is_of_a_failure(node.input[0])
    )


def _bytes(nodes, traced):
    """How many bytes go in each direction: between GPUs, or from or to the host."""
    sizes, found = executed.sizes(nodes, traced), collections.Counter()
    for source, target, _, name in executed.transfers(nodes):
        if not _is_of_a_failure(name):
            # A result is a scalar, of which a graph that ran has no shape.
            size = 4 if re.fullmatch(_RESULT, name) else sizes[name]
            found[source in GPUS, target in GPUS] += size
    return found


def _is_of_a_failure(name):
    """Whether it travels only where a step is not finite: else, the branch is dead."""
    return "check_numerics/cond/else/" in name


def _assert_ready(of_depths, waits=()):
    """Asserts what holds for the graphs of a model with one layer, and with two.

    Args:
        of_depths: What ran, for each.
        waits: How often the host waits for a GPU within the towers, for each; never if
            it is not said.
    """
    _assert_no_waits(of_depths, waits)
    one, two = map(_sends, of_depths)
    assert one == two


def _assert_no_waits(of_depths, waits=()):
    for nodes, expected in zip(of_depths, waits or (0, 0), strict=True):
        assert as_on_gpu.without_kernel(nodes, GPUS) == []
        waiting = [edge for gpu in GPUS for edge in as_on_gpu.waits(nodes, gpu)]
        assert len(_in_towers(waiting)) == expected, _in_towers(waiting)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_towers_of_each_kind(kind):
    ran = [
        _ran(kind, depth, **WAYS["parameter_server, home on a GPU"]) for depth in (1, 2)
    ]
    # What a loop of TensorFlow's does is decided on the host, which also looks at the
    # shapes that it keeps for its gradient: a step is traced for any number of rows.
    # On a GPU, Keras's LSTM has no loop; see below.
    _assert_ready([nodes for nodes, _ in ran], (22, 50) if kind == "lstm" else ())
    one, two = itertools.starmap(_bytes, ran)
    # Nothing but the loss, metrics and what the guard looks at; and batches, and seeds.
    assert one[True, False] == two[True, False] < 32
    assert two[False, True] - one[False, True] <= 2 * 2 * 8


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        slow("transformer", 1),
        slow("transformer", 10),
        slow("cnn", 1),
        slow("cnn", 10),
    ],
)
@pytest.mark.parametrize("way", [*WAYS])
def test_each_way_to_update(kind, way, steps):
    _assert_ready([_ran(kind, depth, steps, **WAYS[way])[0] for depth in (1, 2)])


@pytest.mark.parametrize(
    "kind", ["mlp, dropout", slow("cnn"), slow("transformer"), slow("embedding")]
)
@pytest.mark.parametrize("way", [*WAYS])
def test_a_step_of_the_models_own(kind, way):
    """It once had the host wait for seeds and labels, and sent each by itself."""
    options = {"model": _OwnStep, **WAYS[way]}
    _assert_ready([_ran(kind, depth, **options)[0] for depth in (1, 2)])


@pytest.mark.slow
def test_a_step_of_the_models_own_on_batches_of_unknown_size():
    options = {"model": _OwnStep, "known": False}
    _assert_ready([_ran("cnn", depth, **options)[0] for depth in (1, 2)])


@pytest.mark.parametrize("way", [*WAYS][:1] + [*map(slow, [*WAYS][1:])])
def test_what_is_placed_ahead_stays_there(way, monkeypatch):
    """It once came back to the host, and went to its tower again."""
    placed = []
    copy_each = pieces.LocalBatches.copy_each

    def noted(self, local_batches):
        copied = copy_each(self, local_batches)
        placed.extend(map(tf.nest.flatten, copied))
        return copied

    monkeypatch.setattr(pieces.LocalBatches, "copy_each", noted)
    with as_on_gpu.made_up_gpus(*GPUS):
        model = _model("mlp, dropout", 1, f"model_{next(_numbers)}")
        parallel = multi_gpu_model(model, GPUS, prefetch=2, **WAYS[way])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        parallel.compile("adam", loss, jit_compile=False)
        data = _data("mlp, dropout", 4, known=True)
        nodes = executed.run(lambda: parallel.fit(data, verbose=0), "IteratorGetNext")
    assert executed.transfers(nodes) == []
    assert len(placed) == 4 * len(GPUS)
    for number, tensors in enumerate(placed):
        device = GPUS[number % len(GPUS)]
        assert all(each.backing_device.endswith(device) for each in tensors)


@pytest.mark.slow
def test_batches_of_unknown_size():
    """The usual size has a trace of its own; the host decides which a batch takes."""
    _assert_ready([_ran("cnn", depth, known=False)[0] for depth in (1, 2)])


@pytest.mark.parametrize("home", [HOST, GPUS[0]])
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp, dropout", "cnn"])
def test_asynchronous_towers(kind, home):
    options = {"variable_update": Asynchronous(device=home)}
    ran = [_ran(kind, depth, **options)[0] for depth in (1, 2)]
    _assert_no_waits(ran)
    # Seeds are made on the host, and int32 stays in its memory: a function of home's
    # that returns one on a GPU moves nothing there. Home's int64 would.
    one, two = (
        collections.Counter(
            sent[:3]
            for sent in executed.transfers(nodes)
            if sent[2] != tf.int32 and not _is_of_a_failure(sent[3])
        )
        for nodes in ran
    )
    assert one == two


@pytest.mark.slow
@pytest.mark.parametrize("home", [HOST, GPUS[0]])
def test_an_asynchronous_tower_looks_up_rows_where_the_table_is(home):
    nodes, _ = _ran("embedding", variable_update=Asynchronous(device=home))
    lookups = {
        device
        for device, of_device in nodes.items()
        for node in of_device
        if node.op == "ResourceGather"
    }
    assert lookups == {home}


def _trained(kind, towers, **options):
    """What is left of two epochs, each with a smaller last batch."""
    keras.utils.set_random_seed(3)
    model = trained = _model(kind, 2, None)
    if towers:
        trained = multi_gpu_model(model, GPUS[:towers], **options)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Nothing is traced for one device.
    how = {"run_eagerly": not towers, "jit_compile": False}
    trained.compile(optimizer, loss, metrics=["accuracy"], **how)
    data = _data(kind, 2, known=False).unbatch().take(13).batch(8)
    history = trained.fit(data, epochs=2, shuffle=False, verbose=0).history
    outputs = trained.predict(data, verbose=0)
    return [*model.get_weights(), *history.values(), outputs]


def _assert_equal(found, expected):
    # In numbers: some, such as the gradient of a key's bias, are 0 but for rounding.
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@functools.cache
def _expected(kind):
    return _trained(kind, 0)


QUICK = "embedding", "replicated, ring"
KINDS = "embedding", "transformer, no dropout", "lstm"
OTHERS = [pair for pair in itertools.product(KINDS, WAYS) if pair != QUICK]
PAIRS = [QUICK, *(slow(*pair) for pair in OTHERS)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), PAIRS)
def test_numbers_are_those_of_one_device(kind, way):
    with as_on_gpu.made_up_gpus(*GPUS):
        found = _trained(kind, 2, **WAYS[way])
    _assert_equal(found, _expected(kind))


@pytest.mark.slow
@pytest.mark.parametrize("home", [GPUS[0], HOST])
@pytest.mark.parametrize("kind", ["mlp, dropout", "cnn", "transformer"])
def test_one_gpu_draws_what_keras_draws(kind, home):
    with as_on_gpu.made_up_gpus(*GPUS):
        found = _trained(kind, 1, variable_update=ParameterServer(home))
    _assert_equal(found, _expected(kind))


def _twice(x, seed):
    once = keras.random.uniform(keras.ops.shape(x), seed=seed)
    return once + 2 * keras.random.uniform(keras.ops.shape(x), seed=seed)


def _assigned(x, seed):
    seed.state.assign(seed.state + 3)
    return keras.random.uniform(keras.ops.shape(x), seed=seed)


@pytest.mark.parametrize("draw", [_twice, _assigned])
def test_a_seed_is_the_value_that_it_has_when_it_is_drawn_from(draw):
    class Draws(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(7)

        def call(self, x):
            return draw(x, self.seed)

    def drawn(towers):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, Draws()(inputs))
        if towers:
            model = multi_gpu_model(model, GPUS[:1])
        x = np.zeros((6, 4), "float32")
        return [model.predict_on_batch(x) for _ in range(2)]

    with as_on_gpu.made_up_gpus(*GPUS):
        found = drawn(1)
    np.testing.assert_array_equal(found, drawn(0))


@pytest.mark.slow
def test_state_whose_shape_the_graph_does_not_know():
    class Keeps(keras.layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(shape=(3,), trainable=False)

        def call(self, x):
            self.mean.assign(tf.boolean_mask(tf.reduce_mean(x, 0), [True] * 3))
            return x

    keeps, x = Keeps(), np.random.default_rng(0).normal(size=(13, 3)).astype("float32")
    with as_on_gpu.made_up_gpus(*GPUS):
        model = keras.Sequential([keras.Input((3,)), keeps, keras.layers.Dense(1)])
        trained = multi_gpu_model(model, GPUS, strict=False)
        trained.compile("sgd", "mse", jit_compile=False)
        # The last batch leaves a tower without a row.
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
        trained.fit(data, shuffle=False, verbose=0)
    np.testing.assert_allclose(keeps.mean.numpy(), x[12], rtol=1e-6)


def test_a_recurrent_layer_takes_cudnn_s_kernel(monkeypatch):
    """Which the processor does not have: it is traced, and not run."""
    rnn = importlib.import_module("keras.src.backend.tensorflow.rnn")
    monkeypatch.setattr(rnn, "_is_gpu_available", lambda: True)
    with as_on_gpu.made_up_gpus(*GPUS):
        model = _model("lstm", 2, None)
        x = tf.TensorSpec([None, 5, 4])
        verdict = judge(lambda x: model(x, training=True), x, home=GPUS[0])
        phases = [phase for phase, *_ in Partitioned(verdict).phases]
    every = [
        node
        for phase in phases
        if phase.place.on_towers
        for node in phase.part.graph.node
    ]
    # Seeds are computed on the host, and all else where the tower is called.
    nodes = {GPUS[0]: [node for node in every if not node.device]}
    kinds = [node.op for node in nodes[GPUS[0]]]
    assert kinds.count("CudnnRNNV3") == 2 and "While" not in kinds
    assert as_on_gpu.without_kernel(nodes, GPUS) == []
    assert as_on_gpu.waits(nodes, GPUS[0]) == []
