"""A contract for each private name of Keras and TensorFlow that Towers relies on.

When one fails with a new version, it says what broke, what was promised and which
modules rely on it. `docs/reference/versions.md` says what to do then.
"""

import ast
import functools
import gc
import inspect
import io
import multiprocessing.util
import random
import re
import subprocess
import sys
import tempfile
import traceback
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import config as tf_config
from tensorflow.python.ops import script_ops

from tests.hosts import free_ports
from towers.keras_adapter import (
    datasets,
    file_systems,
    graphs,
    layers,
    models,
    optimizers,
    pools,
    randomness,
    runtime,
    variables,
)
from towers.keras_adapter.patching import patched

pytestmark = pytest.mark.oldest

ROOT = Path(__file__).parents[3]
ADAPTER = ROOT / "towers" / "keras_adapter"


class Contract(NamedTuple):
    """What Towers relies on.

    Attributes:
        name: The private name, or several that are of use only together.
        through: What of the adapter goes by another name for it.
        promise: What it has to do.
        check: Fails if it does not.
    """

    name: str
    through: str
    promise: str
    check: Callable[[], None]


CONTRACTS: list[Contract] = []


def contract(name: str, through: str, promise: str):
    def add(check):
        CONTRACTS.append(Contract(name, through, promise, check))
        return check

    return add


# Files.


@contract(
    ".weights.h5",
    "saved_variables",
    "has a group for each layer: in a list by its class and number, with its name",
)
def _():
    base = [keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2, name="out")]
    model = keras.Sequential([*base, keras.layers.Dense(1)])
    model.compile("sgd")
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/a.keras")
        with zipfile.ZipFile(f"{folder}/a.keras") as archive:
            file = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(file) as weights:
        found = variables.saved_variables(weights)
        values = [weights[each.path][()] for each in found]
    for value, ours in zip(values, model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, ours)
    first, out, last = (layer.name for layer in model.layers)
    assert [each.layer for each in found] == [first, first, out, out, last, last]
    assert [each.key for each in found] == [
        *("layers/dense 0/0", "layers/dense 0/1"),
        *("layers/named out/0", "layers/named out/1"),
        *("layers/dense 1/0", "layers/dense 1/1"),
    ]


@contract(
    "RegisterFilesystemPluginImpl",
    "register",
    "takes the structures of the C interface: a scheme is known, and a file is read",
)
def _():
    class Files:
        def stat(self, path):
            return len(path), 1, False

        def size(self, path):
            return len(path)

        def read(self, path, begin, end):
            return path.encode()[begin:end]

        def __getattr__(self, name):
            return None

    file_systems.register("contract", Files())
    assert tf.io.read_file("contract://a/b").numpy() == b"contract://a/b"


# Layers.


def _nested():
    inner = keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    model = keras.Sequential([keras.Input([3]), inner, keras.layers.Dense(1)])
    return model, inner


@contract(
    "_flatten_layers",
    "layers_of",
    "lists a model and all layers inside it, each once, on request without itself or "
    "the parts of parts",
)
def _():
    model, inner = _nested()
    parts = [*inner.layers]
    found = layers.layers_of(model)
    assert found[0] is model
    assert len(found) == len({*map(id, found)})
    assert {*map(id, found)} >= {*map(id, [*model.layers, *parts])}
    assert model not in layers.layers_of(model, include_self=False)
    shallow = layers.layers_of(model, include_self=False, recursive=False)
    assert inner in shallow and parts[0] not in shallow


@contract(
    "_call_has_training_arg",
    "has_training_argument",
    "tells whether `call` accepts `training`",
)
def _():
    assert layers.has_training_argument(keras.layers.Dropout(0.5))
    assert not layers.has_training_argument(keras.layers.Flatten())


@contract(
    "_trainable_variables",
    "own_variables",
    "lists the variables that a layer itself has created as trainable",
)
def _():
    layer = keras.layers.BatchNormalization()
    layer.build([None, 3])
    layer.trainable = False
    assert {v.name for v in layers.own_variables(layer)} == {
        *("gamma", "beta", "moving_mean", "moving_variance")
    }
    model, _ = _nested()
    assert layers.own_variables(model) == []


@contract(
    "_non_trainable_variables",
    "own_non_trainable_variables",
    "lists the variables that a layer itself has created as not trainable",
)
def _():
    layer = keras.layers.BatchNormalization()
    layer.build([None, 3])
    names = [v.name for v in layers.own_non_trainable_variables(layer)]
    assert names == ["moving_mean", "moving_variance"]


@contract(
    "_seed_generators",
    "own_seed_generators",
    "lists the seed generators of a layer, and not those of its parts",
)
def _():
    model, inner = _nested()
    assert layers.own_seed_generators(model) == []
    dropout = inner.layers[0]
    assert layers.own_seed_generators(dropout) == [dropout.seed_generator]


@contract(
    "_metrics",
    "own_metrics",
    "lists the metrics that a layer itself holds, and not those of its parts",
)
def _():
    class Measured(keras.layers.Layer):
        def __init__(self, metric):
            super().__init__()
            self.measured = metric

    inner, outer = keras.metrics.Mean(name="a"), keras.metrics.Sum(name="b")
    layer = Measured(outer)
    layer.part = Measured(inner)
    assert layers.own_metrics(layer) == [outer]
    assert layers.own_metrics(layer.part) == [inner]


@contract(
    "_run_finalizers",
    "end_pools",
    "calls what pools have left to call at exit, once",
)
def _():
    calls = []
    multiprocessing.util.Finalize(None, calls.append, [1], exitpriority=15)
    pools.end_pools()
    pools.end_pools()
    assert calls == [1]


@contract(
    "_embeddings", "embedding_table", "is the variable that has an Embedding's rows"
)
def _():
    layer = keras.layers.Embedding(5, 2)
    layer.build()
    assert layers.embedding_table(layer) is layer.trainable_variables[0]


@contract(
    "_keras_mask",
    "TAGS",
    "is the mask of a tensor, which the next layer and the loss take",
)
def _():
    ids = tf.constant([[1, 0]])
    output = keras.layers.Embedding(5, 2, mask_zero=True)(ids)
    assert layers.tag(output, "_keras_mask").numpy().tolist() == [[True, False]]
    y = tf.constant([[[1.0], [9.0]]])
    copy = tf.identity(tf.zeros_like(y))
    layers.set_tag(copy, "_keras_mask", tf.constant([[True, False]]))
    assert float(keras.losses.MeanSquaredError()(y, copy)) == pytest.approx(1)


@contract(
    "_keras_logits",
    "logits_of",
    "is what a sigmoid or softmax was made of; losses use it in place of the output",
)
def _():
    logits = tf.constant([[1.0, 2.0]])
    output = keras.activations.softmax(logits)
    assert layers.logits_of(output) is logits
    other = tf.constant([[3.0, 1.0]])
    copy = tf.identity(output)
    layers.set_tag(copy, "_keras_logits", other)
    loss = keras.losses.sparse_categorical_crossentropy
    expected = loss(tf.constant([0]), other, from_logits=True)
    np.testing.assert_allclose(loss(tf.constant([0]), copy), expected, rtol=1e-6)


@contract(
    "keras.src.backend.common.stateless_scope.get_stateless_scope",
    "stateless_scope_here",
    "is the innermost `keras.StatelessScope`",
)
def _():
    assert layers.stateless_scope_here() is None
    with keras.StatelessScope() as scope:
        assert layers.stateless_scope_here() is scope


@contract(
    "keras.src.", "is_keras_own", "is where all of Keras is defined, and no user's"
)
def _():
    class Own(keras.optimizers.SGD):
        def update_step(self, *args):
            pass

    for step in (keras.optimizers.SGD.update_step, keras.optimizers.Adam.update_step):
        assert layers.is_keras_own(step)
    assert layers.is_keras_own(keras.activations.relu)
    assert not layers.is_keras_own(Own.update_step)


def _noting(into):
    def by(original, *args, **kwargs):
        into.append(args)
        return original(*args, **kwargs)

    return by


# Losses.


def _compiled(**options):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, use_bias=False)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model


_X, _Y = np.ones([4, 2], "float32"), np.zeros([4, 1], "float32")


@contract("_compile_config", "compile_config", "is another object after each `compile`")
def _():
    model = _compiled()
    first = models.compile_config(model)
    assert first is models.compile_config(model) is not None
    model.compile(loss="mse")
    assert models.compile_config(model) is not first
    assert models.compile_config(keras.Sequential()) is None


@contract(
    "_compile_loss",
    "compiled_loss",
    "is the sum of the compiled losses, with `variables`, `metrics` and `built`",
)
def _():
    assert models.compiled_loss(_compiled(loss=None)) is None
    loss = models.compiled_loss(_compiled())
    assert not loss.built
    value = loss(tf.ones([4, 1]), tf.zeros([4, 1]), tf.constant([2.0, 0, 0, 0]))
    assert float(value) == 0.5
    assert loss.built and [*loss.variables] == [] and [*loss.metrics] == []
    model = _compiled()
    with models.compiled_loss_as_built(model):
        models.symbolic_build(model, _symbols())
    assert not models.compiled_loss(model).built


class _WithoutTraining(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return tf.reduce_sum(y_pred)


@contract(
    "_compute_loss",
    "compute_loss",
    "calls `compute_loss`, which need not have a `training` argument",
)
def _():
    model = _WithoutTraining([keras.Input([2]), keras.layers.Dense(1)])
    model.compile()
    loss = models.compute_loss(model, None, None, tf.ones([3, 1]), None)
    assert float(loss) == 3


@contract(
    "_compute_loss",
    "compute_loss_replaced",
    "is defined by one base class of every model, and called by Keras's steps",
)
def _():
    seen, model, other = [], _compiled(), _compiled()

    def zero(x, y, y_pred, sample_weight, training):
        seen.append(y_pred)
        return keras.ops.sum(y_pred) * 0

    with models.compute_loss_replaced(model, zero):
        models.symbolic_build(model, _symbols())
        assert len(seen) == 1
        models.symbolic_build(other, _symbols())
    assert len(seen) == 1


@contract(
    "_compile_metrics", "symbolic_build", "holds all compiled metrics, built or not"
)
def _():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    assert not model._compile_metrics.built
    models.symbolic_build(model, _symbols())
    assert model._compile_metrics.built


def _symbols():
    return keras.KerasTensor([4, 2]), keras.KerasTensor([4, 1]), None


@contract(
    "_symbolic_build",
    "symbolic_build",
    "creates the variables of layers, losses, metrics and optimizer from symbols",
)
def _():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    models.symbolic_build(model, _symbols())
    assert model.built and model.optimizer.built
    assert models.compiled_loss(model).built
    assert [v.path for v in model.metrics_variables if "absolute" in v.path]


class _Counted(keras.layers.Layer):
    """It counts its calls."""

    calls = 0

    def call(self, inputs):
        self.calls += 1
        return inputs


def _noting_outputs(seen, original, model, x, y, y_pred, *args, **kwargs):
    seen.append(y_pred)
    return original(model, x, y, y_pred, *args, **kwargs)


@contract(
    "keras.src.models.functional.Functional",
    "symbolic_build",
    "has outputs as `call` returns them, so that metrics are built without a call",
)
def _():
    x = keras.Input([2])
    counted = _Counted()
    wide = keras.layers.Dense(3, name="wide")(counted(x))
    thin = keras.layers.Dense(1, name="thin")(wide)
    for outputs in (wide, [wide], [wide, thin], {"wide": wide, "thin": thin}):
        model, by_keras = keras.Model(x, outputs), keras.Model(x, outputs)
        y = keras.tree.map_structure(
            lambda output: keras.KerasTensor([4, *output.shape[1:]]), model.output
        )
        losses = keras.tree.map_structure(lambda _: "mse", y)
        for either in (model, by_keras):
            auc = keras.tree.map_structure(lambda _: [keras.metrics.AUC()], y)
            # Keras 3.10 takes no list in a list for one output.
            auc = auc[0] if outputs == [wide] else auc
            either.compile("adam", losses, metrics=auc)
        data = keras.KerasTensor([4, 2]), y, None
        seen, counted.calls = [], 0
        with patched(models.COMPUTE_LOSS, functools.partial(_noting_outputs, seen)):
            models.symbolic_build(model, data)
            assert counted.calls == 0
            by_keras._symbolic_build(data_batch=data)
            assert counted.calls == 1
        of_model, of_keras = seen[0], seen[-1]
        keras.tree.assert_same_structure(of_model, of_keras)
        built, expected = (
            [(v.shape, v.dtype) for v in (*m.metrics_variables, *m.optimizer.variables)]
            for m in (model, by_keras)
        )
        assert built == expected and models.compiled_loss(model).built


@contract(
    "keras.src.models.functional.Functional",
    "symbolic_build",
    "is called for outputs of a shape that it was not made for",
)
def _():
    counted = _Counted()
    layers_ = [keras.Input([None, 2]), counted, keras.layers.Flatten()]
    model = keras.Sequential(layers_)
    model.compile("sgd", "mse", metrics=[keras.metrics.AUC(multi_label=True)])
    counted.calls = 0
    data = keras.KerasTensor([4, 3, 2]), keras.KerasTensor([4, 6]), None
    models.symbolic_build(model, data)
    assert counted.calls == 1
    assert (200, 6) in [tuple(v.shape) for v in model.metrics_variables]


class _Packed(keras.layers.Layer):
    """It takes ragged and sparse tensors, and nothing dense."""

    def build(self, shapes):
        self.scale = self.add_weight(shape=())

    def call(self, inputs):
        ragged, sparse = inputs
        rows = ragged.to_tensor(shape=[None, 3])
        return self.scale * rows + tf.sparse.to_dense(sparse)


@contract(
    "keras.src.backend.compute_output_spec",
    "symbolic_build",
    "calls a function, and creates the variables that it builds",
)
def _():
    model = keras.Sequential([_Packed()])
    model.compile(optimizer="adam", loss=lambda y, p: p - y.to_tensor(), metrics=[])
    ragged = tf.RaggedTensorSpec([4, None], tf.float32, 1)
    sparse = tf.SparseTensorSpec([4, 3], tf.float32)
    models.symbolic_build(model, ((ragged, sparse), ragged, None))
    assert model.built and model.optimizer.built
    assert models.compiled_loss(model).built


# Optimizers.


def _built(optimizer):
    variable = keras.Variable(tf.ones([2]), name="one")
    optimizer.build([keras.Variable(tf.ones([2]), name="zero"), variable])
    return variable


@contract("_iterations", "iterations_variable", "is the variable that counts the steps")
def _():
    optimizer = keras.optimizers.SGD()
    variable = _built(optimizer)
    optimizer.apply([None, tf.ones([2])])
    assert int(optimizers.iterations_variable(optimizer).value) == 1
    assert variable.numpy().tolist() != [1, 1]


@contract(
    "_learning_rate",
    "learning_rate_variable",
    "is the variable of the learning rate, or the schedule",
)
def _():
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.learning_rate = 0.25
    assert float(optimizers.learning_rate_variable(optimizer).value) == 0.25
    schedule = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    optimizer = keras.optimizers.SGD(schedule)
    assert optimizers.learning_rate_variable(optimizer) is schedule


@contract(
    "_get_variable_index",
    "slot_index",
    "is a variable's place in lists of an optimizer's own, such as `momentums`",
)
def _():
    optimizer = keras.optimizers.SGD(momentum=0.9)
    variable = _built(optimizer)
    assert optimizers.slot_index(optimizer, variable) == 1
    assert "one" in optimizer.momentums[1].path


@contract(
    "keras.src.optimizers.base_optimizer.BaseOptimizer",
    "APPLY_GRADIENTS",
    "is the class of every optimizer",
)
@contract(
    "_backend_apply_gradients",
    "APPLY_GRADIENTS",
    "is called once for all variables, and calls `update_step` for each",
)
def _():
    whole, each = [], []
    optimizer = keras.optimizers.SGD()
    _built(optimizer)
    with (
        patched(optimizers.APPLY_GRADIENTS, _noting(whole)),
        patched(optimizers.SGD_UPDATE_STEP, _noting(each)),
    ):
        optimizer.apply([tf.ones([2]), tf.ones([2])])
    assert [len(args) for args in whole] == [3]
    assert [len(args) for args in each] == [4, 4]


@contract(
    "TFOptimizer, _all_reduce_sum_gradients",
    "SUM_OVER_REPLICAS",
    "returns pairs of a gradient and a variable, as it gets them, without replicas",
)
def _():
    seen = []

    def keep(original, optimizer, pairs):
        for given, returned in zip(pairs, original(optimizer, pairs), strict=True):
            assert given[1] is returned[1]
            assert given[0].numpy().tolist() == returned[0].numpy().tolist()
        seen.append(pairs)
        return pairs

    optimizer = keras.optimizers.SGD()
    _built(optimizer)
    with patched(optimizers.SUM_OVER_REPLICAS, keep):
        optimizer.apply([tf.ones([2]), tf.ones([2])])
    assert len(seen) == 1


# Variables.


@contract(
    "_value",
    "value_behind",
    "is the `tf.Variable` that a Keras variable reads and assigns",
)
def _():
    variable = keras.Variable(tf.ones([2]))
    with keras.StatelessScope([(variable, tf.zeros([2]))]):
        assert isinstance(variables.value_behind(variable), tf.Variable)
        assert variables.value_behind(variable).numpy().tolist() == [1, 1]
    first, other = variable.value, tf.Variable(tf.zeros([2]))
    with variables.swapped_values([variable], [other]):
        variable.assign([5, 5])
        assert variable.numpy().tolist() == [5, 5]
    assert other.numpy().tolist() == [5, 5] and variable.value is first
    with variables.places_kept([variable]):
        variables.put_behind(variable, other)
        assert variable.value is other
    assert variable.numpy().tolist() == [1, 1]


@contract(
    "_unique_id",
    "take_identity",
    "is what an optimizer knows a `tf.Variable` by",
)
def _():
    optimizer = keras.optimizers.SGD(momentum=0.9)
    variable = _built(optimizer)
    copy = tf.Variable(tf.ones([2]))
    variables.take_identity(copy, variable.value)
    variables.put_behind(variable, copy)
    assert optimizers.slot_index(optimizer, variable) == 1


@contract(
    "_shape",
    "put_behind",
    "is the shape that a variable says it has, and checks what it is assigned for",
)
def _():
    variable, other = keras.Variable([1.0, 1.0]), tf.Variable([1.0, 2.0, 3.0])
    before = variable.value
    with variables.swapped_values([variable], [other]):
        assert variable.shape == (3,)
        variable.assign([4.0, 5.0, 6.0])
    assert variable.shape == (2,) and variable.numpy().tolist() == [1, 1]
    variables.put_behind(variable, other)
    assert variable.shape == (3,) and before.shape == (2,)
    assert variable.numpy().tolist() == [4, 5, 6]


@contract(
    "keras.src.backend.tensorflow.optimizer.TFOptimizer",
    "ADD_SLOT",
    "creates each slot of a variable by `add_variable_from_reference`",
)
def _():
    asked = []
    with patched(optimizers.ADD_SLOT, _noting(asked)):
        _built(keras.optimizers.Adam())
        _built(keras.optimizers.Ftrl(use_ema=True, gradient_accumulation_steps=2))
    # Of two variables, two slots each, and then four.
    assert len(asked) == 4 + 8


@contract(
    "_trainable_variables",
    "slots_of",
    "are the variables of an optimizer, in the order of its lists of slots",
)
@contract(
    "_accumulated_gradients",
    "only_for",
    "has a slot, or `None`, for each variable, and is emptied as a whole",
)
@contract(
    "_model_variables_moving_average",
    "only_for",
    "has the average of each of `_trainable_variables`",
)
def _():
    for options in ({"use_ema": True}, {"gradient_accumulation_steps": 2}):
        optimizer = keras.optimizers.RMSprop(momentum=0.9, **options)
        variable = _built(optimizer)
        slots = optimizers.slots_of(optimizer, variable)
        assert len(slots) == 3 and all("one" in slot.path for slot in slots)
        zero = next(v for v in optimizer._trainable_variables if v is not variable)
        before = [v.numpy() for v in optimizers.slots_of(optimizer, zero)]
        with optimizers.only_for(optimizer, [variable]):
            for _ in range(2):
                optimizer.apply([tf.ones([2])], [variable])
        after = [v.numpy() for v in optimizers.slots_of(optimizer, zero)]
        np.testing.assert_array_equal(before, after)
        assert any(slot.numpy().any() for slot in slots)


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 1), ({"use_ema": True}, 1), ({"gradient_accumulation_steps": 2}, 2)],
)
def test_what_an_optimizer_keeps_of_each_variable(options, steps):
    optimizer = keras.optimizers.SGD(0.5, **options)
    variable = _built(optimizer)
    optimizer.apply([tf.fill([2], 3.0)], [variable])
    kept, found = optimizers.accumulated(optimizer, variable)
    assert found == steps and (kept is None) == (steps == 1)
    if kept is not None:
        np.testing.assert_array_equal(kept, [3.0, 3.0])
    average = optimizers.average(optimizer, variable)
    assert (average is None) == ("use_ema" not in options)
    if average is not None:
        assert average.shape == variable.shape and "one" in average.path


class _Annotated(keras.optimizers.SGD):
    """Has what Python writes into classes: a docstring, annotations, line numbers."""

    scale: float = 2.0

    def update_step(self, gradient, variable, learning_rate):
        self.last = gradient
        super().update_step(self.scale * gradient, variable, learning_rate)


def test_what_python_writes_into_a_class_replaces_no_method():
    assert inspect.get_annotations(_Annotated)  # kept in the class once they are read
    assert optimizers.overridden(_Annotated(0.1)) == ["update_step"]


def test_each_optimizer_of_several_has_slots_of_its_own():
    several = getattr(keras.optimizers, "MultiOptimizer", None)
    if several is None:
        pytest.skip("this Keras has none")
    one, two = keras.Variable([1.0], name="one"), keras.Variable([1.0], name="two")
    adam = keras.optimizers.Adam()
    chosen = {id(one): adam, id(two): keras.optimizers.SGD(momentum=0.9)}
    optimizer = several(lambda variable: chosen[id(variable)])
    optimizer.build([one, two])
    slots = [
        optimizers.slots_of(optimizer, each, of_any_shape=True) for each in (one, two)
    ]
    assert [len(each) for each in slots] == [2, 1]
    assert all("one" in slot.path for slot in slots[0])


@contract(
    "_momentums", "moments", "has Adam's means of gradients, in order of the variables"
)
@contract("_velocities", "moments", "has those of their squares, in the same order")
def _():
    optimizer = keras.optimizers.Adam(beta_1=0.5, beta_2=0.75)
    variables = [keras.Variable([1.0]), keras.Variable([2.0])]
    optimizer.apply([tf.constant([2.0]), tf.constant([4.0])], variables)
    mean, squares = optimizers.moments(optimizer, variables[1])
    assert (float(mean[0]), float(squares[0])) == (2.0, 4.0)


@contract(
    "_accumulators",
    "accumulator",
    "has the sums of squares of Adagrad, in the order of the variables",
)
def _():
    optimizer = keras.optimizers.Adagrad(initial_accumulator_value=0.5)
    variable = _built(optimizer)
    optimizer.apply([tf.constant([1.0, 2.0])], [variable])
    found = optimizers.accumulator(optimizer, variable)
    assert "one" in found.path and found.numpy().tolist() == [1.5, 4.5]


@contract(
    "keras.optimizers.Optimizer(clipnorm, global_clipnorm)",
    "gradients_clipped",
    "clip the norm of each gradient, and of all gradients",
)
def _():
    for options in ({"clipnorm": 1.0}, {"global_clipnorm": 1.0}):
        optimizer = keras.optimizers.SGD(1.0, **options)
        variable = _built(optimizer)
        parts = [tf.constant([3.0, 0.0]), tf.constant([0.0, 4.0])]
        clipped = optimizers.gradients_clipped(optimizer, parts, [variable, variable])
        with clipped as gradients:
            np.testing.assert_allclose(tf.add_n(gradients), [0.6, 0.8], rtol=1e-6)
            assert optimizer.clipnorm is optimizer.global_clipnorm is None
        assert {"clipnorm": optimizer.clipnorm} == options or (
            {"global_clipnorm": optimizer.global_clipnorm} == options
        )


@contract(
    "keras.src.optimizers.base_optimizer.global_norm",
    "GLOBAL_NORM",
    "is what `apply` divides all gradients by, with `global_clipnorm`",
)
def _():
    optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
    variable = _built(optimizer)
    before = variable.numpy()
    with patched(optimizers.GLOBAL_NORM, lambda *_: tf.constant(2.0)):
        optimizer.apply([tf.constant([3.0, 4.0])], [variable])
    np.testing.assert_allclose(before - variable.numpy(), [1.5, 2.0], rtol=1e-6)


@contract("keras.optimizers.Nadam", "scalars", "has a product for all variables")
def _():
    for optimizer, count in (
        (keras.optimizers.Nadam(), 1),
        (keras.optimizers.Adam(), 0),
    ):
        _built(optimizer)
        assert len(optimizers.scalars(optimizer)) == count


@contract(
    "_optimizer_map",
    "updating_one",
    "has the optimizer of each variable, before it is built, too",
)
@contract(
    "_trainable_variables_indices",
    "taking",
    "has as many entries as a `MultiOptimizer` wants gradients",
)
def _():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has none")
    inner = keras.optimizers.SGD(1.0), keras.optimizers.SGD(2.0)
    map = keras.optimizers.OptimizerMap(inner[0], {".*second": inner[1]})
    optimizer = keras.optimizers.MultiOptimizer(map)
    first, second = (keras.Variable([1.0], name=n) for n in ("first", "second"))
    assert optimizers.updating_one(optimizer, first) is inner[0]
    assert optimizers.updating_one(optimizer, second) is inner[1]
    optimizer.build([first, second])
    with optimizers.taking(optimizer, 3):
        optimizer.apply([tf.ones([1])] * 3, [first, second, second])
    assert (first.numpy(), second.numpy()) == (0, -3)
    optimizer.apply([tf.ones([1])] * 2, [first, second])
    assert (first.numpy(), second.numpy()) == (-1, -5)


@contract(
    "make_train_function", "before_training", "is called on a model before it trains"
)
def _():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    calls, data = [], (np.ones((2, 2)), np.ones((2, 1)))
    models.before_training(model, lambda: calls.append("first"))
    models.before_training(model, lambda: calls.append("second"))
    model.evaluate(*data, verbose=0)
    assert not calls
    model.fit(*data, verbose=0)
    model.train_on_batch(*data)
    assert calls == ["second"] * 2


def test_a_method_that_wraps_keras_own_overrides_it():
    class Wrapping(keras.Model):
        @functools.wraps(keras.Model.train_step)
        def train_step(self, data):
            return super().train_step(data)

    assert models.overrides(Wrapping(), "train_step")
    prepared = keras.Sequential()
    models.before_training(prepared, lambda: None)
    assert not models.overrides(prepared, "make_train_function")


@contract("_cached_value", "read_once", "is what a read of a `tf.Variable` gives")
def _():
    variable = tf.Variable(1.0)

    @tf.function
    def reads():
        with variables.read_once([variable]):
            return variable * 2 + variable

    graph = reads.get_concrete_function().graph
    kinds = [op.type for op in graph.get_operations()]
    assert kinds.count("ReadVariableOp") == 1 and float(reads()) == 3
    variable.assign(2.0)
    assert float(reads()) == 6 and float(variable) == 2


@contract(
    "tensorflow.python.ops.resource_variable_ops.UninitializedVariable",
    "without_value",
    "is a variable whose shape graphs know, and gets a value when it is assigned one",
)
def _():
    table = tf.Variable([[1.0, 2.0]] * 3)
    empty = variables.without_value(table, table.device)
    assert not tf.raw_ops.VarIsInitializedOp(resource=empty.handle)

    @tf.function
    def filled():
        variables.fill(empty, table)
        rows = tf.gather(empty, [2])
        with tf.control_dependencies([rows]):
            variables.empty(empty)
        return rows

    graph = filled.get_concrete_function()
    assert graph.structured_outputs.shape == (1, 2)
    assert [*filled()[0]] == [1, 2] == [*filled()[0]]
    assert tf.raw_ops.ReadVariableOp(resource=empty.handle, dtype=tf.float32).shape == 0


# Random numbers.


@contract(
    "keras.src.random.seed_generator.global_seed_generator",
    "shared_generator",
    "makes the generator of all layers without a seed, once",
)
@contract(
    "keras.src.backend.common.global_state.get_global_attribute",
    "shared_generator",
    "gives that generator, if there is one",
)
def _():
    keras.backend.clear_session()
    random.seed(1)
    assert randomness.shared_generator() is None
    keras.random.normal([1])
    shared = randomness.shared_generator()
    assert shared is not None
    assert shared is randomness.shared_generator(create=True)


@contract(
    "tensorflow.python.ops.stateful_random_ops.global_generator",
    "shared_tf_generator",
    "is TensorFlow's global generator, once there is one",
)
def _():
    generator = tf.random.get_global_generator()
    assert randomness.shared_tf_generator() is generator


# Graphs.


@contract("_autograph", "run_in_place", "tells whether AutoGraph converts")
@contract("_experimental_autograph_options", "run_in_place", "what more it converts")
@contract(
    "tensorflow.python.autograph.core.ag_ctx",
    "run_in_place",
    "switches AutoGraph on, also where it is off",
)
@contract(
    "tensorflow.python.eager.polymorphic_function.autograph_util",
    "run_in_place",
    "converts a function as tf.function does",
)
def _():
    def doubled_if_large(x):
        if x > 1:
            return 2 * x
        return x

    class Owner:
        @tf.function
        def doubled(self, x):
            return doubled_if_large(x)

    converted = tf.function(doubled_if_large)
    as_it_is = tf.function(doubled_if_large, autograph=False)
    with tf.Graph().as_default():
        for function in (converted, Owner().doubled):
            found = graphs.run_in_place(function, tf.constant(3))
            assert found.op.type in ("If", "StatelessIf", "Identity")
        with pytest.raises(TypeError, match="Python `bool`"):
            graphs.run_in_place(as_it_is, tf.constant(3))


@contract("_jit_compile", "is_compiled", "tells what tf.function is asked to compile")
def _():
    assert graphs.is_compiled(tf.function(lambda x: x, jit_compile=True))
    assert not graphs.is_compiled(tf.function(lambda x: x, jit_compile=False))
    assert not graphs.is_compiled(tf.function(lambda x: x))


@contract("_is_stateful", "is_stateful", "tells operations that are not pure")
def _():
    with tf.Graph().as_default():
        assert graphs.is_stateful(tf.timestamp().op)
        assert not graphs.is_stateful(tf.ones([1]).op)


@contract(
    "experimental_acd_manager.run_independently",
    "run_independently",
    "has operations of a `tf.function` wait for no other",
)
def _():
    def control_inputs(free):
        @tf.function
        def clock():
            before, after = tf.timestamp(), tf.timestamp()
            if free:
                graphs.run_independently([before.op, after.op])
            return after - before

        graph = clock.get_concrete_function().graph
        return sum(len(op.control_inputs) for op in graph.get_operations())

    assert control_inputs(free=False) > control_inputs(free=True)
    graphs.run_independently([])


@contract(
    "gradient_tape/",
    "GRADIENT_SCOPE",
    "is what a tape puts before the scope of an operation, for its gradient's",
)
def _():
    variable = tf.Variable(tf.ones([3, 3]))

    @tf.function(autograph=False)
    def gradient():
        with tf.GradientTape() as tape:
            with tf.name_scope("layer"):
                product = tf.tanh(variable @ variable)
        return tape.gradient(product, variable)

    graph = gradient.get_concrete_function().graph
    kinds = {op.type: op.name for op in graph.get_operations()}
    assert kinds["TanhGrad"].startswith(f"{graphs.GRADIENT_SCOPE}layer/")


@contract(
    "tensorflow.python.ops.math_grad.SmartBroadcastGradientArgs",
    "BROADCAST_AXES",
    "tells gradients the shape of each input, which axes to sum, and whether to",
)
def _():
    answers = (None, [], False), ([4, 1], [1], True)
    asked = []

    def axes(original, x, y, grad=None):
        asked.extend([x, y])
        assert [len(of_input) for of_input in original(x, y, grad)] == [3, 3]
        return answers

    @tf.function(autograph=False)
    def gradient(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            product = x * y
        with patched(graphs.BROADCAST_AXES, axes):
            gradients = tape.gradient(product, [x, y])
        assert asked[0] is x and asked[1] is y
        return gradients

    of_x, of_y = gradient(2 * tf.ones([4, 3]), 5 * tf.ones([4, 1]))
    np.testing.assert_array_equal(of_x, 5 * np.ones([4, 3]))
    np.testing.assert_array_equal(of_y, 6 * np.ones([4, 1]))


@contract(
    "tensorflow.python.framework.registry.Registry.lookup",
    "GRADIENT_FUNCTION",
    "is where a tape looks up the gradients of a mean, a sum, and products of matrices",
)
def _():
    kinds = []

    def function(original, registry, kind):
        kinds.append(kind)
        for known in ("Mean", "Sum", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
            assert callable(original(registry, known))
        return lambda op, grad: [grad * len(op.inputs)] * len(op.inputs)

    x = tf.ones([2, 2, 2])
    with tf.GradientTape() as tape, patched(graphs.GRADIENT_FUNCTION, function):
        tape.watch(x)
        gradient = tape.gradient(tf.matmul(x, tf.ones([2, 2, 2])), x)
    assert kinds == ["BatchMatMulV2"]
    np.testing.assert_array_equal(gradient, 2 * np.ones([2, 2, 2]))


@contract(
    "_read_only_resource_inputs",
    "may_change",
    "tells of a call which variables its function only reads",
)
def _():
    read, changed = tf.Variable(1.0), tf.Variable(2.0)

    @tf.function
    def inner():
        changed.assign(read * 3.0)

    @tf.function
    def outer():
        inner()

    graph = outer.get_concrete_function().graph
    (call,) = [op for op in graph.get_operations() if graphs.calls_functions(op)]
    outside = {inside.name: handle for handle, inside in graph.captures}
    found = [outside[tensor.name] for tensor in graphs.may_change(call)]
    assert len(call.inputs) == 2
    assert [id(handle) for handle in found] == [id(changed.handle)]


@contract(
    "tensorflow.python.framework.auto_control_deps_utils.get_read_write_resource_inputs",
    "written",
    "tells which variables an operation may write to",
)
@contract(
    "tensorflow.python.framework.auto_control_deps_utils.RESOURCE_READ_OPS",
    "runs_anyway",
    "has the types of operations that only read variables",
)
@contract(
    "control_outputs",
    "runs_anyway",
    "lists what a function runs although nobody takes from it",
)
@contract(
    "tensorflow.python.eager.polymorphic_function.atomic_function.AtomicFunction",
    "PartFunction",
    "is a function that TensorFlow knows, for as long as the last of them is there",
)
@contract(
    "tensorflow.python.eager.polymorphic_function.concrete_function.ConcreteFunction",
    "traced",
    "calls a function by the name that it is given, with structure and captures",
)
@contract("_garbage_collector", "traced", "lets another function have a traced graph")
def _():
    state = tf.Variable(2.0)

    def function(values):
        state.assign_add(1.0)
        first = 0, values[0]
        loop = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, 2 * x), first)
        return {"looped": loop[1] + tf.stop_gradient(state), "given": values[1]}

    specs, values = [tf.TensorSpec([2]), tf.TensorSpec([])], [[1.0, 2.0], 5.0]
    given, names = [tf.constant(value) for value in values], []
    for _ in range(2):
        state.assign(2.0)
        made = graphs.traced(function, specs, xla=True)
        # It changes the numbers that TensorFlow gives to functions.
        tf.function(lambda x: x)(1.0)
        gc.collect()
        results = made(given), tf.function(made)(given)
        assert results[0]["looped"].numpy().tolist() == [11.0, 19.0]
        assert results[1]["looped"].numpy().tolist() == [12.0, 20.0]
        assert [result["given"].numpy() for result in results] == [5.0, 5.0]
        names.append(made.name)
        del made
    assert names[0] == names[1] and "towers_compiled_" in str(names[0])
    other = graphs.traced(lambda x: 3 * x, tf.TensorSpec([2]), xla=True)
    assert other.name not in names
    assert other(given[0]).numpy().tolist() == [3.0, 6.0]


@contract(
    "tensorflow.python.eager.polymorphic_function.atomic_function.partitioned_call_op",
    "PartFunction",
    "adds a call of a function to the graph being built",
)
@contract(
    "_add_function_recursive",
    "PartFunction",
    "gives a graph a function that it calls, and those that this calls",
)
@contract(
    "tensorflow.python.eager.context.Context.call_function",
    "PartFunction",
    "calls a function eagerly",
)
def _():
    read, changed = tf.Variable(1.0), tf.Variable(2.0)

    @tf.function
    def double(x):
        return 2 * x

    @tf.function
    def function(x):
        changed.assign(double(x) + read)
        return tf.split(tf.stack([x, x + read]), 2)[1]

    graph = function.get_concrete_function(tf.TensorSpec([])).graph
    handles = {inside.name: handle for handle, inside in graph.captures}
    part, feeds, written = graphs.GraphDef(), [], set()
    for op in graph.get_operations():
        written.update(op.inputs[i].name for i in graphs.written(op))
        if op.type == "Placeholder":
            feeds.append((op.outputs[0].name, op.outputs[0].dtype))
            continue
        waits = [f"^{each.name}" for each in op.control_inputs]
        graphs.add_copy(part, op, [*(t.name for t in op.inputs), *waits])
    graphs.keep_functions(part, graph)
    assert [id(handles[name]) for name in written] == [id(changed.handle)]
    runs = graphs.runs_anyway(graph)
    kinds = {
        graph.get_operation_by_name(name).type: acts for name, acts in runs.items()
    }
    assert kinds["AssignVariableOp"] and not kinds["ReadVariableOp"]
    (split,) = [op for op in graph.get_operations() if op.type == "Split"]
    for gated in (None, handles):
        about = part, feeds, split.outputs[1:], written, runs, gated
        made = graphs.PartFunction(*about)
        gate = [] if gated is None else [tf.constant(True)]

        def outer(made, gate, x):
            return made([*gate, *(handles.get(name, x) for name, _ in feeds)])

        outer = tf.function(functools.partial(outer, made, gate))
        concrete = outer.get_concrete_function(tf.TensorSpec([]))
        (call,) = [op for op in concrete.graph.get_operations() if "Call" in op.type]
        changing = [t for t in graphs.may_change(call) if t.dtype == tf.resource]
        outside = {inside.name: handle for handle, inside in concrete.graph.captures}
        assert [id(outside[t.name]) for t in changing] == [id(changed.handle)]
        for eagerly in (False, True):
            changed.assign(0.0)
            x = tf.constant(3.0)
            given = [*gate, *(handles.get(name, x) for name, _ in feeds)]
            values = made(given) if eagerly else concrete(x)
            assert values[0].numpy().tolist() == [4.0] and float(changed) == 7.0
        name = call.get_attr("f").name
        known = {each.signature.name for each in part.library.function}
        library = concrete.graph.as_graph_def().library.function
        assert {each.signature.name for each in library} == {name, *known}
        assert graphs.function_definition(name).signature.is_stateful


@contract(
    "tensorflow.core.framework.function_pb2.FunctionDef.control_ret",
    "makers",
    "names what a call of a function waits for, also where it is copied",
)
def _():
    graph = tf.function(tf.sin).get_concrete_function(tf.TensorSpec([])).graph
    (sine,) = [op for op in graph.get_operations() if op.type == "Sin"]
    part = graphs.GraphDef()
    graphs.add_copy(part, sine, ["given:0"])
    feeds = [("given:0", tf.float32)]
    made = graphs.PartFunction(part, feeds, sine.outputs, (), {})
    traced = graphs.traced(lambda x: [tf.sin(x)], tf.TensorSpec([]))

    @tf.function
    def outer(x):
        (mine,), (others,) = made([x]), traced(x)
        waits = graphs.makers([mine, mine, others])
        assert waits[0] is mine.op and waits[1] is others and len(waits) == 2
        with tf.control_dependencies(waits):
            return tf.identity(1.0)

    assert float(outer(tf.constant(0.5))) == 1.0


@contract(
    "tensorflow.python.framework.op_def_registry",
    "operation_definition",
    "has the definition of each type of operation",
)
@contract(
    "tensorflow.core.framework.op_def_pb2.OpDef",
    "operation_definition",
    "names a definition's attributes and tells whether it is stateful",
)
def _():
    found = graphs.operation_definition("StatefulPartitionedCall")
    assert found.is_stateful
    assert "func" in [attribute.type for attribute in found.attr]
    assert graphs.operation_definition("no such operation") is None


@contract(
    "tensorflow.python.eager.context",
    "function_definition",
    "has the definition of each function that a graph calls",
)
@contract(
    "tensorflow.core.framework.function_pb2.FunctionDef",
    "FunctionDef",
    "has a function's nodes and its signature",
)
@contract(
    "tensorflow.core.framework.graph_pb2.GraphDef", "GraphDef", "has a graph's nodes"
)
@contract(
    "tensorflow.core.framework.node_def_pb2.NodeDef", "NodeDef", "is one of its nodes"
)
def _():
    inner = tf.function(lambda x: tf.sqrt(x), autograph=False)
    outer = tf.function(lambda x: inner(x), autograph=False)
    graph = outer.get_concrete_function(tf.TensorSpec([])).graph
    proto = graph.as_graph_def()
    assert isinstance(proto, graphs.GraphDef)
    assert isinstance(proto.node[0], graphs.NodeDef)
    (call,) = [node for node in proto.node if "f" in node.attr]
    found = graphs.function_definition(call.attr["f"].func.name)
    assert isinstance(found, graphs.FunctionDef)
    assert "Sqrt" in [node.op for node in found.node_def]
    assert len(found.signature.input_arg) == 1


@contract(
    "__call__",
    "FUNCTION_CALL",
    "is how what `tf.function` returns is called, also as a method",
)
def _():
    called = []

    def call(original, function, *args):
        called.append(function.python_function)
        return original(function, *args)

    class Doubles:
        @tf.function
        def of(self, x):
            return 2 * x

    with patched(graphs.FUNCTION_CALL, call):
        assert int(tf.function(lambda x: x + 1)(1)) == 2
        assert int(Doubles().of(tf.constant(3))) == 6
    assert len(called) == 2


@contract(
    "get_name_scope", "is_vectorized", "knows the body of `vectorized_map`, not others"
)
def _():
    seen = []

    def body(x):
        seen.append(graphs.is_vectorized())
        tf.cond(x > 0, lambda: seen.append(graphs.is_vectorized()) or x, lambda: x)
        return x

    @tf.function
    def step(x):
        seen.append(graphs.is_vectorized())
        with tf.name_scope("model"):
            return tf.vectorized_map(body, x), tf.map_fn(body, x)

    step(tf.range(3))
    assert seen == [False, True, True, False, False]


# tf.data.


def _dataset():
    def doubled(x):
        return x * 2

    return tf.data.Dataset.range(3).map(doubled, name="twice")


@contract("_dataset", "dataset_of", "is the data set that an iterator goes through")
def _():
    dataset = _dataset()
    assert datasets.dataset_of(iter(dataset)) is dataset


@contract(
    "_functions", "functions_of", "lists a transformation's functions, with names"
)
def _():
    (function,) = datasets.functions_of(_dataset())
    assert b"doubled" in function.function.name
    assert graphs.function_definition(function.function.name.decode())


@contract(
    "tensorflow.python.ops.script_ops.FuncRegistry",
    "guard_python",
    "calls all Python functions of graphs; a generator's last is finalize_py_func",
)
def _():
    registry, begun = script_ops.FuncRegistry, []

    def wrap(call):
        def wrapped(self, token, *arguments):
            begun.append(self.get(token).__name__)
            return call(self, token, *arguments)

        return wrapped

    kept = registry.__call__
    try:
        datasets.guard_python(wrap)
        spec = tf.TensorSpec([], tf.int64)
        data = tf.data.Dataset.from_generator(lambda: iter([1]), output_signature=spec)
        assert [*data.as_numpy_iterator()] == [1]
    finally:
        registry.__call__ = kept
    assert "generator_py_func" in begun
    assert "finalize_py_func" not in begun


@contract("_inputs", "inputs_of", "lists the data sets that a transformation reads")
def _():
    (before,) = datasets.inputs_of(_dataset())
    assert [*before.as_numpy_iterator()] == [0, 1, 2]


@contract("_metadata", "metadata_of", "has the name that a transformation was given")
@contract(
    "tensorflow.core.framework.dataset_metadata_pb2.Metadata",
    "Metadata",
    "is of this type",
)
def _():
    metadata = datasets.metadata_of(_dataset())
    assert metadata.name == b"twice"
    assert isinstance(metadata, datasets.Metadata)


@contract(
    "tensorflow.core.framework.model_pb2.ModelProto",
    "ModelProto",
    "is what `get_model_proto` returns, with a node for each stage",
)
@contract(
    "tensorflow.core.framework.model_pb2.NodeClass",
    "NodeClass",
    "tells which stages run in threads of their own",
)
def _():
    iterator = iter(_dataset().prefetch(1))
    next(iterator)
    model = tf.data.experimental.get_model_proto(iterator)
    assert isinstance(model, datasets.ModelProto)
    assert model.output in model.nodes
    kinds = {node.node_class for node in model.nodes.values()}
    assert datasets.NodeClass.ASYNC_KNOWN_RATIO in kinds


# TensorFlow's runtime.


class _Number(float):
    """Unlike other numbers, it can be seen to be gone."""


@contract(
    "_physical_devices",
    "has_devices",
    "is there once TensorFlow has listed its devices, for which it reads its flags",
)
def _():
    ask = "from towers.keras_adapter.runtime import *; import tensorflow as tf\n"
    ask += (
        "print(has_devices())\ntf.config.list_physical_devices()\nprint(has_devices())"
    )
    told = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["False", "True"]


@contract(
    "pywrap_tfe.TFE_ClearScalarCache",
    "forget_scalars",
    "frees the tensors that TensorFlow keeps of Python's numbers",
)
def _():
    number = _Number(1.5)
    kept = weakref.ref(number)
    tf.constant(number)
    del number
    assert kept() is not None
    runtime.forget_scalars()
    assert kept() is None


@contract(
    "tensorflow.python.framework.config",
    "is_deterministic",
    "tells whether operations have to be deterministic",
)
def _():
    assert not runtime.is_deterministic()
    tf.config.experimental.enable_op_determinism()
    try:
        assert runtime.is_deterministic()
        # Also eagerly, where TensorFlow makes a float32 of a float of Python's.
        assert runtime.now().dtype == tf.float64
    finally:
        tf_config.disable_op_determinism()


@contract(
    "_handle",
    "device_memory_limits",
    "is the runtime, which lists its devices with their memory",
)
@contract(
    "tensorflow.python.pywrap_tfe", "device_memory_limits", "makes the list of devices"
)
@contract(
    "tensorflow.python.client.pywrap_tf_session",
    "device_memory_limits",
    "reads the list of devices",
)
def _():
    limits = runtime.device_memory_limits()
    names = {f"/{d.name.rpartition('/')[2]}" for d in tf.config.list_logical_devices()}
    assert limits.keys() == names
    assert all(size > 0 for size in limits.values())


@contract(
    "tensorflow.tsl.profiler.protobuf.xplane_pb2.XSpace",
    "XSpace",
    "reads and writes the profiler's files",
)
def _():
    space = runtime.XSpace()
    line = space.planes.add(name="plane", id=1).lines.add(id=2, name="line")
    line.events.add(metadata_id=3, offset_ps=4, duration_ps=5)
    copy = runtime.XSpace.FromString(space.SerializeToString())
    assert copy.planes[0].lines[0].events[0].duration_ps == 5


@contract("tensorflow.python.eager.context", "random_seed", "tells the seed")
def _():
    before = runtime.random_seed()
    tf.random.set_seed(5)
    assert runtime.random_seed() == 5
    # As it was, for the tests after this one.
    tf.random.set_seed(before)


# What is public, and not the same in all versions.


@contract(
    "on_train_batch_end",
    "batches_done",
    "is told of the last batch of a call, or in Keras 3.10 of the first",
)
def _():
    done = []

    class Counts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            done.append(models.batches_done(self.model, batch))

    model = _compiled(steps_per_execution=2)
    data = tf.data.Dataset.from_tensors((_X, _Y)).repeat(4)
    model.fit(data, verbose=0, callbacks=[Counts()])
    assert done == [2, 4]


@contract(
    "CallbackList, func_graph_from_py_func, compute_output_spec",
    "called_callback, builds_graph",
    "are in the stack while a callback is called, a graph built",
)
def _():
    called, built = [], []

    def look(*_):
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe())]
        called.append([*filter(None, map(models.called_callback, frames))])
        built.append(any(map(models.builds_graph, frames)))

    class Looks(keras.layers.Layer):
        def call(self, x):
            look()
            return x

    callback = keras.callbacks.LambdaCallback(on_epoch_end=look)
    model = keras.Sequential([Looks(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(_X, _Y, verbose=0, callbacks=[callback])
    assert called[-1] == [callback] and not built[-1]
    assert not any(called[:-1]) and len(built) > 2 and all(built[:-1])


@contract(
    "renorm",
    "renormalizes",
    "tells of batch renormalization, since Keras 3.14 or never",
)
def _():
    assert not layers.renormalizes(keras.layers.BatchNormalization())
    if hasattr(keras.layers.BatchNormalization(), "renorm"):
        assert layers.renormalizes(keras.layers.BatchNormalization(renorm=True))


@contract(
    "__call__", "LAYER_CALL, OPERATION_CALL", "is how layers and operations are called"
)
def _():
    of_layers, of_operations = [], []
    model, inner = _nested()
    with (
        patched(layers.LAYER_CALL, _noting(of_layers)),
        patched(layers.OPERATION_CALL, _noting(of_operations)),
    ):
        model(tf.ones([1, 3]))
    called = [layer for layer, *_ in of_layers]
    assert model in called and inner in called and inner.layers[1] in called
    assert {*map(id, called)} <= {id(operation) for operation, *_ in of_operations}


@contract(
    "call",
    "BATCH_NORMALIZATION_CALL, EMBEDDING_CALL",
    "is what computes a layer's output",
)
def _():
    noted = []
    with (
        patched(layers.BATCH_NORMALIZATION_CALL, _noting(noted)),
        patched(layers.EMBEDDING_CALL, _noting(noted)),
    ):
        rows = keras.layers.Embedding(5, 2)(tf.constant([1, 2]))
        keras.layers.BatchNormalization()(rows, training=True)
    assert [len(args) for args in noted] == [2, 2]


@contract(
    "keras.src.backend",
    "ARGMAX",
    "has `numpy`, since Keras 3.16 in `ops`, with the argmax by which -0.0 < 0.0",
)
def _():
    from towers.layers import substitutes

    x = tf.constant([[-0.0, 0.0, -1.0], [-1.0, -2.0, -0.5], [3.0, 4.0, 4.0]])
    for options in ({}, {"axis": -1}, {"axis": 0, "keepdims": True}):
        noted, theirs = [], keras.ops.argmax(x, **options)
        with patched(layers.ARGMAX, _noting(noted)):
            keras.ops.argmax(x, **options)
        with substitutes.argmax():
            ours = keras.ops.argmax(x, **options)
        assert len(noted) == 1
        np.testing.assert_array_equal(ours, theirs)


@contract(
    "tensorflow.python.framework.func_graph.FuncGraph",
    "function_graph",
    "is a graph with inputs and outputs",
)
@contract(
    "tensorflow.python.ops.handle_data_util",
    "function_graph",
    "gives a handle the shape of its variable",
)
@contract(
    "tensorflow.python.framework.function_def_to_graph.function_def_to_graph_def",
    "function_graph, keep_functions, nodes_of",
    "makes a graph of a function that was traced; its definition can be kept",
)
@contract(
    "tensorflow.python.eager.context.eager_mode",
    "function_graph",
    "lets functions be found while a graph is being built that has none of them",
)
def _():
    factor = tf.Variable([[2.0, 3.0, 4.0]])

    @tf.function
    def double(x):
        return factor * x, x

    @tf.function
    def outer(x):
        return double(x)[0] + 1

    def call_in(function):
        graph = function.get_concrete_function(tf.TensorSpec([None, 3])).graph
        (call,) = (op for op in graph.get_operations() if "Call" in op.type)
        return graph, call

    _, call = call_in(tf.function(lambda x: outer(x)))
    shapes = [tensor.shape for tensor in call.inputs]
    with tf.Graph().as_default():
        inner = graphs.function_graph(call.get_attr("f").name, call.inputs, shapes)
    assert any("Call" in op.type for op in inner.get_operations())
    graph, call = call_in(outer)
    shapes = [call.inputs[0].shape, None]
    inner = graphs.function_graph(call.get_attr("f").name, call.inputs, shapes)
    assert inner.inputs[0].shape.as_list() == [None, 3]
    # The handle tells the variable's shape.
    assert [t.shape.as_list() for t in inner.outputs] == [[None, 3]] * 2
    assert "Mul" in {node.op for node in graphs.nodes_of(call)}
    part = graphs.GraphDef()
    part.node.add().CopyFrom(call.node_def)
    graphs.keep_functions(part, graph)
    assert [f.signature.name for f in part.library.function] == [
        call.get_attr("f").name
    ]


@contract(
    "tensorflow.python.framework.ops",
    "gradient_module",
    "has the functions of custom gradients, by what an operation names",
)
def _():
    @tf.custom_gradient
    def mine(x):
        return x, lambda gradient: 2 * gradient

    def module(function):
        traced = tf.function(function, autograph=False)
        graph = traced.get_concrete_function(tf.TensorSpec([3])).graph
        (op,) = (op for op in graph.get_operations() if op.type == "IdentityN")
        return graphs.gradient_module(op.node_def)

    assert module(tf.nn.silu) == "tensorflow.python.ops.nn_impl"
    assert module(mine) == __name__


_CLUSTER = """
import sys
import tensorflow as tf
from towers.keras_adapter import cluster, runtime

assert not cluster.is_initialized()
server = cluster.configure(["127.0.0.1:" + sys.argv[1]], 0, silent_s=10)
(cpu,) = tf.config.list_physical_devices("CPU")
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
cluster.start(server)
assert len(tf.config.list_logical_devices("CPU")) == 2
assert cluster.is_initialized()
assert cluster.write("key", "value") and not cluster.write("key", "another")
assert cluster.read("key", 1) == "value"
cluster.remove("key")
assert cluster.lost(1) == []
assert cluster.read("key", 0.01) is None
order = tf.Variable(0.0)
add = tf.function(lambda x: runtime.all_reduce(x, runtime.of_tasks(1), 7, order))
assert add(tf.ones([2])).numpy().tolist() == [1, 1]
gather = tf.function(lambda x: runtime.all_gather(x, runtime.of_tasks(1), 8, order))
assert gather(tf.ones([2])).numpy().tolist() == [1, 1]
cluster.report("host 1 has ended")
try:
    while True:
        add(tf.ones([2]))
except cluster.ERRORS as error:
    assert "host 1 has ended" in str(error)
print("as expected", flush=True)
"""


@contract(
    "tensorflow.python.eager.context",
    "configure, start, all_reduce, all_gather, write, read, remove, lost, report",
    "joins a cluster, adds and gathers over its tasks, keeps values, and aborts",
)
@contract("_initialized", "is_initialized", "tells whether TensorFlow has its devices")
def _():
    (port,) = free_ports(1)
    done = subprocess.run(
        [sys.executable, "-c", _CLUSTER, str(port)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "as expected" in done.stdout, done.stderr


@contract(
    "tensorflow.python.eager.context",
    "optimizing_for_cpus",
    "has the options of calls, which functions called in a graph get, too",
)
def _():
    def rewrites():
        inner = tf.function(lambda x: 2 * x)
        traced = tf.function(inner).get_concrete_function(tf.TensorSpec([3]))
        (call,) = (op for op in traced.graph.get_operations() if "Call" in op.type)
        config = tf.compat.v1.ConfigProto.FromString(call.get_attr("config_proto"))
        return config.graph_options.rewrite_options

    def chosen():
        of = rewrites()
        parts = of.layout_optimizer, of.memory_optimization
        return of.meta_optimizer_iterations, *parts

    usual = rewrites().DEFAULT, rewrites().DEFAULT_MEM_OPT
    assert chosen() == (0, *usual)  # TensorFlow's default of passes is two.
    with runtime.optimizing_for_cpus():
        assert chosen() == (1, rewrites().OFF, rewrites().NO_MEM_OPT)
    assert chosen() == (0, *usual)
    # An option that the user sets meanwhile stays set.
    known = context.context()._optimizer_experimental_options
    before = {**known}
    try:
        with runtime.optimizing_for_cpus():
            wishes = {"loop_optimization": False, "layout_optimizer": True}
            tf.config.optimizer.set_experimental_options(wishes)
        assert rewrites().loop_optimization == rewrites().OFF
        with runtime.optimizing_for_cpus():
            assert rewrites().layout_optimizer == rewrites().ON
    finally:
        known.clear()
        tf.config.optimizer.set_experimental_options(before)


@contract(
    "tensorflow.python.eager.forwardprop_util",
    "has_tangents",
    "knows what forward accumulators follow, also variables in a graph",
)
def _():
    watched, other = tf.Variable(1.0), tf.Variable(1.0)

    @tf.function(autograph=False)
    def found():
        with tf.autodiff.ForwardAccumulator(watched, tf.constant(1.0)):
            handles = [tf.convert_to_tensor(each.handle) for each in (watched, other)]
            return [graphs.has_tangents([each]) for each in handles]

    assert [*map(bool, found())] == [True, False]


@pytest.mark.parametrize("contract", [pytest.param(c, id=c.name) for c in CONTRACTS])
def test_contract(contract):
    try:
        contract.check()
    except Exception as error:
        users = ", ".join(_users(contract.through)) or "nobody"
        raise AssertionError(
            f"{contract.name}: {contract.promise}. That is broken in Keras "
            f"{keras.__version__} with TensorFlow {tf.__version__} "
            f"({type(error).__name__}: {error}); towers.keras_adapter gives it to the "
            f"others as {contract.through}, on which rely: {users}."
        ) from error


def _users(through: str) -> list[str]:
    """The modules that rely on something of the adapter, or on several things."""
    names = {*re.split(r", ", through)}
    return [
        str(path.relative_to(ROOT))
        for path in _sources()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("towers.keras_adapter")
        and names & {alias.name for alias in node.names}
    ]


# Python has no public name for these, nor for these methods of named tuples.
ALLOWED = {"_exit", "_current_frames", "_getframe", "_replace", "_asdict", "_fields"}
_PRIVATE = re.compile(r"_(?!_)")
_MODULE = re.compile(r"(keras\.src|tensorflow\.(python|core|tsl|compiler))\b")


@pytest.mark.parametrize(
    "path", sorted(ADAPTER.glob("*.py")), ids=lambda path: path.stem
)
def test_every_private_name_of_the_adapter_has_a_contract(path):
    names = {contract.name for contract in CONTRACTS}
    for used in _private_names(path):
        assert any(f"{name}.".startswith(f"{used}.") for name in names), used


def test_every_contract_is_about_something_in_use():
    used = {name for path in ADAPTER.glob("*.py") for name in _private_names(path)}
    for name in {contract.name for contract in CONTRACTS}:
        if _PRIVATE.match(name) or _MODULE.match(name):
            assert any(f"{name}.".startswith(f"{each}.") for each in used), name


def test_only_the_adapter_knows_private_names():
    assert [
        f"{path.relative_to(ROOT)}: {name}"
        for path in _sources()
        for name in sorted(_private_names(path))
    ] == []


def _private_names(path: Path) -> set[str]:
    """The names that a file uses which somebody else has not meant for it.

    These are modules inside Keras and TensorFlow, and attributes with a leading
    underscore that are not of `self`, unless a class of the file has such an attribute
    itself.
    """
    known = {each.name for each in CONTRACTS if _PRIVATE.match(each.name)}
    known.add("keras.src.")
    found, own = set(), set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {
                f"{node.module}.{alias.name}"
                for alias in node.names
                if _MODULE.match(node.module or "")
            }
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if _MODULE.match(a.name)}
        elif isinstance(node, ast.Constant) and node.value in known:
            found.add(node.value)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if _PRIVATE.match(node.attr) and owner not in SELF:
                found.add(node.attr)
            elif owner == "self" and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
            if _MODULE.fullmatch(f"{owner}.{node.attr}"):
                found.add(f"{owner}.{node.attr}")
    return found - ALLOWED - (own - known)


SELF = "self", "cls", "super()"


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _sources() -> Iterator[Path]:
    """All of the project's source outside the adapter."""
    for folder in ("towers", "input_pipeline", "models", "scripts"):
        # `rglob` does not follow the links in `towers`.
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ADAPTER not in path.parents:
                yield path
