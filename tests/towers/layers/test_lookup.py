"""Embeddings: rows are fetched where the table is; see also tests.exact."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import executed
from tests.valued import valued
from tests.variants import slow
from towers import multi_gpu_model
from towers.layers import substitutes

pytestmark = pytest.mark.quick_one_in(2)

TOWERS, HOME = ["/device:CPU:0", "/device:CPU:1"], "/device:CPU:2"
TABLE = (37, 4)
STEPS = 5
_numbers = itertools.count(1000)


def _ids(rows=13):
    random = np.random.default_rng(0)
    return random.integers(0, TABLE[0], (rows, STEPS)).astype("int32")


def _targets(rows=13):
    return np.random.default_rng(1).normal(size=(rows, 3)).astype("float32")


def _embedding(**options):
    return keras.layers.Embedding(*TABLE, **options)


def _after(embedding, name=None):
    body = [keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]
    inputs = keras.Input((STEPS,), dtype="int32")
    return keras.Sequential([inputs, embedding, *body], name=name)


# Where the table is, and what is done with it.


def _graph(step="train", home=HOME, regularizer=None, **options):
    name = f"table_{next(_numbers)}"
    model = _after(_embedding(embeddings_regularizer=regularizer), name=name)
    parallel = multi_gpu_model(model, gpus=TOWERS, **valued(device=home, **options))
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
        assert sum(name.startswith("home/") for name in names) == 2
        # Ids go there, and the gradient of the rows comes back, with them.
        back = [dtype for source, to, dtype, _ in sent if (source, to) == (tower, HOME)]
        assert 1 <= back.count(tf.int32) <= 2


@pytest.mark.slow
def test_a_table_that_is_used_as_a_whole_is_read():
    # The regularizer and its gradient take all of it; towers' rows are still looked up.
    assert _uses(_graph(regularizer="l2")) == [
        ("AssignSubVariableOp", HOME),
        ("ReadVariableOp", HOME),
        *[("ResourceGather", HOME)] * len(TOWERS),
    ]


def test_replicated_towers_look_up_rows_in_their_copies():
    uses = _uses(_graph(home=None, variable_update="replicated"))
    assert uses == sorted(
        (kind, tower)
        for kind in ("ResourceGather", "ResourceScatterSub")
        for tower in TOWERS
    )


def test_which_tables_stay_at_home():
    class Own(keras.layers.Embedding):
        pass

    def found(embedding):
        model = _after(embedding)
        return [v.name for v in model.variables if id(v) in substitutes.tables(model)]

    assert found(_embedding(name="plain")) == ["embeddings"]
    assert found(_embedding(name="frozen", trainable=False)) == []
    assert found(Own(*TABLE, name="own")) == []
    adapted = _embedding(name="adapted")
    adapted.build()
    adapted.enable_lora(2)
    assert found(adapted) == []


# Rows that the batch names and fixed ones, of one table, in one gradient.


class BatchAndFixedRows(keras.layers.Layer):
    """Looks up rows of a batch, and rows that are the same for all examples."""

    def __init__(self, fixed):
        super().__init__()
        self.table, self.fixed = keras.layers.Embedding(*TABLE), np.array(fixed)

    def call(self, ids):
        rows = keras.ops.sum(self.table(ids), 1)
        return rows * keras.ops.sum(self.table(self.fixed), 0) + self.table(ids[:, 1])


def _trained(fixed, optimizer, wrap):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((STEPS,), dtype="int32")
    outputs = keras.layers.Dense(3)(BatchAndFixedRows(fixed)(inputs))
    model = keras.Model(inputs, outputs)
    trained = wrap(model)
    trained.compile(optimizer, "mse")
    trained.fit(
        _ids() % 7, _targets(), batch_size=5, epochs=2, shuffle=False, verbose=0
    )
    return [variable.numpy() for variable in model.variables]


@pytest.mark.parametrize(
    "options",
    [
        {"variable_update": "parameter_server"},
        {"variable_update": "replicated"},
        {"variable_update": "sharded"},
        {"shard_embeddings": "rows"},
        {"shard_embeddings": "columns"},
        slow({"stages": 2}),
        slow({"micro_batches": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("fixed", [[0, 1, 2], [2, 0, 2, 1]], ids=["once", "twice"])
@pytest.mark.parametrize("optimizer", ["adam", slow("adagrad")])
def test_rows_of_the_batch_and_fixed_ones_are_updated_as_on_one_device(
    optimizer, fixed, options
):
    alone = _trained(fixed, optimizer, lambda model: model)
    together = _trained(
        fixed, optimizer, lambda model: multi_gpu_model(model, 2, **options)
    )
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
