"""Fused kernels against Keras's own operations."""

import collections
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.variants import slow
from towers.layers import substitutes


class Own(keras.layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return inputs + 1


def _layer(shape=(8, 5, 5, 3), **options):
    make = options.pop("make", keras.layers.BatchNormalization)
    layer = make(**options)
    layer.build((None, *shape[1:]))
    random = np.random.default_rng(0)
    for weight in layer.weights:
        weight.assign(random.uniform(0.5, 1.5, weight.shape))
    x = random.normal(2, 3, shape).astype("float32")
    return layer, tf.cast(x, layer.compute_dtype)


def _step(layer, x):
    """Outputs, gradients and new statistics of one training step."""
    weights = layer.trainable_variables
    state = [(v, tf.convert_to_tensor(v.value)) for v in layer.non_trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(x)
        with keras.StatelessScope(state) as scope:
            outputs = layer(x, training=True)
        target = tf.reduce_sum(tf.sin(tf.cast(outputs, tf.float32)))
    gradients = tape.gradient(target, [x, *(w.value for w in weights)])
    return [
        outputs,
        *gradients,
        *(scope.get_current_value(v) for v, _ in state),
    ]


def _operations(layer, spec):
    with substitutes.batch_normalization():
        traced = tf.function(lambda x: layer(x, training=True))
        graph = traced.get_concrete_function(spec).graph
    return collections.Counter(op.type for op in graph.get_operations())


def _kernels(layer, x):
    return _operations(layer, x)["FusedBatchNormV3"]


class OwnMoments(keras.layers.BatchNormalization):
    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean * 0, variance


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": False},
        {"center": False},
        {"momentum": 0.5, "epsilon": 0.1, "axis": 3},
        {"shape": (1, 7, 1, 2)},
        {"shape": (1, 1, 1, 2)},
    ],
)
def test_the_kernel_gives_keras_numbers(options):
    layer, x = _layer(**options)
    expected = _step(layer, x)
    with substitutes.batch_normalization():
        ours = _step(layer, x)
    assert _kernels(layer, x) == 1
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# The last place of 16 bits, and half of it that may round otherwise.
@pytest.mark.parametrize(("dtype", "eps"), [("float16", 1e-3), ("bfloat16", 8e-3)])
@pytest.mark.parametrize("scale", [1, 3e3])
@pytest.mark.parametrize(
    "how", ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)]
)
def test_images_of_16_bits(dtype, eps, scale, how):
    """They are normalised in float32: squares of large ones overflow in float16."""
    layer, x = _layer(dtype=f"mixed_{dtype}")
    x *= tf.cast(scale, dtype)
    expected = _step(layer, x)

    def step(x):
        with substitutes.batch_normalization():
            return _step(layer, x)

    compiled = tf.function(step, autograph=False, jit_compile=how == "xla")
    ours = step(x) if how == "eager" else compiled(x)
    assert _kernels(layer, x) == 1
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=2 * eps, atol=2 * eps * np.abs(b).max())
    for a, b in zip(ours[-2:], expected[-2:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(("rows", "casts"), [(8, 0), (None, 1)])
def test_the_number_of_values_costs_little(rows, casts):
    """It is a constant where the number of rows is known; or else one copy to a GPU."""
    layer, x = _layer()
    spec = tf.TensorSpec([rows, *x.shape[1:]])
    found = _operations(layer, spec)
    assert (found["Cast"], found["Size"]) == (casts, casts)
    *_, expected = _step(layer, x)
    with substitutes.batch_normalization():
        *_, ours = tf.function(lambda x: _step(layer, x), input_signature=[spec])(x)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"shape": (8, 3)},
        {"axis": 1},
        {"epsilon": 1e-7},
        {"dtype": "float16"},
        {"dtype": "float64"},
        {"trainable": False},
        {"renorm": True},
        {"make": Own},
        {"make": OwnMoments},
    ],
    ids=str,
)
def test_where_it_does_not_fit_the_layer_is_keras_own(options):
    layer, x = _layer(**options)
    expected = layer(x, training=True)
    assert _kernels(layer, x) == 0
    layer, x = _layer(**options)
    with substitutes.batch_normalization():
        np.testing.assert_array_equal(layer(x, training=True), expected)


def test_images_of_another_type_than_the_layer_computes_in_are_keras_own():
    layer, x = _layer(dtype="mixed_float16", autocast=False)
    x = tf.cast(x, tf.float32)
    assert _kernels(layer, x) == 0


def test_inference_and_the_outside_are_keras_own():
    layer, x = _layer()
    with substitutes.batch_normalization():
        inside = layer(x, training=False)
    np.testing.assert_array_equal(inside, layer(x, training=False))
    assert "fused" not in keras.layers.BatchNormalization.call.__module__


def test_a_mask_is_respected():
    layer, x = _layer()
    mask = tf.constant(np.random.default_rng(1).uniform(size=(8, 5, 5)) > 0.5)
    expected = layer(x, training=True, mask=mask)
    layer, x = _layer()
    with substitutes.batch_normalization():
        ours = layer(x, training=True, mask=mask)
    np.testing.assert_array_equal(ours, expected)


class OwnStep(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient)


def _train(optimizer, gradients, dtype="float32", how="graph"):
    """Applies gradients; returns all variables, and how often the kernel is there."""
    start = np.random.default_rng(1).normal(size=(6, 4))
    variable = keras.Variable(start, dtype=dtype)
    optimizer.build([variable])

    def apply(gradient):
        optimizer.apply([gradient], [variable])

    traced = tf.function(apply, jit_compile=how == "xla", autograph=False)
    for gradient in gradients:
        (apply if how == "eager" else traced)(gradient)
    found = [v.numpy() for v in (variable, *optimizer.variables)]
    # With those in branches.
    graph = str(traced.get_concrete_function(gradients[0]).graph.as_graph_def())
    return found, graph.count('op: "ResourceApplyKerasMomentum"')


def _gradients(sparse=False):
    random = np.random.default_rng(2)
    for _ in range(3):
        values = tf.constant(random.normal(size=(6, 4)), tf.float32)
        if sparse:
            yield tf.IndexedSlices(values[:2], tf.constant([1, 4]), tf.constant([6, 4]))
        else:
            yield values


class _OfOne(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return tf.fill([1], 0.1)


MOMENTUM = {
    "plain": {},
    "nesterov": {"nesterov": True},
    "with all": {"weight_decay": 0.1, "clipnorm": 0.5, "use_ema": True},
    "schedule": {
        "learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    },
    "accumulation": {"gradient_accumulation_steps": 2},
}
HOW, SCALED = ("graph", "eager", "xla"), ("", "loss scale")
# Each of them in one way, and some with a loss scale.
QUICK = {
    ("plain", "xla", ""),
    ("nesterov", "eager", "loss scale"),
    ("with all", "graph", ""),
    ("schedule", "graph", "loss scale"),
    ("accumulation", "graph", ""),
}


ADAM = {
    "as it is": (keras.optimizers.Adam, {}),
    "decay": (keras.optimizers.AdamW, {"weight_decay": 0.1, "beta_2": 0.9}),
    "a schedule": (
        keras.optimizers.Adam,
        {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)},
    ),
    "accumulated": (keras.optimizers.Adam, {"gradient_accumulation_steps": 2}),
    "amsgrad": (keras.optimizers.Adam, {"amsgrad": True}),
}


@pytest.mark.parametrize("how", ["dense", "sparse", "float64"])
@pytest.mark.parametrize("which", ADAM)
def test_adam_has_keras_numbers_to_the_last_bit(which, how):
    make, options = ADAM[which]
    gradients, dtype = list(_gradients(sparse=how == "sparse")), "float32"
    if how == "float64":
        dtype = how
        gradients = [tf.cast(each, dtype) for each in gradients]
    options = {"learning_rate": 0.1} | options
    expected, _ = _train(make(**options), gradients, dtype)
    with substitutes.updates():
        ours, _ = _train(make(**options), gradients, dtype)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_adam_computes_once_what_variables_share():
    model = [keras.Variable(np.ones([2, k + 1], "float32")) for k in range(4)]
    optimizer = keras.optimizers.Adam()
    optimizer.build(model)

    @tf.function(autograph=False)
    def twice():
        for _ in range(2):
            optimizer.apply([tf.ones_like(each.value) for each in model])

    with substitutes.updates():
        graph = twice.get_concrete_function().graph
    kinds = collections.Counter(op.type for op in graph.get_operations())
    # The second update is of another step.
    assert kinds["Pow"] == 2 * 2 and kinds["Square"] == 2 * 4


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("options", "how", "scaled"),
    [
        each if each in QUICK else slow(*each)
        for each in itertools.product(MOMENTUM, HOW, SCALED)
    ],
)
def test_momentum_in_one_kernel_gives_keras_numbers(options, how, scaled):
    options = {"learning_rate": 0.1, "momentum": 0.9} | MOMENTUM[options]

    def train():
        optimizer = keras.optimizers.SGD(**options)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 4.0)
        return _train(optimizer, list(_gradients()), how=how)

    expected, none = train()
    with substitutes.updates():
        ours, kernels = train()
    assert (none, kernels) == (0, 1)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "make, options, gradients, dtype",
    [
        (keras.optimizers.SGD, {"momentum": 0.0}, _gradients(), "float32"),
        (keras.optimizers.SGD, {}, _gradients(sparse=True), "float32"),
        (keras.optimizers.SGD, {}, _gradients(), "float64"),
        (keras.optimizers.SGD, {}, (g[:1] for g in _gradients()), "float32"),
        (keras.optimizers.SGD, {"learning_rate": _OfOne()}, _gradients(), "float32"),
        (OwnStep, {}, _gradients(), "float32"),
    ],
    ids=["no momentum", "sparse", "float64", "broadcast", "rate of shape [1]", "own"],
)
def test_where_it_does_not_fit_the_update_is_keras_own(make, options, gradients, dtype):
    options = {"learning_rate": 0.1, "momentum": 0.9} | options
    gradients = list(gradients)
    expected, _ = _train(make(**options), gradients, dtype)
    with substitutes.updates():
        ours, kernels = _train(make(**options), gradients, dtype)
    assert kernels == 0
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_who_has_replaced_the_update_knows_better(monkeypatch):
    seen = []
    monkeypatch.setattr(
        keras.optimizers.SGD, "update_step", lambda *args: seen.append(args)
    )
    with substitutes.updates():
        _, kernels = _train(keras.optimizers.SGD(0.1, 0.9), list(_gradients()))
    assert seen and not kernels
    assert keras.optimizers.SGD.update_step(None) is None, "still theirs"


def test_the_largest_of_integers_is_found_by_keras():
    with substitutes.argmax():
        assert int(keras.ops.argmax(tf.constant([1, 3, 2]))) == 1


# Gradients without arithmetic of shapes.


def _taken(compute, values, specs, rows_of):
    """Gradients of a sum of squares, and how often an operation of each type ran."""

    def step(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            target = tf.reduce_sum(compute(*tensors) ** 2)
        # As while a step is traced: outside, TensorFlow's gradients stay as they are.
        rows = {id(tensor): rows_of[i] for i, tensor in enumerate(tensors)}
        with substitutes.gradients(lambda tensor: rows.get(id(tensor))):
            return tape.gradient(target, tensors)

    function = tf.function(step, autograph=False).get_concrete_function(
        *(tf.TensorSpec(shape) for shape in specs)
    )
    types = collections.Counter(op.type for op in function.graph.get_operations())
    return [tensor.numpy() for tensor in function(*map(tf.constant, values))], types


def _taken_eagerly(compute, values):
    """The same gradients, computed eagerly, where all shapes are known."""
    tensors = [*map(tf.constant, values)]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        target = tf.reduce_sum(compute(*tensors) ** 2)
    return [tensor.numpy() for tensor in tape.gradient(target, tensors)]


def _values(*shapes):
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype("float32") for shape in shapes]


@pytest.mark.parametrize("compute", [tf.add, tf.multiply, tf.math.squared_difference])
@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize(
    ("x", "y"), [((3, 2), (3, 2)), ((3, 1), (3, 2)), ((1, 2), (3, 1)), ((), ())]
)
def test_equal_rows_need_no_arithmetic_of_shapes(compute, rows, x, y):
    values = _values((rows, *x), (rows, *y))
    ours, types = _taken(compute, values, [(None, *x), (None, *y)], [1, 1])
    assert not types["BroadcastGradientArgs"]
    # Of the target, and of each tensor that is repeated.
    assert types["Sum"] == 1 + sum(shape != (3, 2) and shape != () for shape in (x, y))
    for a, b in zip(ours, _taken_eagerly(compute, values), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "specs", "rows_of"),
    [
        # One row may be repeated for all others: nothing is known of it.
        ([(1, 3), (4, 3)], [(None, 3), (None, 3)], [None, 1]),
        # Twice the rows, of a single example.
        ([(1, 3), (2, 3)], [(None, 3), (None, 3)], [1, 2]),
        # Another axis of unknown size, which is 1.
        ([(4, 1), (4, 3)], [(None, None), (None, 3)], [1, 1]),
        ([(4, 3), (4, 1)], [(None, None), (None, None)], [1, 1]),
        # Rows stand at another axis.
        ([(3,), (4, 3)], [(None,), (None, None)], [1, 1]),
    ],
)
def test_unequal_rows_and_unknown_sizes_are_asked_at_run_time(shapes, specs, rows_of):
    values = _values(*shapes)
    ours, types = _taken(tf.multiply, values, specs, rows_of)
    assert types["BroadcastGradientArgs"] == 1
    for a, b in zip(ours, _taken_eagerly(tf.multiply, values), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "y", "rows_of", "asked"),
    [
        ((4, 2, 3), (4, 3, 5), [1, 1], 0),
        ((4, 6, 2, 3), (4, 6, 3, 5), [1, 1], 0),
        ((4, 1, 2, 3), (4, 6, 3, 5), [1, 1], 1),
        ((1, 2, 3), (4, 3, 5), [None, 1], 1),
        ((2, 3), (3, 5), [1, 1], 0),
    ],
)
def test_a_product_of_matrices(x, y, rows_of, asked):
    values, specs = _values(x, y), [(None, *x[1:]), (None, *y[1:])]
    ours, types = _taken(tf.matmul, values, specs, rows_of)
    assert types["BroadcastGradientArgs"] == asked
    for a, b in zip(ours, _taken_eagerly(tf.matmul, values), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(
    ("axis", "counted"),
    [(-1, 0), ([1, 2], 0), ([2, -2], 0), ([], 0), (0, 1), ([0, 1], 1), (None, 1)],
)
def test_a_mean(axis, keepdims, counted):
    def compute(x):
        return tf.reduce_mean(x, axis, keepdims)

    values = _values((4, 3, 2))
    ours, types = _taken(compute, values, [(None, 3, 2)], [1])
    assert types["Prod"] == counted
    np.testing.assert_allclose(ours[0], _taken_eagerly(compute, values)[0], rtol=1e-6)
