"""With run_eagerly, one device computes all of each batch, in Python.

The oracle is Keras on one device, eagerly.
"""

import functools
import io
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, ops

from tests import oracle
from tests.variants import slow
from towers import multi_gpu_model
from towers.tower import eager

random = np.random.default_rng(0)
X, Y = random.normal(size=(2, 7, 3)).astype("float32")
WEIGHTS = random.uniform(0.5, 2, 7).astype("float32")


def _batches(*arrays, size=4):
    return tf.data.Dataset.from_tensor_slices(arrays or (X, Y)).batch(size)


def _pair(make, loss="mse", builder="parameter_server", eager=True, **options):
    """Yields the model on one device, and on two towers: what to train, and itself."""
    for towers in (0, 2):
        keras.utils.set_random_seed(7)
        model = make()
        trained = model
        if towers:
            trained = multi_gpu_model(model, gpus=towers, variable_update=builder)
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        # On one device, nothing is traced.
        eagerly = eager or not towers
        trained.compile(optimizer, loss, run_eagerly=eagerly, **options)
        yield trained, model


def _fit(trained, *data, **options):
    data = data[0] if data else _batches()
    return trained.fit(data, shuffle=False, verbose=0, **options).history["loss"]


class Looks(layers.Layer):
    """Does with its input what a graph cannot."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest, self.saw = 0, 0.0, []
        self.dense = layers.Dense(3)

    def call(self, x):
        self.calls += 1
        self.saw.append(type(x).__name__)
        self.largest = max(self.largest, float(ops.max(x)))
        if tf.reduce_all(x > -100):
            x = 2 * x
        print("It looks at", x.numpy().shape)
        return self.dense(x)


class Looking(keras.Model):
    """Is built when it is first called; its normalisation is frozen."""

    def __init__(self, *others):
        super().__init__()
        self.looks, self.others = Looks(), list(others)
        self.normalise = layers.BatchNormalization()
        self.normalise.trainable = False
        self.dense = layers.Dense(3, kernel_regularizer="l2")

    def call(self, x, training=False):
        x = self.looks(x)
        for layer in self.others:
            x = layer(x)
        return self.dense(self.normalise(x, training=training))


def _built():
    model = Looking()
    model(X[:1])  # for which Keras calls layers several times
    return model


def _looking_loss(y, outputs):
    assert y.numpy().shape[1] == 3
    return ops.mean(y * outputs**2, axis=-1) * float(ops.max(y) > -100)


@pytest.mark.parametrize("builder", ["parameter_server", slow("replicated")])
def test_layers_and_losses_are_python(builder, caplog, capsys):
    found = []
    for trained, model in _pair(_built, _looking_loss, builder, metrics=["mae"]):
        model.looks.saw.clear()
        capsys.readouterr()
        history = _fit(trained, _batches(X, Y, WEIGHTS), epochs=2)
        seen = trained.evaluate(_batches(), verbose=0)
        by_hand = trained.train_on_batch(X, Y, sample_weight=WEIGHTS)
        outputs = trained.predict(_batches(), verbose=0)
        found.append([*model.get_weights(), history, seen, by_hand, outputs])
        found[-1] += [model.looks.calls, model.looks.largest]
        printed = capsys.readouterr().out.count("It looks at")
    assert oracle.largest_difference(found[1], found[0]) <= 1e-5
    assert set(model.looks.saw) == {"EagerTensor"}
    # Nine batches, and no other call.
    assert printed == len(model.looks.saw) == 9
    said = [r.getMessage() for r in caplog.records if "eagerly, so" in r.getMessage()]
    assert [line.split()[4] for line in said] == [
        *("train_step", "test_step", "predict_step")
    ]


@pytest.mark.slow
def test_asynchronous_towers_are_python():
    for towers in (1, 2):
        keras.utils.set_random_seed(7)
        model = Looking()
        trained = multi_gpu_model(model, gpus=towers, variable_update="asynchronous")
        trained.compile(keras.optimizers.SGD(0.05), _looking_loss, run_eagerly=True)
        history = _fit(trained)
        if towers == 1:
            ones = [*model.get_weights(), history]
    assert int(trained.optimizer.iterations) == 4
    assert set(model.looks.saw) == {"EagerTensor"}
    keras.utils.set_random_seed(7)
    model = Looking()
    model.compile(keras.optimizers.SGD(0.05), _looking_loss, run_eagerly=True)
    history = _fit(model)
    assert oracle.largest_difference(ones, [*model.get_weights(), history]) <= 1e-5


class Adds(layers.Layer):
    def call(self, x):
        x.numpy()
        self.add_loss(ops.mean(x))
        return x


class Averages(layers.Layer):
    def __init__(self):
        super().__init__()
        self.mean = self.add_weight(shape=(), trainable=False)

    def call(self, x):
        x.numpy()
        self.mean.assign(ops.mean(x))
        return x


class Raw(layers.Layer):
    def __init__(self):
        super().__init__()
        self.count = tf.Variable(0.0, trainable=False)

    def call(self, x):
        x.numpy()
        self.count.assign_add(1.0)
        return x


@pytest.mark.parametrize("layer", [Adds, Averages, Raw])
def test_what_nobody_can_read(layer):
    found = []
    for trained, model in _pair(lambda: Looking(layer())):
        found.append([_fit(trained), *model.get_weights()])
        if layer is Raw:
            found[-1].append(model.others[0].count.numpy())
    assert oracle.largest_difference(found[1], found[0]) <= 1e-5


class Keeps(Looking):
    """Keeps a tensor of a call for the loss."""

    def call(self, x, training=False):
        self.last = x
        return super().call(x)

    def compute_loss(self, x, y, y_pred, *others, **more):
        return ops.mean(self.last * y_pred)


def test_a_tensor_kept_for_compute_loss():
    found = [[_fit(trained), *model.get_weights()] for trained, model in _pair(Keeps)]
    assert oracle.largest_difference(found[1], found[0]) <= 1e-5


# What changes between two traces, or without one.


class Weighted(losses.MeanSquaredError):
    def __init__(self):
        super().__init__(reduction="mean_with_sample_weight")


class Switched(layers.Layer):
    """Adds a loss, or assigns, as it is told."""

    mode = "mean"

    def __init__(self):
        super().__init__()
        self.state = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        if self.mode == "assign":
            self.state.assign(0.9 * self.state + 0.1 * ops.mean(x))
        if self.mode == "steps":
            self.state.assign_add(1.0)
        total = ops.mean if self.mode == "mean" else ops.sum
        self.add_loss(total(x**2))
        return x


class Tells(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        Switched.mode = ("mean", "assign")[epoch]


def _masked():
    x = np.where(X[:, :1] > 0, X, 0)
    return _batches(x[:, :, None], Y)


def _dense():
    return keras.Sequential([keras.Input((3,)), layers.Dense(3)])


def _sequences():
    return keras.Sequential(
        [
            keras.Input((3, 1)),
            layers.Masking(),
            layers.Dense(2),
            layers.SimpleRNN(3, return_sequences=False),
        ]
    )


def _switched():
    return keras.Sequential([keras.Input((3,)), layers.Dense(3), Switched()])


def _of_modes(*modes):
    def train(trained):
        found = []
        for Switched.mode in modes:
            found.append(_fit(trained))
        found.append(trained.evaluate(_batches(), verbose=0))
        return found

    return train


CHANGES = {
    "weights": (
        _dense,
        Weighted,
        lambda t: [_fit(t), _fit(t, _batches(X, Y, WEIGHTS)), _fit(t)],
    ),
    "class_weight": (
        lambda: keras.Sequential([_dense(), layers.Softmax()]),
        lambda: losses.SparseCategoricalCrossentropy(
            reduction="mean_with_sample_weight"
        ),
        lambda t: [
            _fit(t, _batches(X, np.arange(7) % 3)),
            _fit(t, _batches(X, np.arange(7) % 3), class_weight={0: 1, 1: 3, 2: 0.2}),
        ],
    ),
    "by hand": (
        _dense,
        Weighted,
        lambda t: [
            t.train_on_batch(X, Y),
            t.train_on_batch(X, Y, sample_weight=WEIGHTS),
            t.evaluate(_batches(X, Y, WEIGHTS), verbose=0),
            t.train_on_batch(X[:5], Y[:5]),
        ],
    ),
}
# A graph does not see them, as in Keras.
PYTHON = {
    "add_loss": (_switched, losses.MeanSquaredError, _of_modes("mean", "sum")),
    "state": (
        _switched,
        losses.MeanSquaredError,
        _of_modes("mean", "assign", "steps", "mean"),
    ),
    "callback": (
        _switched,
        losses.MeanSquaredError,
        lambda t: [_fit(t, epochs=2, callbacks=[Tells()])],
    ),
}


@functools.cache
def _one_device(name):
    make, loss, train = (CHANGES | PYTHON)[name]
    trained, model = next(_pair(make, loss()))
    Switched.mode = "mean"
    found = train(trained)
    return [*found, *model.get_weights()]


_OTHERS = [change for change in CHANGES | PYTHON if change != "weights"]
_FURTHER = [change for change in _OTHERS if change != "state"]


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(
    ("change", "eager", "builder"),
    [
        ("weights", False, "parameter_server"),
        ("weights", True, "replicated"),
        ("state", True, "parameter_server"),
        *(slow(change, True, "parameter_server") for change in _FURTHER),
        slow("weights", True, "parameter_server"),
        slow("weights", False, "replicated"),
        *(slow(change, True, "replicated") for change in _OTHERS),
    ],
)
def test_rules_belong_to_what_was_traced(change, eager, builder):
    make, loss, train = (CHANGES | PYTHON)[change]
    expected = _one_device(change)
    *_, (trained, model) = _pair(make, loss(), builder, eager)
    Switched.mode = "mean"
    found = [*train(trained), *model.get_weights()]
    assert oracle.largest_difference(found, expected) <= 1e-5


# What towers cannot cut.


class Graph(keras.Model):
    """Multiplies by a matrix of all nodes."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, inputs):
        return self.dense(ops.matmul(inputs["matrix"], inputs["x"]))


class Scaled(Graph):
    def call(self, inputs):
        return self.dense(inputs["x"]) * inputs["matrix"]


class Groups(Graph):
    def call(self, x):
        groups = ops.reshape(self.dense(x), (-1, 3, 3))
        return ops.reshape(groups - ops.mean(groups, 1, keepdims=True), (-1, 3))


MATRIX = np.eye(7, dtype="float32")


NOT_EXAMPLES = {
    "fewer": (
        Graph,
        {"x": X, "matrix": MATRIX[:5]},
        "7 examples in which x\\['matrix'\\]",
    ),
    "one": (
        Scaled,
        {"x": X, "matrix": X[0, :1]},
        "x\\['matrix'\\] has 1 row; expected",
    ),
}


@pytest.mark.parametrize(
    ("case", "eager"),
    [("fewer", True), ("one", False), slow("fewer", False), slow("one", True)],
)
def test_inputs_that_are_not_examples(case, eager):
    make, x, words = NOT_EXAMPLES[case]
    trained = multi_gpu_model(make(), gpus=2)
    trained.compile("sgd", "mse", run_eagerly=eager)
    data = tf.data.Dataset.from_tensors((x, Y))
    for use in trained.fit, trained.evaluate:
        with pytest.raises(ValueError, match=words):
            use(data, verbose=0)


GROUPS = np.concatenate([X, X[:2]]), np.concatenate([Y, Y[:2]])


def _check_equal(theirs, ours):
    for one, other in zip(ours, theirs, strict=True):
        # The gradient of the bias is zero but for rounding.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


TOGETHER = {
    "a matrix of all rows": (Graph, ({"x": X, "matrix": MATRIX}, Y)),
    "groups of rows": (Groups, GROUPS),
}


@pytest.mark.parametrize("case", TOGETHER)
@pytest.mark.parametrize("eager", [False, slow(True)])
def test_what_needs_all_rows(case, eager):
    make, rows = TOGETHER[case]
    data = tf.data.Dataset.from_tensors(rows)
    found = []
    for trained, model in _pair(make, eager=eager):
        losses = _fit(trained, data, epochs=2)
        found.append([losses, trained.evaluate(data, verbose=0), *model.get_weights()])
    _check_equal(*found)


def test_groups_in_a_graph_that_knows_no_rows():
    found = []
    for trained, model in _pair(Groups, eager=False):
        found.append([_fit(trained, _batches(*GROUPS, size=9)), *model.get_weights()])
    _check_equal(*found)


def test_a_model_that_is_not_compiled_predicts():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    rows = np.eye(3, dtype="float32")
    expected = model(rows)
    model.run_eagerly = True
    ours = multi_gpu_model(model, gpus=2).predict_on_batch(rows)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_what_other_threads_write_is_shown(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    with eager.aside(keras.Sequential([layers.Dense(1)])):
        print("mine")
        other = threading.Thread(target=print, args=("theirs",))
        other.start()
        other.join()
        assert sys.stdout.getvalue() == "theirs\n"
