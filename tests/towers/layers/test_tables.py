"""Tables over devices: where they lie, and what travels; see also tests.exact."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import executed, hosts, oracle
from tests.towers.layers import test_lookup as lookup
from tests.variants import slow
from towers import multi_gpu_model
from towers.callbacks import Checkpoint
from towers.layers import sharded, tables
from towers.models.text.layers import TiedEmbedding

pytestmark = pytest.mark.quick_one_in(2)

DEVICES = [f"/device:CPU:{i}" for i in range(3)]
WAYS = "rows", "columns"


def _towers(way, towers=3, **options):
    return lambda model: multi_gpu_model(
        model, gpus=towers, shard_embeddings=way, **options
    )


def _devices(variable):
    return [
        place.device[place.device.rindex("/device") :]
        for place in sharded.places(variable)
    ]


# Where tables lie.


def _several(rows=(37, 5, 4096), **options):
    inputs = keras.Input((4,), dtype="int32")
    names = "abcdefgh"
    found = [
        keras.layers.Embedding(count, 128, name=name, **options)(inputs % count)
        for name, count in zip(names, rows, strict=False)
    ]
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.Concatenate()(found))
    return keras.Model(inputs, keras.layers.Dense(1)(mean))


def _layout(model, way, devices=DEVICES, home="/device:CPU:3"):
    placed = tables.layout(model, devices, way, lambda _: [home])
    return {each.variable.path[0]: (each.axis, len(each.devices)) for each in placed}


def test_rows_and_columns_are_cut_evenly():
    model = _several()
    assert _layout(model, "rows") == dict.fromkeys("abc", (0, 3))
    assert _layout(model, "columns") == dict.fromkeys("abc", (1, 3))


def test_auto_balances_bytes():
    # One is larger than what a device is to have; it leaves the others as they are.
    assert _layout(_several(), "auto") == {"a": (0, 1), "b": (0, 1), "c": (0, 3)}
    # Of four of a size, three fit, and one more would be half as much again.
    even = _several((3000,) * 6)
    assert _layout(even, "auto") == dict.fromkeys("abcdef", (0, 1))
    odd = _several((3000,) * 4)
    assert _layout(odd, "auto") != dict.fromkeys("abcd", (0, 1))
    placed = tables.layout(odd, DEVICES, "auto", lambda _: DEVICES[:1])
    tables.put(placed, None)
    held = tables.bytes_by_device(odd)
    assert max(held.values()) <= 1.05 * sum(held.values()) / 3
    # Small tables are whole, whatever that means for the balance.
    assert {n for _, n in _layout(_several((9, 700)), "auto").values()} == {1}


def test_what_is_cut_fills_up_what_other_variables_leave():
    inputs = keras.Input((4,), dtype="int32")
    rows = keras.layers.Embedding(6000, 128)(inputs)
    hidden = keras.layers.Dense(256, name="first")(rows)
    model = keras.Model(inputs, keras.layers.Dense(1024, name="second")(hidden))
    # The second has a copy.
    places = {"first": DEVICES[:1], "second": DEVICES[1:]}
    held = collections.Counter()
    for name, devices in places.items():
        for weight in model.get_layer(name).weights:
            held.update(dict.fromkeys(devices, 4 * weight.shape.num_elements()))
    (table,) = tables.layout(
        model, DEVICES, "auto", lambda v: places.get(v.path.split("/")[0])
    )
    for device, size in zip(table.devices, table.sizes, strict=True):
        held[device] += 4 * 128 * size
    assert sum(table.sizes) == 6000
    assert max(held.values()) - min(held.values()) <= 4 * 128
    # Where there is no room, nothing is put.
    every = dict.fromkeys(places, DEVICES[:1])
    (table,) = tables.layout(
        model, DEVICES, "auto", lambda v: every.get(v.path.split("/")[0], DEVICES) * 4
    )
    assert (table.devices, table.sizes) == ((*DEVICES[1:],), (3000, 3000))


# The ids that an example has for each of four tables.
IDS = {"a": 30, "b": 1, "c": 30, "d": 1}


def _with_ids():
    inputs = {
        name: keras.Input((n,), dtype="int32", name=name) for name, n in IDS.items()
    }
    rows = [
        keras.layers.Embedding(50, 8, name=f"{name}_table")(ids)
        for name, ids in inputs.items()
    ]
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.Concatenate(1)(rows))
    return keras.Model(inputs, keras.layers.Dense(1)(mean))


def test_look_ups_are_counted():
    model = _with_ids()
    x = {name: tf.zeros([6, n], tf.int32) for name, n in IDS.items()}
    found = tables.look_ups(lambda: model(x))
    expected = {id(v): 6 * IDS[v.path[0]] for v in model.trainable_variables[:4]}
    assert found == expected


@pytest.mark.parametrize(
    ("loads", "more", "expected"),
    [([5, 1, 2], 3, 3.0), ([5, 1, 2], 100, 36.0), ([5, 1, 2], 0, 1.0), ([2], 1, 3.0)],
)
def test_the_level_of_what_is_filled_up(loads, more, expected):
    assert tables.level(loads, more) == expected


def test_what_is_said_of_many_tables(monkeypatch):
    monkeypatch.setattr(tables, "_LISTED", 1)
    model = _several()
    model.get_layer("a").trainable = False
    tables.put(tables.layout(model, DEVICES, "columns", lambda _: DEVICES[:1]), None)
    why, where, held = tables.lines(model, lambda _: DEVICES[0], [])
    assert why.endswith("CPU:0, whole: it is frozen, adapted or quantized.")
    assert where.endswith("\n  and 1 other table") and where.count("\n") == 2
    assert held.startswith("Variables and optimizer slots take: /device:CPU:0 ")


@pytest.mark.parametrize("counted", [True, False])
def test_look_ups_are_balanced_as_far_as_bytes_leave_a_choice(counted, monkeypatch):
    if not counted:
        monkeypatch.setattr(tables, "look_ups", lambda call: {}[call])
    model = _with_ids()
    parallel = _towers("auto", 2)(model)
    parallel.compile("sgd", "mse")
    x = {name: np.ones((6, n), "int32") for name, n in IDS.items()}
    parallel.train_on_batch(x, np.ones((6, 1), "float32"))
    of_table = {v.path[0]: _devices(v) for v in model.trainable_variables[:4]}
    assert (of_table["a"] != of_table["c"]) == counted
    assert all(len(devices) == 1 for devices in of_table.values())
    held = tables.bytes_by_device(model)
    assert max(held.values()) <= 2 * 4 * 50 * 8 + 100


def test_bytes_go_before_look_ups():
    model = _several((6000, 3000, 3000))
    looked_up = {id(v): n for v, n in zip(model.variables, (1, 9, 9), strict=False)}
    placed = tables.layout(model, DEVICES[:2], "auto", lambda _: (), looked_up)
    # To balance look-ups, the second small one would be with the large one.
    assert [each.devices[0] for each in placed] == [DEVICES[0], DEVICES[1], DEVICES[1]]


def test_what_takes_a_table_as_a_whole_leaves_it_at_home(caplog):
    model = lookup._after(
        lookup._embedding(embeddings_regularizer="l2", name="regularized")
    )
    parallel = _towers("rows")(model)
    parallel.compile("sgd", "mse")
    parallel.train_on_batch(lookup._ids(), lookup._targets())
    assert sharded.of(model.trainable_variables[0]) is None
    assert "regularized/embeddings stays on" in caplog.text
    assert "whole: its regularizer takes it as a whole." in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Lamb", "Adafactor", "Muon"])
def test_who_looks_at_whole_variables_is_refused_or_has_tables_at_home(name, caplog):
    def train(way):
        model = _several()
        parallel = _towers(way)(model)
        parallel.compile(getattr(keras.optimizers, name)(), "mse")
        parallel.train_on_batch(np.ones((4, 4), "int32"), np.ones((4, 1), "float32"))
        return model

    with pytest.raises(
        ValueError, match=f"Received shard_embeddings='rows' with {name}"
    ):
        train("rows")
    assert sharded.of(train("auto").trainable_variables[0]) is None
    assert f"where all variables are, because of {name}" in caplog.text


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"expected one of .*'columns'"):
        _towers("cells")(_several())
    with pytest.raises(ValueError, match="whose towers update all of a model at home"):
        _towers("rows", variable_update="asynchronous")(_several())


def test_tables_come_home_again():
    model = _several()
    parallel = _towers("rows")(model)
    parallel.compile(keras.optimizers.Adagrad(), "mse")
    x, y = np.ones((4, 4), "int32"), np.ones((4, 1), "float32")
    parallel.train_on_batch(x, y)
    table, slots = model.trainable_variables[0], model.optimizer.variables
    assert _devices(table) == DEVICES
    assert [_devices(slot) for slot in slots if slot.shape == table.shape] == [DEVICES]
    before = table.numpy()
    parallel = multi_gpu_model(model, gpus=2)
    np.testing.assert_array_equal(table.numpy(), before)
    parallel.train_on_batch(x, y)
    assert all(sharded.of(each) is None for each in [table, *slots])
    assert (table.numpy() != before).any()


# What travels.


@functools.cache
def _executed(way, update, optimizer="SGD"):
    name = f"sharded_{way}_{update}_{optimizer}"
    model = lookup._after(lookup._embedding(name=f"table_{name}"), name=name)
    parallel = _towers(way, 2, variable_update=update)(model)
    parallel.compile(getattr(keras.optimizers, optimizer)(0.1), "mse")
    x, y = lookup._ids(8), lookup._targets(8)
    nodes = executed.run(lambda: parallel.train_on_batch(x, y), name)
    return nodes, sharded.of(model.trainable_variables[0])


@pytest.mark.parametrize("update", ["parameter_server", slow("replicated")])
@pytest.mark.parametrize("way", WAYS)
def test_only_ids_and_rows_travel(way, update):
    nodes, cut = _executed(way, update)
    kinds = collections.Counter(
        (node.op, device)
        for device, each in nodes.items()
        for node in each
        if node.op.startswith(("ResourceGather", "ResourceScatter"))
    )
    # Both towers look up rows on both devices; each updates its own.
    assert kinds == {
        (kind, device): count
        for kind, count in (("ResourceGather", 2), ("ResourceScatterSub", 1))
        for device in DEVICES[:2]
    }
    assert _uses(nodes, cut) == {"ResourceGather", "ResourceScatterSub"}


def test_adagrad_reads_and_writes_rows_alone():
    # Keras takes the root of all sums of squares.
    nodes, cut = _executed("rows", "parameter_server", "Adagrad")
    update = {"ResourceScatterAdd", "ResourceScatterSub"}
    # A handle that is handed on is no copy of the table.
    assert _uses(nodes, cut) - {"Identity"} == {"ResourceGather", *update}


def _uses(nodes, cut):
    """The kinds of operations on what has the shape of a shard."""
    shapes = {tuple(shard.shape) for shard in cut.shards}
    handles = {
        node.name
        for each in nodes.values()
        for node in each
        for shape in node.attr["_handle_shapes"].list.shape
        if node.op == "_Arg" and tuple(d.size for d in shape.dim) in shapes
    }
    assert handles
    return {
        node.op
        for each in nodes.values()
        for node in each
        if handles & {name.split(":")[0] for name in node.input}
    }


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_table_of_a_class_of_its_own_is_said_to_stay_whole(way, caplog):
    embedding, inputs = TiedEmbedding(*lookup.TABLE), keras.Input((lookup.STEPS,))
    logits = embedding(embedding(inputs), reverse=True)
    parallel = _towers(way)(keras.Model(inputs, logits[:, 0, :3]))
    parallel.compile("sgd", "mse")
    parallel.train_on_batch(lookup._ids(), lookup._targets())
    said = "whole: a class of its own looks up its rows"
    assert caplog.text.count(said) == 1


# Checkpoints, and hosts.


def saved_model():
    """A model that is compiled, and alike in all processes."""
    keras.utils.set_random_seed(7)
    model = lookup._after(lookup._embedding())
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    return model


def fit(trained, epochs, *callbacks):
    """Trains with the same batches in each epoch, the last one uneven."""
    data = tf.data.Dataset.from_tensor_slices((lookup._ids(), lookup._targets()))
    trained.fit(data.batch(8), epochs=epochs, verbose=0, callbacks=[*callbacks])


def _assert_alike(*models):
    values = [
        [v.numpy() for v in [*m.variables, *m.optimizer.variables]] for m in models
    ]
    for found in values[1:]:
        assert oracle.largest_difference(found, values[0]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("way", [WAYS[0], WAYS[1]])
def test_saved_and_continued_with_another_layout(way, tmp_path):
    plain, cut, other = saved_model(), saved_model(), saved_model()
    fit(plain, 3)
    fit(_towers(way)(cut), 1, Checkpoint(tmp_path / "run"))
    cut.save(tmp_path / "cut.keras")
    opened = keras.saving.load_model(tmp_path / "cut.keras")
    fit(opened, 2)
    # From the checkpoint: rows over two devices, then a table at home.
    fit(_towers("rows", 2)(other), 2, Checkpoint(tmp_path / "run"))
    last = saved_model()
    fit(multi_gpu_model(last, gpus=2), 3, Checkpoint(tmp_path / "run"))
    _assert_alike(plain, opened, last)


@pytest.mark.slow
def test_saved_by_hosts_and_continued_by_one(tmp_path):
    arguments = "continued", tmp_path, "rows,columns,rows"
    hosts.run("tests.towers.layers.on_hosts", (1, 2), *arguments)
    plain = saved_model()
    fit(plain, 4)
    opened = keras.saving.load_model(tmp_path / "hosts.keras")
    fit(opened, 1)
    last = saved_model()
    fit(_towers("rows")(last), 4, Checkpoint(tmp_path / "run"))
    _assert_alike(plain, opened, last)


@pytest.mark.slow
def test_a_host_that_reads_a_table_alone_ends_the_run(tmp_path):
    arguments = "alone", tmp_path, ""
    hosts.run("tests.towers.layers.on_hosts", (1, 2), *arguments)


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        slow((1, 1), "rows"),
        slow((1, 1), "auto"),
        slow((1, 2), "rows"),
        slow((1, 2), "auto"),
        slow((1, 1, 1), "rows"),
        slow((1, 1, 1), "auto"),
    ],
)
def test_hosts_have_their_share_and_send_rows_alone(layout, way, tmp_path):
    arguments = "large", tmp_path, way
    hosts.run("tests.towers.layers.on_hosts", layout, *arguments)


@pytest.mark.parametrize(
    ("layout", "ids_type"),
    [((1, 2), "int32"), slow((2, 1), "int64"), slow((1, 1, 1), "int32")],
)
def test_hosts_exchange_rows_and_their_gradients(layout, ids_type, tmp_path):
    arguments = "exchanges", tmp_path, ids_type
    hosts.run("tests.towers.layers.on_hosts", layout, *arguments)


@pytest.mark.slow
def test_tables_lie_beside_stages_of_any_size(caplog):
    inputs = keras.Input((4,), dtype="int32")
    mean = keras.layers.GlobalAveragePooling1D()
    hidden = mean(keras.layers.Embedding(3000, 128, name="table")(inputs))
    for k in range(3):
        hidden = keras.layers.Dense(128, name=f"dense_{k}")(hidden)
    model = keras.Model(inputs, hidden)
    parallel = _towers("auto", stages=3)(model)
    parallel.compile("adam", "mse")
    x, y = np.ones((4, 4), "int32"), np.ones((4, 128), "float32")
    parallel.train_on_batch(x, y)
    held = tables.bytes_by_device(model)
    assert max(held.values()) <= 1.02 * sum(held.values()) / 3
    assert "without the tables, which lie on the devices of all" in caplog.text
