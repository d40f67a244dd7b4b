"""Preprocessing on the towers: where it runs, what travels, and what is refused.

That it gives the numbers of one device is shown by tests/exact.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import executed
from tests.exact import preprocessed
from tests.exact.cases import OUTPUTS
from tests.exact.layouts import Layout
from tests.exact.preprocessed import scale
from tests.valued import valued
from tests.variants import slow
from towers import input_pipeline, multi_gpu_model
from towers.model import auto
from towers.tower.preprocess import OnEachTower

pytestmark = pytest.mark.quick_one_in(2)

# Three batches; the last one leaves towers idle.
ROWS, BATCH = 25, 12
BUILDERS = ["parameter_server", "replicated"]
_numbers = itertools.count(2000)


def _data(rows=ROWS):
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (rows, 3, 3, 1)).astype("uint8")
    return x, random.integers(0, OUTPUTS, rows)


def _batches(*arrays):
    # Keras would trace anew how to cut arrays.
    return tf.data.Dataset.from_tensor_slices(arrays or _data()).batch(BATCH)


def _numpy(x, y, training):
    x, y = scale(x, y, training)
    return x.numpy(), y.numpy()


def _model(name=None, built=True):
    keras.utils.set_random_seed(7)
    layers = [keras.Input((3, 3, 1))] if built else []
    layers += [keras.layers.Flatten(), keras.layers.Dense(8, "tanh")]
    layers.append(keras.layers.Dense(OUTPUTS, "softmax"))
    return keras.Sequential(layers, name=name)


def _compiled(model, metric="sparse_categorical_accuracy"):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "categorical_crossentropy", metrics=[metric])
    return model


@pytest.mark.slow
def test_ways_that_are_tried_preprocess_too(monkeypatch):
    monkeypatch.setattr(auto, "_ROUND_S", 0.0)
    case = next(case for case in preprocessed.CASES if case.name == "validation")
    assert Layout("auto").outcome(case)["verdict"] == "equal"


@pytest.mark.parametrize("prefetch", [2, 0])
@pytest.mark.slow
def test_asynchronous_towers_learn(prefetch):
    options = {"variable_update": "asynchronous", "prefetch": prefetch}
    model = _model()
    parallel = multi_gpu_model(model, 3, preprocess=scale, **options)
    history = _compiled(parallel).fit(_batches(), epochs=20, shuffle=False, verbose=0)
    # The third batch has one example.
    assert int(parallel.optimizer.iterations) == 20 * 7
    weights = [np.ravel(weight) for weight in model.get_weights()]
    assert np.isfinite(np.concatenate(weights)).all()
    losses = history.history["loss"]
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow
@pytest.mark.parametrize("first", ["fit", "predict", "evaluate"])
def test_a_model_is_built_for_what_it_will_see(first):
    x, y = _data()
    model = _model(built=False)
    parallel = multi_gpu_model(model, gpus=2, preprocess=scale)
    _compiled(parallel, "accuracy")
    data = _batches(x) if first == "predict" else _batches()
    options = {"shuffle": False} if first == "fit" else {}
    getattr(parallel, first)(data, verbose=0, **options)
    assert model.input_shape == (None, 3, 3, 1) or model.inputs[0].dtype == "float32"
    logs = parallel.test_on_batch(x, y, return_dict=True)
    labels = model(_numpy(x, y, False)[0]).numpy().argmax(-1)
    # Of classes, and not of what the loss sees.
    np.testing.assert_allclose(logs["accuracy"], np.mean(labels == y), rtol=1e-6)


# Examples that meet, and random numbers.


def test_examples_that_are_mixed_are_those_of_the_whole_batch():
    def mixed(x, y, training):
        x, y = scale(x, y, training)
        return (x + x[::-1]) / 2, (y + y[::-1]) / 2

    x, y = _data(20)
    plain, model = _model(), _model()
    _compiled(plain, "mae").train_on_batch(*mixed(x, y, True))
    parallel = multi_gpu_model(model, gpus=2, preprocess=mixed)
    _compiled(parallel).train_on_batch(x, y)
    assert parallel.loss_placement == "gathered"
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("update", BUILDERS)
def test_towers_mix_their_own_rows(update, capsys):
    mix = input_pipeline.Mix(2, 0.4, 1.0)
    draw = np.random.default_rng(2)
    scaled = draw.uniform(size=(20, 3, 1, 1)).astype("float32")
    labels = draw.integers(0, 2, 20)
    halves = zip(tf.split(scaled, 2), tf.split(labels, 2), strict=True)
    parts = [mix(*half) for half in halves]
    x, y = (np.concatenate(each) for each in zip(*parts, strict=True))

    def made():
        keras.utils.set_random_seed(4)
        flat = keras.layers.Flatten()
        return keras.Sequential([keras.Input((3, 1, 1)), flat, keras.layers.Dense(2)])

    plain, model = made(), made()
    plain.compile("sgd", "mse")
    plain.train_on_batch(x, y)
    own = OnEachTower(mix)
    parallel = multi_gpu_model(
        model,
        gpus=2,
        preprocess=lambda x, y, training: own(x, y),
        variable_update=update,
    )
    parallel.compile("sgd", "mse", jit_compile=False)
    parallel.train_on_batch(scaled, labels)
    assert parallel.loss_placement == "tower"
    assert "one device" not in capsys.readouterr().err
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_towers_draw_differently_and_repeat_with_the_seed():
    def noise(x, y, training):
        return tf.random.uniform(tf.shape(x)), y

    def drawn(seed):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Identity()])
        parallel = multi_gpu_model(model, gpus=2, preprocess=noise)
        x = np.zeros((8, 3), "float32")
        return parallel.predict(x, batch_size=4, verbose=0).reshape(4, 2, 3)

    shares = drawn(3)
    for one, other in itertools.combinations(shares, 2):
        assert not np.array_equal(one, other)
    np.testing.assert_array_equal(drawn(3), shares)
    assert not np.array_equal(drawn(4), shares)


# What travels, and what stays as it is.


def _executed(builder, home):
    name = f"preprocess_{next(_numbers)}"
    towers = ["/device:CPU:1", "/device:CPU:2"]
    model = _model(name)
    parallel = multi_gpu_model(
        model,
        gpus=towers,
        **valued(builder, device=home, preprocess=scale),
    )
    _compiled(parallel)
    nodes = executed.run(lambda: parallel.train_on_batch(*_data(BATCH)), name)
    return nodes, towers


@pytest.mark.parametrize(
    ("builder", "home"),
    [("parameter_server", "/device:CPU:3"), slow("replicated", None)],
    ids=BUILDERS,
)
def test_images_travel_in_8_bits(builder, home):
    nodes, towers = _executed(builder, home)
    for tower in towers:
        received = [
            (dtype, name)
            for source, target, dtype, name in executed.transfers(nodes)
            if target == tower and source == "/device:CPU:0"
        ]
        assert tf.uint8 in [dtype for dtype, _ in received]
        floats = [name for dtype, name in received if dtype == tf.float32]
        # Sizes over sizes, and sums of gradients.
        assert not [name for name in floats if "place" in name or "preprocess" in name]
        casts = [n for n in nodes[tower] if n.op == "Cast" and "preprocess" in n.name]
        assert any(n.attr["SrcT"].type == tf.uint8.as_datatype_enum for n in casts)
    # Only labels come back.
    sent = [
        name
        for source, target, dtype, name in executed.transfers(nodes)
        if source in towers and target not in towers and dtype == tf.uint8
    ]
    assert not sent


@pytest.mark.slow
def test_what_is_saved_is_the_model(tmp_path):
    model = _model()
    parallel = multi_gpu_model(model, gpus=2, preprocess=scale)
    _compiled(parallel)
    x, y = _data()
    parallel.train_on_batch(x, y)
    parallel.save(tmp_path / "model.keras")
    seen = _numpy(x, y, False)[0]
    opened = keras.models.load_model(tmp_path / "model.keras")
    expected = parallel.predict_on_batch(x)
    for outputs in (opened(seen), model.predict_on_batch(seen), parallel(seen)):
        np.testing.assert_allclose(outputs, expected, rtol=1e-5)


# Errors.


@pytest.mark.parametrize("wrong", [3, "cast"])
def test_it_is_a_function(wrong):
    with pytest.raises(ValueError, match=f"Received preprocess={wrong!r}; expected"):
        multi_gpu_model(_model(), gpus=2, preprocess=wrong)


def _static(x, y, training):
    return scale(x + tf.zeros([x.shape[0], 1, 1, 1], tf.uint8), y, training)


class _Drawing:
    """Draws as Keras's layers do."""

    def __init__(self):
        self.seeds = keras.random.SeedGenerator(3)

    def __call__(self, x, y, training):
        x, y = scale(x, y, training)
        return x + keras.random.uniform(tf.shape(x), seed=self.seeds), y


_WRONG = {
    "x": (
        lambda: lambda x, y, training: scale(x, y, training)[0],
        "returned a .*pair",
    ),
    "none": (lambda: lambda x, y, training: None, "returned a NoneType; expected the"),
    "three": (lambda: lambda x, y, training: (x, y, y), "a tuple of 3; expected the"),
    "x rows": (lambda: lambda x, y, training: scale(x[1:], y, training), "as many"),
    "y rows": (lambda: lambda x, y, training: scale(x, y[::2], training), "as many"),
    # Where the number is not known while the step is traced, a layer or a metric may
    # stumble first.
    "x rows, later": (
        lambda: lambda x, y, training: scale(x[1:], y, training),
        r"as many|shapes: \[7\] vs. \[8\]|logits_size=\[7,3\] labels_size=\[8,3\]",
    ),
    "y rows, later": (
        lambda: lambda x, y, training: scale(x, y[::2], training),
        r"as many|shapes: \[8\] vs. \[4\]|logits_size=\[8,3\] labels_size=\[4,3\]",
    ),
    "static": (lambda: _static, "number of examples, as towers do; .*write tf.shape"),
    "assigns": (_Drawing, "`preprocess` changes .*AssignVariableOp.*tf.random"),
}


@pytest.mark.parametrize(
    ("batched", "wrong"),
    [
        *((True, wrong) for wrong in _WRONG if "later" not in wrong),
        (False, "x"),
        *(slow(False, wrong) for wrong in [*_WRONG][1:] if "rows" not in wrong),
        slow(False, "x rows, later"),
        slow(False, "y rows, later"),
    ],
)
def test_what_is_wrong_is_said(batched, wrong):
    make, message = _WRONG[wrong]
    parallel = multi_gpu_model(_model(), gpus=2, preprocess=make())
    _compiled(parallel)
    x, y = _data(8)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=message):
        if batched:
            parallel.train_on_batch(x, y)
        else:
            parallel.fit(x, y, verbose=0)
