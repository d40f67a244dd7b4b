"""What towers do to their shares first: as plain Keras on data preprocessed before."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import executed, oracle
from tests.variants import slow
from towers import multi_gpu_model
from towers.model.update import auto

pytestmark = pytest.mark.quick_one_in(2)

CLASSES = 4
# Three batches; the last one leaves towers idle.
ROWS, BATCH = 25, 12
BUILDERS = ["parameter_server", "replicated"]
_numbers = itertools.count(2000)


def _data(rows=ROWS):
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (rows, 3, 3, 1)).astype("uint8")
    return x, random.integers(0, CLASSES, rows)


def _batches(*arrays):
    # Keras would trace anew how to cut arrays.
    return tf.data.Dataset.from_tensor_slices(arrays or _data()).batch(BATCH)


def _scale(x, y, training):
    """From bytes and labels to what the model and its loss take."""
    x = tf.cast(x, tf.float32) / 127.5 - 1 + (0.25 if training else 0)
    return x, None if y is None else tf.one_hot(tf.cast(y, tf.int32), CLASSES)


def _numpy(x, y, training):
    x, y = _scale(x, y, training)
    return x.numpy(), y.numpy()


def _model(name=None, synchronized=False, built=True):
    keras.utils.set_random_seed(7)
    layers = [keras.Input((3, 3, 1))] if built else []
    layers += [keras.layers.Flatten(), keras.layers.Dense(8, "tanh")]
    if synchronized:
        layers.append(keras.layers.BatchNormalization(synchronized=True))
    layers.append(keras.layers.Dense(CLASSES, "softmax"))
    return keras.Sequential(layers, name=name)


def _compiled(model, metric, **options):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    options = {"loss": "categorical_crossentropy"} | options
    model.compile(optimizer, metrics=[metric], **options)
    return model


def _values(history):
    # Keras orders losses and metrics by name, and the metrics differ in theirs.
    names = [name.replace("sparse_", "") for name in history]
    return [value for _, value in sorted(zip(names, history.values(), strict=True))]


@functools.cache
def _plain(synchronized=False):
    """What Keras makes of data that is preprocessed before."""
    model = _model(synchronized=synchronized)
    _compiled(model, "categorical_accuracy", run_eagerly=True)
    seen, test = (_batches(*_numpy(*_data(), training)) for training in (True, False))
    history = model.fit(
        seen, epochs=2, shuffle=False, validation_data=test, verbose=0
    ).history
    outputs = model.predict(test, verbose=0)
    return [*model.get_weights(), *_values(history), outputs]


def _ours(model, towers, epochs=2, options=None, evaluated=False, **compiled):
    """What towers make of it: weights and what is trained, then what is evaluated."""
    parallel = multi_gpu_model(model, towers, preprocess=_scale, **(options or {}))
    _compiled(parallel, "sparse_categorical_accuracy", **compiled)
    test = _batches() if evaluated else None
    history = parallel.fit(
        _batches(), epochs=epochs, shuffle=False, validation_data=test, verbose=0
    ).history
    found = [*model.get_weights(), *_values(history)]
    if evaluated:
        found.append(parallel.predict(test, verbose=0))
    return parallel, found


def _difference(found, synchronized=False):
    """From plain Keras; of what is trained, if nothing is evaluated."""
    plain = _plain(synchronized)
    evaluated = ["val_loss", "val_accuracy", "outputs"]
    assert len(plain) - len(found) in (0, len(evaluated))
    return oracle.largest_difference(found, plain[: len(found)])


# All builders evaluate by the same code; of it, test_by_batch tells, too.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("towers", "builder", "evaluated"),
    [
        (3, "replicated", False),
        (1, "parameter_server", False),
        (3, "parameter_server", False),
        (1, "parameter_server", True),
        (3, "parameter_server", True),
        (1, "replicated", False),
        (4, "replicated", False),
    ],
)
def test_equals_keras_on_preprocessed_data(towers, builder, evaluated):
    options = {"variable_update": builder}
    _, found = _ours(_model(), towers, options=options, evaluated=evaluated)
    assert _difference(found) < 1e-5


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"split_ratios": (3, 1), "packed": True, "prefetch": 2}, 1),
        slow({"loss_placement": "gathered"}, 2),
        slow({"variable_update": "auto"}, 2),
        slow({"split_ratios": (3, 1)}, 1),
        slow({"packed": True}, 1),
        slow({"prefetch": 2}, 1),
    ],
    ids=str,
)
def test_whatever_the_way(options, steps, monkeypatch):
    monkeypatch.setattr(auto, "_ROUND_S", 0.0)
    # XLA is tried in test_auto.
    compiled = {"steps_per_execution": steps, "jit_compile": False}
    # Shares are cut in evaluation, too.
    evaluated = [*options] == ["split_ratios"]
    _, found = _ours(_model(), 2, 2, options, evaluated, **compiled)
    assert _difference(found) < 1e-5


@pytest.mark.parametrize(
    ("how", "loss_placement"),
    [
        ({"run_eagerly": True}, "gathered"),
        slow({"run_eagerly": True}, "auto"),
        slow({"jit_compile": True}, "auto"),
        slow({"jit_compile": True}, "gathered"),
    ],
    ids=str,
)
def test_eager_and_compiled(how, loss_placement):
    # Where the loss is placed is nothing to evaluation.
    evaluated = loss_placement == "auto"
    options = {"loss_placement": loss_placement}
    _, found = _ours(_model(), 2, 2, options, evaluated, **how)
    assert _difference(found) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("loss_placement", ["auto", "tower"])
def test_a_tower_between_others_may_be_idle(loss_placement):
    # Of 12 rows, the second tower gets none. Eager towers know that beforehand.
    options = {"split_ratios": (1, 1, 24), "loss_placement": loss_placement}
    _, found = _ours(_model(), 3, 2, options, evaluated=True, run_eagerly=True)
    assert _difference(found) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("towers", "eager"), [(2, True), (3, False)])
def test_layers_that_talk_to_one_another(towers, eager):
    _, found = _ours(_model(synchronized=True), towers, run_eagerly=eager)
    assert _difference(found, synchronized=True) < 1e-4


@pytest.mark.slow
def test_one_asynchronous_tower_is_one_device():
    _, found = _ours(_model(), 1, options={"variable_update": "asynchronous"})
    assert _difference(found) < 1e-5


@pytest.mark.parametrize("prefetch", [2, 0])
@pytest.mark.slow
def test_asynchronous_towers_learn(prefetch):
    options = {"variable_update": "asynchronous", "prefetch": prefetch}
    parallel, found = _ours(_model(), 3, 20, options)
    # The third batch has one example.
    assert int(parallel.optimizer.iterations) == 20 * 7
    assert np.isfinite(np.concatenate([np.ravel(part) for part in found])).all()
    losses = parallel.history.history["loss"]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("eager", [slow(False), True])
def test_by_batch(eager):
    x, y = _data(7)
    found = []
    for towers in (0, 2):
        model = _model()
        if towers:
            trained = multi_gpu_model(model, gpus=towers, preprocess=_scale)
            _compiled(trained, "sparse_categorical_accuracy", run_eagerly=eager)
            seen = dict.fromkeys((True, False), (x, y))
        else:
            trained = _compiled(model, "categorical_accuracy", run_eagerly=True)
            seen = {training: _numpy(x, y, training) for training in (True, False)}
        weights = np.linspace(0, 2, 7, dtype="float32")
        logs = [
            *trained.train_on_batch(*seen[True], weights),
            *trained.train_on_batch(*(part[:2] for part in seen[True])),
            *trained.test_on_batch(*seen[False]),
        ]
        outputs = trained.predict_on_batch(seen[False][0])
        found.append([*model.get_weights(), np.array(logs), outputs])
    assert oracle.largest_difference(found[1], found[0]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("first", ["fit", "predict", "evaluate"])
def test_a_model_is_built_for_what_it_will_see(first):
    x, y = _data()
    model = _model(built=False)
    parallel = multi_gpu_model(model, gpus=2, preprocess=_scale)
    _compiled(parallel, "accuracy")
    data = _batches(x) if first == "predict" else _batches()
    options = {"shuffle": False} if first == "fit" else {}
    getattr(parallel, first)(data, verbose=0, **options)
    assert model.input_shape == (None, 3, 3, 1) or model.inputs[0].dtype == "float32"
    logs = parallel.test_on_batch(x, y, return_dict=True)
    labels = model(_numpy(x, y, False)[0]).numpy().argmax(-1)
    # Of classes, and not of what the loss sees.
    np.testing.assert_allclose(logs["accuracy"], np.mean(labels == y), rtol=1e-6)


@pytest.mark.slow
def test_a_models_outputs_each_have_a_loss():
    x, y = _data()
    found = []
    for towers in (0, 2):
        keras.utils.set_random_seed(7)
        inputs = keras.Input((3, 3, 1))
        flat = keras.layers.Flatten()(inputs)
        outputs = [
            keras.layers.Dense(CLASSES, "softmax", name=name)(flat) for name in "ab"
        ]
        model = trained = keras.Model(inputs, outputs)

        def both(x, y, training):
            x, y = _scale(x, y, training)
            return x, (y, y)

        if towers:
            trained = multi_gpu_model(model, gpus=towers, preprocess=both)
        losses = ["categorical_crossentropy", "mse"]
        # Not eager: there Keras takes the mean of each one's loss otherwise.
        trained.compile("sgd", losses, jit_compile=False)
        seen = (x, y) if towers else both(x, y, True)
        fit = trained.fit(_batches(*seen), shuffle=False, verbose=0)
        found.append([*model.get_weights(), *_values(fit.history)])
    assert len(fit.history) == 3
    assert oracle.largest_difference(found[1], found[0]) < 1e-5


# Examples that meet, and random numbers.


def _mixed(x, y, training):
    """Half of each example, and half of another of the share."""
    x, y = _scale(x, y, training)
    if training:
        x, y = (x + x[::-1]) / 2, (y + y[::-1]) / 2
    return x, y


@pytest.mark.parametrize(
    ("builder", "loss_placement"),
    [("parameter_server", "auto"), slow("replicated", "gathered")],
)
def test_examples_may_be_mixed(builder, loss_placement):
    x, y = _data(20)
    model, expected = _model(), _model()
    _compiled(expected, "categorical_accuracy", run_eagerly=True)
    options = {"variable_update": builder, "loss_placement": loss_placement}
    parallel = multi_gpu_model(model, gpus=2, preprocess=_mixed, **options)
    _compiled(parallel, "sparse_categorical_accuracy")
    loss, accuracy = parallel.train_on_batch(x, y)
    # That examples meet before the model does not hinder towers.
    placed = {"auto": "tower"}.get(loss_placement, loss_placement)
    assert parallel.loss_placement == placed
    shares = [_mixed(x[:10], y[:10], True), _mixed(x[10:], y[10:], True)]
    mixed_x, mixed_y = (np.concatenate(parts) for parts in zip(*shares, strict=True))
    labels = expected(mixed_x).numpy().argmax(-1)
    expected_loss, _ = expected.train_on_batch(mixed_x, mixed_y)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(accuracy, np.mean(labels == y), rtol=1e-6)
    found = oracle.largest_difference(model.get_weights(), expected.get_weights())
    assert found < 1e-5


def _signs(x, y, training):
    """Turns some examples round, labels too: to a linear model that is the same."""
    signs = tf.sign(tf.random.uniform(tf.shape(x)[:1], -1, 1)) if training else 1.0
    return x * tf.reshape(signs, [-1, 1]), y * tf.reshape(signs, [-1, 1])


@functools.cache
def _linear(towers=0, eager=True, **options):
    """Weights and losses of a linear model, trained."""
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    y = np.ones((ROWS, 1), "float32")
    keras.utils.set_random_seed(7)
    dense = keras.layers.Dense(1, use_bias=False)
    model = trained = keras.Sequential([keras.Input((3,)), dense])
    if towers:
        trained = multi_gpu_model(model, gpus=towers, **options)
    trained.compile("sgd", "mse", run_eagerly=eager)
    fit = trained.fit(_batches(x, y), epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), fit.history["loss"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("towers", "loss_placement", "eager"),
    [
        (2, "gathered", False),
        (3, "tower", True),
        (2, "tower", False),
        (3, "gathered", True),
        (3, "tower", False),
        (3, "gathered", False),
        (1, "tower", False),
        (1, "gathered", True),
    ],
)
def test_what_is_drawn_is_drawn_once(towers, loss_placement, eager):
    options = {"loss_placement": loss_placement, "preprocess": _signs}
    found = _linear(towers, eager, **options)
    assert oracle.largest_difference(found, _linear()) < 1e-5


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
        variable_update=builder,
        local_parameter_device=home,
        preprocess=_scale,
    )
    _compiled(parallel, "sparse_categorical_accuracy")
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


def test_towers_do_not_wait_for_one_another():
    def noisy(x, y, training):
        x, y = _scale(x, y, training)
        return x + tf.random.uniform(tf.shape(x)), y

    name = f"preprocess_{next(_numbers)}"
    towers = ["/device:CPU:1", "/device:CPU:2"]
    parallel = multi_gpu_model(_model(name), gpus=towers, preprocess=noisy)
    _compiled(parallel, "sparse_categorical_accuracy")
    nodes = executed.run(lambda: parallel.train_on_batch(*_data(BATCH)), name)
    for tower, other in (towers, reversed(towers)):
        draws = [n for n in nodes[tower] if n.op == "RandomUniform"]
        assert draws
        others = {n.name for n in nodes[other] if n.op == "RandomUniform"}
        for draw in draws:
            assert not executed.behind(nodes, draw) & others


@pytest.mark.slow
def test_what_is_saved_is_the_model(tmp_path):
    model = _model()
    parallel = multi_gpu_model(model, gpus=2, preprocess=_scale)
    _compiled(parallel, "sparse_categorical_accuracy")
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
    return _scale(x + tf.zeros([x.shape[0], 1, 1, 1], tf.uint8), y, training)


class _Drawing:
    """Draws as Keras's layers do."""

    def __init__(self):
        self.seeds = keras.random.SeedGenerator(3)

    def __call__(self, x, y, training):
        x, y = _scale(x, y, training)
        return x + keras.random.uniform(tf.shape(x), seed=self.seeds), y


_WRONG = {
    "x": (
        lambda: lambda x, y, training: _scale(x, y, training)[0],
        "returned a .*pair",
    ),
    "none": (lambda: lambda x, y, training: None, "returned a NoneType; expected the"),
    "three": (lambda: lambda x, y, training: (x, y, y), "a tuple of 3; expected the"),
    "x rows": (lambda: lambda x, y, training: _scale(x[1:], y, training), "as many"),
    "y rows": (lambda: lambda x, y, training: _scale(x, y[::2], training), "as many"),
    "static": (lambda: _static, "number of examples, as towers do; .*write tf.shape"),
    "assigns": (_Drawing, "`preprocess` changes .*AssignVariableOp.*tf.random"),
}


@pytest.mark.parametrize(
    ("batched", "wrong"),
    [
        *((True, wrong) for wrong in _WRONG),
        (False, "x"),
        *(slow(False, wrong) for wrong in [*_WRONG][1:]),
    ],
)
def test_what_is_wrong_is_said(batched, wrong):
    make, message = _WRONG[wrong]
    parallel = multi_gpu_model(_model(), gpus=2, preprocess=make())
    _compiled(parallel, "sparse_categorical_accuracy")
    x, y = _data(8)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=message):
        if batched:
            parallel.train_on_batch(x, y)
        else:
            parallel.fit(x, y, verbose=0)
