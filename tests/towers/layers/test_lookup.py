"""Embeddings: rows are fetched where the table is, and the numbers are Keras's."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import executed, oracle
from tests.variants import slow
from towers import multi_gpu_model
from towers.layers import embeddings

pytestmark = pytest.mark.quick_one_in(2)

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


def _graph(step="train", home=HOME, regularizer=None, **options):
    name = f"table_{next(_numbers)}"
    model = _after(_embedding(embeddings_regularizer=regularizer), name=name)
    parallel = multi_gpu_model(
        model, gpus=TOWERS, local_parameter_device=home, **options
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


# Of training at home, test_rows_travel_and_no_table tells.
QUICK = ("test", HOME, True), ("predict", HOME, False)


@pytest.mark.parametrize(
    ("step", "home", "packed"),
    [
        each if each in QUICK else slow(*each)
        for each in itertools.product(
            ["train", "test", "predict"], [HOME, TOWERS[0]], [False, True]
        )
    ],
)
def test_only_rows_are_read_and_written(step, home, packed):
    _assert_only_rows(_graph(step, home, packed=packed), step, home)


def _assert_only_rows(nodes, step, home):
    update = [("ResourceScatterSub", home)] if step == "train" else []
    assert _uses(nodes) == [("ResourceGather", home)] * len(TOWERS) + update


def test_rows_travel_and_no_table():
    before = keras.layers.Embedding.call
    nodes = _graph("train")
    assert keras.layers.Embedding.call is before, "Keras is as before outside"
    _assert_only_rows(nodes, "train", HOME)
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


@pytest.mark.slow
def test_a_table_that_is_used_as_a_whole_is_read():
    uses = dict.fromkeys(kind for kind, _ in _uses(_graph(regularizer="l2")))
    assert "ReadVariableOp" in uses
    assert "ResourceGather" not in uses


def test_replicated_towers_look_up_rows_in_their_copies():
    uses = _uses(_graph(home=None, variable_update="replicated"))
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


# Of all types, negative ones, and few that are repeated.
_KINDS = (
    _ids(dtype="int64"),
    _ids(dtype="uint8", seed=1),
    _ids(dtype="float32", seed=2),
    _ids(low=-TABLE[0], seed=3),
    _ids(seed=4) % 3,
)


def _several():
    """A table that is used twice, one with a constraint, one in a model, one frozen."""
    inputs = [keras.Input((STEPS,), dtype=ids.dtype.name) for ids in _KINDS]
    shared, other = _embedding(), _embedding(embeddings_constraint="unit_norm")
    nested = keras.Sequential([keras.Input((STEPS,), dtype="float32"), _embedding()])
    uses = [shared, shared, nested, other, _embedding(trainable=False)]
    rows = [use(ids) for use, ids in zip(uses, inputs, strict=True)]
    rows[1] = keras.ops.tanh(rows[1])
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.Concatenate()(rows))
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


_MASKED = np.where(np.arange(STEPS) < 3, _ids(), 0)
CASES = {
    "plain": (_some({}), _ids()),
    "repeated ids": (_some({}), _ids() % 3),
    "regularized": (_some({"embeddings_regularizer": "l2"}), _ids()),
    "mask": (_some({"mask_zero": True}), _MASKED),
    "mask of an LSTM": (_masked, _MASKED),
    "tied": (Tied, _ids()),
    "lora": (_adapted, _ids()),
    "several": (_several, _KINDS),
    "nested": (_nested, _ids()),
    "frozen": (_frozen, _ids()),
    "in a loop": (_looping, _ids(dtype="float32")[..., None]),
}
# Others are further variants of these: several tables, and one as a whole.


def _run(case, wrap, optimizer=None, batch_size=8, evaluated=True, **options):
    keras.utils.set_random_seed(7)
    make, x = CASES[case]
    model = make()
    trained = wrap(model)
    optimizer = optimizer() if optimizer else keras.optimizers.SGD(0.1)
    trained.compile(optimizer, "mse", **{"jit_compile": False} | options)
    data = tf.data.Dataset.from_tensor_slices((x, _targets())).batch(batch_size)
    fit = trained.fit(data, epochs=2, shuffle=False, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    found = [*fit.history["loss"], *(v.numpy() for v in variables)]
    if evaluated:
        found.append(trained.evaluate(data, verbose=0))
        found.append(trained.predict(data, verbose=0))
    return found


@functools.cache
def _expected(case):
    """What one device makes of a case."""
    # Nothing is traced then. Eagerly, Keras trains a table in a loop otherwise.
    eager = case != "in a loop"
    return _run(case, lambda model: model, run_eagerly=eager)


def _equal(found, expected):
    """Whether they are what one device found, or, without evaluation, its beginning."""
    assert len(expected) - len(found) in (0, 2)
    return oracle.largest_difference(found, expected[: len(found)]) < 1e-5


def _towers(towers=2, **options):
    return lambda model: multi_gpu_model(model, gpus=towers, **options)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_towers_equal_one_device(case):
    assert _equal(_run(case, _towers()), _expected(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("plain", {"variable_update": "replicated"}),
        ("several", {"variable_update": "replicated"}),
        ("several", {"packed": True, "local_parameter_device": "/device:CPU:3"}),
        ("several", {"cpu_merge": False, "loss_placement": "gathered"}),
        ("tied", {"variable_update": "replicated"}),
        ("tied", {"packed": True}),
        ("tied", {"local_parameter_device": "/device:CPU:3"}),
        ("several", {"packed": True}),
        ("several", {"cpu_merge": False}),
        ("several", {"loss_placement": "gathered"}),
    ],
    ids=str,
)
def test_whatever_the_builder_does(case, options):
    # All evaluate alike; of packed values, test_only_rows_are_read_and_written tells.
    found = _run(case, _towers(**options), evaluated=False)
    assert _equal(found, _expected(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}],
    ids=str,
)
def test_however_it_is_compiled(options):
    found = _run("several", _towers(), evaluated=False, **options)
    assert _equal(found, _expected("several"))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
        slow(lambda: keras.optimizers.Adam(0.01)),
        slow(lambda: keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=2)),
        slow(
            lambda: keras.optimizers.RMSprop(
                0.01, use_ema=True, ema_overwrite_frequency=2
            )
        ),
    ],
    ids=["clipped", "adam", "accumulated", "averaged"],
)
def test_sparse_updates(optimizer):
    # Of batches of 4, and of 1, which leaves two towers idle.
    case = "repeated ids"
    options = {"optimizer": optimizer, "batch_size": 4, "evaluated": False}
    expected = _run(case, lambda model: model, run_eagerly=True, **options)
    assert _equal(_run(case, _towers(3), **options), expected)


@pytest.mark.slow
def test_mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    options = {"evaluated": False}
    expected = _run("plain", lambda model: model, run_eagerly=True, **options)
    found = _run("plain", _towers(), **options)
    assert oracle.largest_difference(found, expected) < 1e-2


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "function",
        "vectorized_map",  # looks up rows at home, and loses their gradient
        "cond",
        "map",
    ],
)
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
        # Not strict: inner graphs would be compared, which traces them again.
        trained = model
        if towers:
            trained = multi_gpu_model(model, gpus=towers, strict=False)
        # Nothing is traced for one device.
        trained.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=not towers)
        start = model.embedding.embeddings.numpy()
        trained.fit(data, shuffle=False, verbose=0)
        tables.append(model.embedding.embeddings.numpy())
    assert np.abs(tables[0] - start).max() > 1e-3
    np.testing.assert_allclose(tables[1], tables[0], rtol=1e-5, atol=1e-7)
