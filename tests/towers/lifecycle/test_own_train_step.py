"""Runs of models with a `train_step` of their own, broken off and continued."""

import importlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.towers.lifecycle.runs import Breaks
from towers.layers import variables
from towers.lifecycle.checkpoint import Checkpoint
from towers.train.callbacks import StopAtStep

pytestmark = pytest.mark.quick_one_in(2)

BATCH, STEPS = 8, 4


class Counting(keras.layers.Layer):
    """Holds what is TensorFlow's own."""

    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0.0, trainable=False)
        self.more = tf.Module()
        self.more.calls = [tf.Variable(0.0, trainable=False)]

    def call(self, x):
        """Counts."""
        for count in (self.calls, *self.more.calls):
            count.assign_add(1.0)
        return x * (1 + 0.01 * self.calls + 0.01 * self.more.calls[0])


class Rivals(keras.Model):
    """Two networks with an optimizer each, the second of which begins late."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            keras.Sequential([keras.Input((3,)), Counting(), keras.layers.Dense(3)])
            for _ in range(2)
        )
        self.noise = keras.random.SeedGenerator(2)
        self.seen = tf.Variable(0, dtype=tf.int64)
        self.generator = tf.random.Generator.from_seed(3)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def compile(self):
        """Makes both optimizers."""
        super().compile()
        self.of = [keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1, momentum=0.9)]

    @property
    def metrics(self):
        """The mean loss."""
        return [self.loss_tracker]

    def call(self, x):
        """Passes both."""
        return self.second(self.first(x))

    def train_step(self, x):
        """Trains one network, and then both."""
        self.seen.assign_add(1)
        noise = keras.random.normal(tf.shape(x), seed=self.noise)
        noise += self.generator.normal(tf.shape(x))
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self(x + noise) - x))
            late = loss * tf.cast(self.seen > 2, tf.float32)
        gradients = tape.gradient(loss, self.first.trainable_variables)
        self.of[0].apply(gradients, self.first.trainable_variables)
        gradients = tape.gradient(late, self.second.trainable_variables)
        self.of[1].apply(gradients, self.second.trainable_variables)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def rivals():
    model = Rivals()
    model.compile()
    return model, np.random.default_rng(0).normal(size=[30, 3]).astype("float32")


def dcgan():
    example = importlib.import_module("examples.steps.dcgan")
    return example.build(), example.data()[:30]


def fit(made, *callbacks, epochs=2, **options):
    """Trains; returns the history, and all that was changed."""
    model, rows = made
    data = tf.data.Dataset.from_tensor_slices(rows).batch(BATCH)
    parallel = towers.multi_gpu_model(model, **({"gpus": 2} | options))
    history = parallel.fit(data, epochs=epochs, verbose=0, callbacks=[*callbacks])
    found = [*variables.of(model), *variables.plain(model).values()]
    return history.history, [np.array(variable) for variable in found]


# Of several towers that do not wait, no two runs are the same.
ALONE = {"gpus": 1, "variable_update": "asynchronous"}
AFTER = 3, STEPS, STEPS + 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options", "after"),
    [
        *((rivals, options, after) for options in ({}, ALONE) for after in AFTER),
        *((dcgan, ALONE, after) for after in AFTER),
        *((dcgan, {}, after) for after in AFTER[:-1]),
        (dcgan, {}, AFTER[-1]),
    ],
)
def test_a_run_that_was_broken_off_ends_with_the_same_bits(
    make, options, after, tmp_path
):
    keras.utils.set_random_seed(4)
    history, wanted = fit(make(), **options)
    keras.utils.set_random_seed(4)
    with pytest.raises(ZeroDivisionError):
        callbacks = Checkpoint(tmp_path, save_steps=1), Breaks(after)
        fit(make(), *callbacks, **options)
    # Nothing of the new start may be left.
    keras.utils.set_random_seed(5)
    checkpoint = Checkpoint(tmp_path)
    continued, found = fit(make(), checkpoint, **options)
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert continued == history


def test_steps_are_those_of_the_busiest_optimizer():
    made = rivals()
    fit(made, StopAtStep(STEPS + 1))
    assert variables.steps_done(made[0]) == STEPS + 1
    assert [int(each.iterations) for each in made[0].of] == [STEPS + 1] * 2


def test_another_model_is_refused(tmp_path):
    fit(rivals(), Checkpoint(tmp_path), epochs=1)
    model, rows = rivals()
    model.of[0] = keras.optimizers.Adam(0.1, amsgrad=True)
    with pytest.raises(ValueError, match="holds another of"):
        fit((model, rows), Checkpoint(tmp_path))


@pytest.mark.slow
def test_what_nobody_saves_is_said(capsys):
    held_nowhere = tf.Variable(0.0, name="held_nowhere")
    read_only = tf.Variable(1.0, name="read_only")

    class Forgetful(Rivals):
        def train_step(self, x):
            held_nowhere.assign_add(read_only)
            return super().train_step(x)

    model = Forgetful()
    model.compile()
    fit((model, rivals()[1]), epochs=1)
    said = " ".join(capsys.readouterr().err.split())
    assert "changes held_nowhere:0, which no attribute of the model" in said
    fit(rivals(), epochs=1)
    assert "no attribute" not in capsys.readouterr().err


class _Holder(keras.layers.Layer):
    """Holds an object that is no variable of Keras's."""

    def __init__(self, state):
        super().__init__()
        self.state = state


class _Holders(keras.Model):
    """Has layers whose attributes have one name."""

    def __init__(self):
        super().__init__()
        module = tf.Module()
        module.first, module.second = tf.Variable(1.0), tf.Variable(2.0)
        self.module, self.variable = _Holder(module), _Holder(tf.Variable(3.0))

    def train_step(self, data):
        return {}


def test_variables_under_one_name_are_all_known():
    values = [float(v) for v in variables.plain(_Holders()).values()]
    assert values == [1, 2, 3]
