"""`towers.RigL`, and the gradients that it moves blocks by."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import hosts
from tests.towers.sparse import networks, on_hosts
from tests.variants import slow
from towers import callbacks
from towers.keras_adapter.optimizers import slots_of
from towers.models.block_sparse import BlockSparseDense
from towers.sparse.rigl import moved, norms_of_blocks

pytestmark = pytest.mark.quick_one_in(2)

LIMIT = 1e-5
X, Y = networks.batch()


def adam(**options):
    # It divides a gradient by its size: with Keras's epsilon of 1e-7, what is only
    # rounding would become a step.
    return keras.optimizers.Adam(0.01, epsilon=1e-4, **options)


def trained(
    wrap=lambda model: model,
    optimizer=adam,
    epochs=4,
    data=(X, Y),
    more=(),
    model=None,
    every=3,
    until=12,
    drop=0.9,
    steps_per_execution=1,
):
    """Trains with RigL, 3 steps an epoch; returns the model."""
    model = model or networks.sparse()
    ours = wrap(model)
    ours.compile(optimizer(), "mse", steps_per_execution=steps_per_execution)
    rigl = towers.RigL(data, every=every, until=until, drop=drop)
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    ours.fit(X, Y, epochs=epochs, callbacks=[rigl, *more], **options)
    return model


def on_towers(gpus, **options):
    return functools.partial(towers.multi_gpu_model, gpus=gpus, **options)


def places(model):
    return [model.get_layer(name).places.numpy() for name in networks.NAMES]


def check_same(model, other, limit=LIMIT):
    for ours, theirs in zip(places(model), places(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert networks.apart(model.get_weights(), other.get_weights()) <= limit
    first = places(networks.sparse())
    assert any((a != b).any() for a, b in zip(places(model), first, strict=True))


class TestGradients:
    def norms(self, model, x, y, weight=None):
        layers = [model.get_layer(name) for name in networks.NAMES]
        found = norms_of_blocks(model, layers)(x, y, weight)
        return [each.numpy() for each in found]

    def expected(self, model, x, y, weight=None):
        """Keras's gradients of the dense model's kernels."""
        kernels = [model.get_layer(name).kernel.value for name in networks.NAMES]
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.compute_loss(x, y, outputs, weight, training=True)
        gradients = tape.gradient(loss, kernels)
        return [networks.block_squares(each, 2) ** 0.5 for each in gradients]

    def check(self, x, y, *weight, limit=1e-5, optimizer="sgd", loss="mse", **options):
        model = networks.sparse(networks.dense(**options))
        other = networks.dense_like(model, **options)
        model.compile(optimizer, loss)
        other.compile("sgd", loss)
        found = self.norms(model, x, y, *weight)
        expected = self.expected(other, x, y, *weight)
        assert [each.dtype for each in found] == ["float32"] * 3
        scale = max(map(np.max, found)) / max(map(np.max, expected))
        for ours, theirs in zip(found, expected, strict=True):
            apart = np.abs(ours / scale - theirs).max()
            assert apart <= limit * theirs.max()
        return scale

    @pytest.mark.slow
    def test_are_those_of_the_dense_model(self):
        assert self.check(X, Y) == pytest.approx(1)

    @pytest.mark.slow
    def test_of_a_weighted_sum(self):
        weight = np.linspace(0, 3, len(X)).astype("float32")
        assert self.check(X, Y, weight) == pytest.approx(1)

    @pytest.mark.slow
    def test_of_channels_first(self):
        x = np.moveaxis(X, -1, 1)
        model = networks.sparse(networks.dense(data_format="channels_first"))
        other = networks.sparse()
        for each in (model, other):
            each.compile("sgd", "mse")
        # The same model of the same pictures, whose dense form is tested above.
        ours, theirs = self.norms(model, x, Y), self.norms(other, X, Y)
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)

    @pytest.mark.slow
    def test_in_bfloat16(self):
        self.check(X, Y, dtype="mixed_bfloat16", limit=0.05)

    @pytest.mark.slow
    def test_in_float16_they_do_not_vanish(self):
        optimizer = keras.optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**10)

        def tiny(y, found):
            return 1e-6 * keras.losses.mean_squared_error(y, found)

        model = networks.sparse(networks.dense(dtype="mixed_float16"))
        other = networks.dense_like(model)
        model.compile(optimizer, tiny)
        other.compile("sgd", tiny)
        ours, theirs = self.norms(model, X, Y), self.expected(other, X, Y)
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b * 2**10, atol=0.05 * b.max() * 2**10)

    def test_of_losses_that_layers_add(self):
        def made():
            inputs = keras.Input((8,))
            dense = keras.layers.Dense(8, activity_regularizer="l2", name="it")
            keras.utils.set_random_seed(1)
            return keras.Model(inputs, dense(inputs))

        x = X.reshape(-1, 8)[:20]
        model, other = networks.sparse(made()), made()
        other.layers[-1].kernel.assign(model.layers[-1].dense_kernel())
        for each in (model, other):
            each.compile("sgd", "mse")
        (found,) = norms_of_blocks(model, [model.layers[-1]])(x, x, None)
        kernel = other.layers[-1].kernel.value
        with tf.GradientTape() as tape:
            loss = other.compute_loss(x, x, other(x, training=True), None)
        gradient = tape.gradient(loss, kernel)
        expected = networks.block_squares(gradient, 2) ** 0.5
        np.testing.assert_allclose(found, expected, rtol=1e-4)

    @pytest.mark.slow
    def test_change_no_variable(self):
        keras.utils.set_random_seed(1)
        kinds = keras.layers
        body = kinds.BatchNormalization(), kinds.Dropout(0.5), kinds.Dense(9)
        dense = keras.Sequential([keras.Input((8,)), kinds.Dense(8), *body])
        model = networks.sparse(dense)
        model.compile(adam(), "mse", metrics=["mae"])
        x, y = X.reshape(-1, 8)[:24], Y
        model.fit(x, y, verbose=0)
        variables = [*model.variables, *model.optimizer.variables]
        assert any("seed" in variable.path for variable in variables)
        before = [variable.numpy() for variable in variables]
        sparse = [model.layers[0], model.layers[-1]]
        assert all(
            each.numpy().any() for each in norms_of_blocks(model, sparse)(x, y, None)
        )
        for variable, value in zip(variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
        assert all(layer.added_kernel is None for layer in sparse)


WAYS = {
    "2 towers": on_towers(2),
    "3 towers": on_towers(3, split_ratios=(1, 2, 1)),
    "replicated": on_towers(3, variable_update="replicated"),
    "state in shards": on_towers(
        2, variable_update=towers.Replicated(shard_optimizer_state=True)
    ),
    "watched": on_towers(2, check_numerics=True),
    "stages": on_towers(4, stages=towers.Stages(2, {"last": 1, ".*": 0})),
}


class TestOnTowers:
    @pytest.mark.slow
    @pytest.mark.parametrize("way", networks.slow_but(WAYS, "2 towers"))
    def test_is_as_on_one_device(self, way):
        check_same(trained(WAYS[way]), _on_one())

    @pytest.mark.slow
    @pytest.mark.parametrize("way", networks.slow_but(WAYS, "replicated"))
    def test_several_steps_a_call(self, way):
        options = {"steps_per_execution": 3}
        check_same(trained(WAYS[way], **options), _on_one())

    @pytest.mark.slow
    @pytest.mark.parametrize("way", networks.slow_but(WAYS, "replicated"))
    def test_averages(self, way):
        def optimizer():
            options = {"use_ema": True, "ema_overwrite_frequency": 4}
            return keras.optimizers.SGD(0.05, momentum=0.9, **options)

        check_same(trained(WAYS[way], optimizer), trained(optimizer=optimizer))

    @pytest.mark.slow
    def test_asynchronous_towers_move_blocks(self):
        model = trained(on_towers(2, variable_update="asynchronous"), epochs=8)
        first = networks.sparse()
        for ours, begun in zip(places(model), places(first), strict=True):
            assert sorted(ours) == sorted(begun)
        assert np.isfinite(model.predict(X, verbose=0)).all()

    @pytest.mark.slow
    def test_parity(self):
        model = networks.sparse()
        model.compile("adam", "mse")
        found = towers.check_parity(model, (X, Y), gpus=2)
        assert found.equal, str(found)


@functools.cache
def _on_one():
    return trained()


class Watch(keras.callbacks.Callback):
    """Keeps the weights and slots of the blocks that moved last."""

    def on_train_begin(self, logs=None):
        self.before, self.moved = places(self.model), 0

    def on_train_batch_end(self, batch, logs=None):
        now = places(self.model)
        for name, old, new in zip(networks.NAMES, self.before, now, strict=True):
            kernel = self.model.get_layer(name).kernels[0]
            slots = slots_of(self.model.optimizer, kernel)
            assert len(slots) == 2
            for variable in (kernel, *slots):
                values = variable.numpy()
                assert not values[old != new].any()
                assert values[old == new].any()
            self.moved += (old != new).sum()
        self.before = now


@pytest.mark.slow
@pytest.mark.parametrize("way", networks.slow_but(WAYS, "2 towers"))
def test_blocks_that_moved_begin_at_zero(way):
    watch = Watch()
    trained(WAYS[way], more=[watch])
    assert watch.moved


@pytest.mark.slow
@pytest.mark.parametrize("name", networks.slow_but(["Ftrl", "Adafactor"], "Ftrl"))
def test_slots_begin_as_the_optimizer_has_it(name):
    model = trained(optimizer=getattr(keras.optimizers, name), epochs=1)
    layer = model.get_layer("hidden")
    slots = slots_of(model.optimizer, layer.kernels[0], of_any_shape=True)
    there = places(model)[1] != places(networks.sparse())[1]
    assert there.any()
    for slot in slots:
        if slot.shape[:1] == there.shape:
            expected = 0.1 if "accumulator" in slot.path else 0
            np.testing.assert_allclose(slot.numpy()[there], expected)
    assert np.isfinite(model(X)).all()


def test_moves_as_the_rule_has_it(caplog):
    """The first move, from Keras's own gradients of the dense model."""
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model = networks.sparse()
    model.compile(adam(), "mse")
    model.fit(X, Y, **options)
    other = networks.dense_like(model)
    other.compile("sgd", "mse")
    norms = TestGradients().expected(other, X, Y)
    share = 0.9 / 2 * (1 + np.cos(np.pi * 3 / 12))
    number = 0
    for name, wanted in zip(networks.NAMES, norms, strict=True):
        layer = model.get_layer(name)
        sizes = [(each**2).sum() for each in layer.kernels[0].numpy()]
        before = layer.places.numpy()
        outputs = layer.layouts[0].outputs
        after = moved(
            before, outputs, np.array(sizes), wanted, round(share * len(sizes))
        )
        layer.places.assign(after)
        number += (after != before).sum()
    found = trained(epochs=1)
    for ours, theirs in zip(places(found), places(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    blocks = sum(map(len, places(model)))
    assert f"RigL moved {number} of {blocks} blocks after step 3." in caplog.messages


@pytest.mark.slow
def test_nothing_moves_after_the_last_step(caplog):
    trained(every=2, until=4)
    assert [line[-2] for line in caplog.messages if "moved" in line] == ["2", "4"]


def in_batches(size):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


@pytest.mark.parametrize(
    ("data", "order"),
    [
        pytest.param((X, Y), "last", marks=pytest.mark.slow),
        # The last batch is short, and gradients are traced for any size.
        slow(in_batches(7), "first"),
    ],
    ids=["batch", "dataset"],
)
def test_a_run_that_was_stopped_moves_the_same_blocks(data, order, tmp_path):
    """Keras's `BackupAndRestore`; whichever callback comes first."""

    class Stop(Exception):
        pass

    def stop(epoch, logs):
        if epoch == 1:
            raise Stop

    def run(more):
        model = networks.sparse()
        model.compile(adam(), "mse")
        rigl = [towers.RigL(data, every=4, until=16, drop=0.9)]
        each = [*more, *rigl] if order == "last" else [*rigl, *more]
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        model.fit(X, Y, epochs=6, callbacks=each, **options)
        return model

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)

    with pytest.raises(Stop):
        run([backup(), keras.callbacks.LambdaCallback(on_epoch_end=stop)])
    check_same(run([backup()]), run([]), 0)


@pytest.mark.slow
def test_continues_from_a_checkpoint(tmp_path):
    def run(epochs, *more):
        model = networks.sparse()
        return trained(
            on_towers(2), more=more, model=model, every=4, until=16, epochs=epochs
        )

    run(2, callbacks.Checkpoint(tmp_path))
    check_same(run(6, callbacks.Checkpoint(tmp_path)), run(6), 0)


@pytest.mark.slow
def test_takes_data_as_fit_does():
    check_same(trained(data=[X.astype("float64"), Y, None]), _on_one())


@pytest.mark.slow
def test_a_frozen_layer_keeps_its_blocks():
    model = networks.sparse()
    model.get_layer("hidden").trainable = False
    before = model.get_layer("hidden").get_weights()
    trained(model=model)
    assert not networks.apart(before, model.get_layer("hidden").get_weights())
    model.trainable = False
    with pytest.raises(ValueError, match="without a layer whose blocks can change"):
        trained(model=model)


@pytest.mark.quick_one_in(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "Received every=0; expected a whole number of steps"),
        ({"every": 1.5}, "Received every=1.5"),
        ({"until": 2}, "Received until=2 and every=3; expected until"),
        ({"drop": 0}, "Received drop=0; expected more than 0"),
        ({"drop": 1.1}, "Received drop=1.1"),
    ],
)
def test_says_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        towers.RigL((X, Y), **{"every": 3, "until": 9} | options)


def test_needs_a_dynamic_layer():
    with pytest.raises(ValueError, match=r"expected a trainable one .*dynamic=True"):
        trained(model=networks.dense())


@pytest.mark.slow
def test_needs_a_batch():
    with pytest.raises(ValueError, match="which has no batch; expected one"):
        trained(data=in_batches(8).take(0), epochs=1)


@pytest.mark.slow
def test_a_model_that_its_first_step_builds():
    options = {"pattern": "random", "sparsity": 0.5, "dynamic": True}
    dense = BlockSparseDense(networks.OUTPUTS, block_size=1, **options)
    unused = BlockSparseDense(networks.OUTPUTS, **options)
    model = keras.Sequential([keras.layers.Flatten(), dense])
    model.unused = unused
    model.compile(adam(), "mse")
    rigl = towers.RigL((X, Y), every=2, until=9, drop=0.9)
    prune = towers.PruneBlocks(lambda step: 0.8, every=3)
    options = {"batch_size": 8, "verbose": 0}
    model.fit(X, Y, callbacks=[rigl, prune], **options)
    assert (dense.places.numpy() != dense.layouts[0].inputs).any()
    assert np.mean(dense.present) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("update", ["parameter_server", "replicated"])
def test_hosts_move_the_same_blocks(update, tmp_path):
    hosts.run("tests.towers.sparse.on_hosts", (1, 2), update, tmp_path)
    for kind in ("rigl", "prune"):
        on_hosts.train(kind, lambda model: model, tmp_path / f"{kind}-one.npz")
        one, *others = (
            [each for _, each in sorted(np.load(tmp_path / f"{kind}-{k}.npz").items())]
            for k in ("one", 0, 1)
        )
        for weights in others:
            assert networks.apart(one, weights) <= LIMIT
