"""Steps that are not finite: stopped in time, and explained."""

import os
import runpy
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests import warm
from tests.towers.train.runs import main_here
from tests.variants import slow
from towers import ParameterServer, Stages, multi_gpu_model
from towers.callbacks import Checkpoint
from towers.layers import variables
from towers.lifecycle.checkpoints import store
from towers.model import auto
from towers.numerics import recorded_step, search
from towers.numerics.errors import NotFinite, NotFiniteStep
from towers.numerics.recorded_step import RecordedStep

pytestmark = pytest.mark.quick_one_in(2)

# Of 3 batches for 3 towers, the row in question is the 2nd one's, on tower 1.
ROWS, BATCH, ROW = 63, 21, 30


@keras.saving.register_keras_serializable()
class Root(layers.Layer):
    """Not a number below 0; at 0, its gradient is infinite."""

    def call(self, x):
        return tf.sqrt(x)


def root_of_both(y, predicted):
    """Not a number where y is below 0; at 0, its gradient is."""
    return tf.reduce_mean(tf.sqrt(y * (1 + predicted**2)))


def build(*more, rate=0.1):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((1,)),
            layers.Dense(1, use_bias=False, kernel_initializer="ones", name="weight"),
            Root(name="root"),
            *more,
            layers.Dropout(rate),
            layers.Dense(1, name="out"),
        ]
    )


def data(x_at=2.0, y_at=2.0, row=ROW):
    x, y = np.random.default_rng(0).uniform(1, 2, [2, ROWS, 1]).astype("float32")
    x[row], y[row] = x_at, y_at
    return x, y


def on_towers(model, gpus=3, loss=root_of_both, optimizer="sgd", **options):
    compiled = {
        name: options.pop(name)
        for name in ("steps_per_execution", "run_eagerly", "jit_compile", "metrics")
        if name in options
    }
    parallel = multi_gpu_model(model, gpus, **{"check_numerics": True, **options})
    parallel.compile(optimizer, loss, **compiled)
    return parallel


def stopped(parallel, x, y=None, **options):
    """Trains until it is stopped; returns the error."""
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | options
    with pytest.raises(NotFiniteStep) as caught:
        parallel.fit(x, y, **options)
    return caught.value


def told(origin):
    return origin.source, origin.during, origin.name, origin.tower


FORWARD = "layer", "forward", "layer 'root'", 1
BACKWARD = "layer", "backward", "layer 'root'", 1
FAULTS = {
    "data": ({"x_at": np.nan}, ("data", "", "x", 1)),
    "target": ({"y_at": np.inf}, ("data", "", "y", 1)),
    "forward": ({"x_at": -1}, FORWARD),
    "backward": ({"x_at": 0}, BACKWARD),
    "loss": ({"y_at": -1}, ("loss", "forward", "", 1)),
    "loss's gradient": ({"y_at": 0}, ("loss", "backward", "", 1)),
}


ADVICE = {
    "data": "; look where it comes from, or leave it out; nothing of the step",
    "layer": "; look for a root, logarithm or quotient there, or try a smaller",
    "loss": "; look for a root, logarithm or quotient in it, and for targets",
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    file = tmp_path_factory.mktemp("numerics") / "made" / "bad.npz"
    model = build()
    parallel = on_towers(model, check_numerics=file)
    parallel.optimizer.build(model.trainable_variables)
    return model, parallel, file, variables.values(model)


@pytest.fixture
def watched(traced):
    """A model on towers that other tests have traced, as it was at first."""
    model, parallel, _, start = traced
    variables.assign(model, start)
    return parallel


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_names_what_was_not_finite_first(fault, watched, traced):
    at, expected = FAULTS[fault]
    file = traced[2]
    error = stopped(watched, *data(**at))
    origin = error.origin
    assert told(origin) == expected
    assert (error.step, origin.towers, origin.examples) == (2, 3, BATCH)
    if origin.source != "loss":
        assert origin.rows == (ROW - BATCH,)
    assert str(error).startswith(f"Step 2 (epoch 1, batch 2): {origin}")
    assert ADVICE[origin.source] in str(error)
    assert "tower 1 of 3" in str(error)
    assert str(error).endswith(f"the batch is in {file}.")
    # By another model of that kind, with other variables.
    again = build()
    again.compile("sgd", root_of_both)
    again.layers[0].kernel.assign([[7.0]])
    before = [v.numpy() for v in again.variables]
    assert search.locate(again, file) == origin
    for now, then in zip(again.variables, before, strict=True):
        np.testing.assert_array_equal(now.numpy(), then)


class InGraph(layers.Layer):
    """Calls a layer in a graph, where no value can be looked at."""

    def build(self, shape):
        self.root = Root()

    def call(self, x):
        return tf.function(self.root)(x)


class RootOfItsOwn(keras.Model):
    """Computes outside of its layers."""

    def __init__(self, **options):
        super().__init__(name="own")
        self.dense = layers.Dense(1, kernel_initializer="ones", **options)

    def call(self, x):
        return tf.sqrt(self.dense(x))


def gap(kernel):
    """Is 0, with a gradient that is no number."""
    return tf.sqrt(tf.reduce_sum(kernel - kernel))


THREE = {"split_ratios": (1, 1, 1), "towers": 3}
NOT_FINITE = "that is not finite on tower"
REPEATED = {
    "a tower": (
        *(build, {"x_at": -1}, THREE),
        "the output of layer 'root' is not finite on tower 1 of 3 (forward pass), "
        "1 of 21 examples",
    ),
    "its gradient": (
        *(lambda: build(rate=0), {"x_at": 0}, THREE),
        f"layer 'root' makes a gradient {NOT_FINITE} 1 of 3 (backward pass), 1 of 21",
    ),
    "a loss": (
        *(build, {"y_at": -1}, THREE),
        "the loss is not finite, while the outputs are, on tower 1 of 3 (forward pass)",
    ),
    "a loss's gradient": (
        *(build, {"y_at": 0}, THREE, "the loss has a gradient "),
        f"{NOT_FINITE} 1 of 3 (backward pass), 1 of 21 examples",
    ),
    "nothing again": (
        *(build, {"rows": 1}, THREE, "the loss or a gradient is not finite, but was "),
        "when the step was computed once more, op by op",
    ),
    "in a graph": (
        *(lambda: build(InGraph(), rate=0), {"x_at": 0}, {}),
        f"layer 'in_graph' makes a gradient {NOT_FINITE} 0 of 1 (backward pass)",
    ),
    "outside": (
        *(RootOfItsOwn, {"x_at": -1}, {}, "the output of model 'own' outside of its "),
        "layers is not finite on tower 0 of 1 (forward pass), 1 of 21 examples",
    ),
    "a regularizer": (
        *(lambda: RootOfItsOwn(kernel_regularizer=gap), {}, {}),
        "layer 'dense' makes a gradient that is not finite (backward pass)",
    ),
}


@pytest.mark.quick_one_in(1)
@pytest.mark.parametrize("name", REPEATED)
def test_what_a_repeated_step_shows(name):
    """Without towers, which only decide what is repeated."""
    make, at, options, *expected = REPEATED[name]
    model = make()
    model.compile("sgd", root_of_both)
    at = {"rows": BATCH, "row": 9} | at
    rows = at.pop("rows")
    x, y = (tf.constant(each[:rows]) for each in data(**at))
    model(x)
    # Not 0, with which no gradient would come to the root.
    model.layers[-1].bias.assign([0.5])
    values = [variable.value for variable in search.variables_of(model)]
    step = recorded_step.RecordedStep(2, (x, y, None), values, **options)
    assert str(search.search(model, step)).startswith("".join(expected))


def test_a_file_keeps_texts_and_16_bits(tmp_path):
    texts, halves = tf.constant(["ä", ""]), tf.constant([1.5, 2.0], tf.bfloat16)
    step = recorded_step.RecordedStep(1, ({"a": texts, "b": halves}, None, None), [])
    file = str(tmp_path / "bad.npz")
    recorded_step.write(file, step)
    x, *others = recorded_step.read(file).data
    assert others == [None, None]
    for name, tensor in step.data[0].items():
        assert x[name].dtype == tensor.dtype
        np.testing.assert_array_equal(x[name], tensor)
    ragged = tf.ragged.constant([[1], [2, 3]])
    with pytest.raises(ValueError, match="the batch has ragged or sparse tensors"):
        recorded_step.write(file, step._replace(data=(ragged, None, None)))


WAYS = {
    "replicated": {"variable_update": "replicated"},
    "steps in a loop": {"steps_per_execution": 3},
    "gathered": {"loss_placement": "gathered"},
    "replicated, gathered": {
        "variable_update": "replicated",
        "loss_placement": "gathered",
    },
    "XLA": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "packed": {"variable_update": ParameterServer(packed=True)},
    "prefetched": {"prefetch": 2},
    "uneven": {"split_ratios": (1, 2, 1)},
    "asynchronous": {"variable_update": "asynchronous"},
    "asynchronous, eager": {"variable_update": "asynchronous", "run_eagerly": True},
    "asynchronous, in a loop": {
        "variable_update": "asynchronous",
        "steps_per_execution": 2,
    },
}


# Where the passes are told apart otherwise, both.
BOTH = "replicated", "gathered", "XLA", "eager", "asynchronous"


# Each path through our code is met by one of them.
QUICK = "replicated", "steps in a loop", "gathered", "asynchronous, eager"


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("way", [way if way in QUICK else slow(way) for way in WAYS])
def test_whichever_way_towers_go(way):
    asynchronous = "asynchronous" in way
    # What is dropped depends on which tower was faster.
    parallel = on_towers(build(rate=0 if asynchronous else 0.1), **WAYS[way])
    faults = ("forward", "backward") if way in BOTH else ("forward",)
    # Each time the first batch is trained on, and the second not.
    for step, fault in enumerate(faults, start=2):
        at, expected = FAULTS[fault]
        error = stopped(parallel, *data(**at))
        assert told(error.origin) == expected
        if not asynchronous:
            assert error.step == step
        if way == "steps in a loop":
            assert "(epoch 1, batches 1-3)" in str(error)


def test_a_micro_batch_is_named():
    options = {"stages": Stages(2, {"weight": 0, ".*": 1}), "micro_batches": 3}
    parallel = on_towers(build(), 2, **options)
    at, expected = FAULTS["forward"]
    error = stopped(parallel, *data(**at))
    assert told(error.origin) == expected
    assert "on tower 0 of 1, in micro-batch 1 of 3 (" in str(error)


@pytest.mark.parametrize(
    "way",
    [
        "loop",
        slow("replicated"),
        slow("parameter_server"),
        slow("eager"),
    ],
)
def test_nothing_of_the_step_is_applied(way):
    """Variables, metrics and what layers assign are those of the step before."""
    options = {
        "loop": {"steps_per_execution": 3},
        "eager": {"run_eagerly": True},
    }.get(way, {"variable_update": way})

    model = build(layers.BatchNormalization())
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    parallel = on_towers(model, optimizer=optimizer, metrics=["mae"], **options)
    first = [rows[:BATCH] for rows in data()]

    def train():
        parallel.fit(*first, batch_size=BATCH, shuffle=False, verbose=0)
        return variables.values(model)

    start = train()
    before = train()
    for fault in ("forward", "backward"):
        variables.assign(model, start)
        stopped(parallel, *data(**FAULTS[fault][0]))
        for ours, theirs in zip(variables.values(model), before, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(start[0], before[0])


@pytest.mark.slow
def test_finite_steps_are_what_they_are_without_the_check():
    found = []
    for check in (True, False):
        model = build()
        on_towers(model, optimizer="adam", check_numerics=check).fit(
            *data(), batch_size=BATCH, shuffle=False, verbose=0, epochs=2
        )
        found.append(variables.values(model))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_is_off_by_default_as_on_one_device():
    model = build()
    parallel = multi_gpu_model(model, 3)
    parallel.compile("sgd", root_of_both)
    parallel.fit(*data(x_at=-1), batch_size=BATCH, verbose=0)
    assert np.isnan(model.layers[0].kernel.numpy()).all()


@pytest.mark.slow
def test_towers_without_examples(watched):
    x, y = data(x_at=-1, row=0)
    error = stopped(watched, x[:1], y[:1])
    assert told(error.origin) == ("layer", "forward", "layer 'root'", 0)


def test_synchronized_towers():
    model = build(layers.BatchNormalization(synchronized=True))
    error = stopped(on_towers(model), *data(x_at=0))
    assert told(error.origin) == BACKWARD


def test_a_table_of_which_rows_are_looked_up():
    keras.utils.set_random_seed(1)
    rows = layers.Embedding(50, 1, embeddings_initializer="ones", name="table")
    model = keras.Sequential(
        [keras.Input((1,), dtype="int32"), rows, layers.Flatten(), Root(name="root")]
    )
    model.add(layers.Dense(1))
    parallel = on_towers(model, loss="mse")
    table = np.ones([50, 1], "float32")
    table[7] = 0
    parallel.build_from_config({"input_shape": (None, 1)})
    rows.embeddings.assign(table)
    x = np.full([BATCH, 1], 3)
    x[9] = 7
    error = stopped(parallel, x, np.ones([BATCH, 1], "float32"))
    assert told(error.origin) == BACKWARD
    np.testing.assert_array_equal(rows.embeddings.numpy(), table)


def test_a_variable_that_was_not_finite_before(watched):
    watched.get_layer("out").kernel.assign([[np.inf]])
    error = stopped(watched, *data())
    assert error.origin.source == "variable"
    assert "out/kernel' was not finite before it; look for what has set it;" in str(
        error
    )


def overflowing():
    """A model, and data of which the second update is infinite."""
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    x, y = np.ones([ROWS, 1], "float32"), np.zeros([ROWS, 1], "float32")
    y[BATCH : 2 * BATCH] = 1e37
    loss, optimizer = lambda y, p: tf.reduce_mean(y * p), keras.optimizers.SGD(100.0)
    return on_towers(model, loss=loss, optimizer=optimizer), x, y


def test_a_variable_that_an_update_made_infinite(tmp_path):
    """With a loss and gradients that are finite. No checkpoint has it."""
    checkpoint = Checkpoint(tmp_path, save_steps=1)
    error = stopped(*overflowing(), callbacks=[checkpoint])
    assert error.step == 3
    assert "kernel' was not finite before it: the update of the step before made" in (
        str(error)
    )
    assert "; try a smaller learning rate, or clip the gradients;" in str(error)
    assert checkpoint.latest == str(tmp_path / "ckpt-0-1")
    assert store.find(tmp_path) == [checkpoint.latest]


def test_a_step_that_cannot_be_repeated():
    """A layer that is right when it is asked a second time."""
    calls = []

    class Fickle(layers.Layer):
        def call(self, x):
            def first(x):
                calls.append(1)
                return x * np.nan if len(calls) == 1 else x

            return tf.ensure_shape(tf.numpy_function(first, [x], x.dtype), x.shape)

    model = build(Fickle())
    error = stopped(on_towers(model, 1), *data())
    assert error.origin.source == "unknown"
    assert "computed once more" in str(error)


class Countdown(layers.Layer):
    """Not a number from its fourth call on."""

    def build(self, shape):
        self.left = self.add_weight(name="left", initializer="ones", trainable=False)

    def call(self, x):
        self.left.assign(self.left - 0.3)
        return x * tf.sqrt(self.left)


def test_ways_to_update_that_race_are_stopped_at_the_same_step(monkeypatch):
    """The fourth step is the first one of a candidate."""
    for name in ("BUDGET_S", "OF_SHORT_RUN"):
        monkeypatch.setattr(auto, name, 1e9)
    monkeypatch.setattr(auto, "_ROUNDS", 1)
    monkeypatch.setattr(auto, "_ROUND_S", 0.0)
    model = build(Countdown(name="countdown"))
    parallel = on_towers(model, variable_update="auto", jit_compile=False)
    error = stopped(parallel, *data(), epochs=2)
    assert told(error.origin) == ("layer", "forward", "layer 'countdown'", 0)
    assert str(error).startswith("Step 4 (epoch 2, batch 1)")


def test_a_batch_without_fit(watched):
    x, y = data(x_at=-1, row=9)
    with pytest.raises(NotFiniteStep, match=r"^Step 1: the output of layer"):
        watched.train_on_batch(x[:BATCH], y[:BATCH])


@pytest.mark.slow
def test_accumulated_gradients():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    parallel = on_towers(build(), optimizer=optimizer, loss="mse")
    error = stopped(parallel, *data(x_at=0))
    assert told(error.origin) == BACKWARD


@pytest.mark.slow
def test_in_half_precision():
    """A number that is finite in the data need not be so in the layer's type."""
    keras.config.set_dtype_policy("mixed_float16")
    model = build()
    error = stopped(on_towers(model, loss="mse"), *data(x_at=1e6))
    assert error.origin.name == "what comes before layer 'weight'"
    assert (error.origin.tower, error.origin.rows) == (1, (ROW - BATCH,))


def test_several_inputs_and_outputs(tmp_path):
    inputs = {name: keras.Input((1,), name=name) for name in "ab"}
    total = layers.Add(name="add")([*inputs.values()])
    ends = {
        "root": Root(name="root")(layers.Dense(1, name="weight")(total)),
        "plain": layers.Dense(1)(total),
    }
    model = keras.Model(inputs, ends)
    model.get_layer("weight").kernel.assign([[1.0]])
    file = tmp_path / "bad.npz"
    loss = {"root": "mse", "plain": "mse"}
    parallel = on_towers(model, loss=loss, check_numerics=file)
    x, y = data()
    batch = {"a": x, "b": x * 1}
    batch["b"][ROW] = -9
    error = stopped(parallel, batch, {"root": y, "plain": y})
    assert told(error.origin) == FORWARD
    assert search.locate(parallel, file) == error.origin
    batch["b"][ROW] = np.nan
    error = stopped(parallel, batch, {"root": y, "plain": y})
    assert "x['b'][9] of the batch is not finite on tower 1" in str(error)
    assert f"it is x['b'][{ROW}] of what `fit` has got" in str(error)


def test_a_layer_inside_a_layer():
    class Block(layers.Layer):
        def __init__(self):
            super().__init__(name="block")
            self.root = Root(name="root")

        def call(self, x):
            return self.root(x) + 1

    dense = layers.Dense(1, use_bias=False, kernel_initializer="ones")
    parallel = on_towers(keras.Sequential([keras.Input((1,)), dense, Block()]))
    for at, during in ((-1, "forward"), (0, "backward")):
        error = stopped(parallel, *data(x_at=at))
        assert told(error.origin) == ("layer", during, "layer 'root'", 1)


@pytest.mark.slow
def test_what_a_model_computes_itself():
    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.dense = layers.Dense(1)

        def call(self, x):
            return self.dense(tf.sqrt(x))

    error = stopped(on_towers(Own(), loss="mse"), *data(x_at=-1))
    assert error.origin.name == "what comes before layer 'dense'"


class TestInput:
    def test_a_model_that_is_not_compiled(self, tmp_path):
        with pytest.raises(ValueError, match=r"not compiled; expected .* first \("):
            search.locate(build(), tmp_path / "bad.npz")

    def test_of_multi_gpu_model(self):
        with pytest.raises(ValueError, match=r"check_numerics=1; expected True, False"):
            multi_gpu_model(build(), 2, check_numerics=1)

    def test_a_file_that_is_none(self, tmp_path):
        model = build()
        model.compile("sgd", "mse")
        for name in ("missing.npz", "text.npz"):
            (tmp_path / "text.npz").write_text("no array")
            with pytest.raises(ValueError, match=rf"{name}, which cannot be read"):
                search.locate(model, tmp_path / name)

    def test_a_file_of_another_model(self, watched, traced):
        file = traced[2]
        stopped(watched, *data(x_at=-1))
        other = build(layers.Dense(3))
        other.compile("sgd", root_of_both)
        with pytest.raises(ValueError, match=r"expected the model that it was written"):
            search.locate(other, file)

    def test_a_place_that_cannot_be_written_to(self, tmp_path):
        (tmp_path / "file").touch()
        file = tmp_path / "file" / "bad.npz"
        error = stopped(on_towers(build(), check_numerics=file), *data(x_at=-1))
        assert f"the batch cannot be written to {file}: " in str(error)
        assert error.file is None


def test_a_step_is_written_whatever_its_types(tmp_path):
    file = str(tmp_path / "step.npz")
    x = {"text": tf.constant(["ab", "c"]), "half": tf.cast([1.5, 2.5], tf.bfloat16)}
    recorded_step.write(file, RecordedStep(3, (x, tf.constant([1]), None), []))
    found, y, _ = recorded_step.read(file).data
    assert found["half"].dtype == tf.bfloat16 and y.numpy().tolist() == [1]
    assert found["half"].numpy().tolist() == [1.5, 2.5]
    assert found["text"].numpy().tolist() == [b"ab", b"c"]
    for value in (tf.ragged.constant([[1], []]), tf.sparse.eye(2)):
        with pytest.raises(ValueError, match="the batch has ragged or sparse tensors"):
            recorded_step.write(file, RecordedStep(3, (value, None, None), []))


def test_the_same_random_numbers_are_drawn_again():
    seen = []

    class Spy(layers.Layer):
        def call(self, x):
            noted = tf.numpy_function(lambda x: seen.append(x) or x, [x], x.dtype)
            return tf.ensure_shape(noted, x.shape)

    stages = layers.Dropout(0.5, seed=1), Spy(), Root(), layers.Dense(1)
    x = np.arange(1, 22, dtype="float32")[:, None]
    x[7:14] *= -1
    model = keras.Sequential([keras.Input((1,)), *stages])
    parallel = on_towers(model, loss="mse")
    error = stopped(parallel, x, np.ones_like(x))
    assert error.origin.tower == 1
    then, again = seen
    np.testing.assert_array_equal(then, again)


class TestLossScale:
    def steep(self, y, predicted):
        return 1000 * root_of_both(y, predicted)

    def scaled(self, scale):
        inner = keras.optimizers.SGD(0.01)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale)

    def test_an_overflow_is_passed_over(self):
        optimizer = self.scaled(2.0**127)
        parallel = on_towers(build(), optimizer=optimizer, loss=self.steep)
        parallel.fit(*data(), batch_size=BATCH, verbose=0, epochs=2)
        assert float(optimizer.dynamic_scale) < 2.0**127

    @pytest.mark.slow
    def test_a_loss_that_is_not_finite_is_not(self):
        parallel = on_towers(build(), optimizer=self.scaled(2.0**15))
        assert told(stopped(parallel, *data(x_at=-1)).origin) == FORWARD

    def test_a_gradient_that_no_scale_makes_finite_is_not(self):
        optimizer = self.scaled(4.0)
        parallel = on_towers(build(), optimizer=optimizer)
        x, y = data(x_at=0)
        error = stopped(parallel, x[BATCH : 2 * BATCH], y[:BATCH], epochs=5)
        assert told(error.origin) == BACKWARD
        # With a scale of 4, and of 2, it was passed over.
        assert ", after 2 skipped for the loss scale: layer 'root' makes" in str(error)
        assert float(optimizer.dynamic_scale) == 1


class TestOrigin:
    def test_is_the_row_of_the_arrays(self):
        x, y = data(x_at=np.nan)
        x = np.concatenate([x, x[::-1] * 1.0], axis=1)
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        error = stopped(on_towers(model, loss="mse"), x, y, shuffle=True)
        place = {ROW, ROWS - 1 - ROW}
        assert any(f"it is x[{i}] of what `fit` has got" in str(error) for i in place)

    def test_is_epoch_batch_and_row_of_other_data(self, watched):
        dataset = tf.data.Dataset.from_tensor_slices(data(x_at=np.nan)).batch(BATCH)
        error = stopped(watched, dataset, batch_size=None)
        assert str(error).startswith("Step 2 (epoch 1, batch 2): x[9] of the batch is")

    def test_of_what_preprocess_has_made(self):
        def preprocess(x, y, training):
            return tf.math.log(tf.cast(x, tf.float32)), y

        x, y = data()
        x = (x * 5).astype("uint8")
        x[ROW] = 0
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
        parallel = on_towers(model, loss="mse", preprocess=preprocess)
        error = stopped(parallel, x, y)
        assert told(error.origin) == (
            *("data", "", "what `preprocess` has made of x", 1),
        )
        assert error.origin.rows == (ROW - BATCH,)


def test_the_last_checkpoint_stays(watched, tmp_path):
    checkpoint = Checkpoint(tmp_path / "run", save_steps=1)
    x, y = data(x_at=-1)
    with pytest.raises(NotFinite) as caught:
        watched.fit(
            *(x, y), batch_size=BATCH, shuffle=False, verbose=0, callbacks=[checkpoint]
        )
    error = caught.value
    latest = str(tmp_path / "run" / "ckpt-0-1")
    assert error.checkpoint == checkpoint.latest == latest
    assert str(error).endswith(
        f"; the last checkpoint, from before, is {error.checkpoint}."
    )


@pytest.mark.slow
def test_tensorflow_does_not_warn_of_it():
    """In a process that shows warnings, as this one does not."""
    script = """
from tests.towers.numerics.test_numerics import *
on_towers(build(), 1).fit(*data(x_at=-1), batch_size=BATCH, verbose=0)
"""
    shown = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=warm.ROOT, env=shown, capture_output=True, text=True
    )
    assert "NotFiniteStep: Step " in done.stderr
    assert "rendezvous" not in done.stderr and "StopIteration" not in done.stderr


def run(*flags, code):
    done = main_here("--num_gpus=3", *flags)
    assert done.returncode == code, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("towers.")]
    assert "Traceback" not in done.stderr
    return done, said


@pytest.mark.slow
def test_the_program_stops_and_says_so(tmp_path):
    """In its second epoch, where a checkpoint of the first stays."""
    rows = [f"{value},{label}" for label in range(2) for value in range(1, 22)]
    (tmp_path / "train.csv").write_text("\n".join(["a,label", *rows, ""]))
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            import keras
            import tensorflow as tf

            @keras.saving.register_keras_serializable()
            class Root(keras.layers.Layer):
                def build(self, shape):
                    initializer = keras.initializers.Constant(2.0)
                    options = {"initializer": initializer, "trainable": False}
                    self.left = self.add_weight(name="left", **options)

                def call(self, x):
                    self.left.assign(self.left - 0.5)
                    return x * tf.sqrt(self.left)

            def build(input_shape, num_classes):
                root, dense = Root(name="root"), keras.layers.Dense(num_classes)
                return keras.Sequential([keras.Input(input_shape), root, dense])
            """
        )
    )
    model_dir = tmp_path / "run"
    flags = (
        *(f"--dataset=csv:{tmp_path}/*.csv", f"--model={tmp_path}/mine.py:build"),
        *("--batch_size=21", f"--model_dir={model_dir}", "--eval_fraction=0"),
        "--variable_update=parameter_server",
    )
    _, (said,) = run(*flags, code=3)
    assert said.startswith("towers.train: Step 5 (epoch 3, batch 1): the output of ")
    assert "layer 'root' is not finite on tower 0 of 3 (forward pass), 21 of" in said
    assert f"the batch is in {model_dir}/not_finite.npz; the last checkpoint" in said
    assert said.endswith(f", from before, is {model_dir}/checkpoints/ckpt-2-0.")
    assert not (model_dir / "model.keras").exists()
    # What was written is enough to find it again.
    path = str(tmp_path / "mine.py")
    root = runpy.run_path(path)["build"]((1,), 2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    root.compile("adam", loss)
    found = search.locate(root, model_dir / "not_finite.npz")
    assert told(found) == ("layer", "forward", "layer 'root'", 0)


def test_the_program_names_file_and_record_of_a_number_that_is_none(tmp_path):
    rows = ["1,0", "2,1"] * 20
    rows[30] = "inf,0"
    path = tmp_path / "train.csv"
    path.write_text("\n".join(["a,label", *rows, ""]))
    flags = f"--dataset=csv:{path}", "--model=mlp", f"--model_dir={tmp_path / 'run'}"
    _, (said,) = run(*flags, code=1)
    assert f"{path}" in said and "a is inf, expected a number" in said
