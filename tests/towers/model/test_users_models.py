"""What users do with models, and models with trackers of their own: as plain Keras."""

import copy
import pickle
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import towers
from tests.variants import slow

pytestmark = pytest.mark.quick_one_in(2)

ROWS = 12


def _rows(seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, 4)).astype("float32")


def _targets():
    return np.zeros((ROWS, 1), "float32")


class OwnStep(keras.Model):
    """Has what subclasses need: a step of its own."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential([keras.Input((4,)), layers.Dense(1)])

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - y))
        variables = self.network.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(loss)
        return {"own": self.tracker.result()}


class MadeByCompile(OwnStep):
    def compile(self, **given):
        super().compile(**given)
        self.tracker = keras.metrics.Mean(name="own")

    @property
    def metrics(self):
        return [self.tracker]


class NoneBeforeCompile(OwnStep):
    tracker = None

    def compile(self, **given):
        super().compile(**given)
        self.tracker = keras.metrics.Mean(name="own")

    @property
    def metrics(self):
        return [self.tracker]


class OfCompiled(OwnStep):
    """Takes its tracker from a dictionary that only `compile` fills."""

    def __init__(self):
        super().__init__()
        self.given = {}

    def compile(self, **given):
        super().compile(**given)
        self.given["tracker"] = keras.metrics.Mean(name="own")

    @property
    def tracker(self):
        return self.given["tracker"]

    @property
    def metrics(self):
        return [self.given["tracker"]]


class OfBuilt(MadeByCompile):
    """Trains what `build` makes."""

    def __init__(self):
        super().__init__()
        del self.network

    def build(self, shape):
        self.network = layers.Dense(1)
        self.network.build(shape)

    @property
    def trainable_variables(self):
        return self.network.trainable_variables


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize(
    "kind", [MadeByCompile, NoneBeforeCompile, OfCompiled, OfBuilt]
)
def test_a_property_may_need_compile_or_build(kind):
    def train(wrap):
        keras.utils.set_random_seed(2)
        model = wrap(kind())
        model.compile(optimizer=keras.optimizers.SGD(0.1))
        data = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(_rows(), _targets(), **data).history["own"]

    ours = train(lambda model: towers.multi_gpu_model(model, gpus=3))
    np.testing.assert_allclose(ours, train(lambda model: model), rtol=1e-5)


def test_a_property_that_fails_in_a_compiled_model_raises():
    class Wrong(MadeByCompile):
        @property
        def metrics(self):
            return [self.no_such_tracker]

    model = Wrong()
    # Keras itself asks for them in `compile`.
    with pytest.raises(AttributeError, match="no_such_tracker"):
        towers.multi_gpu_model(model, gpus=2).compile(optimizer="sgd")
        model.fit(_rows(), _targets(), verbose=0)


def _compiled(model):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(_rows(), _targets(), verbose=0, shuffle=False)
    return model


def _dense():
    inputs = keras.Input((4,))
    hidden = layers.Dense(5, "tanh")(inputs)
    return keras.Model(inputs, layers.Dense(1)(hidden))


@pytest.mark.parametrize("copied", [copy.copy, slow(copy.deepcopy)])
def test_a_copy_is_another_model_on_the_same_towers(copied):
    parallel = towers.multi_gpu_model(_dense(), gpus=3, loss_placement="tower")
    parallel = _compiled(parallel)
    parallel.resize(gpus=2, split_ratios=(2, 1))
    another = copied(parallel)
    assert isinstance(another, type(parallel)) and another is not parallel
    assert another.builder.plan.devices == parallel.builder.plan.devices
    assert another.builder.plan.split_ratios == (2, 1)
    assert another.builder.context.loss_placement == "tower"
    before = parallel.get_weights()
    for each, same in zip(before, another.get_weights(), strict=True):
        np.testing.assert_array_equal(each, same)
    # Its optimizer goes on where the first one's was, and that one stays.
    another.fit(_rows(1), _targets(), verbose=0, shuffle=False)
    for each, same in zip(before, parallel.get_weights(), strict=True):
        np.testing.assert_array_equal(each, same)
    parallel.fit(_rows(1), _targets(), verbose=0, shuffle=False)
    for each, same in zip(parallel.get_weights(), another.get_weights(), strict=True):
        np.testing.assert_allclose(each, same, rtol=1e-6)


def test_a_pickle_has_the_users_model():
    parallel = _compiled(towers.multi_gpu_model(_dense(), gpus=2))
    loaded = pickle.loads(pickle.dumps(parallel))
    assert type(loaded) is keras.src.models.Functional
    expected = parallel.predict(_rows(), verbose=0)
    np.testing.assert_allclose(loaded.predict(_rows(), verbose=0), expected, rtol=1e-5)


class _Checked(layers.Layer):
    def call(self, x):
        check = tf.debugging.assert_less(x, 10, message="10 is too large")
        with tf.control_dependencies([check]):
            return tf.one_hot(x, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (
            lambda: layers.Embedding(10, 3, name="codes"),
            r"(?s)codes.*indices.* = 77 is not in \[0, 10\)",
        ),
        (lambda: _Checked(name="codes"), "(?s)codes.*10 is too large"),
    ],
    ids=["an id out of range", "a check"],
)
@pytest.mark.parametrize("gpus", [1, 3])
def test_data_that_one_device_cannot_compute_either(layer, said, gpus):
    """TensorFlow's own error names the layer, as on one device."""
    inputs = keras.Input((4,), dtype="int32")
    outputs = layers.Dense(1)(layer()(inputs))
    model = towers.multi_gpu_model(keras.Model(inputs, outputs), gpus=gpus)
    model.compile("sgd", "mse")
    ids = np.ones((ROWS, 4), "int32")
    ids[5, 1] = 77
    targets = np.zeros((ROWS, 4, 1))
    with pytest.raises(tf.errors.InvalidArgumentError, match=said):
        model.fit(ids, targets, batch_size=ROWS, verbose=0)
    # What is right is computed.
    ids[5, 1] = 7
    model.fit(ids, targets, batch_size=ROWS, verbose=0)


@pytest.mark.slow
def test_masked_beside_unmasked():
    """An attention decoder's form: the mask takes the shape of a layer's output."""

    def train(wrap):
        keras.utils.set_random_seed(3)
        ids, others = keras.Input((5,), dtype="int32"), keras.Input((5, 4))
        masked = layers.Embedding(9, 4, mask_zero=True)(ids)
        joined = layers.Concatenate()([masked, layers.Dense(3)(others)])
        model = wrap(keras.Model([ids, others], layers.Dense(2)(joined)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        draw = np.random.default_rng(1)
        x = [draw.integers(0, 9, (14, 5)), draw.normal(size=(14, 5, 4))]
        given = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(x, draw.normal(size=(14, 5, 2)), **given).history
        return model, history["loss"]

    model, ours = train(lambda model: towers.multi_gpu_model(model, gpus=3))
    assert model.loss_placement == "tower"
    np.testing.assert_allclose(ours, train(lambda model: model)[1], rtol=1e-5)


class _Unseeded(layers.Layer):
    def call(self, x):
        return x + keras.random.normal(ops.shape(x))


def test_unseeded_random_numbers_name_the_layer(capsys):
    inputs = keras.Input((4,))
    outputs = layers.Dense(1)(_Unseeded(name="shaken")(inputs))
    model = towers.multi_gpu_model(keras.Model(inputs, outputs), gpus=2)
    model.compile("sgd", "mse")
    model.fit(_rows(), _targets(), verbose=0)
    said = capsys.readouterr().err
    assert re.search("random numbers without a seed by shaken", said), said


class Follows(layers.Layer):
    """Follows a value of its rows, as the centre of a cluster does."""

    def __init__(self, following):
        super().__init__()
        self.following = following

    def build(self, shape):
        self.centre = self.add_weight(
            shape=(4,), trainable=False, initializer="ones", name="centre"
        )

    def call(self, x):
        self.centre.assign(self.following(self.centre, x))
        return x


LINEAR = {
    "a moving sum": lambda old, x: 0.9 * old + 0.1 * ops.sum(x, axis=0),
    "a sum added": lambda old, x: old + ops.sum(x, axis=0),
    "a difference": lambda old, x: (old - ops.sum(x, axis=0) / 3) * 0.5,
    "a sum, a mean and neither": lambda old, x: (
        ops.sum(x, axis=0) - 2 * ops.mean(x, axis=0) + old / 2 - 0.25
    ),
}


def _followed(following, wrap, options):
    keras.utils.set_random_seed(3)
    inputs, follows = keras.Input((4,)), Follows(following)
    model = wrap(keras.Model(inputs, layers.Dense(1)(follows(inputs))))
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    model.fit(_rows(), _targets(), batch_size=7, shuffle=False, verbose=0)
    return follows.centre.numpy()


@pytest.mark.quick_one_in(8)
@pytest.mark.parametrize("update", ["parameter_server", "replicated"])
@pytest.mark.parametrize("following", LINEAR.values(), ids=LINEAR)
def test_a_variable_follows_a_sum_of_all_rows(following, update):
    def wrap(model):
        return towers.multi_gpu_model(model, gpus=3, variable_update=update)

    ours = _followed(following, wrap, {})
    expected = _followed(following, lambda model: model, {})
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("following", "options"),
    [
        (lambda old, x: old * ops.sum(x, axis=0) + ops.sum(x, axis=0) ** 2, {}),
        (lambda old, x: old / ops.sum(x, axis=0), {}),
        (LINEAR["a sum added"], {"run_eagerly": True}),
    ],
    ids=["a square", "a divisor", "no graph"],
)
def test_other_values_of_sums(following, options):
    ours = _followed(following, lambda m: towers.multi_gpu_model(m, gpus=3), options)
    expected = _followed(following, lambda model: model, options)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
