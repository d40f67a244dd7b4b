"""`towers.PruneBlocks`, against numpy and one device."""

import functools

import keras
import numpy as np
import pytest

import towers
from tests.towers.sparse import networks
from towers import callbacks
from towers.keras_adapter.optimizers import slots_of

pytestmark = pytest.mark.quick_one_in(2)

LIMIT = 1e-5
X, Y = networks.batch()


def schedule(step):
    return min(0.7, 0.1 * step)


def trained(
    wrap=lambda model: model,
    optimizer=lambda: keras.optimizers.Adam(0.01),
    sparsity=schedule,
    epochs=3,
    more=(),
    model=None,
    steps_per_execution=1,
):
    """Trains with pruning, 3 steps an epoch; returns the model."""
    model = model or networks.sparse(pattern="magnitude", sparsity=0.0)
    ours = wrap(model)
    ours.compile(optimizer(), "mse", steps_per_execution=steps_per_execution)
    every = [towers.PruneBlocks(sparsity, every=2), *more]
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    ours.fit(X, Y, epochs=epochs, callbacks=every, **options)
    return model


def check_same(model, other, limit=LIMIT):
    for name in networks.NAMES:
        ours, theirs = (each.get_layer(name).present for each in (model, other))
        np.testing.assert_array_equal(ours, theirs)
        assert not ours.numpy().all()
    assert networks.apart(model.get_weights(), other.get_weights()) <= limit


@functools.cache
def _on_one(steps_per_execution=1):
    return trained(steps_per_execution=steps_per_execution)


def on_towers(gpus, **options):
    return functools.partial(towers.multi_gpu_model, gpus=gpus, **options)


WAYS = {
    "2 towers": on_towers(2),
    "3 towers": on_towers(3),
    "replicated": on_towers(3, variable_update="replicated"),
    "state in shards": on_towers(
        2, variable_update=towers.Replicated(shard_optimizer_state=True)
    ),
    "stages": on_towers(4, stages=towers.Stages(2, {"last": 1, ".*": 0})),
}


class TestOnTowers:
    @pytest.mark.slow
    @pytest.mark.parametrize("way", networks.slow_but(WAYS, "3 towers"))
    def test_is_as_on_one_device(self, way):
        check_same(trained(WAYS[way]), _on_one())

    @pytest.mark.parametrize("way", networks.slow_but(WAYS))
    def test_several_steps_a_call(self, way):
        check_same(trained(WAYS[way], steps_per_execution=3), _on_one(3))

    @pytest.mark.parametrize("way", networks.slow_but(WAYS))
    def test_averages(self, way):
        def optimizer():
            return keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True)

        check_same(trained(WAYS[way], optimizer), trained(optimizer=optimizer))

    @pytest.mark.slow
    def test_asynchronous_towers_drop_blocks(self):
        model = trained(on_towers(2, variable_update="asynchronous"))
        assert np.isfinite(model.predict(X, verbose=0)).all()
        assert not model.get_layer("hidden").present.numpy().all()


class Oracle(keras.callbacks.Callback):
    """Numpy's own pruning of each layer, beside ours."""

    def __init__(self, sparsity):
        super().__init__()
        self.sparsity = sparsity

    def on_train_begin(self, logs=None):
        self.layers = [self.model.get_layer(name) for name in networks.NAMES]
        self.present = {layer.name: layer.present.numpy() > 0 for layer in self.layers}
        self.dropped = 0

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        for layer in self.layers:
            present, kernel = self.present[layer.name], layer.kernels[0].numpy()
            # What has been dropped stays zero.
            assert not kernel[~present].any()
            if step % 2 == 0:
                wanted = round((1 - self.sparsity(step)) * layer.layouts[0].mask.size)
                sums = [(block.astype("float64") ** 2).sum() for block in kernel]
                there = sorted(np.flatnonzero(present), key=lambda k: -sums[k])
                self.dropped += len(there[wanted:])
                present[there[wanted:]] = False

    def expect(self, layer):
        np.testing.assert_array_equal(layer.present > 0, self.present[layer.name])


class Checked(keras.callbacks.Callback):
    """Compares with the oracle, after ours."""

    def __init__(self, oracle):
        super().__init__()
        self.oracle = oracle

    def on_train_batch_end(self, batch, logs=None):
        for layer in self.oracle.layers:
            self.oracle.expect(layer)
            gone = ~self.oracle.present[layer.name]
            slots = slots_of(self.model.optimizer, layer.kernels[0])
            assert len(slots) == 2
            for variable in (layer.kernels[0], *slots):
                assert not variable.numpy()[gone].any()


@pytest.mark.parametrize("way", networks.slow_but(WAYS, "2 towers"))
def test_drops_the_smallest_blocks(way):
    model = networks.sparse(pattern="magnitude", sparsity=0.0)
    oracle = Oracle(schedule)
    ours = WAYS[way](model)
    ours.compile(keras.optimizers.Adam(0.01), "mse")
    prune = towers.PruneBlocks(schedule, every=2)
    every = [oracle, prune, Checked(oracle)]
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    ours.fit(X, Y, epochs=3, callbacks=every, **options)
    assert oracle.dropped > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Ftrl", "Adafactor", "AdamW"])
def test_dropped_blocks_stay_zero(name):
    model = trained(optimizer=getattr(keras.optimizers, name))
    assert np.isfinite(model(X)).all()
    for layer in map(model.get_layer, networks.NAMES):
        gone = layer.present.numpy() == 0
        assert gone.any() and not layer.kernels[0].numpy()[gone].any()


@pytest.mark.slow
@pytest.mark.parametrize("last", [0.7, 0.9])
def test_then_sparsify_makes_it_small(last):
    """Also where a float32 of the schedule would round to another number of blocks."""
    decay = keras.optimizers.schedules.PolynomialDecay(0.0, 4, last, 3)
    # Of these, 15 blocks: a tenth of them is 1.5.
    keras.utils.set_random_seed(1)
    body = keras.layers.Dense(6, name="conv"), keras.layers.Dense(10, name="hidden")
    last_one = keras.layers.Dense(9, name="last")
    made = keras.Sequential(
        [keras.Input((5, 5, 6)), keras.layers.Flatten(), *body, last_one]
    )
    model = networks.sparse(made, pattern="magnitude", sparsity=0.0)
    trained(sparsity=decay, model=model)
    small = towers.sparsify(model, sparsity=last, block_size=2)
    np.testing.assert_allclose(small(X), model(X), atol=1e-5)
    assert small.count_params() < model.count_params()
    assert not small.layers[-1].dynamic


@pytest.mark.slow
def test_says_how_many(caplog):
    trained(sparsity=lambda step: 0.5, epochs=1)
    lines = [line for line in caplog.messages if "dropped" in line]
    assert len(lines) == 1  # not again, where nothing more is dropped
    assert "blocks were dropped after step 2, for a sparsity of 0.50." in lines[0]


@pytest.mark.slow
def test_nothing_comes_back():
    model = trained(sparsity=lambda step: 0.6 if step < 5 else 0.1)
    layer = model.get_layer("hidden")
    assert np.mean(layer.present.numpy() == 0) == pytest.approx(0.6, abs=0.05)


@pytest.mark.slow
def test_one_block_stays():
    model = trained(sparsity=lambda step: 0.9999)
    assert all(
        model.get_layer(name).present.numpy().sum() == 1 for name in networks.NAMES
    )


@pytest.mark.slow
def test_continues_from_a_checkpoint(tmp_path):
    wrap = on_towers(2)
    trained(wrap, epochs=1, more=[callbacks.Checkpoint(tmp_path)])
    found = trained(wrap, epochs=3, more=[callbacks.Checkpoint(tmp_path)])
    check_same(found, trained(wrap, epochs=3), 0)


@pytest.mark.slow
def test_is_saved(tmp_path):
    model = trained()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    check_same(loaded, model, 0)
    np.testing.assert_array_equal(loaded(X), model(X))


@pytest.mark.quick_one_in(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.5, 10), "Received sparsity=0.5; expected a function of the step"),
        ((schedule, 0), "Received every=0; expected a whole number of steps"),
    ],
)
def test_says_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        towers.PruneBlocks(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [1.0, -0.1, float("nan")])
def test_a_schedule_must_leave_blocks(wrong):
    with pytest.raises(ValueError, match="for step 2; expected a schedule of at least"):
        trained(sparsity=lambda step: wrong)


def test_needs_a_dynamic_layer():
    with pytest.raises(ValueError, match=r"expected a trainable one .*dynamic=True"):
        trained(model=networks.sparse(dynamic=False))
