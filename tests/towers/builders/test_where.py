"""Where operations run: looked up in the graphs that TensorFlow executed."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests import executed
from tests.valued import valued
from tests.variants import slow
from towers import multi_gpu_model
from towers.builders import steps

pytestmark = pytest.mark.quick_one_in(2)

TOWERS = "/device:CPU:0", "/device:CPU:1"
HOME = "/device:CPU:2"
_numbers = itertools.count(1000)


@functools.cache
def _step(towers, home, cpu_merge=True, rows=8):
    name = f"model_{next(_numbers)}"
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(3)],
        name=name,
    )
    parallel = multi_gpu_model(
        model, gpus=towers, **valued(device=home), cpu_merge=cpu_merge
    )
    parallel.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["accuracy"]
    )
    x, y = np.ones((rows, 6), "float32"), np.ones((rows, 3), "float32")
    # TensorFlow tells of a graph when it first runs it.
    return model, executed.run(lambda: parallel.train_on_batch(x, y), name)


def _on(nodes, *kinds):
    """The devices that hold operations of these kinds, by number of operations.

    Looking at the clock is left out: home does not do that.
    """
    counts = {
        device: sum(
            any(kind in node.op for kind in kinds)
            and not node.name.startswith("phases")
            for node in found
        )
        for device, found in nodes.items()
    }
    return {device: count for device, count in counts.items() if count}


def test_the_host_and_towers_on_cpus_look_at_the_clock():
    _, nodes = _step(TOWERS, HOME)
    clocks = {
        device: [node.name for node in found if node.op == "Timestamp"]
        for device, found in nodes.items()
    }
    assert all(name.startswith("phases") for name in itertools.chain(*clocks.values()))
    # The host: the batch is there; each tower has its gradients; the end. Each tower:
    # it has its local batch.
    counts = {device: len(names) for device, names in clocks.items() if names}
    assert counts == {TOWERS[0]: 4 + 1, TOWERS[1]: 1}


@pytest.mark.parametrize(
    "check",
    [
        # The loss checks its labels' shape where their number of rows is not known.
        tf.identity,
        lambda x: tf.debugging.check_numerics(x, "not finite"),
    ],
    ids=["in the loss", "in a layer"],
)
def test_a_tower_waits_for_no_check_of_another(check):
    name = f"model_{next(_numbers)}"
    layers = [keras.layers.Lambda(check), keras.layers.Dense(5)]
    model = keras.Sequential([keras.Input((4, 6)), *layers], name=name)
    parallel = multi_gpu_model(model, gpus=TOWERS, **valued(device=HOME))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parallel.compile("sgd", loss)
    examples = np.ones((8, 4, 6), "float32"), np.ones((8, 4), "int32")
    batches = tf.data.Dataset.from_tensor_slices(examples).batch(8)
    nodes = executed.run(lambda: parallel.fit(batches, verbose=0), name)
    assert any(node.op in ("Assert", "CheckNumerics") for node in nodes[TOWERS[1]])
    for device, other in zip(TOWERS, ["tower_1", "tower_0"], strict=True):
        products = [node for node in nodes[device] if "MatMul" in node.op]
        assert products
        for product in products:
            before = executed.behind(nodes, product)
            assert not [name for name in before if name.startswith(other)]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "steps", "prefetch", "builder"),
    [
        ("fit", 1, 0, "parameter_server"),
        ("fit", 1, 2, "parameter_server"),
        ("fit", 10, 0, "parameter_server"),
        ("fit", 10, 0, "replicated"),
        ("evaluate", 1, 0, "parameter_server"),
        ("evaluate", 10, 0, "parameter_server"),
        ("predict", 1, 0, "parameter_server"),
        ("predict", 10, 0, "parameter_server"),
    ],
)
def test_nothing_crosses_a_device_that_happens_to_be_the_default(
    kind, steps, prefetch, builder
):
    """On a machine with GPUs that is the first of them."""
    default, name = "/device:CPU:3", f"model_{next(_numbers)}"
    layers = [keras.layers.Dense(4, "relu"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers], name=name)
    parallel = multi_gpu_model(
        model, gpus=TOWERS, variable_update=builder, prefetch=prefetch
    )
    parallel.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        "mse",
        metrics=["mae"],
        steps_per_execution=steps,
    )
    x, y = np.ones((53, 6), "float32"), np.ones((53, 3), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)

    def call():
        with tf.device(default):
            getattr(parallel, kind)(data, verbose=0)

    nodes = executed.run(call, name)
    assert sum("MatMul" in node.op for node in nodes[TOWERS[1]])
    crossing = [sent for sent in executed.transfers(nodes) if default in sent[:2]]
    assert not crossing
    assert not nodes[default]


def test_an_idle_tower_computes_nothing():
    _, nodes = _step(("/device:CPU:1", "/device:CPU:2"), "/device:CPU:0", rows=1)
    assert set(_on(nodes, "MatMul")) == {"/device:CPU:1"}


def test_nothing_is_left_to_chance():
    """On a machine with GPUs, an operation without a device would run on the first."""
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    )
    parallel = multi_gpu_model(model, gpus=TOWERS, **valued(device=HOME))
    parallel.compile("adam", "mse", metrics=["accuracy"])
    spec = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 3])
    step = tf.function(parallel.train_step, autograph=False)
    graph = step.get_concrete_function(spec).graph
    # A variable is read where it is; constants go where they are used.
    free = {"ReadVariableOp", "Placeholder", "Const", "NoOp", "Identity"}
    # The size of a batch is found where the batch is.
    left = [
        op
        for op in graph.get_operations()
        if not op.device and not _is_with_a_placeholder(op)
    ]
    assert not {op.type for op in left} - free


def _is_with_a_placeholder(op):
    names = [group.decode().removeprefix("loc:@") for group in op.colocation_groups()]
    others = [name for name in names if name != op.name]
    return any(op.graph.get_operation_by_name(n).type == "Placeholder" for n in others)


def _mixed_types(name):
    keras.utils.set_random_seed(7)
    body = [keras.layers.Dense(4), keras.layers.BatchNormalization()]
    # Its seed is of whole numbers.
    body += [keras.layers.Dropout(0.5), keras.layers.Dense(5), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *body], name=name)


@functools.cache
def _travels(packed, home=HOME):
    name = f"model_{next(_numbers)}"
    parallel = multi_gpu_model(
        _mixed_types(name), gpus=TOWERS, **valued(device=home, packed=packed)
    )
    parallel.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    x, y = np.ones((8, 6), "float32"), np.ones((8, 3), "float32")
    nodes = executed.run(lambda: parallel.train_on_batch(x, y), name)
    return executed.transfers(nodes)


@pytest.mark.slow
@pytest.mark.parametrize("tower", TOWERS)
def test_packed_values_and_gradients_travel_in_one_piece(tower):
    sent = _travels(packed=True)
    there = [name for a, b, _, name in sent if (a, b) == (HOME, tower)]
    # Weights and moving averages in one; the seed of the dropout is a whole number.
    assert sum(name.endswith("/read/concat") for name in there) == 1
    assert not any("ReadVariableOp" in name for name in there)
    back = [
        dtype.name
        for a, b, dtype, name in sent
        if (a, b, "reduce") == (tower, HOME, name[:6])
    ]
    assert back == ["float32"]


# Between logical CPUs, nothing is packed unless it is asked for.
@pytest.mark.parametrize("packed", [None, slow(False)])
def test_unpacked_values_and_gradients_travel_one_by_one(packed):
    sent = _travels(packed=packed)
    there = [name for a, b, _, name in sent if (a, b) == (HOME, TOWERS[1])]
    # Eight weights, two averages, and the seed.
    assert sum(name.startswith("home/") for name in there) >= 10
    assert not any(name.startswith("reduce/concat") for *_, name in sent)
    assert not any("concat" in name for *_, name in sent if "read" in name)


@pytest.mark.slow
def test_home_does_not_send_to_itself():
    sent = _travels(packed=True, home=TOWERS[0])
    assert not any(a == b for a, b, *_ in sent)
    there = [
        name
        for a, b, _, name in sent
        if (a, b) == TOWERS and ("read" in name or "ReadVariableOp" in name)
    ]
    # TensorFlow may name the one buffer after either tower.
    assert len(there) == 1 and there[0].endswith("/read/concat")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 4, "stages": 2, "shard_embeddings": "rows"},
        {"gpus": 4, "stages": 2, "shard_embeddings": "columns"},
        {"gpus": 4, "stages": 2, "micro_batches": 2, "recompute": "layer"},
        # Towers look up their rows at home.
        {"gpus": 2},
        {"gpus": 2, "shard_embeddings": "rows"},
    ],
    ids=str,
)
def test_what_stays_a_function_runs_on_one_device(options, monkeypatch):
    """If it did not, an error in it could end in a crash, or in nothing at all."""
    monkeypatch.setattr(steps, "_MANY_LAYERS", 1)
    every = [keras.layers.Embedding(64, 8), keras.layers.Flatten()]
    every += [keras.layers.Dense(6), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input([5]), *every])
    parallel = multi_gpu_model(model, **options)
    parallel.compile("adam", "mse")
    known = context.context()
    before = {*known.list_function_names()}
    parallel.train_on_batch(np.zeros([7, 5], "int32"), np.zeros([7, 1], "float32"))
    made = [
        known.get_function_def(name) for name in {*known.list_function_names()} - before
    ]
    of_one = [each for each in made if each.attr["_noinline"].b]
    placed = {each.signature.name for each in made if _names_devices(each)}
    assert placed
    for each in of_one:
        called = {
            attribute.func.name
            for node in each.node_def
            for attribute in node.attr.values()
        }
        assert not ({each.signature.name} | called) & placed


def _names_devices(function):
    return any(node.device for node in function.node_def)
