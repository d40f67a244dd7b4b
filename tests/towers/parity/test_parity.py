"""check_parity: what it finds equal, what it finds different, and why it says so."""

import contextlib
import importlib
import textwrap
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import warm
from tests.towers.train.runs import read_settings
from tests.variants import slow
from towers import input_pipeline
from towers.collectives import reduce
from towers.hosts.group import HostFailedError
from towers.layers import substitutes
from towers.parity import __main__ as parity_program
from towers.parity import causes, check, check_flags, check_parity
from towers.parity.report import (
    DIFFERS,
    EQUAL,
    ROUNDING,
    Parity,
    ReportEntry,
    Row,
    compare,
    difference,
    differences,
)
from towers.parity.trials import Setting
from towers.plan import Pipeline
from towers.program import ending
from towers.tower.errors import ModelError

pytestmark = pytest.mark.quick_one_in(2)

layers = keras.layers


def data(rows=12, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, rng.normal(size=(rows, 2)).astype("float32")


def compiled(*middle, optimizer="sgd", **options):
    """A small model with the given layers in the middle."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", name="first"),
            *middle,
            layers.Dense(2, name="last"),
        ],
        name="net",
    )
    model.compile(optimizer, "mse", **{"metrics": ["mae"], **options})
    return model


def verdicts(parity):
    return {(row.kind, row.name): row.verdict for row in parity.rows}


def everything(model):
    found = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [variable.numpy() for variable in found]


@contextlib.contextmanager
def unchanged(model):
    """Checks that a built model, its layers and its functions stay as they were."""
    before = everything(model)
    own = [dict(vars(layer)) for layer in model._flatten_layers()]
    functions = model.train_function, model.test_function, model.predict_function
    yield
    # Those that measure the loss may be new: Keras makes them with the first batch.
    for ours, theirs in zip(everything(model)[: len(before)], before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for layer, attributes in zip(model._flatten_layers(), own, strict=True):
        assert "call" not in vars(layer)
        assert vars(layer).keys() == attributes.keys()
        assert getattr(layer, "synchronized", None) == attributes.get("synchronized")
    assert functions == (
        model.train_function,
        model.test_function,
        model.predict_function,
    )


# Layers that are not exact on towers, or not to be silenced.


class Centre(layers.Layer):
    """Looks at the whole batch."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


class FromFirst(layers.Layer):
    """Looks at the first example, so that the order of rows matters."""

    def call(self, x):
        return x - x[:1]


class Noise(layers.Layer):
    """Random, with no argument to say that this is not training."""

    def __init__(self, size, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(3)
        self.size = size

    def call(self, x):
        noise = keras.random.normal(keras.ops.shape(x), seed=self.seed_generator)
        return x + self.size * noise


class NoiseInTraining(Noise):
    """The same with the argument."""

    def call(self, x, training=False):
        return super().call(x) if training else x


# What is equal.


def test_equal():
    model = compiled(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    x, y = data()
    parity = check_parity(model, (x, y, np.arange(12.0) / 6), gpus=2)
    assert parity.equal, parity
    assert parity.reasons == ()
    assert parity.loss_placement == "tower"
    found = verdicts(parity)
    for key in [
        *(("loss", f"step {step}") for step in (1, 2, 3)),
        ("metric", "mae"),
        ("variable", "net/first/kernel"),
        ("optimizer", "sgd/net_last_bias_momentum"),
        ("optimizer", "sgd/iteration"),
        ("prediction", "output 0"),
    ]:
        assert found[key] == EQUAL
    # Exactly the same bits nowhere would be no comparison of two computations.
    assert any(row.difference > 0 for row in parity.rows)
    text = str(parity)
    assert "loss        step 1" in text
    assert "The loss was computed on the towers." in text
    assert text.endswith("Equal: 2 towers give the numbers of one device.")


@pytest.mark.slow
class OwnStep(keras.Model):
    """A step that takes two values, whether or not there are weights."""

    def train_step(self, data):
        """Trains on x and y."""
        x, y = data
        with tf.GradientTape() as tape:
            error = keras.ops.mean(keras.ops.square(self(x) - y))
        gradients = tape.gradient(error, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"error": error}


@pytest.mark.slow
@pytest.mark.parametrize("update", ["parameter_server", "replicated"])
def test_a_step_of_the_models_own(update):
    inputs = keras.Input((6,))
    model = OwnStep(inputs, layers.Dense(2)(layers.Dense(8, "tanh")(inputs)))
    model.compile("adam")
    parity = check_parity(model, data(11), gpus=3, variable_update=update)
    assert parity.equal, parity
    kinds = {row.kind for row in parity.rows}
    assert kinds == {"metric", "variable", "optimizer", "prediction"}


@pytest.mark.parametrize("name", ["accumulate", "dcgan", "wgan_gp", "simclr"])
def test_published_steps(name):
    example = importlib.import_module(f"examples.steps.{name}")
    batch = keras.tree.map_structure(lambda each: each[:7], example.data())
    parity = check_parity(example.build(), batch, gpus=2, parity_steps=2)
    assert parity.equal, parity
    optimizers = [row for row in parity.rows if row.kind == "optimizer"]
    assert optimizers and all(row.verdict in (EQUAL, ROUNDING) for row in parity.rows)
    predicts = name in ("accumulate", "simclr")
    assert ("Predictions are not compared" in str(parity)) != predicts


@pytest.mark.slow
def test_pairs_that_towers_compare_among_their_own_are_not_equal():
    example = importlib.import_module("examples.steps.simclr")
    batch = keras.tree.map_structure(lambda each: each[:7], example.data())
    parity = check_parity(
        *(example.build(), batch), gpus=2, parity_steps=2, loss_placement="tower"
    )
    assert not parity.equal


@pytest.mark.slow
def test_stages():
    parity = check_parity(compiled(), data(), gpus=4, stages=2, micro_batches=3)
    assert str(parity).endswith(
        "Equal: 2 towers of 2 stages, in 3 micro-batches, give the numbers of one "
        "device."
    )


@pytest.mark.slow
def test_a_layer_that_mixes_the_examples_of_a_micro_batch():
    model, alone = compiled(Centre(name="centre")), {"loss_placement": "tower"}
    parity = check_parity(model, data(), gpus=1, micro_batches=2, **alone)
    (reason,) = parity.reasons
    assert reason.startswith("Layer 'centre' mixes the examples of a batch")


@pytest.mark.slow
def test_batches_of_several_sizes_and_uneven_shares():
    batches = [data(12), data(7, seed=1), data(2, seed=2), data(12, seed=3)]
    parity = check_parity(compiled(Centre()), batches, gpus=3, split_ratios=(1, 3, 2))
    assert parity.equal, parity
    assert sum(row.kind == "loss" for row in parity.rows) == 4
    assert "The loss was computed with the rows of all towers." in str(parity)


@pytest.mark.slow
def test_several_inputs_and_outputs():
    a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
    joined = layers.Concatenate()([a, b])
    outputs = {"p": layers.Dense(1, name="p")(joined), "q": layers.Dense(3)(joined)}
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile("adam", {"p": "mse", "q": "mae"})
    rng = np.random.default_rng(0)
    x = {name: rng.normal(size=(9, n)) for name, n in (("a", 6), ("b", 4))}
    y = {name: rng.normal(size=(9, n)) for name, n in (("p", 1), ("q", 3))}
    parity = check_parity(model, (x, y), gpus=2)
    assert parity.equal, parity
    assert ("prediction", "output 1") in verdicts(parity)


@pytest.mark.slow
def test_only_rounding():
    # The gradient of the first bias is zero but for rounding, which Adam blows up.
    model = compiled(
        layers.BatchNormalization(synchronized=True), optimizer="adam", metrics=[]
    )
    model.layers[0].activation = keras.activations.linear
    parity = check_parity(model, data(), gpus=2)
    assert parity.equal, parity
    assert verdicts(parity)["variable", "net/first/bias"] == ROUNDING
    assert verdicts(parity)["loss", "step 1"] == EQUAL
    (remark,) = parity.reasons
    assert "equal to rounding" in remark and "net/first/bias" in remark


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [slow("mixed_bfloat16", "adam"), ("mixed_float16", "sgd")],
)
def test_16_bits(policy, optimizer):
    keras.config.set_dtype_policy(policy)
    model = compiled(optimizer=optimizer)
    assert check_parity(model, data(), gpus=2).equal


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.slow
def test_16_bits_still_find_what_is_wrong(policy):
    """With their wider tolerance."""
    keras.config.set_dtype_policy(policy)
    model = compiled(Centre())
    assert not check_parity(model, data(), gpus=2, loss_placement="tower").equal


def test_nothing_trained_says_little():
    parity = check_parity(compiled(optimizer=keras.optimizers.SGD(0.0)), data(), gpus=2)
    assert parity.equal
    assert parity.reasons == (
        "No trainable variable changed, so that this says little.",
    )


# What differs by design.


@pytest.mark.slow
def test_batch_normalization():
    norms = [layers.BatchNormalization(name=f"norm_{i}") for i in range(2)]
    # One that is frozen normalises nothing by the batch.
    norms[1].trainable = False
    model = compiled(*norms)
    with unchanged(model):
        parity = check_parity(model, data(), gpus=2)
    assert not parity.equal
    design, tried = parity.reasons
    assert design == (
        "Differs by design: BatchNormalization normalises each local batch by itself "
        "(norm_0)."
    )
    assert tried.startswith("Tried with synchronized=True on BatchNormalization, all")
    assert verdicts(parity)["state", "net/norm_0/moving_variance"] == DIFFERS


@pytest.mark.slow
def test_batch_normalization_in_micro_batches():
    model = compiled(layers.BatchNormalization(name="norm"))
    with unchanged(model):
        parity = check_parity(model, data(), gpus=2, stages=2, micro_batches=3)
    design, tried = parity.reasons
    assert design == (
        "Differs by design: BatchNormalization normalises each micro-batch by its own "
        "statistics, as a tower does, and its moving averages take their mean, "
        "weighted by examples (norm)."
    )
    assert tried.startswith("Tried with BatchNormalization by its moving averages, all")


@pytest.mark.slow
def test_batch_normalization_of_the_whole_batch_is_not_a_matter_of_design(monkeypatch):
    """One tower normalises what one device does; only rounding can be different."""
    plain = substitutes._call

    def otherwise(keras_call, layer, inputs, training=None, mask=None):
        found = plain(keras_call, layer, inputs, training, mask)
        return found * 1.001 if training else found

    monkeypatch.setattr(substitutes, "_call", otherwise)
    model = compiled(layers.BatchNormalization(name="norm"))
    reason, _ = check_parity(model, data(), gpus=2, stages=2).reasons
    assert "by rounding" in reason and "norm" in reason


def test_random_layers():
    kinds = NoiseInTraining, layers.GaussianNoise, layers.Dropout, Noise
    middle = [kind(0.4, name=f"draws_{i}") for i, kind in enumerate(kinds)]
    model = compiled(*middle)
    with unchanged(model):
        parity = check_parity(model, data(), gpus=2)
    assert parity.equal, parity


@pytest.mark.slow
def test_dropout_in_a_recurrent_cell():
    model = keras.Sequential(
        [keras.Input((3, 2)), layers.SimpleRNN(4, dropout=0.4), layers.Dense(2)]
    )
    model.compile("sgd", "mse")
    x, y = data()
    parity = check_parity(model, (x.reshape(12, 3, 2), y), gpus=2)
    assert parity.equal, parity


@pytest.mark.slow
def test_only_what_is_needed_is_named():
    # The noise is drawn and comes to nothing.
    middle = [layers.BatchNormalization(name="norm"), NoiseInTraining(0.0)]
    parity = check_parity(compiled(*middle), data(), gpus=2)
    norm, tried = parity.reasons
    assert "(norm)" in norm
    assert tried.startswith("Tried with synchronized=True on BatchNormalization, all")


# What differs for another reason.


def test_a_layer_that_mixes_examples():
    parity = check_parity(compiled(Centre(name="centre")), data(), gpus=2)
    assert parity.equal and parity.loss_placement == "gathered", parity
    # The innermost layer is named, and no other.
    inner = keras.Sequential([layers.Dense(8), Centre(name="centre")], name="outer")
    parity = check_parity(compiled(inner), data(), gpus=2, loss_placement="tower")
    assert not parity.equal
    (mixing,) = parity.reasons
    assert mixing.startswith("Layer 'centre' mixes the examples of a batch:")
    assert verdicts(parity)["loss", "step 1"] == DIFFERS


@pytest.mark.slow
@pytest.mark.parametrize("initializer", ["glorot_uniform", "zeros"])
def test_a_model_that_looks_at_the_order(initializer):
    model = compiled(FromFirst())
    head = model.layers[-1].kernel
    head.assign(keras.initializers.get(initializer)(head.shape))
    parity = check_parity(model, data(), gpus=2)
    assert parity.equal and parity.rows, parity


def test_a_wrong_gradient_is_found(monkeypatch):
    """A bug of ours, of a thousandth, in one variable."""
    right = reduce.add
    monkeypatch.setattr(
        *(reduce, "add"),
        lambda parts: right(parts) * (1.001 if parts[0].shape == [6, 8] else 1),
    )
    model = compiled(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    parity = check_parity(model, data(), gpus=2)
    assert not parity.equal
    found = verdicts(parity)
    assert found["optimizer", "sgd/net_first_kernel_momentum"] == DIFFERS
    assert "the first layers whose variables differ are first" in parity.reasons[0]


# What is said of the cause, without training.

ALIKE, SILENT, BOTH = Setting(True), Setting(silent=True), Setting(True, True)
SAME, ROUNDED, OTHER = (
    (Row("loss", "step 1", difference, rounding, verdict),)
    for difference, rounding, verdict in (
        *((1e-7, 0.0, EQUAL), (2e-4, 1e-4, ROUNDING), (0.5, 0.0, DIFFERS)),
    )
)
BOTH_TRIED = "with synchronized=True on BatchNormalization and random layers silenced"


@pytest.mark.quick_one_in(1)
@pytest.mark.parametrize(
    ("found", "towers", "parts", "said"),
    [
        (
            *({BOTH: SAME, ALIKE: SAME}, 2, 1),
            [
                "Differs by design: BatchNormalization normalises each local batch by "
                "itself (norm).",
                "Tried with synchronized=True on BatchNormalization, all is equal (at ",
            ],
        ),
        (
            *({BOTH: ROUNDED, SILENT: ROUNDED}, 2, 2),
            [
                "Differs by design: random layers draw differently for each micro-b",
                "Tried with random layers silenced, all is equal (1 of 1 values are se",
            ],
        ),
        (
            *({BOTH: SAME}, 4, 2),
            [
                "Differs by design: BatchNormalization normalises each micro-batch",
                "Differs by design: random layers draw differently for each micro-b",
                "Tried with BatchNormalization by its moving averages and random l",
            ],
        ),
        (
            *({BOTH: SAME, ALIKE: SAME}, 1, 1),
            [
                "Differs by rounding: a tower computes BatchNormalization by other ker",
                "Tried with synchronized=True on BatchNormalization, all is equal (at ",
            ],
        ),
        ({}, 2, 1, [f"Some of it remains {BOTH_TRIED}.", "Layer 'x' mixes."]),
        (
            *({BOTH: ModelError("No.")}, 2, 1),
            [f"Could not try {BOTH_TRIED}: No.", "Layer 'x' mixes."],
        ),
    ],
)
def test_what_is_tried_is_what_is_said(monkeypatch, found, towers, parts, said):
    def judge(trials, setting):
        rows = found.get(setting, OTHER)
        if isinstance(rows, ModelError):
            raise rows
        return rows

    monkeypatch.setattr(causes, "judge", judge)
    monkeypatch.setattr(causes, "_mixing", lambda trials: ["Layer 'x' mixes."])
    norms = [layers.BatchNormalization(name="norm")]
    random = [layers.Dropout(0.5)]
    trials = mock.Mock(batch_norms=norms, random_layers=random, unseeded=[])
    trials.plan.count = towers
    trials.plan.pipeline = Pipeline(parts, micro_batches=parts)
    reasons = [*causes.explain(trials, OTHER)]
    for reason, start in zip(reasons, said, strict=True):
        assert reason.startswith(start)


def test_what_differs_beside_variables_that_are_equal():
    model = compiled(noise := Noise(0.1, name="noise"))
    trials = mock.Mock(model=model, random_layers=[noise], unseeded=[])
    rows = [Row("variable", v.path, 0.0, 0.0, EQUAL) for v in model.trainable_variables]
    rows += [
        Row("state", v.path, 0.0, 0.0, EQUAL) for v in model.non_trainable_variables
    ]
    unknown, stubborn = causes._unknown(trials, [*rows, *OTHER])
    assert unknown.endswith("the variables are equal, but loss step 1 differ.")
    assert stubborn.startswith("Random layers without a training argument (noise) can")


def test_of_what_takes_no_other_size_nothing_is_said():
    def of_four(x):
        return tf.ensure_shape(x, [4, 2]) if len(x) == 4 else tf.reshape(x, [3])

    x, bounds = tf.ones([4, 2]), [(0, 2), (2, 4)]
    assert causes._difference_of_parts(of_four, ((x,), {}), x, bounds) == 0


def test_a_refusal_stays_one():
    refused = Parity(False, ("It is refused.",))
    equal, other = (Parity(same, ("Why.",), OTHER, towers=2) for same in (True, False))
    found = check._check_refused(refused, equal)
    assert not found.equal and found.rows == OTHER
    same = "Here the numbers are equal all the same, with strict=False."
    assert found.reasons == ("It is refused.", same)
    assert check._check_refused(refused, other).reasons == ("It is refused.", "Why.")
    assert check._check_refused(refused, refused) is refused


def test_what_is_remarked_of_models_that_are_equal():
    trials = mock.Mock(changes_variables=True, predicts=False, unseeded=[])
    predicts, rounded = check._remarks(trials, [*SAME, *ROUNDED])
    assert predicts.startswith("Predictions are not compared, as the model does not ")
    assert rounded.startswith("1 of 2 are equal to rounding, which training amplifies")
    assert "step 1 differs by 2.0e-04, where one device, rounded otherwise," in rounded


def test_towers_of_stages_are_named():
    parity = Parity(True, (), SAME, towers=2, stages=3, micro_batches=4)
    assert str(parity).endswith(
        "Equal: 2 towers of 3 stages, in 4 micro-batches, give the numbers of one dev"
        "ice."
    )


# What cannot be a tower, and bad input.


class Unseeded(layers.Layer):
    def __init__(self, random):
        super().__init__()
        self.random = random

    def call(self, x):
        return x + self.random.normal(keras.ops.shape(x))


@pytest.mark.parametrize("random", [tf.random, keras.random], ids=["tf", "keras"])
def test_random_numbers_without_a_seed_are_named(random):
    model = compiled(Unseeded(random))
    with unchanged(model):
        parity = check_parity(model, data(), gpus=2)
    (reason,) = parity.reasons
    assert "The train_step draws random numbers without a seed " in reason
    place = "seed_generator" if random is keras.random else "test_parity.py:"
    assert place in reason and "keras.random.SeedGenerator" in reason


@pytest.mark.quick_one_in(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 9}, "gpus=9"),
        (
            {"gpus": 2, "split_ratios": (1, 2, 3)},
            r"split_ratios=\(1, 2, 3\) for 2 towers",
        ),
        ({"gpus": 2, "stages": 0}, "stages=0; expected an integer from 1"),
        ({"gpus": 2, "stages": 3}, "stages=3 for 2 devices"),
        ({"gpus": 2, "parity_steps": 0}, "parity_steps=0; expected at least 1"),
        ({"gpus": 2, "variable_update": "none"}, "variable_update='none'"),
        (
            {"gpus": 2, "variable_update": "asynchronous"},
            "'asynchronous', whose towers do not make one device's updates; expected",
        ),
        ({"gpus": 2, "loss_placement": "home"}, "loss_placement='home'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        check_parity(compiled(), data(), **options)


def test_a_model_that_is_not_compiled():
    with pytest.raises(ValueError, match=r"Sequential; .* call `compile` first"):
        check_parity(keras.Sequential([layers.Dense(2)]), data(), gpus=2)


def test_divergence():
    with pytest.raises(ValueError, match=r"(nan|inf) at step \d; expected a finite"):
        check_parity(compiled(optimizer=keras.optimizers.SGD(1e20)), data(), gpus=2)


# The model is left as it was found.


class Subclassed(keras.Model):
    def __init__(self, rate=0.3, synchronized=False):
        super().__init__()
        self.dense, self.out = layers.Dense(4), layers.Dense(2)
        self.norm = layers.BatchNormalization(synchronized=synchronized, name="norm")
        self.dropout = layers.Dropout(rate, name="drop")

    def call(self, x, training=False):
        x = self.norm(self.dense(x), training=training)
        return self.out(self.dropout(x, training=training))


@pytest.mark.slow
def test_both_and_the_model_is_unchanged():
    def averaged():
        return keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True)

    model = Subclassed()
    model.compile(averaged(), "mse", metrics=["mae"])
    model.train_on_batch(*data())
    count = len(everything(model))
    with unchanged(model):
        parity = check_parity(model, data(seed=1), gpus=2)
    assert len(everything(model)) == count
    norm, tried = parity.reasons
    assert "(norm)" in norm
    assert tried.startswith("Tried with synchronized=True on BatchNormalization,")
    # It goes on as a model that was never checked.
    keras.utils.set_random_seed(1)
    again = Subclassed()
    again.compile(averaged(), "mse", metrics=["mae"])
    again.train_on_batch(*data())
    assert model.train_on_batch(*data(seed=2)) == again.train_on_batch(*data(seed=2))


@pytest.mark.slow
def test_a_model_that_is_not_built():
    model = Subclassed(rate=0.0, synchronized=True)
    model.compile("adam", "mse")
    assert not model.built
    check_parity(model, data(), gpus=2)
    assert model.built
    assert int(model.optimizer.iterations) == 0
    np.testing.assert_array_equal(model.norm.moving_mean, np.zeros(4))


# How differences are measured.


def test_difference():
    one = np.array([0.0, 2.0, -4.0])
    assert difference(one, one) == 0
    assert difference(one + [0.0, 0.0, 0.5], one) == 0.125
    assert difference(np.zeros(2), np.zeros(2)) == 0
    assert difference(np.array([1.0]), np.array([1e-9]), least=10.0) < 0.11
    assert difference(np.ones(1), np.zeros(1)) == 1
    assert difference(np.zeros(2), np.zeros(3)) == float("inf")
    # What is not finite has to be so on both sides.
    odd = np.array([np.nan, 1.0])
    assert difference(odd, odd) == 0
    assert difference(odd, np.ones(2)) == float("inf")
    assert difference(np.ones(2), odd) == float("inf")
    # Integers that do not fit in their own type's difference.
    big = np.array([2**32 - 1], np.uint32)
    assert difference(np.array([0], np.uint32), big) == 1


def entries(**values):
    return [
        ReportEntry("variable", name, 0, np.asarray(value))
        for name, value in values.items()
    ]


def test_rounding_is_measured_by_its_group():
    ours = entries(kernel=[1.0, 2.0], bias=[1e-9])
    theirs = entries(kernel=[1.0, 2.0], bias=[-1e-9])
    assert differences(ours, theirs) == [0.0, pytest.approx(1e-6)]


def test_the_step_that_tells_most_is_shown():
    found = [ReportEntry("variable", "v", step, np.ones(1)) for step in (0, 2)]
    (row,) = compare(found, [2e-4, 0.5], [1e-6, 0.4], tolerance=1e-5)
    assert (row.difference, row.verdict) == (2e-4, DIFFERS)
    (row,) = compare(found, [2e-6, 0.5], [1e-6, 0.4], tolerance=1e-5)
    assert (row.difference, row.verdict) == (0.5, ROUNDING)


# The command.


def run(*flags, code):
    done = warm.run("towers.parity", *flags)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    assert "retracing" not in done.stderr
    assert "RuntimeWarning" not in done.stderr
    return done


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    input_pipeline.open_source("digits", data_dir=path).prepare()
    return path


@pytest.mark.slow
def test_command_equal(data_dir, tmp_path):
    done = run(
        *("--model=lstm", f"--data_dir={data_dir}", f"--model_dir={tmp_path / 'run'}"),
        *("--num_gpus=3", "--split_ratios=2,3,3", "--parity_steps=2"),
        code=0,
    )
    assert "24\n" in done.stdout, "the table of devices"
    assert "Model lstm, data digits: towers and one device." in done.stdout
    assert "loss        step 2" in done.stdout
    assert done.stdout.endswith("Equal: 3 towers give the numbers of one device.\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_command_on_hosts(tmp_path):
    done = run(
        *("--hosts=2", "--num_gpus=2", "--model=mlp", "--batch_size=14"),
        *("--dataset=synthetic:4x4x1:3:64", "--parity_steps=2"),
        code=0,
    )
    assert "2 hosts: host 0 (" in done.stdout
    assert "Equal: 4 towers give the numbers of one device." in done.stdout


def test_hosts_are_started(monkeypatch):
    started = mock.Mock()
    monkeypatch.setattr(check_flags.os, "execv", started)
    argv = ["towers.parity", "--hosts=2", "--num_gpus=3", "--model=mlp"]
    for environ, count in ({}, 1), ({"TOWERS_HOST_RANK": "0"}, 1):
        found = check_flags.read(argv, "What it is for.", environ)
        assert (found.hosts, started.call_count) == (2, count)
    _, command = started.call_args.args
    assert command[1:] == [
        *("-m", "towers.launch", "--hosts=2", "--num_gpus=3", "--"),
        *("-m", "towers.parity", *argv[1:]),
    ]


@pytest.mark.parametrize(("equal", "code"), [(True, 0), (False, 2)])
def test_what_the_command_compares(monkeypatch, capsys, equal, code):
    found = mock.Mock(equal=equal, __str__=lambda _: "What was found.")
    compares = mock.Mock(return_value=found)
    monkeypatch.setattr(parity_program, "check_parity", compares)
    flags = "--dataset=synthetic:4x4x1:3:64", "--model=mlp", "--batch_size=16"
    settings = read_settings(*flags, "--num_gpus=3", "--split_ratios=2,3,3")
    assert parity_program.check(settings) == code
    out = capsys.readouterr().out
    assert "tower" in out and " 6\n" in out, "the table of devices"
    assert out.endswith(
        "synthetic:4x4x1:3:64: towers and one device.\nWhat was found.\n"
    )
    (model, batches, towers), options = compares.call_args
    assert model.input_shape == (None, 4, 4, 1)
    sizes = [len(labels) for _, labels in batches]
    # The last one is short, and does not divide evenly.
    assert sizes[:-1] == [16, 16] and sizes[-1] < 16 and sizes[-1] % 3
    assert [*towers] == [f"/device:CPU:{i}" for i in range(3)]
    assert options["split_ratios"] == (2, 3, 3)


def test_another_host_that_fails_is_said(monkeypatch, capsys):
    def fails(settings, steps):
        raise HostFailedError("Host 1 has failed.")

    monkeypatch.setattr(parity_program, "check", fails)
    assert parity_program.main(check_flags.Check(model="mlp")) == ending.ANOTHER_FAILED
    assert capsys.readouterr().err == "towers.parity: Host 1 has failed.\n"


def test_the_command_compares_stages_and_tables(monkeypatch):
    compares = mock.Mock(return_value=mock.Mock(equal=True))
    monkeypatch.setattr(parity_program, "check_parity", compares)
    flags = "--dataset=synthetic:4x4x1:3:64", "--model=mlp", "--batch_size=16"
    flags += "--num_gpus=2", "--stages=2", "--placement=.*1=0,.*=1", "--micro_batches=3"
    flags += "--shard_embeddings=rows", "--variable_update=replicated"
    parity_program.check(read_settings(*flags, "--all_reduce_alg=ring"))
    options = compares.call_args.kwargs
    assert options["stages"] == towers.Stages(2, {".*1": 0, ".*": 1})
    assert options["variable_update"] == towers.Replicated("ring")
    assert (options["micro_batches"], options["shard_embeddings"]) == (3, "rows")


def test_command_not_equal(tmp_path):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            from keras import Input, Sequential, layers

            def build(input_shape, num_classes):
                norm = layers.BatchNormalization(name="norm")
                dense = layers.Dense(num_classes)
                return Sequential([Input(input_shape), layers.Flatten(), norm, dense])
            """
        )
    )
    done = run(
        f"--model={tmp_path / 'mine.py'}:build",
        *("--dataset=synthetic:4x4x1:3:64", "--batch_size=16", "--dtype=bf16"),
        code=2,
    )
    assert "\nNot equal.\nDiffers by design: BatchNormalization" in done.stdout
    assert "(norm)" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--split_ratios=1,2,3 --num_gpus=2",
            ["--split_ratios=1,2,3", "2 towers"],
        ),
        slow("--no_such_flag=1", ["no_such_flag", "--help"]),
    ],
)
def test_command_with_bad_input(flags, words):
    done = run("--dataset=synthetic:4x4x1:3:64", "--model=mlp", *flags.split(), code=1)
    (said,) = [x for x in done.stderr.splitlines() if x.startswith("towers.parity: ")]
    for word in words:
        assert word in said


def test_command_help():
    text = run("--help", code=0).stdout
    assert "Exit codes: 0 equal" in text
    assert "  --model " in text
