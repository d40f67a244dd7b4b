"""What an update costs: operations for each variable, in the graph that is executed."""

import contextlib
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import as_on_gpu, executed, oracle
from tests.variants import slow
from towers.layers import substitutes

pytestmark = pytest.mark.quick_one_in(2)

optimizers = keras.optimizers
_numbers = itertools.count()

OPTIMIZERS = {
    "SGD": optimizers.SGD,
    "SGD, momentum": lambda: optimizers.SGD(momentum=0.9),
    "RMSprop": optimizers.RMSprop,
    "Adam": optimizers.Adam,
    "Adam, amsgrad": lambda: optimizers.Adam(amsgrad=True),
    "Adam, schedule": lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.1, 9)),
    "Adam, clipnorm, use_ema": lambda: optimizers.Adam(clipnorm=1.0, use_ema=True),
    "AdamW": optimizers.AdamW,
    "AdamW, schedule": lambda: optimizers.AdamW(
        optimizers.schedules.CosineDecay(0.1, 9)
    ),
    "Adagrad": optimizers.Adagrad,
    "Adadelta": optimizers.Adadelta,
    "Adamax": optimizers.Adamax,
    "Nadam": optimizers.Nadam,
    "Adafactor": optimizers.Adafactor,
    "Ftrl": optimizers.Ftrl,
    "Lion": optimizers.Lion,
    "Lamb": optimizers.Lamb,
    "Muon": optimizers.Muon,
    "ScheduleFreeAdamW": optimizers.ScheduleFreeAdamW,
    "LossScaleOptimizer, SGD": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(momentum=0.9)
    ),
    "LossScaleOptimizer, Adam": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam()
    ),
}
# Operations for a variable, the mean of a matrix's and a vector's: as Keras does it,
# and as we do.
TABLE = {
    "SGD": (2, 2),
    "SGD, momentum": (5, 1),
    "RMSprop": (10, 10),
    "Adam": (21, 12),
    "Adam, amsgrad": (23, 14),
    "Adam, schedule": (21, 12),
    "Adam, clipnorm, use_ema": (37, 24),
    "AdamW": (24, 15),
    "AdamW, schedule": (32, 15),
    "Adagrad": (7, 7),
    "Adadelta": (19, 19),
    "Adamax": (16, 12),
    "Nadam": (36, 21),
    "Adafactor": (36, 26),
    "Ftrl": (22, 19),
    "Lion": (10, 10),
    "Lamb": (32, 26),
    "Muon": (42.5, 38),
    "ScheduleFreeAdamW": (26, 20),
    "LossScaleOptimizer, SGD": (11, 7),
    "LossScaleOptimizer, Adam": (28, 19),
}
# Nothing is computed, or launched on a GPU, for these.
_FREE = "_Arg", "Const", "Identity", "NoOp", "ReadVariableOp", "_Recv", "_Send", "Shape"


def _trained(make, ours, pairs=2, steps=1, xla=False):
    """Updates so many matrices and vectors.

    Returns:
        All variables, and how many operations an update has executed.
    """
    optimizer, random = make(), np.random.default_rng(0)
    variables = [
        keras.Variable(random.normal(size=shape), dtype="float32")
        for _ in range(pairs)
        for shape in [(6, 4), (4,)]
    ]
    optimizer.build(variables)
    name = f"apply_{next(_numbers)}"

    @tf.function(autograph=False, jit_compile=xla)
    def update(gradients):
        with substitutes.updates() if ours else contextlib.nullcontext():
            with tf.name_scope(name):
                optimizer.apply(gradients, variables)

    def train():
        for _ in range(steps):
            gradients = [random.normal(size=v.shape) for v in variables]
            update([tf.constant(gradient, tf.float32) for gradient in gradients])

    nodes = executed.run(train, name)
    found = [v.numpy() for v in (*variables, *optimizer.variables)]
    return found, _operations(nodes, name)


def _operations(nodes, name):
    return sum(
        f"{name}/" in node.name and node.op not in _FREE
        for each in nodes.values()
        for node in each
    )


# One of each way of ours: a kernel of TensorFlow's, what all variables share and a
# schedule, and a branch.
QUICK = "SGD, momentum", "AdamW, schedule", "LossScaleOptimizer, SGD"


def _quick(names):
    return [name if name in names else slow(name) for name in OPTIMIZERS]


@pytest.mark.slow
@pytest.mark.parametrize("name", _quick(QUICK))
def test_fewer_operations_make_keras_own_numbers_to_the_last_bit(name):
    """What all variables share is computed once."""
    more, counts = [], []
    for ours in False, True:
        _, few = _trained(OPTIMIZERS[name], ours, pairs=1)
        found, many = _trained(OPTIMIZERS[name], ours, pairs=3, steps=4)
        counts.append((many - few) / 4)
        more.append(found)
    assert tuple(counts) == TABLE[name]
    expected, found = more
    # Momentum's kernel rounds in its own way.
    tolerance = 1e-6 if "SGD" in name else 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", _quick(["LossScaleOptimizer, SGD"]))
def test_xla_compiles_it(name):
    expected, _ = _trained(OPTIMIZERS[name], False, steps=4)
    found, _ = _trained(OPTIMIZERS[name], True, steps=4, xla=True)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class Counting(keras.optimizers.Adam):
    """Assigns what others only read."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        self._iterations.assign_add(1)


def test_an_update_of_the_users_own_reads_for_itself():
    expected, _ = _trained(Counting, False, steps=3)
    found, _ = _trained(Counting, True, steps=3)
    np.testing.assert_equal(found, expected)


def _fail(*arguments):
    raise KeyError


def test_after_a_failure_variables_are_read_again(monkeypatch):
    _fail.__module__ = keras.optimizers.Adam.__module__
    monkeypatch.setattr(keras.optimizers.Adam, "update_step", _fail)
    optimizer, variable = keras.optimizers.Adam(), keras.Variable([1.0])
    optimizer.build([variable])
    with pytest.raises(KeyError), substitutes.updates():
        optimizer.apply([tf.constant([1.0])], [variable])
    optimizer.iterations.assign(7)
    assert int(optimizer.iterations + 0) == 7


@pytest.mark.parametrize(
    "builder", ["parameter_server", slow("replicated"), slow("asynchronous")]
)
def test_builders_update_so(builder):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4) for _ in range(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    parallel = towers.multi_gpu_model(model, 2, variable_update=builder)
    name = f"adam_{next(_numbers)}"
    parallel.compile(keras.optimizers.Adam(name=name), "mse")
    x = np.ones((4, 4), "float32")
    data = tf.data.Dataset.from_tensors((x, x))
    nodes = executed.run(lambda: parallel.fit(data, verbose=0), f"{name}/Pow")
    # On each device that has the variables. Towers that do not wait for one another
    # have a graph each, in which the same names occur.
    powers = [
        {node.name for node in each if node.op == "Pow" and f"{name}/" in node.name}
        for each in nodes.values()
    ]
    assert max(map(len, powers)) == 2


# On a GPU, XLA compiles it. A logical CPU stands in for one.

TOWERS = "/device:CPU:1", "/device:CPU:2"
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


@pytest.fixture
def on_gpus():
    with as_on_gpu.made_up_gpus(*TOWERS):
        yield


def _dense():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, name=f"dense_{i}") for i in range(2)]
    return keras.Sequential([keras.Input((4,)), *layers], name="dense")


def _embedding():
    keras.utils.set_random_seed(1)
    layers = keras.layers.Embedding(5, 4), keras.layers.GlobalAveragePooling1D()
    return keras.Sequential([keras.Input((4,)), *layers], name="embedding")


def _fit(make, optimizer, x=X, wrap=lambda model: model, **options):
    """Trains for four steps; returns the weights, and what an update has executed."""
    made = make()
    trained = wrap(made)
    trained.compile(optimizer, "mse", **options)
    data = tf.data.Dataset.from_tensor_slices((x, X)).batch(4)
    fit = functools.partial(trained.fit, data, epochs=2, verbose=0)
    nodes = executed.run(fit, "apply/")
    scopes = "apply", "learning_rate"
    ours = {
        device: [n.op for n in each if n.name.startswith(scopes) and n.op not in _FREE]
        for device, each in nodes.items()
    }
    return made.get_weights(), {device: ops for device, ops in ours.items() if ops}


def _towers(made, **options):
    update = towers.ParameterServer(TOWERS[0])
    return towers.multi_gpu_model(
        made, TOWERS, **{"variable_update": update, **options}
    )


def _plain(make, optimizer, x=X):
    def wrap(model):
        # If Keras's `fit` builds it, ScheduleFreeAdamW begins with zeros.
        optimizer.build(model.trainable_variables)
        return model

    return _fit(make, optimizer, x, wrap, run_eagerly=True)[0]


# The last two have variables of other types, and of no shape.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Adam", "LossScaleOptimizer, Adam", "Adafactor", "Nadam"]
)
def test_compiled_it_is_one_operation(on_gpus, name):
    make = OPTIMIZERS[name]
    expected = _plain(_dense, make())
    found, operations = _fit(_dense, make(), wrap=_towers)
    assert operations == {TOWERS[0]: ["StatefulPartitionedCall"]}
    assert oracle.largest_difference(found, expected) < 1e-5


@pytest.mark.slow
def test_each_copy_is_updated_by_one(on_gpus):
    wrap = functools.partial(_towers, variable_update="replicated")
    found, operations = _fit(_dense, "adam", wrap=wrap)
    assert oracle.largest_difference(found, _plain(_dense, optimizers.Adam())) < 1e-5
    # The second one gets the learning rate.
    assert operations[TOWERS[0]] == ["StatefulPartitionedCall"]
    assert sorted(operations[TOWERS[1]]) == [
        "AssignVariableOp",
        "StatefulPartitionedCall",
    ]


class Whole(keras.optimizers.SGD):
    """Reads a number of a type that GPUs do not have, so that it is on the host."""

    def build(self, variables):
        super().build(variables)
        with tf.device("/device:CPU:0"):
            self.whole = self.add_variable((), dtype="int32", name="whole")

    def update_step(self, gradient, variable, learning_rate):
        gradient += tf.cast(self.whole, tf.float32)
        super().update_step(gradient, variable, learning_rate)


class Foreign(keras.optimizers.SGD):
    """Calls Python."""

    def update_step(self, gradient, variable, learning_rate):
        gradient = tf.numpy_function(lambda g: g, [gradient], tf.float32)
        gradient = tf.ensure_shape(gradient, variable.shape)
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.slow
def test_what_reads_the_host_is_not_compiled(on_gpus, capsys):
    """XLA compiles for one device: nothing is tried, and nothing said."""
    expected = _plain(_dense, Whole())
    capsys.readouterr()
    found, operations = _fit(_dense, Whole(), wrap=_towers)
    assert oracle.largest_difference(found, expected) < 1e-5
    assert operations[TOWERS[0]].count("AssignSubVariableOp") == 4
    assert "XLA cannot compile" not in capsys.readouterr().err


@pytest.mark.slow
def test_what_cannot_be_compiled_goes_on_without(on_gpus, capsys):
    expected = _plain(_dense, Foreign())
    wrapped = []

    def wrap(made):
        wrapped.append(_towers(made))
        return wrapped[0]

    capsys.readouterr()
    found, _ = _fit(_dense, Foreign(), wrap=wrap)
    assert oracle.largest_difference(found, expected) < 1e-5
    assert not wrapped[0].builder.compiles_update
    said = capsys.readouterr().err.splitlines()
    told = [
        line
        for line in said
        if line.startswith("towers: XLA cannot compile the update of")
    ]
    assert len(told) == 1


def test_sparse_gradients_are_not_compiled_anew_for_each_size(on_gpus, caplog):
    x = np.abs(X).round() % 5
    expected = _plain(_embedding, optimizers.SGD(), x)
    caplog.clear()
    found, operations = _fit(_embedding, "sgd", x, wrap=_towers)
    assert oracle.largest_difference(found, expected) < 1e-5
    assert "StatefulPartitionedCall" not in itertools.chain(*operations.values())
    said = [record.getMessage() for record in caplog.records]
    told = [line for line in said if "for each size of its sparse gradients" in line]
    assert len(told) == 1


def _compiles(**options):
    parallel = _towers(_dense())
    parallel.compile("adam", "mse", **options)
    return parallel.builder.compiles_update


def test_who_wants_no_xla_gets_none(on_gpus):
    assert _compiles()
    assert not _compiles(jit_compile=False)


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, "auto"])
def test_without_xla_the_update_is_no_call(jit_compile, request):
    if not jit_compile:
        request.getfixturevalue("on_gpus")
    _, operations = _fit(_dense, "adam", wrap=_towers, jit_compile=jit_compile)
    assert "StatefulPartitionedCall" not in itertools.chain(*operations.values())


def test_on_cpus_it_is_not_compiled():
    assert not _compiles()
