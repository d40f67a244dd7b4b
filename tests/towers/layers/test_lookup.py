"""Embeddings: rows are fetched where the table is, and the numbers are Keras's."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import executed, oracle
from towers import multi_gpu_model
from towers.layers import embeddings

TOWERS, HOME = ["/device:CPU:0", "/device:CPU:1"], "/device:CPU:2"
TABLE = (37, 4)
STEPS = 5
_numbers = itertools.count(1000)


def _ids(rows=13, dtype="int32", low=0, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(low, TABLE[0], (rows, STEPS)).astype(dtype)


def _targets(rows=13):
    return np.random.default_rng(1).normal(size=(rows, 3)).astype("float32")


def _embedding(**options):
    return keras.layers.Embedding(*TABLE, **options)


def _after(embedding, dtype="int32", name=None):
    body = [keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]
    inputs = keras.Input((STEPS,), dtype=dtype)
    return keras.Sequential([inputs, embedding, *body], name=name)


# Where the table is, and what is done with it.


def _graph(step, home=HOME, towers=TOWERS, make=None, **options):
    name = f"table_{next(_numbers)}"
    model = make(name) if make else _after(_embedding(), name=name)
    parallel = multi_gpu_model(
        model, gpus=towers, local_parameter_device=home, **options
    )
    parallel.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = _ids(8), _targets(8)
    arguments = {"train": (x, y), "test": (x, y), "predict": (x,)}[step]
    function = getattr(parallel, f"{step}_on_batch")
    return executed.run(lambda: function(*arguments), name)


def _uses(nodes):
    """Kinds and devices of the operations on the table."""
    arguments = {
        node.name
        for each in nodes.values()
        for node in each
        for shape in node.attr["_handle_shapes"].list.shape
        if node.op == "_Arg" and tuple(d.size for d in shape.dim) == TABLE
    }
    assert arguments, "there is a table"
    return sorted(
        (node.op, device)
        for device, each in nodes.items()
        for node in each
        if arguments & {name.split(":")[0] for name in node.input}
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("home", [HOME, TOWERS[0]])
@pytest.mark.parametrize("step", ["train", "test", "predict"])
def test_only_rows_are_read_and_written(step, home, packed):
    uses = _uses(_graph(step, home, packed=packed))
    update = [("ResourceScatterSub", home)] if step == "train" else []
    assert uses == [("ResourceGather", home)] * len(TOWERS) + update


def test_rows_travel_and_no_table():
    nodes = _graph("train")
    sent = executed.transfers(nodes)
    for tower in TOWERS:
        names = [name for source, to, _, name in sent if (source, to) == (HOME, tower)]
        # Of four rows of five, in place of a table of 37.
        assert sum("Gather" in name for name in names) == 1
        # The dense layer's two variables are read as they are.
        assert sum("ReadVariableOp" in name for name in names) == 2
        # Ids go there, and the gradient of the rows comes back, with them.
        back = [dtype for source, to, dtype, _ in sent if (source, to) == (tower, HOME)]
        assert 1 <= back.count(tf.int32) <= 2


def test_a_table_that_is_used_as_a_whole_is_read():
    def make(name):
        return _after(_embedding(embeddings_regularizer="l2"), name=name)

    uses = dict.fromkeys(kind for kind, _ in _uses(_graph("train", make=make)))
    assert "ReadVariableOp" in uses
    assert "ResourceGather" not in uses


def test_replicated_towers_look_up_rows_in_their_copies():
    uses = _uses(_graph("train", home=None, variable_update="replicated"))
    assert uses == sorted(
        (kind, tower)
        for kind in ("ReadVariableOp", "ResourceScatterSub")
        for tower in TOWERS
    )


def test_which_tables_stay_at_home():
    class Own(keras.layers.Embedding):
        pass

    def found(embedding):
        model = _after(embedding)
        return [v.name for v in model.variables if id(v) in embeddings.tables(model)]

    assert found(_embedding(name="plain")) == ["embeddings"]
    assert found(_embedding(name="frozen", trainable=False)) == []
    assert found(Own(*TABLE, name="own")) == []
    adapted = _embedding(name="adapted")
    adapted.build()
    adapted.enable_lora(2)
    assert found(adapted) == []


def test_keras_is_as_before_outside_of_towers():
    before = keras.layers.Embedding.call
    parallel = multi_gpu_model(_after(_embedding()), gpus=2)
    parallel.compile("sgd", "mse")
    parallel.train_on_batch(_ids(), _targets())
    assert keras.layers.Embedding.call is before


# The numbers.


class Tied(keras.Model):
    """Its output layer is the embedding, transposed."""

    def __init__(self):
        super().__init__(name="tied")
        self.embedding = _embedding()

    def call(self, ids):
        mean = keras.ops.mean(self.embedding(ids), axis=1)
        table = keras.ops.transpose(self.embedding.embeddings)
        return keras.ops.matmul(mean, table)[:, :3]


class EmbedsInLoop(keras.layers.Layer):
    """A recurrent cell that looks up rows in each step."""

    state_size = 4

    def __init__(self):
        super().__init__(name="embeds_in_loop")
        self.embedding = _embedding()

    def call(self, ids, states):
        row = self.embedding(keras.ops.cast(ids[:, 0], "int32"))
        state = keras.ops.tanh(states[0] + row)
        return state, [state]


def _adapted():
    model = _after(_embedding())
    model.layers[0].enable_lora(2)
    return model


def _several():
    """Of two tables, one is used twice and one has a constraint."""
    inputs = [keras.Input((STEPS,), dtype="int32") for _ in range(2)]
    shared, other = _embedding(), _embedding(embeddings_constraint="unit_norm")
    rows = [shared(inputs[0]), keras.ops.tanh(shared(inputs[1])), other(inputs[1])]
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.Concatenate()(rows))
    return keras.Model(inputs, keras.layers.Dense(3)(mean))


# Of all types, negative ones, and few that are repeated: a table for each.
_KINDS = (
    _ids(dtype="int64"),
    _ids(dtype="uint8", seed=1),
    _ids(dtype="float32", seed=2),
    _ids(low=-TABLE[0], seed=3),
    _ids(seed=4) % 3,
)


def _of_all_kinds():
    inputs = [keras.Input((STEPS,), dtype=ids.dtype.name) for ids in _KINDS]
    rows = keras.layers.Concatenate()([_embedding()(each) for each in inputs])
    mean = keras.layers.GlobalAveragePooling1D()(rows)
    return keras.Model(inputs, keras.layers.Dense(3)(mean))


def _masked():
    body = [_embedding(mask_zero=True), keras.layers.LSTM(4), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((STEPS,), dtype="int32"), *body])


def _nested():
    inner = keras.Sequential([_embedding(), keras.layers.Dense(4, "tanh")])
    return _after(inner)


def _frozen():
    return _after(_embedding(trainable=False))


def _looping():
    inputs = keras.Input((STEPS, 1))
    rows = keras.layers.RNN(EmbedsInLoop())(inputs)
    return keras.Model(inputs, keras.layers.Dense(3)(rows))


def _some(options):
    return lambda: _after(_embedding(**options))


CASES = {
    "plain": (_some({}), _ids()),
    "repeated ids": (_some({}), _ids() % 3),
    "ids of all kinds": (_of_all_kinds, _KINDS),
    "regularized": (_some({"embeddings_regularizer": "l2"}), _ids()),
    "mask": (_masked, np.where(np.arange(STEPS) < 3, _ids(), 0)),
    "tied": (Tied, _ids()),
    "lora": (_adapted, _ids()),
    "several": (_several, (_ids(), _ids(seed=5))),
    "nested": (_nested, _ids()),
    "frozen": (_frozen, _ids()),
    "in a loop": (_looping, _ids(dtype="float32")[..., None]),
}
# A row, one of several, and a table as a whole: others read like one of these.
EVALUATED = "plain", "several", "regularized"


def _run(case, wrap, optimizer=None, batch_size=8, epochs=2, **options):
    keras.utils.set_random_seed(7)
    make, x = CASES[case]
    model = make()
    trained = wrap(model)
    optimizer = optimizer() if optimizer else keras.optimizers.Adam(0.01)
    trained.compile(optimizer, "mse", **{"jit_compile": False} | options)
    # Batches of 8 and 5: shares of 3, 3 and 2, or of 2, 2 and 1.
    data = tf.data.Dataset.from_tensor_slices((x, _targets())).batch(batch_size)
    fit = trained.fit(data, epochs=epochs, shuffle=False, verbose=0)
    found = list(fit.history["loss"])
    if case in EVALUATED:
        found.append(trained.evaluate(data, verbose=0))
    found.append(trained.predict(data, verbose=0))
    return found + [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


@functools.cache
def _expected(case):
    """What one device makes of a case."""
    # Nothing is traced then. Eagerly, Keras trains a table in a loop otherwise.
    eager = case != "in a loop"
    return _run(case, lambda model: model, run_eagerly=eager)


def _towers(towers=3, **options):
    return lambda model: multi_gpu_model(model, gpus=towers, **options)


@pytest.mark.parametrize("case", CASES)
def test_towers_equal_one_device(case):
    found = _run(case, _towers())
    assert oracle.largest_difference(found, _expected(case)) < 1e-5


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("several", {"variable_update": "replicated"}),
        ("tied", {"variable_update": "replicated"}),
        ("several", {"packed": True}),
        ("tied", {"packed": True}),
        ("several", {"cpu_merge": False}),
        ("several", {"local_parameter_device": "/device:CPU:3"}),
        ("tied", {"local_parameter_device": "/device:CPU:3"}),
        ("several", {"loss_placement": "gathered"}),
    ],
    ids=str,
)
def test_whatever_the_builder_does(case, options):
    found = _run(case, _towers(**options))
    assert oracle.largest_difference(found, _expected(case)) < 1e-5


@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}],
    ids=str,
)
def test_however_it_is_compiled(options):
    found = _run("several", _towers(2), **options)
    # What `fit` says of an epoch is Keras's, by the steps of a call.
    assert oracle.largest_difference(found, _expected("several")) < 1e-5


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
        lambda: keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=2),
        lambda: keras.optimizers.RMSprop(0.01, use_ema=True, ema_overwrite_frequency=2),
    ],
    ids=["sgd", "clipped", "accumulated", "averaged"],
)
def test_sparse_updates(optimizer):
    case = "repeated ids"
    expected = _run(case, lambda model: model, optimizer, run_eagerly=True)
    found = _run(case, _towers(), optimizer)
    assert oracle.largest_difference(found, expected) < 1e-5


def test_mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    expected = _run("plain", lambda model: model, run_eagerly=True)
    assert oracle.largest_difference(_run("plain", _towers()), expected) < 1e-2


def test_idle_towers():
    options = {"batch_size": 2, "epochs": 1}
    expected = _run("plain", lambda model: model, run_eagerly=True, **options)
    found = _run("plain", _towers(4), **options)
    assert oracle.largest_difference(found, expected) < 1e-5


class InnerGraph(keras.Model):
    """Calls its embedding in a graph within the tower's."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.embedding = keras.layers.Embedding(20, 4)
        self.dense = keras.layers.Dense(1)

    def call(self, ids):
        look_up = self.embedding
        if self.how == "cond":
            rows = tf.cond(
                tf.size(ids) > 3, lambda: look_up(ids), lambda: 0 * look_up(ids)
            )
        elif self.how == "function":
            rows = tf.function(look_up)(ids)
        elif self.how == "map":
            rows = keras.ops.map(look_up, ids)
        else:
            rows = keras.ops.vectorized_map(look_up, ids)
        return self.dense(keras.ops.mean(rows, axis=1))


@pytest.mark.parametrize("how", ["cond", "function", "map", "vectorized_map"])
def test_a_table_in_an_inner_graph_learns(how):
    random = np.random.default_rng(0)
    ids = random.integers(0, 20, (14, 5)).astype("int32")
    y = random.normal(size=(14, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((ids, y)).batch(8)
    tables = []
    for towers in (0, 2):
        keras.utils.set_random_seed(1)
        model = InnerGraph(how)
        model(ids)
        trained = multi_gpu_model(model, gpus=towers) if towers else model
        # Nothing is traced for one device.
        trained.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=not towers)
        start = model.embedding.embeddings.numpy()
        trained.fit(data, shuffle=False, verbose=0)
        tables.append(model.embedding.embeddings.numpy())
    assert np.abs(tables[0] - start).max() > 1e-3
    np.testing.assert_allclose(tables[1], tables[0], rtol=1e-5, atol=1e-7)
