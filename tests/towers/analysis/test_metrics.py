"""Metrics on towers: which add up, and what is done about those that do not."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.towers.analysis import metrics
from tests.variants import slow
from towers import multi_gpu_model

TABLE = metrics.table()
ADDED = [row for row in TABLE if row.outcome in ("proved", "trusted", "values")]
# Means of numbers without an axis are of the whole batch: the rule is another.
MEANS = "single numbers"


def test_each_class_is_in_the_table():
    # A new one has to be measured: add lines to metrics.txt, and run `metrics`.
    assert {row.kind for row in TABLE} == metrics.classes().keys()


def test_each_class_is_measured():
    # Every one that towers trust adds up, without weights or with them.
    measured = {row.kind for row in ADDED if row.batch != MEANS}
    assert measured == metrics.classes().keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        ("Mean", "RootMeanSquaredError", "F1Score", "IoU", "Precision"),
        tuple(metrics.classes()),
    ],
    ids=["some", "all"],
)
def test_what_a_batch_adds_is_what_its_parts_add(kinds):
    for row in ADDED:
        if row.kind in kinds and row.batch != MEANS:
            assert metrics.adds_up(row, weighted=False), str(row)
            assert metrics.adds_up(row, weighted=True), str(row)


def test_what_does_not_add_up_is_gathered():
    gathered = [row for row in TABLE if row.outcome == "gathered"]
    assert gathered
    for row in gathered:
        with pytest.raises((AssertionError, tf.errors.InvalidArgumentError)):
            assert metrics.adds_up(row, weighted=False)


@pytest.mark.parametrize(
    "kinds",
    [
        ("CosineSimilarity", "RootMeanSquaredError", "SparseCategoricalAccuracy"),
        slow(tuple(metrics.classes())),
    ],
    ids=["some", "all"],
)
def test_outcomes(kinds):
    for row in TABLE:
        if row.kind in kinds:
            assert metrics.outcome(row) == row.outcome, str(row)


def _mean_error(y, p):
    return ops.mean(ops.abs(y - p), axis=-1)


def _from_the_mean(y, p):
    return ops.abs(y - p)[:, 0] - ops.mean(p)


class Total(keras.metrics.Metric):
    """Adds up errors: a metric as users write it."""

    def __init__(self, name="total", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(ops.sum(self.error(y, p)))
        self.count.assign_add(ops.cast(ops.shape(y)[0], "float32"))

    def error(self, y, p):
        return ops.abs(ops.cast(y, p.dtype) - p)

    def result(self):
        return self.total / self.count


class Largest(Total):
    def update_state(self, y, p, sample_weight=None):
        largest = ops.max(self.error(y, p))
        self.total.assign(ops.maximum(self.total, largest))
        self.count.assign(1.0)


class Moving(Total):
    def update_state(self, y, p, sample_weight=None):
        self.total.assign(0.9 * self.total + 0.1 * ops.mean(self.error(y, p)))
        self.count.assign(1.0)


class Printing(Total):
    def error(self, y, p):
        tf.print("seen", output_stream="file:///dev/null")
        return super().error(y, p)


class InPython(Total):
    def error(self, y, p):
        return tf.py_function(lambda y, p: tf.abs(y - p), [y, p], tf.float32)


class OfKnownSize(Total):
    """Needs a number of rows when it is traced."""

    def error(self, y, p):
        return ops.stack([ops.abs(y[i] - p[i]) for i in range(p.shape[0])])


class MeanOfErrors(keras.metrics.Mean):
    def update_state(self, y, p, sample_weight=None):
        return super().update_state(_mean_error(y, p), sample_weight=sample_weight)


# What a metric of the user's is, and why it is gathered, if it is.
OWN = {
    "function": (lambda: keras.metrics.MeanMetricWrapper(_mean_error), None),
    "function, couples": (
        lambda: keras.metrics.MeanMetricWrapper(_from_the_mean),
        "(Sub)",
    ),
    "sums": (Total, None),
    "mean": (MeanOfErrors, None),
    "maximum": (Largest, "no addition"),
    "moving average": (Moving, "no addition"),
    "prints": (Printing, "PrintV2"),
    "py_function": (InPython, "EagerPyFunc"),
    "known size": (OfKnownSize, ""),
}


@pytest.mark.parametrize("name", OWN)
def test_metrics_of_the_users(name):
    make, reason = OWN[name]
    refused = metrics.reasons([make()], "numbers")
    assert bool(refused) == (reason is not None), refused
    assert not refused or reason in next(iter(refused.values()))


def _two_outputs():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(6, "tanh")(inputs)
    first = keras.layers.Dense(3, "softmax", name="first")(hidden)
    second = keras.layers.Dense(2, name="second")(hidden)
    return keras.Model(inputs, {"first": first, "second": second})


def _compiled(model):
    twice = keras.metrics.MeanAbsoluteError(name="twice")
    model.compile(
        keras.optimizers.SGD(0.1),
        {"first": "sparse_categorical_crossentropy", "second": "mse"},
        metrics={"first": ["accuracy"], "second": [twice, "mse", Largest("largest")]},
        weighted_metrics={"first": ["accuracy"], "second": [Total(), twice]},
    )
    return model


def _trained(towers):
    keras.utils.set_random_seed(0)
    model = _two_outputs()
    if towers:
        model = multi_gpu_model(model, gpus=towers)
    _compiled(model)
    random = np.random.default_rng(0)
    x = random.normal(size=(19, 4)).astype("float32")
    y = {
        "first": random.integers(0, 3, 19),
        "second": random.normal(size=(19, 2)).astype("float32"),
    }
    weights = {each: random.uniform(0, 2, 19).astype("float32") for each in y}
    # The last batch has fewer rows than there are towers.
    data = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(8)
    data = data.concatenate(data.take(1).map(_first_rows))
    history = model.fit(data, verbose=0).history
    return history, model.evaluate(data, return_dict=True, verbose=0)


def _first_rows(*batch):
    return tf.nest.map_structure(lambda rows: rows[:2], batch)


@pytest.mark.slow
@pytest.mark.parametrize("towers", [2, 4])
def test_outputs_with_losses_and_metrics_of_their_own(towers, capsys):
    (history, evaluated), (expected, expected_evaluated) = map(_trained, (towers, 0))
    assert history.keys() == expected.keys()
    assert evaluated.keys() == expected_evaluated.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    for name, value in expected_evaluated.items():
        np.testing.assert_allclose(evaluated[name], value, rtol=1e-5, err_msg=name)
    said = {line for line in capsys.readouterr().err.splitlines() if "gather" in line}
    assert len(said) == 1 and "Metric 'largest'" in said.pop()
