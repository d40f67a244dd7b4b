"""`GradientTowers` with a copy of the variables on each device."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import executed, oracle
from tests.variants import slow
from towers.layers.variables import digest
from towers.partition.functions import variable_copies

pytestmark = pytest.mark.quick_one_in(2)

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=[7, 4]).astype("float32")
Y = RANDOM.normal(size=[7, 1]).astype("float32")
ENDS = 7, 4, 1, 2, 7
replicated = functools.partial(towers.GradientTowers, variable_update="replicated")


def _model():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *layers])


def _adam():
    # A larger epsilon: else, gradients near zero are enlarged.
    return keras.optimizers.Adam(0.01, epsilon=1e-4)


class _Plain:
    """The same loop on one device, without our code."""

    def __init__(self, loss_fn, variables):
        self._loss_fn, self._variables = loss_fn, variables

    def __call__(self, *batch):
        with tf.GradientTape() as tape:
            loss = self._loss_fn(*batch)
        return loss, tape.gradient(loss, self._variables), None

    def apply(self, optimizer, gradients):
        optimizer.apply(gradients, self._variables)


def _mean_square(model, x, y):
    return tf.reduce_mean((model(x) - y) ** 2)


def _trained(make, between=lambda model, optimizer, step, gradients: gradients):
    """Trains a model for some steps; returns its weights."""
    model = _model()
    step = make(functools.partial(_mean_square, model), model.trainable_variables)
    optimizer = _adam()
    for end in ENDS:
        _, gradients, _ = step(X[:end], Y[:end])
        gradients = between(model, optimizer, step, gradients)
        step.apply(optimizer, gradients)
    return [variable.numpy() for variable in model.variables]


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["auto", "cpu", "device", "ring"])
def test_a_loop_equals_one_device(gpus, algorithm):
    make = functools.partial(replicated, gpus=gpus, all_reduce_alg=algorithm)
    assert oracle.largest_difference(_trained(make), _trained(_Plain)) < 1e-5


def _exchanged(model, optimizer, step, gradients):
    """Two rows of a matrix change places; the sum of all numbers does not change."""
    kernel = model.trainable_variables[0]
    kernel.assign(kernel.numpy()[::-1])
    return gradients


def _negated(model, optimizer, step, gradients):
    for variable in model.trainable_variables:
        variable.assign(-variable)
    return gradients


def _perturbed(model, optimizer, step, gradients):
    """Sharpness-aware: a step elsewhere, and back."""
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable.assign_add(0.1 * gradient)
    _, there, _ = step(X, Y)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable.assign_sub(0.1 * gradient)
    return there


def _clipped(model, optimizer, step, gradients):
    return tf.clip_by_global_norm(gradients, 0.1)[0]


def _one_clipped(model, optimizer, step, gradients):
    return [gradients[0], tf.clip_by_norm(gradients[1], 0.01), *gradients[2:]]


def _summed(model, optimizer, step, gradients):
    _, more, _ = step(X[2:], Y[2:])
    return [a + b for a, b in zip(gradients, more, strict=True)]


def _slower(model, optimizer, step, gradients):
    optimizer.learning_rate = float(optimizer.learning_rate) / 2
    return gradients


def _twice(model, optimizer, step, gradients):
    step.apply(optimizer, gradients)
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    "between",
    [_exchanged, _perturbed, _one_clipped, _slower]
    + [*map(slow, [_negated, _twice, _clipped, _summed])],
)
def test_what_a_loop_does_between_its_lines(between):
    make = functools.partial(replicated, gpus=3)
    found, wanted = _trained(make, between), _trained(_Plain, between)
    assert oracle.largest_difference(found, wanted) < 1e-5


def _alternating(make):
    """A generator's and a discriminator's optimizers take turns, in a tf.function."""
    model = _model()
    first, second = model.layers[0].trainable_variables, model.layers[1:]
    second = second[0].trainable_variables
    loss_fn = functools.partial(_mean_square, model)
    steps = make(loss_fn, first), make(lambda *batch: -loss_fn(*batch), second)
    of_both = keras.optimizers.SGD(0.1, momentum=0.9), _adam()
    for optimizer, mine in zip(of_both, (first, second), strict=True):
        optimizer.build(mine)

    @tf.function
    def train(x, y):
        for step, optimizer in zip(steps, of_both, strict=True):
            step.apply(optimizer, step(x, y)[1])

    for end in ENDS:
        train(tf.constant(X[:end]), tf.constant(Y[:end]))
    return [variable.numpy() for variable in model.variables]


@pytest.mark.slow
def test_two_of_them_within_a_function():
    """What one of them updates, the other one reads at home."""
    found = _alternating(functools.partial(replicated, gpus=2))
    assert oracle.largest_difference(found, _alternating(_Plain)) < 1e-5


def _of_all_kinds(make, optimizer):
    """A table, a variable of TensorFlow's own, and one that the loss ignores."""
    keras.utils.set_random_seed(1)
    table = keras.layers.Embedding(5, 4)
    table.build()
    scale, unused = tf.Variable(tf.ones([4])), tf.Variable(1.0)
    every = [*table.trainable_variables, scale, unused]

    def loss_fn(ids):
        return tf.reduce_mean(tf.reduce_sum(table(ids) * scale, -1) ** 2)

    step, optimizer = make(loss_fn, every), optimizer()
    optimizer.build(every)
    for end in ENDS:
        _, gradients, _ = step(np.arange(end) % 5)
        step.apply(optimizer, gradients)
    return [tf.convert_to_tensor(each).numpy() for each in every]


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        _adam,
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.LossScaleOptimizer(_adam()),
        lambda: keras.optimizers.Adam(0.01, epsilon=1e-4, use_ema=True),
        keras.optimizers.Lamb,
    ],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_variables_of_all_kinds(optimizer):
    found = _of_all_kinds(functools.partial(replicated, gpus=2), optimizer)
    assert oracle.largest_difference(found, _of_all_kinds(_Plain, optimizer)) < 1e-5


@pytest.mark.slow
def test_sums_travel_in_a_ring():
    """And variables do not: what is in the branch runs only if a copy differs."""
    model = _model()
    made = functools.partial(_mean_square, model)
    step = replicated(made, model.trainable_variables, gpus=3, all_reduce_alg="ring")
    optimizer = _adam()
    step.apply(optimizer, step(X, Y).gradients)

    @tf.function(autograph=False)
    def train(x, y):
        with tf.name_scope("train_in_a_ring"):
            step.apply(optimizer, step(x, y).gradients)

    nodes = executed.run(lambda: train(X, Y), "train_in_a_ring")
    sent = [each for each in executed.transfers(nodes) if "cond" not in each[-1]]
    counts = collections.Counter(
        (source[-5:], target[-5:])
        for source, target, dtype, name in sent
        if dtype is tf.float32 and name not in ("x", "y")
    )
    # A part of the gradients, and the sum of another part, in each direction.
    assert set(counts.values()) == {2} and len(counts) == 6


def test_copies_that_are_alike_are_left_alone(monkeypatch):
    told = []
    original = variable_copies.packing.broadcast

    def broadcast(*given):
        # In the branch that TensorFlow takes if a copy differs.
        tf.py_function(lambda: told.append(1), [], [])
        original(*given)

    monkeypatch.setattr(variable_copies.packing, "broadcast", broadcast)
    model, optimizer = _model(), _adam()
    made = functools.partial(_mean_square, model)
    step = replicated(made, model.trainable_variables, gpus=2)
    for _ in range(3):
        step.apply(optimizer, step(X, Y).gradients)
    assert not told
    model.layers[0].bias.assign_add(tf.ones([8]))
    for _ in range(2):
        step.apply(optimizer, step(X, Y).gradients)
    # Of the variables, and of the optimizer's.
    assert len(told) == 2


class Around(keras.optimizers.Optimizer):
    """Wraps an optimizer, has noise, and counts; of this, no optimizer tells."""

    def __init__(self, inner):
        super().__init__(1.0)
        self.inner, self.noise = inner, keras.random.SeedGenerator(3)
        self.applied = tf.Variable(0.0, trainable=False)

    def build(self, variables):
        super().build(variables)
        self.inner.build(variables)

    def apply(self, grads, trainable_variables=None):
        self.applied.assign_add(1.0)
        grads = [
            g + 0.01 * self.applied * keras.random.normal(g.shape, seed=self.noise)
            for g in grads
        ]
        self.inner.apply(grads, trainable_variables)


def _around(make):
    model, optimizer = _model(), Around(_adam())
    step = make(functools.partial(_mean_square, model), model.trainable_variables)
    optimizer.build(model.trainable_variables)
    for end in ENDS:
        step.apply(optimizer, step(X[:end], Y[:end])[1])
    state = optimizer.applied.numpy(), optimizer.noise.state.numpy()
    return [*(variable.numpy() for variable in model.variables), *state]


@pytest.mark.slow
def test_what_an_optimizer_does_not_list_changes_once():
    found = _around(functools.partial(replicated, gpus=3))
    assert oracle.largest_difference(found, _around(_Plain)) < 1e-5


def _halves(make):
    """An optimizer averages the weights of two models, and one of them is updated."""
    model = _model()
    halves = [layer.trainable_variables for layer in model.layers]
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)
    optimizer.build(model.trainable_variables)
    loss_fn = functools.partial(_mean_square, model)
    steps = [make(loss_fn, half) for half in halves]
    for end in ENDS:
        for step in steps:
            step.apply(optimizer, step(X[:end], Y[:end])[1])
    return [variable.numpy() for variable in model.variables]


@pytest.mark.slow
def test_averages_of_variables_that_have_no_copy():
    found = _halves(functools.partial(replicated, gpus=2))
    assert oracle.largest_difference(found, _halves(_Plain)) < 1e-5


@pytest.mark.parametrize("update", ["parameter_server", "replicated"])
@pytest.mark.parametrize(
    "name",
    ["momentum", slow("clipnorm"), slow("nesterov"), slow("learning_rate")],
)
def test_settings_that_change_between_updates(name, update):
    value = {"momentum": 0.5, "clipnorm": 0.1, "nesterov": True}.get(
        name, keras.optimizers.schedules.CosineDecay(0.1, 9)
    )

    def trained(make):
        model = _model()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        step = make(functools.partial(_mean_square, model), model.trainable_variables)
        optimizer.build(model.trainable_variables)
        for k, end in enumerate(ENDS):
            if k == 2:
                setattr(optimizer, name, value)
            step.apply(optimizer, step(X[:end], Y[:end])[1])
        return [variable.numpy() for variable in model.variables]

    make = functools.partial(towers.GradientTowers, gpus=2, variable_update=update)
    assert oracle.largest_difference(trained(make), trained(_Plain)) < 1e-5


def test_a_learning_rate_that_changes_renews_no_copies():
    model, optimizer = _model(), _adam()
    made = functools.partial(_mean_square, model)
    step = replicated(made, model.trainable_variables, gpus=2)
    for k in range(4):
        optimizer.learning_rate = 0.01 / (k + 1)
        step.apply(optimizer, step(X, Y).gradients)
    (update,) = step._updates.values()
    assert int(step._copies.renewals) == int(update._state.renewals) == 0


# Of these, a digest that added products of bits did not tell the first two apart.
_POSITIVE = tf.random.stateless_uniform([10, 6, 10, 4, 16], [1, 2], 0.001, 0.01)
_VALUES = {
    "another order": ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]),
    "evenly spaced": ([1, 5, 3], [3, 1, 5]),
    "another sign": ([1.0, 1.0], [-1.0, -1.0]),
    "minus zero": ([0.0], [-0.0]),
    "rows": ([[1.0, 2.0], [3.0, 4.0]], [[3.0, 4.0], [1.0, 2.0]]),
    "columns": ([[1.0, 2.0], [3.0, 4.0]], [[2.0, 1.0], [4.0, 3.0]]),
    "both": ([[1.0, 2.0], [2.0, 1.0]], [[2.0, 1.0], [1.0, 2.0]]),
    "transposed": ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 3.0], [2.0, 4.0]]),
    "truth": ([True, False], [False, True]),
    "all of one sign": (_POSITIVE, -_POSITIVE),
    "twice as much": (_POSITIVE, 2 * _POSITIVE),
}


@pytest.mark.parametrize("name", _VALUES)
def test_a_digest_tells_values_apart(name):
    one, other = map(tf.constant, _VALUES[name])
    kinds = [one.dtype]
    if one.dtype is tf.float32:
        kinds += [tf.float16, tf.bfloat16, tf.float64, tf.complex64, tf.complex128]
    for kind in kinds:
        pair = [tf.cast(each, kind) for each in (one, other)]
        digests = [int(digest([each])) for each in pair]
        assert digests[0] != digests[1], kind
        again = int(digest([tf.identity(pair[0])]))
        assert again == digests[0]


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_a_digest_of_small_floats(kind):
    kind = getattr(tf.dtypes.experimental, kind)
    pair = [tf.cast(tf.constant(each), kind) for each in ([1.0, 2.0], [2.0, 1.0])]
    assert int(digest(pair[:1])) != int(digest(pair[1:]))


def test_a_digest_tells_variables_apart():
    one, other = tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])
    digests = {int(digest(each)) for each in ([one, other], [other, one])}
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"variable_update": "asynchronous"},
            "Received variable_update='asynchronous'",
        ),
        ({"all_reduce_alg": "ring"}, "with variable_update='parameter_server'"),
        (
            {"variable_update": "replicated", "all_reduce_alg": "rong"},
            "expected one of",
        ),
        ({"variable_update": "replicated", "all_reduce_alg": "nccl"}, "NCCL needs"),
    ],
)
def test_what_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        towers.GradientTowers(tf.reduce_mean, [tf.Variable(1.0)], 2, **given)


@pytest.mark.parametrize(
    "variable",
    [
        tf.Variable("text", name="given"),
        tf.Variable(1.0, shape=tf.TensorShape(None), name="given"),
        tf.Variable([1.0], shape=[None], name="given"),
    ],
)
def test_variables_that_cannot_be_copied_are_refused(variable):
    with pytest.raises(ValueError, match=r"variable 'given:0' of shape .*; expected"):
        replicated(tf.reduce_mean, [variable], gpus=2)


def test_what_is_no_optimizer_is_refused():
    step = replicated(lambda x: tf.reduce_mean(x), [tf.Variable(1.0)], gpus=2)
    with pytest.raises(ValueError, match="Received 'adam' as the optimizer"):
        step.apply("adam", [tf.constant(1.0)])


def test_variables_elsewhere_are_refused():
    with tf.device("/device:CPU:1"):
        elsewhere = tf.Variable(1.0, name="elsewhere")
    with pytest.raises(
        ValueError, match=r"'elsewhere:0' on /device:CPU:1; expected all"
    ):
        replicated(tf.reduce_mean, [tf.Variable(1.0), elsewhere], ["/cpu:0", "/cpu:1"])


@pytest.mark.slow
@pytest.mark.parametrize("of_state", [True, False])
def test_a_loop_that_goes_back(of_state):
    """Weights are given back, as from a checkpoint; so is the optimizer's state."""
    kept = []

    def between(model, optimizer, step, gradients):
        given_back = [*model.trainable_variables]
        given_back += optimizer.variables if of_state else []
        if not kept:
            step.apply(optimizer, gradients)
            kept.extend(variable.numpy() for variable in given_back)
        elif len(kept) == len(given_back):
            for variable, value in zip(given_back, kept, strict=True):
                variable.assign(value)
            kept.append("given back")
        return gradients

    found = _trained(functools.partial(replicated, gpus=2), between)
    kept.clear()
    assert oracle.largest_difference(found, _trained(_Plain, between)) < 1e-5


@pytest.mark.slow
def test_slots_alone_are_assigned():
    """The copies compute another update, which the next step notices."""

    def between(model, optimizer, step, gradients):
        for variable in optimizer.variables:
            if variable.shape:
                variable.assign(tf.ones_like(variable.value))
        return gradients

    found = _trained(functools.partial(replicated, gpus=2), between)
    assert oracle.largest_difference(found, _trained(_Plain, between)) < 1e-5
