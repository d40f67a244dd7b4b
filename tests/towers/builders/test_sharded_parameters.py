"""Fully sharded parameters: what each device holds, what is refused, what is saved.

That no number changes is shown by tests/exact.
"""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.text import transformer_lm
from tests import executed, oracle, peak_bytes
from tests.variants import slow
from towers import Replicated, Sharded, multi_gpu_model
from towers.layers import parameters, sharded, variables
from towers.layers.parameters import ShardedParameter
from towers.tower.errors import ModelError

TOWERS = 4
ROWS, FEATURES = 12, 40
IN_PARTS = Sharded(min_bytes=1)


def _model(units=(32, 24, 3), name=None):
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(n, "tanh") for n in units]
    return keras.Sequential([keras.Input((FEATURES,)), *layers], name=name)


def _normalized():
    keras.utils.set_random_seed(7)
    norm = keras.layers.SpectralNormalization(keras.layers.Dense(8))
    return keras.Sequential([keras.Input((FEATURES,)), norm, keras.layers.Dense(3)])


def _data():
    random = np.random.default_rng(0)
    x = random.normal(size=(2 * ROWS, FEATURES)).astype("float32")
    return x, random.normal(size=(2 * ROWS, 3)).astype("float32")


def _adam(**options):
    return keras.optimizers.Adam(0.01, epsilon=1e-3, **options)


def _fit(model, epochs=1):
    options = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    return model.fit(*_data(), epochs=epochs, **options)


def _state(model):
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def _check_close(values, expected):
    assert oracle.largest_difference(values, expected) < 1e-5


def _on_one_device_and_in_parts(make, optimizer=_adam):
    """Yields a model that is compiled for one device, and one in three parts.

    Each comes with what trains it: the model itself, or what wraps it.
    """
    for towers in (0, 3):
        model = wrapped = make()
        if towers:
            wrapped = multi_gpu_model(model, towers, variable_update=IN_PARTS)
        wrapped.compile(optimizer(), "mse")
        yield model, wrapped


def _held(model, builder):
    """Returns the bytes of variables on each device."""
    held = collections.Counter()
    every = [place for v in variables.of(model) for place in sharded.places(v)]
    for variable in [*every, *builder.copies()]:
        device = variable.device[variable.device.index("/device") :]
        held[device] += variable.numpy().nbytes
    return held


@pytest.mark.parametrize("layers", [2, slow(6)])
def test_bytes_at_the_peak(layers):
    vocabulary, steps = 320, 8
    ids = np.random.default_rng(0).integers(1, vocabulary, (8, steps + 1))
    peaks = {}
    for update in ("replicated", Sharded(min_bytes=4096)):
        keras.utils.set_random_seed(3)
        body = transformer_lm.build(
            vocabulary, steps, layers=layers, width=256, heads=2, dropout=0.0
        )
        name = f"peak_{layers}_{getattr(update, 'name', update)}"
        model = keras.Model(body.inputs, body.outputs, name=name)
        parallel = multi_gpu_model(model, TOWERS, variable_update=update)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        parallel.compile("adam", loss)
        data = ids[:, :-1], ids[:, 1:]
        nodes = executed.run(lambda p=parallel, d=data: p.train_on_batch(*d), "AddN")
        assert len(nodes) == TOWERS
        sizes = executed.sizes(nodes, parallel.builder.graph)
        held = _held(model, parallel.builder)
        peaks[str(update)] = max(peak_bytes.peak_bytes(nodes, sizes, held).values())
    copies, parts = peaks.values()
    # A tower has two whole parameters at once, which of two layers are many.
    assert parts <= (0.36 if layers == 2 else 0.30) * copies


def test_small_variables_stay_whole():
    model = _model()
    parallel = multi_gpu_model(model, 2, variable_update=Sharded(min_bytes=1000))
    parallel.compile(_adam(), "mse")
    _fit(parallel)
    kinds = [isinstance(sharded.of(v), ShardedParameter) for v in model.variables]
    # Kernels of 40 x 32 and 32 x 24 numbers; not one of 24 x 3, and no bias.
    assert kinds == [True, False, True, False, False, False]


@pytest.mark.parametrize(
    "optimizer", [keras.optimizers.Muon, slow(keras.optimizers.Adafactor)]
)
def test_whole_variables_are_distributed(optimizer, caplog):
    trained = []
    for model, wrapped in _on_one_device_and_in_parts(_model, lambda: optimizer(0.01)):
        _fit(wrapped)
        trained.append((model, [v.numpy() for v in model.variables]))
    (_, expected), (model, values) = trained
    _check_close(values, expected)
    places = {v.path: sharded.of(v).shards for v in model.variables}
    assert all(len(shards) == 1 for shards in places.values())
    assert len({shards[0].device for shards in places.values()}) == 3
    assert "is whole on one device, and not cut over all" in caplog.text


class OwnOptimizer(keras.Model):
    """A model that applies another optimizer than `self.optimizer`."""

    def __init__(self, body):
        super().__init__(body.inputs, body.outputs)
        self.other = keras.optimizers.SGD(0.1)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        self.other.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"loss": loss}


def test_an_optimizer_of_its_own_is_refused():
    model = multi_gpu_model(OwnOptimizer(_model()), 2, variable_update=IN_PARTS)
    model.compile(_adam(), "mse")
    with pytest.raises(ModelError, match="applies an optimizer of its own"):
        _fit(model)


@pytest.mark.parametrize("value", [0, -1, "1 MB", True])
def test_min_bytes_is_checked(value):
    with pytest.raises(ValueError, match="min_bytes"):
        Sharded(min_bytes=value)


def test_what_a_layer_assigns_stays_whole(caplog):
    trained = []
    for model, wrapped in _on_one_device_and_in_parts(_normalized):
        _fit(wrapped)
        trained.append([v.numpy() for v in model.variables])
    _check_close(trained[1], trained[0])
    norm, last = model.layers
    assert sharded.of(norm.layer.kernel) is None
    assert isinstance(sharded.of(last.kernel), ShardedParameter)
    assert f"assigns {norm.layer.kernel.path} beside the optimizer" in caplog.text


class BeforeAndAfter(keras.Model):
    """A model whose step reads its weights before and after it applies an optimizer."""

    def __init__(self, body):
        super().__init__(body.inputs, body.outputs)
        self.mean = [
            keras.Variable(v.numpy(), trainable=False) for v in self.trainable_variables
        ]

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            out = self(x, training=True)
            loss = self.compute_loss(x, y, out)
        gradients = tape.gradient(loss, weights)
        old = [tf.identity(v.value) for v in weights]
        # Towers take it behind what home makes, and yet before the update.
        again = tf.reduce_mean(self(x + tf.reduce_mean(out)) ** 2)
        self.optimizer.apply(gradients, weights)
        for mean, weight in zip(self.mean, weights, strict=True):
            mean.assign(0.5 * mean + 0.5 * weight)
        moved = [new - before for new, before in zip(weights, old, strict=True)]
        return {
            "loss": loss,
            "again": again,
            "moved": tf.linalg.global_norm(moved),
            "after": tf.reduce_mean(self(x) ** 2),
        }


class AppliesTwice(keras.Model):
    """A model whose step takes two steps on its batch."""

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def _applies_twice():
    body = _model()
    return AppliesTwice(body.inputs, body.outputs)


@pytest.mark.parametrize(
    "make", [lambda: BeforeAndAfter(_model()), _applies_twice], ids=["reads", "applies"]
)
def test_a_step_reads_what_is_there_then(make):
    trained = []
    for model, wrapped in _on_one_device_and_in_parts(make):
        logs = _fit(wrapped, 2).history
        trained.append([*_state(model), *map(np.array, logs.values())])
    _check_close(trained[1], trained[0])


class EvaluatesMeans(BeforeAndAfter):
    """A model that evaluates means of its weights, which it assigns to them."""

    def test_step(self, data):
        weights = self.trainable_variables
        old = [tf.identity(v.value) for v in weights]
        for weight, mean in zip(weights, self.mean, strict=True):
            weight.assign(mean)
        logs = super().test_step(data)
        for weight, value in zip(weights, old, strict=True):
            weight.assign(value)
        return logs


@pytest.mark.parametrize(
    "make",
    [lambda: EvaluatesMeans(_model()), _normalized],
    ids=["evaluation assigns", "training assigns"],
)
def test_functions_follow_what_becomes_whole(make):
    """A function that was traced before does not go on with the parts of then."""
    trained = []
    for model, wrapped in _on_one_device_and_in_parts(make):
        x, y = _data()
        values = [wrapped.predict(x, verbose=0)]
        if make is _normalized:
            values.append(wrapped.evaluate(x, y, verbose=0))
        for _ in range(2):
            _fit(wrapped)
            values += [wrapped.evaluate(x, y, verbose=0), wrapped.predict(x, verbose=0)]
        trained.append([*_state(model), *map(np.array, values)])
    _check_close(trained[1], trained[0])


OTHERS = {
    "one device": None,
    "two parts": IN_PARTS,
    "copies": "replicated",
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_file_goes_on_in_any_layout(other, tmp_path):
    """A run in four parts that was saved is that of one device, whoever continues."""
    expected = _model()
    expected.compile(_adam(), "mse")
    _fit(expected, 2)
    model = _model()
    parallel = multi_gpu_model(model, TOWERS, variable_update=IN_PARTS)
    parallel.compile(_adam(), "mse")
    _fit(parallel)
    parallel.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    way = OTHERS[other]
    trained = loaded if way is None else multi_gpu_model(loaded, 2, variable_update=way)
    _fit(trained)
    _check_close(_state(loaded), _state(expected))
    # And back: variables that another builder has cut are taken as they are.
    back = multi_gpu_model(loaded, 3, variable_update=IN_PARTS)
    _fit(back)
    _fit(expected)
    _check_close(_state(loaded), _state(expected))


def _with_table():
    keras.utils.set_random_seed(7)
    ids = keras.Input((4,))
    rows = keras.layers.Embedding(20, 8)(keras.ops.cast(ids > 0, "int32"))
    return keras.Model(ids, keras.layers.Dense(3)(keras.layers.Flatten()(rows)))


IN_ANY_PARTS = {
    "parameters": {"variable_update": IN_PARTS},
    "optimizer state": {"variable_update": Replicated(shard_optimizer_state=True)},
    "tables": {"shard_embeddings": "rows"},
}


@pytest.mark.parametrize("way", IN_ANY_PARTS)
def test_plain_keras_trains_and_evaluates_what_is_wrapped(way, monkeypatch):
    monkeypatch.setattr(parameters, "MIN_BYTES", 1)
    x, y = _data()
    x, values = x[:, :4], []
    for options in (None, IN_ANY_PARTS[way]):
        plain = model = _with_table()
        plain.compile(_adam(), "mse")
        losses = [plain.evaluate(x, y, verbose=0)]
        if options is not None:
            model = multi_gpu_model(plain, 2, **options)
        for trained in (model, plain, model):
            trained.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
            # A function that was traced before does not go on with values of then.
            losses += [each.evaluate(x, y, verbose=0) for each in (plain, model)]
        values.append([*_state(plain), np.array(losses)])
    _check_close(values[1], values[0])


@pytest.mark.parametrize("way", IN_ANY_PARTS)
@pytest.mark.parametrize("whole", ["parameter_server", "replicated"])
def test_models_with_parts_and_without_take_turns(way, whole, monkeypatch):
    monkeypatch.setattr(parameters, "MIN_BYTES", 1)
    x, y = _data()
    x, values = x[:, :4], []
    for wraps in (False, True):
        plain = one = other = _with_table()
        plain.compile(_adam(), "mse")
        if wraps:
            one = multi_gpu_model(plain, 2, **IN_ANY_PARTS[way])
            other = multi_gpu_model(plain, 2, variable_update=whole)
        losses = []
        # Each finds the variables as the other one has left them.
        for trained in (one, other, one, other):
            trained.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
            losses += [each.evaluate(x, y, verbose=0) for each in (one, other)]
        values.append([*_state(plain), np.array(losses)])
    _check_close(values[1], values[0])
