"""Runs whose towers have a batch each: what a batch is follows the number of towers."""

import csv
import shutil
import signal
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import once, warm
from tests.towers.launch.launching import ROOT
from tests.towers.train import runs
from tests.towers.train.runs import assembled, main_here, ours, read_settings
from towers.elastic import requests, resize
from towers.train import callbacks

pytestmark = pytest.mark.quick_one_in(2)

# Without a ReLU: where rounding decides on which side of 0 an output is, the weights
# of two equal runs part.
SMOOTH = (ROOT / "scripts/elastic/smooth.py").read_text()
# Of one tower.
SIZE, RATE = 8, 0.02
DATA = ("--dataset=synthetic:4x4x1:3:100",)
# Of an epoch, by the number of towers; the last batch is short.
STEPS = {1: 13, 2: 7, 3: 5}
# An epoch that 2 towers begin, and 3 end.
BOTH = [(7, 2, 0.04)] * 3 + [(7, 3, 0.04)] * 4
SAID = (
    "Step {}: With {}, a batch has {} examples from here on, after {}, and the "
    "learning rate is {}. The numbers are no longer those of a run whose towers stay."
)
OWN_OPTIMIZER = "\noptimizer = lambda learning_rate: keras.optimizers.SGD({})\n"
PLATEAU = """
def callbacks():
    options = {"mode": "max", "factor": 0.5, "patience": 2}
    return keras.callbacks.ReduceLROnPlateau("val_loss", **options)
"""
OWN_DATA = """
import keras
import numpy as np
import tensorflow as tf

loss = "mse"
x = np.random.default_rng(0).normal(size=[100, 4]).astype("float32")
y = np.tanh(x.sum(axis=1, keepdims=True))

def build(input_shape):
    layers = keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)
    return keras.Sequential([keras.Input(input_shape), *layers])
"""
KINDS = {
    "arrays": "\ntrain_data = x, y\n",
    "dataset": """
def train_data(batch_size, seed):
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return data.shuffle(100, seed=seed).batch(batch_size)
""",
    "PyDataset": """
class Data(keras.utils.PyDataset):
    def __len__(self):
        return -(-100 // self.size)

    def __getitem__(self, number):
        rows = slice(number * self.size, (number + 1) * self.size)
        return x[rows], y[rows]

def train_data(batch_size):
    data = Data()
    data.size = batch_size
    return data
""",
}
FIXED = "\ntrain_data = tf.data.Dataset.from_tensor_slices((x, y)).batch({})\n"


class Events(keras.callbacks.Callback):
    """Looks at a run; after some steps, asks for other towers, or ends it."""

    def __init__(self, seen, events):
        super().__init__()
        self.seen, self.events = seen, events

    def on_train_batch_end(self, batch, logs=None):
        optimizer, plan = self.model.optimizer, self.model.builder.plan
        rate = round(float(optimizer.learning_rate), 6)
        self.seen.steps.append((self.params["steps"], len(plan.replicas), rate))
        event = self.events.get(int(optimizer.iterations))
        if event is signal.SIGTERM:
            signal.raise_signal(event)
        elif event is not None:
            request = {"key": str(event), "num_gpus": event}
            request |= {"gpu_indices": (), "split_ratios": ()}
            requests._write(str(self.seen.path), "resize.json", request)

    def on_epoch_end(self, epoch, logs=None):
        self.seen.losses[epoch] = logs["loss"]


def flags_of(path, *flags, mine=SMOOTH, data=DATA):
    """The flags of a run; `mine` is the file of its model."""
    file = path.with_suffix(".py")
    file.write_text(mine)
    flags = *data, f"--model={file}", f"--model_dir={path}", *flags
    flags = f"--batch_size={SIZE}", f"--learning_rate={RATE}", "--max_gpus=4", *flags
    return "--elastic_batch=per_tower", "--train_epochs=4", "--deterministic", *flags


def train(path, *flags, events=None, code=0, **options):
    """Trains in this process; what was said, and the steps: see `epochs`."""
    seen = types.SimpleNamespace(path=path, steps=[], losses={})
    make = callbacks.make

    def with_events(*args, **kwargs):
        return [*make(*args, **kwargs), Events(seen, events or {})]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(callbacks, "make", with_events)
        patched.setattr(resize, "_LOOK_EVERY_S", 0)
        seen.done = main_here(*flags_of(path, *flags, **options))
    assert seen.done.returncode == code, seen.done.stderr
    assert "Traceback" not in seen.done.stderr
    seen.said = [line for line in ours(seen.done) if "a batch has" in line]
    return seen


def epochs(*towers):
    """Of each step the steps of its epoch, the towers, and the learning rate."""
    rates = {n: round(RATE * n, 6) for n in towers}
    return [(STEPS[n], n, rates[n]) for n in towers for _ in range(STEPS[n])]


def of_pipeline(job, epoch, size):
    """An epoch of the synthetic data, whose pixels become floats."""
    options = {"batch_size": size, "start_epoch": epoch, "repeat": False}
    data = job.data.open_training(**options)
    return data.map(lambda x, y: (tf.cast(x, "float32") / 127.5 - 1, y))


def plain(path, *towers, make=keras.optimizers.Adam, data_of=of_pipeline, **options):
    """Losses and weights of plain Keras, with the batches of so many towers."""
    job = assembled(*flags_of(path, **options))
    model = keras.models.clone_model(job.model)
    model.set_weights(job.model.get_weights())
    model.compile(make(), job.model.loss, jit_compile=False)
    losses = {}
    for epoch, count in enumerate(towers):
        model.optimizer.learning_rate = RATE * count
        data = data_of(job, epoch, SIZE * count)
        fitted = model.fit(data, verbose=0, shuffle=False)
        losses[epoch] = fitted.history["loss"][0]
    return losses, model.get_weights()


def assert_equal(seen, losses, expected):
    for epoch, loss in seen.losses.items():
        np.testing.assert_allclose(loss, losses[epoch], rtol=1e-5, atol=1e-6)
    for found, theirs in zip(runs.weights(seen.path), expected, strict=True):
        np.testing.assert_allclose(found, theirs, atol=1e-5)


def made(factory, name, events, code=0):
    def make(folder):
        flags = "--num_gpus=2", "--log_csv"
        return train(folder / "run", *flags, events=events, code=code)

    return once.make(factory, f"{name}_batches", make)


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A run of 2 towers, then 3, then 1; not to be changed."""
    return made(tmp_path_factory, "changed", {3: 3, 14: 1})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """That run as it ends in its first epoch; not to be changed."""
    return made(tmp_path_factory, "stopped", {3: 3, 5: signal.SIGTERM}, code=143)


@pytest.mark.slow
def test_as_plain_keras_with_other_batches(changed, tmp_path):
    assert [*changed.losses] == [0, 1, 2, 3]
    assert_equal(changed, *plain(tmp_path / "plain", 2, 3, 3, 1))


def test_an_epoch_ends_as_it_has_begun(changed):
    third = [(5, 3, 0.06)] * 2 + [(5, 1, 0.06)] * 3
    assert changed.steps == BOTH + epochs(3) + third + epochs(1)
    summary = runs.summary_of(changed.path)
    assert [summary[name] for name in ("batch_size", "epochs", "steps")] == [8, 4, 30]
    found = [(each["step"], len(each["towers"])) for each in summary["generations"]]
    assert found == [(0, 2), (3, 3), (14, 1)]
    assert summary["towers"] == ["/device:CPU:0"]


def test_a_line_for_each_change(changed):
    first = SAID.format(7, "3 towers", 24, 16, 0.06)
    assert changed.said == [first, SAID.format(17, "1 tower", 8, 24, 0.02)]


def test_tensorboard_has_the_changes(changed):
    files = (changed.path / "train").glob("*tfevents*")
    texts = b"".join(file.read_bytes() for file in files)
    for line in (b"Step 3: 2 -> 3 towers", b"With 3 towers, a", b"With 1 tower, a"):
        assert line in texts


def test_the_log_has_the_columns_of_its_header(changed):
    with open(changed.path / "log.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert {len(row) for row in rows} == {len(header)}
    found = [float(row[header.index("loss")]) for row in rows]
    np.testing.assert_allclose(found, [*changed.losses.values()])


@pytest.mark.slow
def test_eval_only(changed):
    done = main_here(*flags_of(changed.path, "--num_gpus=3", "--eval_only"))
    assert done.returncode == 0, done.stderr
    loss = runs.summary_of(changed.path)["val_loss"]
    assert f"validation loss {loss:.4f}" in done.stdout


@pytest.mark.slow
def test_a_run_goes_on_as_if_never_stopped(stopped, changed, tmp_path):
    path = shutil.copytree(stopped.path, tmp_path / "run")
    seen = train(path, "--num_gpus=3", events={14: 1})
    assert stopped.steps + seen.steps == changed.steps
    assert seen.losses == changed.losses
    assert seen.said == changed.said
    runs.assert_same_bits(*map(runs.weights, (path, changed.path)))


@pytest.mark.slow
@pytest.mark.parametrize("towers", [1, 2])
def test_a_run_goes_on_with_the_batch_of_its_epoch(stopped, tmp_path, towers):
    path = shutil.copytree(stopped.path, tmp_path / "run")
    seen = train(path, f"--num_gpus={towers}", "--train_epochs=2")
    assert seen.steps == [(7, towers, 0.04)] * 2 + epochs(towers)
    assert_equal(seen, *plain(tmp_path / "plain", 2, towers))
    said = SAID.format(7, "1 tower", 8, 16, 0.02)
    assert seen.said == ([said] if towers == 1 else [])


@pytest.mark.slow
def test_a_run_goes_on_between_epochs(tmp_path):
    path, sgd = tmp_path / "run", keras.optimizers.SGD
    own = SMOOTH + OWN_OPTIMIZER.format("learning_rate")
    for count, towers in enumerate((2, 3), 1):
        flags = f"--num_gpus={towers}", f"--train_epochs={count}"
        seen = train(path, *flags, mine=own)
        assert (seen.steps, seen.said) == (epochs(towers), [])
    assert_equal(seen, *plain(tmp_path / "plain", 2, 3, make=sgd))


@pytest.mark.parametrize("flag", ["--lr_schedule=cosine", "--warmup_steps=3"])
def test_what_counts_steps_is_refused(flag):
    with pytest.raises(ValueError, match=rf"per_tower and {flag}, which counts steps"):
        read_settings("--elastic_batch=per_tower", flag)


def test_a_schedule_of_the_users_is_refused(tmp_path):
    schedule = "keras.optimizers.schedules.CosineDecay(learning_rate, 10)"
    own = SMOOTH + OWN_OPTIMIZER.format(schedule)
    (said,) = ours(train(tmp_path / "run", mine=own, code=1).done)
    assert "an optimizer with a schedule of the learning rate, which counts" in said


@pytest.mark.parametrize("size", [10, 2 * SIZE])
def test_batches_of_the_users_own_size_are_refused(tmp_path, size):
    own = OWN_DATA + FIXED.format(size)
    said = f"gives batches of {size}; expected the size that is asked for"
    with pytest.raises(ValueError, match=said):
        assembled(*flags_of(tmp_path / "run", "--num_gpus=2", mine=own, data=()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "dataset", "PyDataset"])
def test_data_and_optimizer_of_the_users_own(tmp_path, kind):
    own = OWN_DATA + KINDS[kind] + OWN_OPTIMIZER.format("learning_rate")
    path, options = tmp_path / "run", {"mine": own, "data": ()}
    seen = train(path, "--num_gpus=2", "--train_epochs=2", events={3: 3}, **options)
    assert seen.steps == BOTH + epochs(3)
    if kind == "PyDataset":
        options["data_of"] = lambda job, _, size: job.data.in_batches_of(size).training
        options["make"] = keras.optimizers.SGD
        assert_equal(seen, *plain(tmp_path / "plain", 2, 3, **options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "dataset", "PyDataset"])
def test_data_of_the_users_own_go_on_between_epochs(tmp_path, kind):
    own = OWN_DATA + KINDS[kind] + OWN_OPTIMIZER.format("learning_rate")
    for count in (1, 2):
        flags = "--num_gpus=2", f"--train_epochs={count}"
        seen = train(tmp_path / "run", *flags, mine=own, data=())
        assert seen.steps == epochs(2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "dataset", "PyDataset"])
@pytest.mark.parametrize("towers", [2, 3])
def test_data_of_the_users_own_go_on_within_an_epoch(tmp_path, kind, towers):
    path, options = tmp_path / "run", {"mine": OWN_DATA + KINDS[kind], "data": ()}
    train(path, "--num_gpus=2", events={3: signal.SIGTERM}, code=143, **options)
    seen = train(path, f"--num_gpus={towers}", "--train_epochs=2", **options)
    assert seen.steps == [(7, towers, 0.04)] * 4 + epochs(towers)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_patience_counts_on(tmp_path, dtype):
    """Of a loss of which more is better, the first epoch is the best."""
    flags = "--monitor=max:val_loss", f"--dtype={dtype}"
    flags += "--early_stopping=3", "--num_gpus=2", "--train_epochs=9"
    seen = train(tmp_path / "run", *flags, mine=SMOOTH + PLATEAU, events={3: 3})
    assert seen.steps == BOTH + epochs(3, 3) + [(5, 3, 0.03)] * 5
    assert "has not been better for 3 epochs" in seen.done.stdout


@pytest.mark.slow
def test_parity(tmp_path):
    flags = flags_of(tmp_path / "run", "--num_gpus=3")
    done = warm.run("towers.parity", *runs.QUICKLY, *flags)
    assert done.returncode == 0, done.stderr
