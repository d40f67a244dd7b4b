"""A run that goes on reads the records that it would have read."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.variants import slow
from towers import multi_gpu_model
from towers.input_pipeline import ArraySource, make_dataset
from towers.lifecycle.checkpoint import Checkpoint
from towers.model.program import Program
from towers.model.tower_model import TowerModel
from towers.train.callbacks import StopAtStep

EXAMPLES, BATCH = 21, 4  # six batches


@pytest.fixture
def record(monkeypatch):
    """Instead of training: notes which examples a step is given."""
    seen = []

    def make(parallel, builder=None):
        def function(iterator):
            batches = [
                tuple(map(int, keras.tree.flatten(batch)[-1]))
                for batch in itertools.islice(iterator, parallel.steps_per_execution)
            ]
            if not batches:
                raise StopIteration
            seen.extend(batches)
            parallel.optimizer.iterations.assign_add(len(batches))
            return {"loss": 0.0}

        return function

    monkeypatch.setattr(Program, "create_variables", lambda *_: None)
    monkeypatch.setattr(TowerModel, "_train_function", make)
    return seen, make


@functools.cache
def model(call):
    """One that is ready in no time."""
    model = keras.Sequential([keras.Input((1, 1, 1)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=call)
    model.optimizer.build(model.trainable_variables)
    return model, multi_gpu_model(model, gpus=1)


def begin(call):
    """Begins as a new process does."""
    plain, parallel = model(call)
    plain.optimizer.iterations.assign(0)
    plain.train_function = parallel.train_function = None
    keras.utils.set_random_seed(1)
    return plain, parallel


def images():
    return np.zeros([EXAMPLES, 1, 1, 1], np.uint8)


def arrays():
    return images().astype("float32"), np.arange(EXAMPLES)


def finite():
    data = tf.data.Dataset.from_tensor_slices(arrays())
    return data.shuffle(EXAMPLES, seed=5).batch(BATCH)


def unknown():
    return finite().filter(lambda *_: True)


def repeated():
    return finite().repeat()


def pipeline(classes=EXAMPLES, **options):
    source = ArraySource(images(), np.arange(EXAMPLES), num_classes=classes)
    options = {"batch_size": BATCH, "image_shape": (1, 1, 1)} | options
    return make_dataset(source, "train", training=True, **options)


def repeated_pipeline():
    return pipeline(repeat=True)


def generator():
    for image, label in iter(repeated().take(60)):
        yield image.numpy(), label.numpy()


class Batches(keras.utils.PyDataset):
    """Shuffles itself as an epoch ends, and by the seed of its own."""

    def __init__(self):
        super().__init__()
        self._order, self._rng = np.arange(EXAMPLES), np.random.default_rng(0)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x, y = arrays()
        where = self._order[BATCH * index : BATCH * (index + 1)]
        return x[where], y[where]

    def on_epoch_end(self):
        self._order = self._rng.permutation(self._order)


def options(make):
    if make is arrays:
        x, y = make()
        return {"x": x, "y": y, "batch_size": BATCH}
    return {"x": make(), "shuffle": make is Batches}


@pytest.mark.quick_one_in(6)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("make", "steps", "call"),
    [
        *[(make, None, 1) for make in (finite, Batches)],
        *[slow(make, None, 1) for make in (arrays, unknown)],
        *[(make, 4, 1) for make in (arrays, unknown, repeated, generator)],
        # Data of input_pipeline are those of quick tests in test_continued.py.
        slow(pipeline, 4, 1),
        *[slow(finite, 4, 1), slow(finite, 3, 1)],
        (finite, 8, 2),
        (repeated_pipeline, 3, 2),
    ],
)
def test_the_same_records(tmp_path, record, make, steps, call, capsys):
    seen, function = record
    run = {"steps_per_epoch": steps, "verbose": 0}
    plain, _ = begin(call)
    plain.train_function = function(plain)
    plain.fit(**options(make), epochs=5, **run)
    wanted = [*seen]
    seen.clear()
    # Ended inside of an epoch, as one ends, and inside of another one.
    for epochs, inside in ((1, True), (2, False), (5, True), (5, False)):
        _, parallel = begin(call)
        stop = (
            StopAtStep(len(seen) + 2 * call) if inside else keras.callbacks.Callback()
        )
        callbacks = [Checkpoint(tmp_path), stop]
        parallel.fit(**options(make), epochs=epochs, callbacks=callbacks, **run)
    assert seen == wanted
    assert "other data" not in capsys.readouterr().err


def test_a_second_fit_goes_on_with_the_same_object(tmp_path, record):
    seen, function = record
    plain, _ = begin(1)
    plain.train_function = function(plain)
    plain.fit(**options(finite), epochs=3, verbose=0)
    wanted = [*seen]
    seen.clear()
    (_, parallel), data, checkpoint = begin(1), options(finite), Checkpoint(tmp_path)
    for epochs in (1, 3):
        parallel.fit(**data, epochs=epochs, callbacks=[checkpoint], verbose=0)
    assert seen == wanted
