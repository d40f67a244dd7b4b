"""TowerModel.resize: other towers between two batches; see also the exact cases."""

import dataclasses
import gc
import weakref
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import oracle
from tests.valued import valued
from tests.variants import slow
from towers import ParameterServer
from towers.model import placing, program

pytestmark = pytest.mark.quick_one_in(2)

BATCH, STEPS = 12, 20
X = np.random.default_rng(0).normal(size=(BATCH * STEPS - 5, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, len(X))


def build():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input([6]), *layers])


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def parallel(gpus=2, **options):
    return compiled(towers.multi_gpu_model(build(), gpus=gpus, **options))


def fit(model, epochs=1):
    model.fit(X, Y, BATCH, epochs, shuffle=False, verbose=0)


@pytest.mark.slow
def test_what_was_traced_is_kept():
    model = parallel()
    fit(model)
    first = model.builder
    model.resize(gpus=3)
    fit(model)
    assert model.builder is not first
    assert model.train_function is not None
    second, function = model.builder, model.train_function
    model.resize(gpus=2)
    assert model.builder is first
    model.resize(gpus=3)
    assert (model.builder, model.train_function) == (second, function)


def test_a_model_compiled_anew_keeps_nothing():
    model = parallel()
    fit(model)
    first = model.builder
    model.resize(gpus=3)
    compiled(model)
    model.resize(gpus=2)
    assert model.builder is not first


@pytest.mark.slow
def test_only_the_last_layouts_are_kept(monkeypatch):
    monkeypatch.setattr(program, "_MOST_KEPT", 2)
    model = parallel(1)
    fit(model)
    gone = weakref.ref(model.builder)
    for gpus in (2, 3, 4):
        model.resize(gpus=gpus)
        fit(model)
    gc.unfreeze()
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_devices_that_are_left_keep_no_copies():
    model = parallel(3, variable_update="replicated")
    fit(model)
    copies = model.builder.copies()
    assert all(copy.shape.num_elements() == tf.size(copy) for copy in copies)
    before = model.builder
    model.resize(gpus=1)
    assert not any(int(tf.size(copy)) for copy in copies if copy.shape.rank)
    weights = model.get_weights()
    model.resize(gpus=3)
    assert model.builder is before
    fit(model)
    for copy, variable in zip(copies, model.trainable_variables, strict=False):
        np.testing.assert_array_equal(copy, variable)
    assert oracle.largest_difference(weights, model.get_weights()) > 0


def test_one_of_several_hosts_is_not_resized():
    model = parallel(2)
    plan = model.builder.plan
    hosts = mock.Mock(wraps=plan.hosts, count=3)
    model.builder.plan = dataclasses.replace(plan, hosts=hosts)
    with pytest.raises(ValueError, match=r"on one of 3 hosts; expected one host, so"):
        model.resize(gpus=3)


@pytest.mark.parametrize("update", ["replicated", slow("parameter_server")])
def test_what_fails_leaves_all_as_it_was(monkeypatch, update):
    expected = parallel(2, variable_update=update)
    fit(expected, epochs=2)

    class Fails(keras.callbacks.Callback):
        """A move of variables fails half way, as where memory runs out."""

        def on_train_batch_begin(self, batch, logs=None):
            if batch != 3:
                return
            moved = iter(range(2))
            make = placing.variables.variable_like

            def fails(*args, **options):
                if next(moved, None) is None:
                    raise tf.errors.ResourceExhaustedError(None, None, "no room")
                return make(*args, **options)

            with monkeypatch.context() as patched:
                patched.setattr(placing.variables, "variable_like", fails)
                with pytest.raises(tf.errors.ResourceExhaustedError):
                    self.model.resize(gpus=[3, 2])

    home = "gpu" if update == "parameter_server" else None
    model = parallel(2, **valued(update, device=home))
    model.fit(X, Y, BATCH, 2, verbose=0, shuffle=False, callbacks=[Fails()])
    weights = expected.get_weights()
    assert oracle.largest_difference(model.get_weights(), weights) < 1e-5
    assert model.builder.plan.devices == ("/device:CPU:0", "/device:CPU:1")
    model.resize(gpus=4)
    assert model.builder.plan.count == 4


@pytest.mark.slow
def test_variables_that_were_moved_are_not_kept():
    model = parallel(2, variable_update=ParameterServer("gpu"))
    fit(model)
    old = [weakref.ref(each.value) for each in model.trainable_variables]
    model.resize(gpus=[2, 3])
    fit(model)
    gc.unfreeze()
    gc.collect()
    assert not any(each() is not None for each in old)


def test_the_first_towers_variables_move():
    model = parallel(2, variable_update="replicated")
    fit(model)
    model.resize(gpus=[2, 3])
    fit(model)
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        assert variable.value.device.endswith("CPU:2")


@pytest.mark.slow
def test_evaluation_follows():
    model, plain = parallel(), compiled(build())
    for gpus in (2, 4, [3], 2):
        model.resize(gpus=gpus)
        found = model.evaluate(X, Y, verbose=0, return_dict=True)
        expected = plain.evaluate(X, Y, verbose=0, return_dict=True)
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
        outputs = model.predict(X, verbose=0)
        np.testing.assert_allclose(outputs, plain.predict(X, verbose=0), atol=1e-6)
        assert model.builder.plan.count == (gpus if isinstance(gpus, int) else 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": 5}, "gpus=5 was received"),
        ({"gpus": 0}, "gpus=0 was received"),
        ({"gpus": [7]}, "gpus names 7, which does not exist"),
        ({"gpus": 2, "split_ratios": (1,)}, r"split_ratios=\(1,\) for 2 towers"),
    ],
    ids=str,
)
def test_what_cannot_be_changes_nothing(arguments, message):
    model = parallel()
    before = model.builder
    with pytest.raises(ValueError, match=message):
        model.resize(**arguments)
    assert model.builder is before


def test_devices_that_stages_do_not_divide_are_refused():
    model = parallel(stages=2, micro_batches=2)
    with pytest.raises(ValueError, match="stages=2 for 3 devices"):
        model.resize(gpus=3)


@pytest.mark.slow
def test_a_user_of_train_on_batch():
    model, plain = parallel(), compiled(build())
    for k in range(6):
        model.resize(gpus=1 + k % 4)
        rows = slice(k * BATCH, (k + 1) * BATCH)
        found = model.train_on_batch(X[rows], Y[rows], return_dict=True)
        expected = plain.train_on_batch(X[rows], Y[rows], return_dict=True)
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
