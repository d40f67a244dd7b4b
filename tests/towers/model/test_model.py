"""The Keras door: what `multi_gpu_model` returns is a Keras model in every way."""

import json
import os
import subprocess
import sys
import textwrap
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import oracle
from tests.variants import slow
from towers import ParameterServer, multi_gpu_model
from towers.tower.errors import ModelError


def _data(rows=60):
    random = np.random.default_rng(0)
    return (
        random.normal(size=(rows, 6)).astype("float32"),
        random.integers(0, 3, rows),
    )


def _batches(rows=60, size=32):
    return tf.data.Dataset.from_tensor_slices(_data(rows)).batch(size)


def _model():
    keras.utils.set_random_seed(2)
    layers = [keras.Input((6,)), keras.layers.Dense(3, activation="softmax")]
    return keras.Sequential(layers, name="mine")


def _sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def _compiled(model=None, gpus=2, optimizer=None, **options):
    parallel = multi_gpu_model(model or _model(), gpus=gpus)
    options = {"metrics": ["accuracy"], **options}
    parallel.compile(optimizer or _sgd(), "sparse_categorical_crossentropy", **options)
    return parallel


def test_it_is_the_users_model():
    model = _model()
    parallel = multi_gpu_model(model, gpus=2)
    assert isinstance(parallel, keras.Model)
    assert parallel.name == "mine"
    assert parallel.layers == model.layers
    lines = []
    parallel.summary(print_fn=lambda line, **_: lines.append(line))
    assert "mine" in "\n".join(lines)
    parallel.set_weights([w + 1 for w in parallel.get_weights()])
    for ours, theirs in zip(parallel.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_the_template_shares_weights_and_stays_on_one_device():
    data = _batches()
    model = _model()
    parallel = _compiled(model)
    parallel.fit(data, epochs=1, shuffle=False, verbose=0)
    # Both have steps of their own, on the same weights and optimizer.
    model.fit(data, epochs=1, shuffle=False, verbose=0)
    parallel.fit(data, epochs=1, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 6
    np.testing.assert_allclose(
        model.predict(data, verbose=0), parallel.predict(data, verbose=0), rtol=1e-5
    )
    # Compiling the template again is noticed.
    model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
    before = model.get_weights()
    parallel.fit(data, epochs=1, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_model_compiled_before_keeps_its_optimizer():
    data, options = _batches(), {"epochs": 2, "shuffle": False, "verbose": 0}
    expected, model = _model(), _model()
    for each in (expected, model):
        loss = "sparse_categorical_crossentropy"
        each.compile(_sgd(), loss, run_eagerly=True)  # where nothing is traced
        each.fit(data, **options)
    expected.fit(data, **options)
    model.run_eagerly = False
    multi_gpu_model(model, gpus=3).fit(data, **options)
    assert int(model.optimizer.iterations) == int(expected.optimizer.iterations)
    difference = oracle.largest_difference(model.get_weights(), expected.get_weights())
    assert difference <= 1e-4


@pytest.mark.parametrize("relocated", [slow(False), True])
def test_variables_live_at_home(relocated):
    with tf.device("/device:CPU:3"):
        model = _model()
    weights = model.get_weights()
    parallel = multi_gpu_model(model, gpus=2, cpu_relocation=relocated)
    parallel.compile(_sgd(), "sparse_categorical_crossentropy")
    parallel.fit(_batches(), epochs=1, verbose=0)
    home = "/device:CPU:0" if relocated else "/device:CPU:3"
    for variable in [
        *model.variables,
        *model.optimizer.variables,
        *model.metrics_variables,
    ]:
        assert variable.value.device.endswith(home), variable.path
    assert not np.array_equal(model.get_weights()[0], weights[0])


def test_relocation_takes_the_optimizer_along():
    weights = []
    for relocation in (None, True):
        keras.utils.set_random_seed(7)
        with tf.device("/device:CPU:3"):
            model = _model()
            # Nothing is traced where there is one device.
            loss = "sparse_categorical_crossentropy"
            model.compile(_sgd(), loss, run_eagerly=True)
            model.fit(_batches(), shuffle=False, verbose=0)
        trained = model
        if relocation:
            model.run_eagerly = False
            trained = multi_gpu_model(model, gpus=2, cpu_relocation=relocation)
            variables = [*model.variables, *model.optimizer.variables]
            assert all(v.value.device.endswith("CPU:0") for v in variables)
        trained.fit(_batches(), shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class _Number(float):
    """Unlike other numbers, it can be seen to be gone."""


def test_tensors_of_numbers_are_kept_for_an_epoch_at_most():
    kept = []

    def make_a_tensor(epoch, logs):
        number = _Number(epoch)
        kept.append(weakref.ref(number))
        tf.constant(number)

    by_epoch = []
    _compiled().fit(
        _batches(),
        epochs=3,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_epoch_begin=make_a_tensor,
                on_epoch_end=lambda *_: by_epoch.append([n() is None for n in kept]),
            )
        ],
    )
    assert by_epoch == [[False], [True, False], [True, True, False]]


@pytest.mark.slow
def test_early_stopping_restores_and_backup_resumes(tmp_path):
    class Die(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    options = {"epochs": 4, "verbose": 0}
    backup = keras.callbacks.BackupAndRestore
    with pytest.raises(KeyboardInterrupt):
        _compiled().fit(_batches(), callbacks=[backup(tmp_path), Die()], **options)
    again = _compiled()
    history = again.fit(_batches(), callbacks=[backup(tmp_path)], **options)
    assert history.epoch == [2, 3]
    assert int(again.optimizer.iterations) == 8

    stopping = keras.callbacks.EarlyStopping(
        "loss", mode="max", patience=1, restore_best_weights=True
    )
    again.fit(_batches(), epochs=5, verbose=0, callbacks=[stopping])
    assert len(again.history.epoch) < 5


# It runs where this project cannot be imported.
_ELSEWHERE = textwrap.dedent(
    """
    import json, sys
    sys.modules["towers"] = None
    import keras, numpy as np
    path, data = sys.argv[1:]
    arrays = np.load(data)
    model = keras.models.load_model(path)
    print(json.dumps({
        "evaluated": model.evaluate(arrays["x"], arrays["y"], verbose=0),
        "iterations": int(model.optimizer.iterations),
        "optimizer": type(model.optimizer).__name__,
        "slots": [float(np.abs(v).sum()) for v in model.optimizer.variables],
    }))
    """
)


def _load_elsewhere(path, tmp_path, x, y):
    np.savez(tmp_path / "data.npz", x=x, y=y)
    script = tmp_path / "load.py"
    script.write_text(_ELSEWHERE)
    done = subprocess.run(
        [sys.executable, script, path, tmp_path / "data.npz"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


_THREE_LOOPS = textwrap.dedent(
    """
    import keras
    import numpy as np
    import towers

    towers.configure(num_gpus=2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    parallel = towers.multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "mse")
    x = np.ones((8, 4), "float32")
    parallel.fit(x, x[:, :1], verbose=0)
    parallel.evaluate(x, x[:, :1], verbose=0)
    parallel.predict(x, verbose=0)
    """
)


@pytest.mark.slow
def test_on_cpus_tensorflow_optimizes_the_graphs_of_steps_once():
    # TensorFlow's log says when it optimizes a graph, and how often it goes over it.
    log = {
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_MAX_VLOG_LEVEL": "1",
        "TF_CPP_VMODULE": "meta_optimizer=1",
    }
    done = subprocess.run(
        [sys.executable, "-c", _THREE_LOOPS],
        env=os.environ | log,
        capture_output=True,
        text=True,
        check=True,
    )
    passes, graph = {}, ""
    for line in done.stderr.splitlines():
        if "Starting optimization for grappler item: " in line:
            graph = line.split()[-1]
        elif "model_pruner: Graph size after" in line:
            passes.setdefault(graph, []).append(line)
    of_steps = {name: len(n) for name, n in passes.items() if "Dataset" not in name}
    assert len(of_steps) >= 3
    assert {*of_steps.values()} == {1}, of_steps


@pytest.mark.slow
def test_a_checkpointed_model_opens_without_this_project(tmp_path):
    x, y = _data()
    path = tmp_path / "best.keras"
    parallel = _compiled(optimizer=keras.optimizers.Adam(0.01))
    parallel.fit(
        x,
        y,
        batch_size=25,
        epochs=4,
        verbose=0,
        callbacks=[keras.callbacks.ModelCheckpoint(path)],
    )
    loaded = _load_elsewhere(path, tmp_path, x, y)
    np.testing.assert_allclose(
        loaded["evaluated"], parallel.evaluate(x, y, verbose=0), atol=1e-6
    )
    assert loaded["iterations"] == 4 * 3
    assert loaded["optimizer"] == "Adam"
    np.testing.assert_allclose(
        loaded["slots"],
        [float(np.abs(v).sum()) for v in parallel.optimizer.variables],
        rtol=1e-6,
    )


def test_weights_save_and_export(tmp_path):
    x, _ = _data()
    parallel = _compiled()
    weights = tmp_path / "w.weights.h5"
    parallel.fit(
        _batches(),
        epochs=1,
        verbose=0,
        callbacks=[keras.callbacks.ModelCheckpoint(weights, save_weights_only=True)],
    )
    expected = parallel.predict(x, verbose=0)
    other = _compiled()
    other.load_weights(weights)
    np.testing.assert_allclose(other.predict(x, verbose=0), expected, rtol=1e-5)
    parallel.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, rtol=1e-5)
    parallel.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    served = exported.serve(x)
    np.testing.assert_allclose(served, expected, rtol=1e-5)


class Custom(keras.Model):
    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.9)
        self.classes = keras.layers.Dense(3, activation="softmax")

    def call(self, x, training=False):
        # Passes `training` on to nobody: Keras's call context does.
        return self.classes(self.dropout(x))


def test_an_empty_batch():
    model = _model()
    parallel = _compiled(model, gpus=3, metrics=[])
    x, y = np.zeros((0, 6), "float32"), np.zeros((0,), "int32")
    assert parallel.predict_on_batch(x).shape == (0, 3)
    model.compile(_sgd(), "sparse_categorical_crossentropy", run_eagerly=True)
    assert parallel.test_on_batch(x, y) == model.test_on_batch(x, y)


class _OwnStep(Custom):
    def train_step(self, data):
        return {}


class _OwnLoop(Custom):
    def make_train_function(self, force=False):
        self.train_function = lambda iterator: {"loss": 0.0}


class _AssignsTensorFlow(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.count = tf.Variable(0.0)

    def call(self, x):
        self.count.assign_add(1.0)
        return x + self.count


class _KeepsLargest(keras.layers.Layer):
    def build(self, shape):
        self.total = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x):
        self.total.assign(keras.ops.maximum(self.total, keras.ops.sum(x)))
        return x


class _Unseeded(keras.layers.Layer):
    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


class _AddsVariance(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.var(x))
        return x


@pytest.mark.parametrize("layer", [_AssignsTensorFlow, _KeepsLargest, _AddsVariance])
def test_what_a_tower_alone_cannot_do(layer):
    found = []
    for towers in (0, 2):
        keras.utils.set_random_seed(7)
        every = [keras.Input((6,)), layer(), keras.layers.Dense(3, "softmax")]
        model = keras.Sequential(every)
        trained = multi_gpu_model(model, gpus=towers) if towers else model
        trained.compile(_sgd(), "sparse_categorical_crossentropy", jit_compile=False)
        history = trained.fit(_batches(), shuffle=False, verbose=0).history
        found.append([history["loss"], *model.get_weights()])
    for theirs, ours in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_random_numbers_without_a_seed_are_named(caplog):
    layers = [keras.Input((6,)), _Unseeded(), keras.layers.Dense(3)]
    _compiled(keras.Sequential(layers)).fit(_batches(), shuffle=False, verbose=0)
    assert "draws random numbers without a seed" in caplog.text


def test_gathered_is_auto_and_a_line_says_so(caplog):
    for model in _model(), _OwnStep():
        multi_gpu_model(model, gpus=2, loss_placement="gathered")
    assert caplog.text.count("loss_placement='gathered' is 'auto'") == 2


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (_OwnLoop, {}, "overrides `make_train_function`"),
        (lambda: multi_gpu_model(_model(), gpus=2), {}, "user's own Keras model"),
        (lambda: "resnet50", {}, "an object of type str; expected a keras.Model"),
        (_model, {"gpus": 99}, "gpus=99"),
        (_model, {"gpus": 0}, "gpus=0"),
        (_model, {"gpus": ["/gpu:7"]}, "gpu:7"),
        (_model, {"variable_update": "magic"}, "variable_update='magic'"),
        (
            _model,
            {"variable_update": ParameterServer("/gpu:3")},
            "device names '/gpu:3'",
        ),
        (_model, {"split_ratios": (1, 2, 3)}, "split_ratios=.1, 2, 3. for 2 towers"),
        (_model, {"split_ratios": (1, 0)}, "a positive integer for each"),
        (_model, {"loss_placement": "gpu"}, "loss_placement='gpu'"),
    ],
)
def test_bad_arguments(make, options, words):
    with pytest.raises(ValueError, match=words):
        multi_gpu_model(make(), **{"gpus": 2, **options})


def test_a_strategy_scope_is_refused():
    with (
        tf.distribute.OneDeviceStrategy("/cpu:0").scope(),
        pytest.raises(ValueError, match="leave the scope"),
    ):
        multi_gpu_model(_model(), gpus=2)


def test_it_can_be_called_and_used_as_a_layer():
    x, _ = _data()
    model = _model()
    parallel = multi_gpu_model(model, gpus=2)
    np.testing.assert_array_equal(parallel(x), model(x))
    wider = keras.Sequential([keras.Input((6,)), parallel, keras.layers.Dense(2)])
    assert wider(x).shape == (60, 2)


def test_a_model_without_an_optimizer_is_evaluated():
    x, y = _data()
    parallel = multi_gpu_model(_model(), gpus=2)
    parallel.compile(optimizer=None, loss="sparse_categorical_crossentropy")
    assert parallel.evaluate(x, y, verbose=0) > 0


def test_methods_of_the_object_count_as_overridden():
    model = _model()
    model.compute_loss = lambda x, y, y_pred, *others, **more: keras.ops.mean(y_pred)
    parallel = _compiled(model)
    # Each row of a softmax adds up to 1.
    assert parallel.train_on_batch(*_data())[0] == pytest.approx(1 / 3)


class _Static(keras.layers.Layer):
    def call(self, x):
        return tf.reshape(x, [x.shape[0], 2, 3])[:, 0]

    def compute_output_shape(self, shape):
        return (*shape[:1], 3)


def test_a_static_batch_size_is_said():
    model = keras.Sequential([keras.Input(batch_shape=(8, 6)), _Static()])
    parallel = multi_gpu_model(model, gpus=2)
    with pytest.raises(ValueError, match="unknown number of examples"):
        parallel.predict(np.zeros((8, 6), "float32"), batch_size=8, verbose=0)


class _Unreadable(keras.layers.Layer):
    def call(self, x):
        return tf.map_fn(lambda row: 2 * row, x)


@pytest.mark.slow
def test_doubts_and_placement_are_said_once(caplog):
    data = _batches()
    model = Custom()
    model.classes = keras.Sequential([_Unreadable(), model.classes])
    parallel = _compiled(model)
    parallel.fit(data, epochs=2, shuffle=False, verbose=0)
    parallel.evaluate(data, verbose=0)
    parallel.predict(data, verbose=0)
    said = [
        r.getMessage()
        for r in caplog.records
        if "on one device, with" in r.getMessage()
    ]
    assert len(said) == len({*said}) == 3
    assert parallel.loss_placement == "gathered"


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_stateful_layer_is_refused(gpus):
    model = keras.Sequential(
        [keras.Input(batch_shape=(8, 5, 6)), keras.layers.LSTM(3, stateful=True)]
    )
    x = np.zeros((8, 5, 6), "float32")
    with pytest.raises(ValueError, match="'lstm' is stateful"):
        multi_gpu_model(model, gpus).predict(x, batch_size=8, verbose=0)


def test_outputs_for_the_whole_batch():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.ops.sum(inputs, axis=0))
    expected = model.predict(_data()[0], verbose=0)
    ours = multi_gpu_model(model, gpus=2).predict(_data()[0], verbose=0)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_targets_have_as_many_rows_as_inputs():
    parallel = _compiled()
    rows = tf.data.Dataset.from_tensors((tf.ones([8, 6]), tf.zeros([4], tf.int32)))
    for data in (rows, rows.map(lambda *t: [tf.repeat(i, 2, axis=0) for i in t])):
        for use in parallel.fit, parallel.evaluate:
            with pytest.raises(Exception, match="as many rows"):
                use(data, verbose=0)


@pytest.mark.slow
def test_targets_have_as_many_rows_in_a_loop_of_the_users_own():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "mse")
    signature = [tf.TensorSpec([None, 6]), tf.TensorSpec([None, 3])]
    step = tf.function(lambda *data: parallel.train_step(data), signature)
    step(tf.ones([8, 6]), tf.zeros([8, 3]))
    # One row would be taken for all.
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many rows"):
        step(tf.ones([8, 6]), tf.zeros([1, 3]))


@pytest.mark.slow
def test_moving_the_model_again_is_noticed():
    data = _batches()
    model = _model()
    first = multi_gpu_model(model, gpus=2)
    first.predict(data, verbose=0)
    second = multi_gpu_model(model, gpus=2, variable_update=ParameterServer("/cpu:2"))
    model.set_weights([w * 0 for w in model.get_weights()])
    np.testing.assert_allclose(
        first.predict(data, verbose=0), second.predict(data, verbose=0), rtol=1e-6
    )


def test_xla_is_the_models_setting():
    parallel = _compiled(optimizer="sgd", metrics=None)
    parallel.jit_compile = True
    assert parallel.__wrapped__.jit_compile
    assert not parallel.jit_compile


class RaggedMean(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(tf.reduce_mean(x, axis=1)[:, None])


@pytest.mark.slow
def test_an_unbuilt_model_of_ragged_inputs_predicts():
    rows = tf.ragged.constant([[1.0], [2.0, 4.0], [3.0, 3.0, 3.0], [5.0], [7.0]])
    model = RaggedMean()
    data = tf.data.Dataset.from_tensors(rows)
    ours = multi_gpu_model(model, gpus=2).predict(data, verbose=0)
    np.testing.assert_allclose(ours, model.predict(data, verbose=0), rtol=1e-6)


class Text(keras.layers.Layer):
    def call(self, x):
        return tf.strings.as_string(tf.argmax(x, axis=-1))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape[:1], dtype="string")


def test_outputs_may_be_text_where_a_tower_is_idle():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, [inputs, Text()(inputs)])
    rows = tf.data.Dataset.from_tensor_slices(np.eye(3, dtype="float32")).batch(2)
    _, texts = multi_gpu_model(model, gpus=2).predict(rows, verbose=0)
    assert texts.tolist() == [b"0", b"1", b"2"]


def test_a_model_without_any_gradient():
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3), keras.layers.Lambda(keras.ops.sign)]
    )
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", lambda y, outputs: keras.ops.stop_gradient(outputs))
    with pytest.raises(ModelError, match=r"No variable of model .* has a gradient"):
        parallel.train_on_batch(np.ones([4, 2]), np.ones([4, 1]))


def test_rows_that_differ_are_a_sentence_in_a_graph_too():
    rows = np.ones((4, 3), "float32"), np.ones((6, 1), "float32")
    spec = tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1))
    data = tf.data.Dataset.from_generator(lambda: iter([rows]), output_signature=spec)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"^Received y and x .* for each example\.$"):
        parallel.fit(data, verbose=0)
