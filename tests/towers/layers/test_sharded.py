"""Sharded variables: one variable to Keras, shards on devices, the user's optimizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import oracle
from tests.variants import slow
from towers.keras_adapter.optimizers import slots_of
from towers.layers import sharded, substitutes
from towers.lifecycle.checkpoints import saved_model

DEVICES = [f"/device:CPU:{i}" for i in range(1, 4)]
ROWS, COLUMNS = 7, 4


def _model():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((2,), dtype="int32")
    rows = keras.layers.Embedding(ROWS, COLUMNS)(inputs)
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(rows)))


def _cut(model, axis, optimizer=None):
    for variable in model.trainable_variables[:2]:
        # A table and a kernel, in one way each.
        slots = slots_of(optimizer, variable) if optimizer else ()
        for each in [variable, *slots]:
            sharded.cut(each, DEVICES, axis)


def _gradients(variables, sparse, seed=0):
    random = np.random.default_rng(seed)
    gradients = [random.normal(size=v.shape).astype("float32") for v in variables]
    gradients = [*map(tf.constant, gradients)]
    if sparse:
        rows = tf.constant([1, 6, 1, 0, 3, 6])
        values = random.normal(size=(6, COLUMNS)).astype("float32")
        gradients[0] = tf.IndexedSlices(
            tf.constant(values), rows, tf.constant([ROWS, COLUMNS])
        )
    return gradients


AXES = pytest.mark.parametrize("axis", [0, 1, None], ids=["rows", "columns", "flat"])


@AXES
def test_keras_sees_one_variable(axis, tmp_path):
    model, plain = _model(), _model()
    for each in (model, plain):
        each.compile(keras.optimizers.Adam(), "mse")
        each.optimizer.build(each.trainable_variables)
    before = model.get_weights()
    _cut(model, axis, model.optimizer)
    table = sharded.of(model.trainable_variables[0])
    devices = DEVICES[: len(table.shards)]
    assert len(devices) == (3 if axis is None else min(3, (ROWS, COLUMNS)[axis]))
    for shard, device in zip(table.shards, devices, strict=True):
        assert shard.device.endswith(device)
    assert sum(shard.shape.num_elements() for shard in table.shards) == ROWS * COLUMNS
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    np.testing.assert_array_equal(tf.convert_to_tensor(model.variables[0]), before[0])
    np.testing.assert_array_equal(model.variables[0][1:3], before[0][1:3])
    np.testing.assert_array_equal(-model.variables[0] * 2, before[0] * -2)
    others = [np.arange(w.size, dtype=w.dtype).reshape(w.shape) for w in before]
    model.set_weights(others)
    np.testing.assert_array_equal(model.get_weights()[0], others[0])
    for i, slot in enumerate(model.optimizer.variables[2:]):
        slot.assign(np.full(slot.shape, i, "float32"))

    # A file that plain Keras opens, and one that plain Keras has made.
    model.save(tmp_path / "model.keras")
    opened = keras.saving.load_model(tmp_path / "model.keras")
    pairs = zip(
        [*opened.variables, *opened.optimizer.variables],
        [*model.variables, *model.optimizer.variables],
        strict=True,
    )
    for theirs, ours in pairs:
        np.testing.assert_array_equal(theirs.numpy(), ours.numpy())
    plain.save_weights(tmp_path / "plain.weights.h5")
    model.load_weights(tmp_path / "plain.weights.h5")
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    assert sharded.of(model.variables[0]) is table
    tf.train.Checkpoint(model=model).write(str(tmp_path / "tf"))
    plain.set_weights(others)
    tf.train.Checkpoint(model=plain).read(str(tmp_path / "tf")).assert_consumed()
    np.testing.assert_array_equal(plain.get_weights()[0], before[0])
    model.set_weights(others)
    tf.train.Checkpoint(model=model).read(str(tmp_path / "tf")).assert_consumed()
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    # As optimizers do without Keras's variable.
    table.assign_add(2 * before[0])
    table.assign_sub(table)
    np.testing.assert_array_equal(model.get_weights()[0], 0 * before[0])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_are_cut_and_whole_again(axis, sparse):
    model = _model()
    variables = model.trainable_variables
    _cut(model, axis)
    gradients = _gradients(variables, sparse)
    parts = sharded.expand(variables, [*gradients[:-1], None])
    assert len(parts) == len(sharded.targets(variables))
    *again, none = sharded.whole(variables, parts)
    assert none is None
    for ours, theirs in zip(again, gradients, strict=False):
        assert type(ours) is type(theirs)
        np.testing.assert_array_equal(*map(tf.convert_to_tensor, (ours, theirs)))


def test_checkpoints_know_no_shards():
    cut, plain = _model(), _model()
    for model in (cut, plain):
        model.compile(keras.optimizers.Adam())
        model.optimizer.build(model.trainable_variables)
    _cut(cut, 0, cut.optimizer)
    for variable in [*cut.variables, *cut.optimizer.variables]:
        variable.assign(np.random.default_rng(0).integers(9, size=variable.shape))
    kept = saved_model.values(cut)
    saved_model.assign(plain, kept)
    for part, values in saved_model.values(plain).items():
        for ours, theirs in zip(kept[part], values, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    described = [saved_model.describe(each.variables) for each in (cut, plain)]
    assert described[0] == described[1]


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "decayed": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipped": lambda: keras.optimizers.Adagrad(0.1, clipnorm=0.3),
    "clipped together": lambda: keras.optimizers.SGD(0.1, 0.9, global_clipnorm=0.3),
    "averaged": lambda: keras.optimizers.RMSprop(
        0.01, use_ema=True, ema_overwrite_frequency=2, clipvalue=0.2
    ),
    "accumulated": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1), initial_scale=2.0, dynamic_growth_steps=2
    ),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.1),
    "lion": lambda: keras.optimizers.Lion(0.1),
    "amsgrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
}
QUICK = "clipped", "clipped together", "averaged", "accumulated", "scaled"


def test_a_slot_is_cut_however_it_is_asked_for():
    model, optimizer = _model(), keras.optimizers.SGD()
    _cut(model, 0)
    table = model.trainable_variables[0]
    with sharded.slots_like_variables():
        for slot in (
            optimizer.add_variable_from_reference(table, "momentum"),
            # As Adafactor and Muon do.
            optimizer.add_variable_from_reference(reference_variable=table, name="x"),
        ):
            assert [each.device for each in sharded.of(slot).shards] == [
                each.device for each in sharded.of(table).shards
            ]


@pytest.mark.quick_one_in(12)
@pytest.mark.parametrize(
    ("name", "sparse"),
    [
        (name, sparse) if name in QUICK and sparse else slow(name, sparse)
        for name in OPTIMIZERS
        for sparse in (True, False)
    ],
)
@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_the_users_optimizer_updates_shards_where_they_lie(name, sparse, axis):
    plain, model = _model(), _model()
    optimizers = [OPTIMIZERS[name](), OPTIMIZERS[name]()]
    assert sharded.why_not_cut(optimizers[1]) is None
    _cut(model, axis)
    optimizers[0].build(plain.trainable_variables)
    with sharded.slots_like_variables():
        optimizers[1].build(model.trainable_variables)

    @tf.function(autograph=False)
    def update(gradients):
        with substitutes.updates():
            parts = sharded.expand(model.trainable_variables, gradients)
            sharded.apply(optimizers[1], parts, model.trainable_variables)

    for step in range(4):
        gradients = _gradients(plain.trainable_variables, sparse, step)
        optimizers[0].apply(gradients, plain.trainable_variables)
        update(gradients)
    ours, theirs = (
        [v.numpy() for v in [*each.variables, *optimizer.variables]]
        for each, optimizer in zip((model, plain), optimizers[::-1], strict=True)
    )
    assert oracle.largest_difference(ours, theirs) < 1e-5
    # All slots of the table lie where it does.
    table = sharded.of(model.trainable_variables[0])
    slots = [v for v in optimizers[1].variables if v.shape == (ROWS, COLUMNS)]
    assert slots or name == "sgd"
    for slot in slots:
        devices = [shard.device for shard in sharded.of(slot).shards]
        assert devices == [shard.device for shard in table.shards]


def test_optimizers_that_look_at_whole_variables_are_known():
    class Own(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            pass

    def why(optimizer):
        return sharded.why_not_cut(optimizer)

    assert "Lamb" in why(keras.optimizers.Lamb())
    assert "Adafactor" in why(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adafactor())
    )
    assert "Own" in why(Own())
    both = {"clipnorm": 1.0, "gradient_accumulation_steps": 2}
    assert "accumulates" in why(keras.optimizers.SGD(**both))
    assert why(keras.optimizers.SGD(clipvalue=1.0)) is None
