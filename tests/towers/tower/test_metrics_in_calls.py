"""Metrics that a layer or a model updates while it is called, against plain Keras."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import towers
from towers.tower.errors import ModelError

pytestmark = pytest.mark.quick_one_in(2)

ROWS = 23
X = np.random.RandomState(0).normal(size=(ROWS, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class _Watches(layers.Layer):
    """Hands on what it gets, and updates a metric with some of it."""

    def __init__(self, metric, update):
        super().__init__()
        self.metric, self.update = metric, update

    def call(self, x, training=False):
        self.update(self.metric, x, training)
        return x


def _mean_of_rows(metric, x, training):
    metric.update_state(ops.mean(ops.abs(x), axis=-1))


def _one_number(metric, x, training):
    metric.update_state(ops.mean(ops.square(x)))


def _with_weights(metric, x, training):
    metric.update_state(ops.sum(x, axis=-1), sample_weight=ops.abs(x[:, 0]))


def _in_training_alone(metric, x, training):
    if training:
        metric.update_state(ops.mean(x, axis=-1))


def _errors(metric, x, training):
    metric.update_state(ops.zeros_like(x), x)


# By the name of the metric.
UPDATES = {
    "of_rows": (keras.metrics.Mean, _mean_of_rows),
    "of_one_number": (keras.metrics.Mean, _one_number),
    "weighted": (keras.metrics.Mean, _with_weights),
    "sum": (keras.metrics.Sum, _mean_of_rows),
    "in_training": (keras.metrics.Mean, _in_training_alone),
    "errors": (keras.metrics.MeanAbsoluteError, _errors),
}


def _watching():
    watch = [_Watches(m(name=name), update) for name, (m, update) in UPDATES.items()]
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, "tanh"), *watch, layers.Dense(1)]
    )


class Own(keras.Model):
    """Holds a metric itself."""

    def __init__(self, metric=None, update=_mean_of_rows):
        super().__init__()
        self.hidden, self.out = layers.Dense(4, "tanh"), layers.Dense(1)
        self.seen, self.update = metric or keras.metrics.Mean(name="seen"), update

    def call(self, x, training=False):
        h = self.hidden(x)
        self.update(self.seen, h, training)
        return self.out(h)


class OwnLoss(Own):
    """Computes its loss itself, which towers do not cut."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        return ops.mean(ops.square(y - y_pred))


def _numbers(make, wrap):
    keras.utils.set_random_seed(1)
    model = wrap(make())
    model.compile("adam", "mse", metrics=["mae"])
    fitted = model.fit(
        *(X, Y, 5), epochs=2, shuffle=False, verbose=0, validation_data=(X[:7], Y[:7])
    )
    evaluated = model.evaluate(X, Y, batch_size=9, return_dict=True, verbose=0)
    return {**fitted.history, **evaluated}


def _same(plain, parallel):
    assert plain.keys() == parallel.keys()
    for name in plain:
        np.testing.assert_allclose(parallel[name], plain[name], 1e-5, err_msg=name)


# What makes the model, metrics in it, and how it trains.
WAYS = {
    "layers": (_watching, [*UPDATES], {}),
    "a gathered loss": (OwnLoss, ["seen"], {}),
    "copies": (Own, ["seen"], {"variable_update": "replicated"}),
    "stages": (Own, ["seen"], {"stages": 2, "gpus": 4}),
}
QUICK = "layers", "a gathered loss"


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, way in WAYS.items()
    ],
)
def test_a_metric_in_a_call_is_that_of_one_device(way):
    make, names, options = way
    arguments = {"gpus": 2, **options}
    parallel = _numbers(make, lambda m: towers.multi_gpu_model(m, **arguments))
    plain = _numbers(make, lambda model: model)
    assert {*names} <= plain.keys()
    _same(plain, parallel)


class _Largest(keras.metrics.Metric):
    """The largest value so far, which no sum puts together."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_weight(shape=(), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

    def result(self):
        return ops.convert_to_tensor(self.value)


class ReturnsHidden(keras.Model):
    """What the refusal of `_Largest` in a call advises."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(4, "tanh"), layers.Dense(1)

    def call(self, x):
        h = self.hidden(x)
        return {"out": self.out(h), "hidden": h}


def test_what_cannot_be_put_together_is_said_with_what_to_do():
    def update(metric, x, training):
        metric.update_state(x, x)

    parallel = towers.multi_gpu_model(Own(_Largest(name="seen"), update), gpus=2)
    parallel.compile("sgd", "mse")
    words = "return what the metric 'seen' takes as an output, and pass the metric to"
    with pytest.raises(ModelError, match=words):
        parallel.fit(X, Y, 5, verbose=0)


def test_run_eagerly_is_named_where_it_hinders():
    parallel = towers.multi_gpu_model(Own(), gpus=2)
    parallel.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ModelError, match=r"to 'seen/total' .* run_eagerly=False"):
        parallel.fit(X, Y, 5, verbose=0)


@pytest.mark.slow
def test_what_is_advised_gives_the_numbers_of_one_device():
    def numbers(wrap):
        keras.utils.set_random_seed(1)
        model = wrap(ReturnsHidden())
        model.compile(
            "adam", {"out": "mse", "hidden": None}, metrics={"hidden": [_Largest()]}
        )
        targets = {"out": Y, "hidden": Y}
        return model.fit(X, targets, 5, epochs=2, shuffle=False, verbose=0).history

    plain = numbers(lambda model: model)
    assert "hidden_largest" in plain
    _same(plain, numbers(lambda model: towers.multi_gpu_model(model, gpus=2)))


def test_a_metric_that_no_layer_holds_is_named():
    apart = keras.metrics.Mean(name="apart")

    class Uses(layers.Layer):
        def call(self, x):
            apart.update_state(x)
            return x

    model = keras.Sequential([keras.Input((6,)), Uses(), layers.Dense(1)])
    parallel = towers.multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "mse")
    words = "changes 'apart/total'.*make the metric an attribute of the layer"
    with pytest.raises(ModelError, match=words):
        parallel.fit(X, Y, 5, verbose=0)
