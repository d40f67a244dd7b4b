"""Tracing the step of a place that a host will have, before it joins the others."""

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.variants import slow
from towers.hosts import group
from towers.input_pipeline import ArraySource, make_dataset
from towers.keras_adapter.randomness import random_states
from towers.model import fit_call, rehearsal, tower_model

X = np.random.default_rng(0).normal(size=[50, 4]).astype("float32")
Y = X[:, :2]


def model_of(*layers, **compiled):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(2)])
    options = {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"}
    model.compile(**(options | {"metrics": ["mae"]} | compiled))
    return model


def on_towers(model, gpus=2, **options):
    parallel = towers.multi_gpu_model(model, gpus=gpus, **options)
    parallel.compile_from_config(model.get_compile_config())
    return parallel


@pytest.fixture
def rehearse(monkeypatch):
    """Rehearses as the second of two hosts, or another place."""

    def run(parallel, *args, place=(1, 2), **kwargs):
        member = types.SimpleNamespace(expects=lambda: place)
        with monkeypatch.context() as patch:
            patch.setattr(group, "member", lambda: member)
            patch.setattr(group, "change", lambda: None)
            swap = functools.partial(tower_model._swap_functions, parallel)
            update = parallel._self_program
            trace = functools.partial(tower_model._trace_training, parallel)
            call = tower_model._fit_call(parallel, args, kwargs)
            rehearsal.rehearse(call, update, swap, trace)

    return run


def tensors():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=1)
    return data.batch(16)


def pipeline():
    return make_dataset(ArraySource(X, Y), "train", 16, training=True, seed=3)


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("options", "layers", "compiled"),
    [
        ({}, [functools.partial(keras.layers.Dropout, 0.5)], {}),
        slow({"variable_update": "replicated"}, [keras.layers.BatchNormalization], {}),
        slow({}, [], {"steps_per_execution": 3}),
        slow({"check_numerics": True}, [], {}),
        slow({}, [keras.layers.BatchNormalization], {"optimizer": "sgd"}),
        slow({"gpus": 1, "gradient_compression": "fp16"}, [], {}),
    ],
)
@pytest.mark.parametrize("data", [None, tensors, slow(pipeline)])
def test_nothing_changes_but_graphs(rehearse, options, layers, compiled, data):
    model = model_of(*(make() for make in layers), **compiled)
    parallel = on_towers(model, **options)
    parallel.builder.build_optimizer()
    variables = [*model.variables, *model.optimizer.variables]
    before = [np.array(each) for each in variables]
    numbers = random_states()
    args = (X, Y) if data is None else (given := data(),)
    traced = []
    count_traces(model, traced)
    rehearse(parallel, *args, batch_size=None if data else 16)
    assert traced and parallel.train_function is not None
    assert parallel.builder.plan.hosts.index == 1
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    assert random_states() == numbers
    assert not any(np.any(each) for each in model.metrics_variables)
    if data is not None:
        for ours, theirs in zip(given, data(), strict=True):
            tf.nest.map_structure(np.testing.assert_array_equal, ours, theirs)


def count_traces(model, traced):
    """Has each trace of the last layer noted."""
    layer = model.layers[-1]
    call = layer.call

    def noting(inputs, *args, **kwargs):
        if tf.is_symbolic_tensor(inputs):
            traced.append(inputs)
        return call(inputs, *args, **kwargs)

    layer.call = noting


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise AssertionError("Nobody may read it.")


class Lists(keras.utils.PyDataset):
    """Its batches may be read in any order."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[index : index + 5], Y[index : index + 5]


@pytest.mark.parametrize(
    ("x", "inputs", "size"),
    [
        (X, X[:1], 4),
        ({"a": X}, {"a": X[:1]}, 4),
        (Lists(), X[:5], None),
        ((each for each in [X]), None, None),
    ],
)
def test_what_data_tell_before_they_are_read(x, inputs, size):
    options = {"x": x, "batch_size": 4, "steps_per_epoch": None}
    options |= {"validation_split": 0.0, "validation_data": None}
    found = fit_call.inputs(options)
    tf.nest.map_structure(np.testing.assert_array_equal, found, inputs)
    assert fit_call.batch_size(options) == size


def test_what_data_sets_tell_before_they_are_read():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4, drop_remainder=True)
    assert fit_call.inputs({"x": data}) == data.element_spec[0]
    assert fit_call.batch_size({"x": data}) == 4
    assert fit_call.batch_size({"x": pipeline()}) == 16
    apart = rehearsal._apart({"x": (ours := pipeline())})
    assert apart is not ours
    for one, other in zip(apart, ours, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)


def test_data_that_cannot_be_copied_stay(monkeypatch):
    def too_large(**_):
        raise tf.errors.InvalidArgumentError(None, None, "It has more than 2 GB.")

    data = tf.data.Dataset.from_tensor_slices(X).shuffle(9)
    assert fit_call.unopened(data) is not data
    monkeypatch.setattr(tf.raw_ops, "DatasetToGraphV2", too_large)
    assert fit_call.unopened(data) is data


def generator():
    raise AssertionError("Nobody may read it.")
    yield X, Y


def test_a_model_is_built_if_the_data_tell_what_it_takes(rehearse):
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    parallel = on_towers(model)
    rehearse(parallel, generator())
    assert not model.built
    rehearse(parallel, X, Y)
    assert model.built and parallel.train_function is not None


@pytest.mark.parametrize("data", [generator, Batches])
def test_what_can_be_read_once_is_not_read(rehearse, data, capsys):
    rehearse(on_towers(model_of()), data())
    assert "Note" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("options", "compiled", "place"),
    [
        ({"variable_update": "auto"}, {}, (1, 2)),
        ({}, {"run_eagerly": True}, (1, 2)),
        ({}, {}, None),
    ],
)
def test_nothing_is_traced(rehearse, options, compiled, place):
    parallel = on_towers(model_of(**compiled), **options)
    rehearse(parallel, X, Y, place=place)
    assert parallel.train_function is None
    assert parallel.builder.plan.hosts.count == 1


def test_an_error_is_left_to_training(rehearse, capsys):
    rehearse(on_towers(model_of()), X, Y[:, :1, None, None] + np.zeros([1, 1, 3, 5]))
    assert "This host's first step is not traced before others wait" in "".join(
        capsys.readouterr()
    )


def test_an_echo():
    echo = rehearsal.Echo(3)
    parts = echo.all_gather(b"abcd", "letters")
    assert [bytes(each) for each in parts] == [b"abcd"] * 3
    whole = parts[0].obj.view(np.uint8)
    assert bytes(whole) == b"abcd" * 3
    (total,) = echo.grouped_all_reduce([np.ones(2)], "ones")
    np.testing.assert_array_equal(total, 1)
