"""XLA compiles towers wherever they are, and where it cannot, a line says so.

A tower that XLA compiles may read nothing from another device than its own: in the
table one tower is away from home, where variables, losses and metrics are.
"""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import oracle
from tests.exact import oracle as exact
from tests.exact.cases import CASES
from tests.exact.layouts import alone
from tests.valued import valued
from tests.variants import slow
from towers.builders.builder import Builder
from towers.builders.context import Context
from towers.numerics.errors import NotFiniteStep

pytestmark = pytest.mark.quick_one_in(2)

HOME, AWAY = "/device:CPU:0", "/device:CPU:1"
GROUPS = "losses", "metrics", "state"
# To compile them all takes ten minutes. The quick case has integers. MANY, of another
# group, has losses of several outputs, which are tracked.
QUICK = "state/counter, int64"
MANY = "batches/dict of outputs, each with loss, loss weight, metrics, sample weights"
TABLE = [
    case if str(case) == QUICK else slow(case)
    for case in CASES
    if str(case) == MANY or case.group in GROUPS
    if case.expect != "stateful"  # refused before anything is compiled
]


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_compiled_away_from_home(case):
    built = []

    def wrap(model):
        parallel = towers.multi_gpu_model(
            model, [AWAY], **valued(device=HOME, **case.options)
        )
        built.append(parallel.builder)
        return parallel

    case = dataclasses.replace(
        alone(case),
        name=f"{case.name}, compiled",
        batches=lambda batches=case.batches: batches()[:1],
        compile=lambda compile=case.compile: compile() | {"jit_compile": True},
        between=None,
    )
    found = exact.outcome(case, wrap, later=("evaluate",))
    assert found["verdict"] == "equal", found
    assert built[0].context.facts.compiled


def test_the_named_ones_are_cases():
    assert {QUICK, MANY} <= {str(case) for case in CASES}


@keras.saving.register_keras_serializable("test_xla")
class Scaled(keras.layers.Layer):
    """A layer that reads a variable that is not the model's."""

    scale = tf.Variable(2.0)

    def call(self, x):
        return x * self.scale


def _scaled_error(y, predicted):
    return keras.ops.mean(keras.ops.square(y - predicted), axis=-1) * Scaled.scale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "loss"),
    [([Scaled], "mse"), ([], _scaled_error)],
    ids=["layer", "loss"],
)
def test_what_is_on_another_device_is_compiled(capsys, layers, loss):
    x = np.random.default_rng(0).normal(size=(7, 6)).astype("float32")

    def weights(wrap, **options):
        keras.utils.set_random_seed(7)
        body = [keras.Input((6,)), *[kind() for kind in layers], keras.layers.Dense(1)]
        model = keras.Sequential(body)
        trained = wrap(model)
        trained.compile("sgd", loss, **options)
        trained.train_on_batch(x, x[:, :1])
        return model.get_weights()

    expected = weights(lambda model: model, run_eagerly=True)
    capsys.readouterr()
    built = []

    def wrap(model):
        built.append(towers.multi_gpu_model(model, 2))
        return built[0]

    ours = weights(wrap, jit_compile=True)
    # Home reads the variable, and each tower gets its value.
    assert "XLA cannot compile" not in capsys.readouterr().err
    assert built[0].builder.context.facts.compiled
    assert oracle.largest_difference(ours, expected) < 1e-5


# What a wish for XLA means.


def _dense(**options):
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)], name="dense")
    if options:
        model.compile("sgd", "mse", **options)
    return model


def _batch():
    x = np.random.default_rng(0).normal(size=(7, 6)).astype("float32")
    return x, x[:, :1]


@pytest.fixture
def a_gpu(monkeypatch):
    """A made-up GPU, which is why Keras turns XLA on."""
    found = tf.config.list_physical_devices

    def devices(kind=None):
        gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
        return [*found(kind), *([gpu] if kind in (None, "GPU") else [])]

    monkeypatch.setattr(tf.config, "list_physical_devices", devices)


def _wants_xla(parallel):
    return parallel._self_program.wanted_xla()


@pytest.mark.parametrize(
    ("asked", "of_keras", "ours"),
    [("auto", True, None), slow(True, True, True), (False, False, False)],
)
def test_auto_is_not_what_keras_makes_of_it(a_gpu, asked, of_keras, ours):
    model = _dense()
    parallel = towers.multi_gpu_model(model, ["cpu:0", "cpu:1"])
    parallel.compile("sgd", "mse", jit_compile=asked)
    assert model.jit_compile is of_keras
    assert _wants_xla(parallel) is ours
    assert parallel.builder.xla is bool(ours)
    parallel.train_on_batch(*_batch())
    assert parallel.builder.context.facts.compiled is bool(ours)


def test_a_wish_that_keras_has_decided_for_itself(a_gpu, capsys):
    for asked, ours in ((False, False), ("auto", None), (True, None)):
        capsys.readouterr()
        before = towers.multi_gpu_model(_dense(jit_compile=asked), ["cpu:0"])
        assert _wants_xla(before) is ours
        said = capsys.readouterr().err
        assert ("so the towers go without" in said) is (asked is not False)
    # What is said later counts.
    before.jit_compile = True
    before.train_on_batch(*_batch())
    assert before.builder.context.facts.compiled


def test_a_wish_where_keras_has_no_reason_of_its_own():
    for asked in (False, True):
        before = towers.multi_gpu_model(_dense(jit_compile=asked), ["cpu:0"])
        assert _wants_xla(before) is asked


def test_evaluation_is_not_compiled_around_towers(monkeypatch):
    parallel = towers.multi_gpu_model(_dense(), ["cpu:0", "cpu:1"])
    parallel.compile("sgd", "mse", jit_compile=True)
    compiled, function = [], tf.function

    def noted(*args, **kwargs):
        compiled.append(kwargs.get("jit_compile"))
        return function(*args, **kwargs)

    monkeypatch.setattr(tf, "function", noted)
    parallel.evaluate(*_batch(), verbose=0)
    parallel.predict(_batch()[0], verbose=0)
    assert compiled and not any(compiled)
    assert parallel.__wrapped__.jit_compile


def test_the_model_compiled_by_itself_later_forgets_the_wish():
    parallel = towers.multi_gpu_model(_dense(), ["cpu:0"])
    parallel.compile("sgd", "mse", jit_compile=True)
    parallel.__wrapped__.compile("sgd", "mse", jit_compile=False)
    parallel.train_on_batch(*_batch())
    assert not parallel.builder.xla


# As TensorFlow says it where libdevice or ptxas are missing, or memory.
FAILURES = [
    tf.errors.InternalError(None, None, "libdevice not found at ./libdevice.10.bc"),
    tf.errors.NotFoundError(None, None, "Couldn't find a suitable version of ptxas"),
    tf.errors.UnknownError(None, None, "Failed to load in-memory CUBIN"),
    tf.errors.ResourceExhaustedError(None, None, "Out of memory while trying"),
    tf.errors.UnimplementedError(None, None, ""),
]


@functools.cache
def _expected():
    """Weights after the same step without XLA."""
    parallel = towers.multi_gpu_model(model := _dense(), 2)
    parallel.compile("sgd", "mse", jit_compile=False)
    parallel.train_on_batch(*_batch())
    return model.get_weights()


def _trained(monkeypatch, train_function, **options):
    """Trains a model for a step, as a builder's `train_function` does it."""
    model = _dense()
    with monkeypatch.context() as patched:
        patched.setattr(Builder, "train_function", train_function)
        parallel = towers.multi_gpu_model(model, 2)
        parallel.compile("sgd", "mse", **options)
        parallel.train_on_batch(*_batch())
    return parallel, model.get_weights()


def _behind_a_step(error, fails, says=lambda builder: None):
    """Makes a `train_function` that raises an error if `fails` of the builder."""
    make = Builder.train_function

    def train_function(self, scope):
        function = make(self, scope)

        def call(iterator):
            logs = function(iterator)
            says(self)
            if fails(self):
                raise error
            return logs

        return call

    return train_function


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [FAILURES[0], *map(slow, FAILURES[1:])],
    ids=lambda error: type(error).__name__,
)
def test_whatever_fails_with_xla_goes_on_without(monkeypatch, capsys, error):
    expected = _expected()
    capsys.readouterr()
    fails = _behind_a_step(error, lambda builder: builder.xla)
    parallel, ours = _trained(monkeypatch, fails, jit_compile=True)
    assert oracle.largest_difference(ours, expected) == 0
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "XLA" in x]
    assert line == (
        "towers: XLA cannot compile model 'dense', which goes on without: "
        f"{error.message or 'UnimplementedError'}"
    )
    assert not (parallel.builder.xla or parallel.builder.context.facts.compiled)


@pytest.mark.parametrize("asked", [slow(True), "auto"])
def test_the_update_is_fallen_back_from_by_itself(monkeypatch, capsys, asked):
    monkeypatch.setattr(
        Context,
        "compiles_update",
        property(lambda self: self.facts.asked_xla is not False),
    )
    tried, expected = [], _expected()
    capsys.readouterr()
    fails = _behind_a_step(
        FAILURES[0],
        lambda builder: builder.compiles_update,
        lambda builder: tried.append(builder.context.facts.asked_xla),
    )
    _, ours = _trained(monkeypatch, fails, jit_compile=asked)
    assert tried == ([True, None, False] if asked is True else [None, False])
    assert oracle.largest_difference(ours, expected) == 0
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "XLA" in x]
    what = "model" if asked is True else "the update of model"
    assert line.startswith(
        f"towers: XLA cannot compile {what} 'dense', which goes on without"
    )


@pytest.mark.parametrize(
    ("error", "ways"),
    [
        # One of the model's own is there without XLA, too.
        (FAILURES[0], [True, False]),
        (tf.errors.OutOfRangeError(None, None, "End of sequence"), [True]),
    ],
    ids=["an error", "the end of the data"],
)
def test_what_is_none_of_xla_is_raised(monkeypatch, capsys, error, ways):
    tried = []

    def train_function(self, scope):
        def call(iterator):
            tried.append(self.xla)
            raise error

        return call

    with pytest.raises(type(error), match=error.message):
        _trained(monkeypatch, train_function, jit_compile=True)
    assert tried == ways
    assert "XLA" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_none_of_xla(tmp_path):
    model = _dense()
    parallel = towers.multi_gpu_model(model, 2, check_numerics=True)
    parallel.compile("sgd", "mse", jit_compile=True)
    x, y = _batch()
    with pytest.raises(NotFiniteStep):
        parallel.train_on_batch(x, y * np.nan)
    assert parallel.builder.xla
