"""A file of the user's: what it may define beside the model, and what runs with it."""

import contextlib
import dataclasses
import json
import textwrap
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.towers.train.runs import (
    assembled,
    assert_same_bits,
    heard,
    read_settings,
    run,
    run_here,
    weights,
)
from tests.variants import slow
from towers.find_batch_size import probe
from towers.parity import __main__ as parity_program
from towers.train import callbacks
from towers.train.outputs import start
from towers.train.parts import model as model_parts
from towers.train.parts import my_model, own_data
from towers.train.parts.my_model import MyModel
from towers.train.settings import Settings

HEAD = """
import keras
import numpy as np
import tensorflow as tf

def build(input_shape):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(1)])

x = np.arange(80, dtype="float32").reshape([40, 2]) / 80
y = x.sum(axis=1, keepdims=True)
"""
ARRAYS = "\ntrain_data = x[:32], y[:32]\neval_data = x[32:], y[32:]\n"
DATASET = """
def train_data(batch_size, seed):
    data = tf.data.Dataset.from_tensor_slices((x[:32], y[:32]))
    return data.shuffle(32, seed=seed).batch(batch_size)
"""
PY_DATASET = """
class Data(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return x[number::4], y[number::4]

def train_data():
    return Data()
"""


def write(folder, *parts):
    """Writes a file of the user's; its path."""
    path = folder / "mine.py"
    path.write_text("".join((HEAD, *map(textwrap.dedent, parts))))
    return path


def loaded(folder, *parts):
    return my_model.load(Settings(model=str(write(folder, *parts))))


# What it defines.


def test_values_and_functions(tmp_path):
    mine = loaded(
        tmp_path,
        """
        from keras import losses as metrics
        def loss(y_true, y_pred):
            return y_pred - y_true
        def optimizer(learning_rate, momentum=0.5):
            return keras.optimizers.SGD(learning_rate, momentum)
        def callbacks(input_shape):
            return keras.callbacks.TerminateOnNaN()
        """,
    )
    assert mine.loss(input_shape=(2,)) is mine.module.loss
    assert mine.optimizer(learning_rate=0.25, input_shape=(2,)).momentum == 0.5
    (callback,) = mine.callbacks(input_shape=(2,))
    assert isinstance(callback, keras.callbacks.TerminateOnNaN)
    # A module that is called so, and what is not there.
    assert mine.metrics() is None and mine.preprocess() is None
    assert "metrics" not in mine and "loss" in mine


def test_preprocess_of_two_or_three_arguments(tmp_path):
    mine = loaded(tmp_path, "\ndef preprocess(x, y):\n    return x + 1, y\n")
    assert mine.preprocess()(1, 2, True) == (2, 2)
    mine = loaded(tmp_path, "\ndef preprocess(x, y, t):\n    return x, t\n")
    assert mine.preprocess()(1, 2, True) == (1, True)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("loss", "3", "loss of '.*mine.py' is 3; expected a loss of Keras"),
        ("loss", "'no_such'", "is 'no_such'; expected a loss"),
        ("loss", "keras.losses.Huber", "the class Huber; expected a loss"),
        ("metrics", "keras.metrics.AUC()", "is a AUC; expected a list of metrics"),
        ("metrics", "['no_such']", "expected a list of metrics"),
        ("optimizer", "'sgd'", "is 'sgd'; expected an optimizer of Keras"),
        ("preprocess", "keras.Model", "the class Model; expected a function of"),
        ("callbacks", "[3]", "a list of 1; expected a list of callbacks"),
        ("preprocess", "lambda x: x", r"a function of \(x\); expected a function of"),
        ("train_data", "[1, 2]", r"a list of 2; expected a tf.data.Dataset in batches"),
        ("train_data", "(i for i in 'ab')", "a generator; expected a tf.data"),
    ],
)
def test_what_is_not_expected(tmp_path, name, value, said):
    mine = loaded(tmp_path, f"\n{name} = {value}\n")
    get = mine.data if name == "train_data" else getattr(mine, name)
    with pytest.raises(ValueError, match=said):
        get(*["train_data"] if name == "train_data" else [])


def test_a_function_that_fails(tmp_path):
    mine = loaded(tmp_path, "\ndef loss():\n    raise KeyError('a')\n")
    said = r"'loss' of '.*mine.py' raised KeyError \('a'\) in line \d+; correct the"
    with pytest.raises(ValueError, match=said):
        mine.loss()


def test_names_that_a_star_brings(tmp_path):
    (tmp_path / "common_of_mine.py").write_text("loss = 'mse'\n")
    with pytest.raises(ValueError, match=r"brings loss by `import \*`"):
        loaded(tmp_path, "\nfrom common_of_mine import *\n")


# Flags.


@pytest.mark.parametrize(
    ("defined", "flags", "said"),
    [
        ("train_data = 1", "--dataset=digits", "--dataset=digits, but mine.py defines"),
        ("train_data = 1", "--label_column=y", "--label_column=y, .* train_data, for"),
        ("train_data = 1", "--recipe=cifar", "--recipe=cifar, but mine.py defines"),
        ("eval_data = 1", "", "defines eval_data and no train_data"),
        ("optimizer = 1", "--momentum=0.5", "--momentum=0.5, .* defines optimizer"),
        ("loss = 1", "--mix=mixup:0.5", "--mix=mixup:0.5, .* defines loss"),
    ],
)
def test_flags_that_say_nothing_of_it(tmp_path, defined, flags, said):
    path = write(tmp_path, f"\n{defined}\n")
    with pytest.raises(ValueError, match=said):
        read_settings(f"--model={path}", *flags.split())


def test_which_data_are_the_default(tmp_path):
    def dataset(*flags):
        return read_settings(*flags, f"--model_dir={tmp_path}/run").dataset

    path = write(tmp_path, "\ndef helper():\n    train_data = 1\n")
    assert dataset(f"--model={path}") == "digits"
    assert dataset(f"--model={path}", "--task=language_model") == "text:python"
    path = write(tmp_path, "\nif True:\n    train_data = 1\n")
    assert dataset(f"--model={path}") is None


# Data.


@pytest.mark.parametrize(
    ("data", "flags", "said"),
    [
        (ARRAYS, "", "mine.py defines train_data and no loss, .* give --task"),
        (DATASET.replace(".batch(batch_size)", ""), "--task=regression", "single exam"),
        (
            DATASET.replace(".batch(", ".repeat().batch("),
            "--task=regression",
            "never ends",
        ),
        (DATASET, "--task=classification", r"y of .* is float32 .* expected whole num"),
        (
            DATASET.replace("(batch_size, seed)", "()")
            .replace("seed=seed", "seed=1")
            .replace(".batch(batch_size)", ".batch(8)"),
            "--task=regression --batch_size=16",
            "--batch_size=16, but train_data of mine.py gives batches of 8",
        ),
        ("\ntrain_data = x, y[1:]\n", "--task=regression", "arrays of 39, 40 rows"),
        ("\ndef train_data():\n    x\n", "", "train_data of mine.py returned None"),
        (
            DATASET.replace(".batch(", ".take(0).batch("),
            *("--task=regression", "is empty; expected at least one batch"),
        ),
        (
            DATASET.replace("(x[:32], y[:32])", "x"),
            *("--task=regression", r"gives a TensorSpec; expected batches \(x, y\) or"),
        ),
        (
            ARRAYS + "\noptimizer = keras.optimizers.SGD()\n",
            "--task=regression --learning_rate=0.5",
            r"--learning_rate=0.5, but optimizer of .* does not ask for learning_rate",
        ),
        (
            "\ntrain_data = x, y\neval_data = x[:, :1], y\n",
            "--task=regression",
            r"eval_data of mine.py has shapes \(None, 1\), but train_data",
        ),
        (
            "\ndef train_data(rows):\n    return x, y\n",
            "--task=regression",
            r"a function of \(rows\); expected a tf.data.Dataset",
        ),
    ],
)
def test_data_that_cannot_be_trained_on(tmp_path, data, flags, said):
    path = write(tmp_path, data)
    with pytest.raises(ValueError, match=said):
        assembled(f"--model={path}", f"--model_dir={tmp_path}/run", *flags.split())


def test_bytes_stay_as_they_are_and_that_is_said(tmp_path):
    data = "\ntrain_data = (x * 80).astype('uint8'), y\n"
    flags = f"--model_dir={tmp_path}/run", "--task=regression", "--batch_size=20"
    job = assembled(f"--model={write(tmp_path, data)}", *flags)
    said = start.text(job)
    assert "has uint8 inputs, which the model gets as they are, 0 to 255" in said
    assert (
        "Data train_data of mine.py: 40 examples of (2,), 1 number to predict, ta"
        in (said)
    )
    (batch,) = parity_program.read_batches(job.setup, job.data, 2, 1)
    assert batch[0].dtype == tf.uint8


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [ARRAYS, DATASET, PY_DATASET], ids=["arrays", "dataset", "py"]
)
def test_a_run_goes_on_with_the_same_bits(tmp_path, data):
    """It is stopped in the middle of an epoch of four batches, and begun again."""
    path = write(tmp_path, data)
    flags = f"--model={path}", "--task=regression", "--deterministic", "--save_every=1"
    size = () if data is PY_DATASET else ("--batch_size=8",)

    def run(name, steps):
        folder = tmp_path / name
        done = heard(
            *(run_here, *flags, *size, f"--model_dir={folder}"),
            *(f"--max_train_steps={steps}", "--train_epochs=3"),
        )
        return done.stdout, folder

    out, whole = run("whole", 11)
    summary = json.loads((whole / "summary.json").read_text())
    prefix = "val" if data is ARRAYS else "train"
    assert {f"{prefix}_loss", f"{prefix}_mae", f"{prefix}_rmse"} <= summary.keys()
    assert (summary["task"], summary["steps"]) == ("regression", 11)
    run("parts", 6)
    out, parts = run("parts", 11)
    assert "after epoch 1 and 2 batches, step 6" in out
    assert_same_bits(weights(whole), weights(parts))


# A step of its own.

OWN_STEP = """
@keras.saving.register_keras_serializable()
class Clipped(keras.Model):
    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            given = (loss,) if metric.name == "loss" else (y, outputs)
            metric.update_state(*given)
        return {each.name: each.result() for each in self.metrics}

def build(input_shape, num_outputs):
    inputs = keras.Input(input_shape)
    hidden = keras.layers.Flatten()(inputs)
    return Clipped(inputs, keras.layers.Dense(num_outputs)(hidden))
"""


@pytest.mark.slow
@pytest.mark.parametrize("update", ["auto", "replicated"])
def test_a_model_with_a_step_of_its_own(update, tmp_path):
    """By flags and defaults of training; it is stopped, and begun again."""
    path = write(tmp_path, OWN_STEP)
    flags = f"--model={path}", "--dataset=synthetic:4x4x1:3:80", "--deterministic"
    flags += f"--variable_update={update}", "--batch_size=16", "--save_every=1"

    def run(name, steps):
        folder = tmp_path / name
        done = heard(
            *(run_here, *flags, f"--model_dir={folder}"),
            *(f"--max_train_steps={steps}", "--train_epochs=3"),
        )
        return done.stdout, folder

    out, whole = run("whole", 12)
    assert json.loads((whole / "summary.json").read_text())["steps"] == 12
    run("parts", 7)
    out, parts = run("parts", 12)
    assert "step 7" in out
    assert_same_bits(weights(whole), weights(parts))


@pytest.mark.slow
def test_a_model_with_a_step_of_its_own_asynchronously(tmp_path):
    path = write(tmp_path, OWN_STEP)
    flags = f"--model={path}", "--dataset=synthetic:4x4x1:3:80", "--num_gpus=2"
    flags += "--variable_update=asynchronous", "--batch_size=16", "--save_every=1"
    # Each of two towers makes a step of its part of a batch.
    for steps in (4, 8):
        done = heard(
            *(run_here, *flags, f"--model_dir={tmp_path / 'run'}"),
            *(f"--max_train_steps={steps}", "--train_epochs=3"),
        )
    assert "step 4" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 8


PAIRS = (
    "loss = self.compute_loss(x, y, outputs)",
    "alike = tf.matmul(outputs, outputs, transpose_b=True)\n"
    "            loss = tf.reduce_mean(tf.reduce_logsumexp(alike, 1))",
)


@pytest.mark.slow
def test_a_step_over_pairs_with_each_towers_own_rows(tmp_path):
    path = write(tmp_path, OWN_STEP.replace(*PAIRS))
    flags = f"--model={path}", "--dataset=synthetic:4x4x1:3:80", "--num_gpus=2"
    folder = tmp_path / "run"
    done = heard(
        *(run_here, *flags, "--loss_placement=tower", "--max_train_steps=3"),
        f"--model_dir={folder}",
    )
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3
    assert "as loss_placement='tower' asks: 'MatMul' at" in done.stdout + done.stderr


def test_labels_of_another_form_than_its_step_expects(tmp_path):
    path = write(tmp_path, OWN_STEP)
    flags = f"--model={path}", "--dataset=synthetic:4x4x1:3:80"
    said = "Received --label_smoothing, .* with a model that defines its own train_step"
    with pytest.raises(ValueError, match=said):
        assembled(*flags, "--label_smoothing=0.1", f"--model_dir={tmp_path}/run")


# Programs.

OWN = """
loss = {"a": "mse", "b": keras.losses.Huber()}
metrics = {"a": ["mae"]}
heard = []

def build(input_shape):
    x = inputs = keras.Input(input_shape)
    heads = {name: keras.layers.Dense(1, name=name)(x) for name in "ab"}
    return keras.Model(inputs, heads)

def optimizer(learning_rate):
    return keras.optimizers.SGD(learning_rate, momentum=0.25)

def callbacks():
    return [keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: heard.append(1))]

def preprocess(x, y, training):
    return x * 2, y

train_data = x, {"a": y, "b": -y}
"""


@pytest.mark.slow
def test_all_of_it_together(tmp_path):
    """What the towers train is what plain Keras does, with all the file defines."""
    flags = (
        *("--batch_size=40", "--train_epochs=2", "--learning_rate=0.125"),
        *("--deterministic", "--monitor=a_mae", f"--model_dir={tmp_path}/run"),
    )
    done = heard(run_here, f"--model={write(tmp_path, OWN)}", *flags)
    assert (
        "Of mine.py: loss, metrics, optimizer, callbacks, preprocess, train_data."
        in (done.stdout)
    )
    assert "examples of (2,), trained by loss of mine.py, shuffled" in done.stdout
    module = loaded(tmp_path, OWN).module
    model = keras.models.load_model(tmp_path / "run/model.keras", compile=False)
    plain = assembled(
        f"--model={tmp_path}/mine.py", f"--model_dir={tmp_path}/new", *flags[:-1]
    ).model
    optimizer = keras.optimizers.SGD(0.125, momentum=0.25)
    plain.compile(optimizer, module.loss, run_eagerly=True)
    data = tf.data.Dataset.from_tensors((module.x * 2, module.train_data[1]))
    plain.fit(data, epochs=2, verbose=0)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["best"]["monitor"] == "a_mae" and summary["task"] is None


@pytest.mark.slow
def test_parity_of_all_of_it(tmp_path, capsys):
    settings = read_settings(
        *(f"--model={write(tmp_path, OWN)}", "--batch_size=12", "--num_gpus=3"),
        f"--model_dir={tmp_path}/run",
    )
    assert parity_program.check(settings) == 0
    assert "data train_data of mine.py" in capsys.readouterr().out


def test_what_programs_make_of_it(tmp_path):
    job = assembled(f"--model={write(tmp_path, OWN)}", f"--model_dir={tmp_path}/run")
    setup, (own,) = job.setup, job.data.batches(1)
    # A probe makes batches of any size, whatever the size of the data's own.
    for size in (4, 100):
        setup = dataclasses.replace(setup, settings=setup.settings.but(batch_size=size))
        x, y = next(iter(probe.batches(setup, own)))
        assert x.shape == (size, 2) and {*y} == {"a", "b"}
    assert "examples of (2,), trained by loss of mine.py, shuffled" in start.text(job)
    assert model_parts.metric_names(setup) == ["mae"]
    x, _ = model_parts.make_preprocess(setup)(own[0], None, training=False)
    np.testing.assert_array_equal(x, 2 * own[0])


def test_batches_that_the_file_makes(tmp_path):
    flags = "--task=binary", f"--model_dir={tmp_path}/run"
    job = assembled(f"--model={write(tmp_path, PY_DATASET)}", *flags)
    assert (job.data.examples, job.batch_size, job.setup.facts.target.size) == (
        40,
        10,
        2,
    )
    assert "40 examples of (2,), 2 classes, " in (said := start.text(job))
    assert "in batches of 10 examples as the file makes them." in said
    first, *_, again = job.data.batches(5)
    np.testing.assert_array_equal(first[0], again[0])
    data = own_data.open_data(job.settings, loaded(tmp_path, DATASET))
    assert data.in_batches_of(5).batches(1)[0][0].shape == (5, 2)


@pytest.mark.parametrize(
    ("monitor", "said"),
    [
        ("val_no", "=val_no, which this run does not log; expected one of a, loss, or"),
        ("a", "=a, and it is not known whether more .* --monitor=min:a or"),
        ("val_loss", None),
    ],
)
def test_a_monitor_that_is_not_known(monitor, said):
    job = mock.Mock(settings=Settings(monitor=monitor))
    job.task_logs.return_value = {}
    callback = callbacks._TaskLogs(job)
    callback.set_model(keras.Sequential([keras.layers.Dense(1)]))
    expected = pytest.raises(callbacks.UnknownMonitorError, match=said)
    with expected if said else contextlib.nullcontext():
        callback.on_train_batch_end(0, {"loss": 1.0, "a": 1.0})


def test_several_inputs_by_name(tmp_path):
    """`build` gets a dict of shapes, and returns a model that takes a dict."""
    path = write(
        tmp_path,
        """
        loss = "mse"
        train_data = {"a": x, "b": x[:, :1]}, y

        def build(input_shape):
            inputs = {n: keras.Input(s, name=n) for n, s in input_shape.items()}
            both = keras.layers.Concatenate()(list(inputs.values()))
            return keras.Model(inputs, keras.layers.Dense(1)(both))
        """,
    )
    job = assembled(f"--model={path}", f"--model_dir={tmp_path}/run")
    assert {name: each.shape for name, each in job.model.input.items()} == {
        "a": (None, 2),
        "b": (None, 1),
    }
    (batch,) = parity_program.read_batches(job.setup, job.data, 2, 1)
    assert job.model(batch[0]).shape == (40, 1)


def test_the_file_is_run_once(tmp_path):
    path = write(tmp_path, OWN, "\nprint('run')\n")
    done = heard(assembled, f"--model={path}", f"--model_dir={tmp_path}/run")
    assert done.stdout.count("run\n") == 1


def test_a_file_is_a_model_by_itself():
    assert isinstance(my_model.load(Settings(model="examples/binary.py")), MyModel)
    assert my_model.load(Settings(model="cnn")) is None


PIXELS = """
import keras
import numpy as np

draw = np.random.default_rng(0)
x = draw.normal(size=[6, 3, 3, 4]).astype("float32")
y = draw.integers(0, 4, [6, 3, 3])
# Another number in each part of a batch.
y[0], y[1, 1:], y[5, 0, 0] = 255, 255, 255
train_data = x, y

def build(input_shape, num_outputs):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Activation("relu")])
"""


def test_pixels_without_a_class_count_in_no_metric(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PIXELS)
    flags = f"--model={path}", "--task=segmentation"
    job = assembled(*flags, "--num_gpus=2", f"--model_dir={tmp_path}")
    found = job.model.evaluate(job.data.evaluation, return_dict=True, verbose=0)
    mine = my_model.load(job.settings).module
    scores, y = np.maximum(mine.x, 0), mine.y
    counts, best = y != 255, scores.argmax(axis=-1)
    assert found["accuracy"] == pytest.approx((best == y)[counts].mean(), rel=1e-6)
    chances = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    of_y = np.take_along_axis(chances, np.where(counts, y, 0)[..., None], -1)[..., 0]
    assert found["loss"] == pytest.approx(-np.log(of_y[counts]).mean(), rel=1e-5)
    overlap = [
        ((best == k) & (y == k)).sum() / ((best == k) & counts | (y == k)).sum()
        for k in range(4)
    ]
    assert found["mean_iou"] == pytest.approx(np.mean(overlap), rel=1e-6)


@pytest.mark.slow
def test_batches_of_other_processes(tmp_path):
    """Keras ends its workers by SIGTERM, which is no signal to the run."""
    path = tmp_path / "mine.py"
    path.write_text(WORKERS)
    flags = f"--model={path}", "--train_epochs=3", f"--model_dir={tmp_path}/run"
    done = run(*flags)
    assert "Done: 3 epochs, 18 steps" in done.stdout


WORKERS = """
import keras
import numpy as np

loss = "mse"


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, number):
        x = np.random.default_rng(number).normal(size=(16, 4))
        return x, x.sum(axis=1, keepdims=True)


def build():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def train_data():
    return Batches(workers=2, use_multiprocessing=True)
"""

RAISES = """
loss = "mse"

def rows():
    for number in range(40):
        if number == {number}:
            raise RuntimeError("no such photograph")
        yield x[:8], y[:8]

def train_data():
    specs = tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1])
    return tf.data.Dataset.from_generator(rows, output_signature=specs)
"""


@pytest.mark.parametrize("number", [0, slow(30)])
def test_of_a_generator_that_raises_only_the_users_line_is_seen(tmp_path, number):
    path = write(tmp_path, RAISES.format(number=number))
    done = run(f"--model={path}", f"--model_dir={tmp_path}/run", code=1)
    line = 1 + path.read_text()[: path.read_text().index("raise ")].count("\n")
    said = f"an error was raised at {path}:{line}, in rows: RuntimeError: no such"
    assert done.stderr.splitlines()[-1].startswith(f"towers.train: {said}")
    assert "Traceback" not in done.stderr
