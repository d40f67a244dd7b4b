"""What hosts compare before they compute, with hosts of which one runs here."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.collectives.world import Alone
from towers.loop import alike
from towers.model import fit_call
from towers.train.settings import OF_A_HOST, Settings


class Hosts(Alone):
    """Hosts that say in turn what they were given."""

    count, names = 3, ("host 0", "host 1 (b)", "host 2")

    def __init__(self, *others):
        self.others = others

    def exchange(self, value):
        if isinstance(value, str):  # a digest
            return [value, "another"] if len({*map(str, self.others)}) > 1 else [value]
        return [value, *self.others]


def compare(*given):
    """What hosts say that were given this; `None` if nothing differs."""
    if all(each == given[0] for each in given):
        return None
    return alike.difference([f"host {k}" for k in range(len(given))], given)


def test_a_sentence_names_what_differs_and_on_which_hosts():
    hosts = Hosts({"fit": {"epochs": 3}}, {"fit": {"epochs": 2}})
    with pytest.raises(alike.HostsDifferError) as error:
        alike.check(hosts, {"fit": {"epochs": 2}})
    assert str(error.value).startswith(
        "Hosts differ in epochs of fit: 2 on host 0 and host 2 and 3 on host 1 (b); "
    )
    alike.check(Alone(), {"fit": {"epochs": 2}})


def test_a_sentence_counts_what_else_differs():
    first, second = {"a": 1, "b": {"c": [1, 2], "d": 0}}, {"a": 1, "b": {"c": [1]}}
    said = compare(first, second)
    assert "differ in c of b: [1, 2] on host 0 and [1] on host 1, and in 1 more" in said


def model(units=4, activation="relu", kind="functional", dtype="float32", **compiled):
    layers = [
        keras.layers.Dense(units, activation, dtype=dtype),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1),
    ]
    if kind == "functional":
        x = y = keras.Input((3,))
        for layer in layers:
            y = layer(y)
        made = keras.Model(x, y)
    elif kind == "subclassed":

        class Own(keras.Model):
            def __init__(self, layers):
                super().__init__()
                self.parts = layers

            def call(self, x):
                for layer in self.parts:
                    x = layer(x)
                return x

        made = Own(layers)
        made(np.zeros((1, 3)))
    else:
        made = keras.Sequential([keras.Input((3,)), *layers])
    options = {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": "mse"}
    made.compile(**options | {"metrics": [keras.metrics.AUC()]} | compiled)
    return made


@pytest.mark.parametrize("kind", ["functional", "sequential", "subclassed"])
def test_other_models_in_a_process_change_nothing(kind):
    first = alike.of_model(model(kind=kind))
    model()
    assert compare(first, alike.of_model(model(kind=kind))) is None


def test_weights_and_rates_are_the_first_hosts():
    made = model(loss=lambda y, p: y - p)
    first = alike.of_model(made)
    made.optimizer.learning_rate = 0.5
    made.fit(np.ones((2, 3)), np.ones((2, 1)), verbose=0)
    assert compare(first, alike.of_model(made)) is None


SCHEDULE = keras.optimizers.schedules.CosineDecay(1.0, 9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"units": 5}, "units of config of layer 1 dense of the model: 4 on host 0"),
        ({"activation": "gelu"}, '"relu" on host 0 and "gelu" on host 1'),
        ({"kind": "sequential"}, 'class of the model: "Functional" on host 0 and'),
        ({"dtype": "mixed_float16"}, "dtype"),
        ({"optimizer": keras.optimizers.SGD(0.1)}, "momentum of the optimizer: 0.9"),
        ({"optimizer": "adam"}, 'class of the optimizer: "SGD" on host 0 and "Adam"'),
        (
            {"optimizer": keras.optimizers.SGD(SCHEDULE, momentum=0.9)},
            "of learning_rate of the optimizer",
        ),
        ({"loss": "mae"}, 'loss of compile: "mse" on host 0 and "mae" on host 1'),
        ({"metrics": []}, "metrics of compile"),
        ({"steps_per_execution": 2}, "steps_per_execution of compile: 1 on host 0 and"),
    ],
)
def test_models_that_differ(change, said):
    found = compare(*(alike.of_model(model(**each)) for each in ({}, change)))
    assert said in found


def test_variables_of_a_class_of_the_users():
    found = compare(
        *(alike.of_model(model(units, kind="subclassed")) for units in (4, 5))
    )
    assert "variable own/dense/kernel, number 0 of the model: [[3, 4], " in found


X = np.zeros((6, 3), "float32")


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (X, X[:5], "examples: [6] on host 0 and [5] on host 1"),
        (X, X.astype("float64"), "elements"),
        ([X, X[:, 0]], [X, X], "elements"),
        (
            tf.data.Dataset.from_tensor_slices(X).batch(2),
            tf.data.Dataset.from_tensor_slices(X[:, :2]).batch(2),
            "elements",
        ),
        (tf.data.Dataset.from_tensor_slices(X).batch(2), X, "elements"),
        (
            tf.data.Dataset.from_tensor_slices(X).batch(2),
            tf.data.Dataset.from_tensor_slices(X[:-2]).batch(2),
            "batches",
        ),
        (iter([X]), X, "class"),
    ],
)
def test_data_that_differ(first, second, said):
    assert said in compare(*map(alike.of_data, (first, second)))


def test_of_a_batch_the_number_of_rows_may_differ():
    data = (tf.data.Dataset.from_tensor_slices(X[: 2 * size]) for size in (2, 3))
    sizes = (of_host.batch(len(of_host) // 2, drop_remainder=True) for of_host in data)
    assert compare(*map(alike.of_data, sizes)) is None


def test_flags_of_a_host_are_its_own():
    first = Settings(model="cnn", num_gpus=1, model_dir="a")
    other = dataclasses.replace(first, num_gpus=2, model_dir="b")
    assert compare(first.of_all_hosts(), other.of_all_hosts()) is None
    other = dataclasses.replace(first, metrics=("AUC",), seed=8)
    said = compare(first.of_all_hosts(), other.of_all_hosts())
    assert "differ in --metrics: none on host 0" in said and "in 1 more" in said
    assert {*OF_A_HOST} <= {field.name for field in dataclasses.fields(Settings)}


def test_callbacks_may_differ():
    """The first host's may show or write what others leave to it."""
    one = {"x": np.ones([4, 2]), "epochs": 2, "callbacks": None}
    other = {**one, "callbacks": [keras.callbacks.History()]}
    assert fit_call.given("fit", one, None) == fit_call.given("fit", other, None)
    fewer = fit_call.given("fit", {**one, "steps_per_epoch": 1}, None)
    said = compare(fit_call.given("fit", one, None), fewer)
    assert "none on host 0 and 1 on host 1" in said
