"""Runs of a few batches, for tests of what is saved and continued."""

import functools

import keras
import numpy as np
import tensorflow as tf

from tests.small import tiny
from towers import multi_gpu_model
from towers.input_pipeline import ArraySource, make_dataset

EXAMPLES, BATCH, STEPS = 44, 8, 6


def source():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, [EXAMPLES, 4, 4, 1], np.uint8)
    return ArraySource(images, rng.integers(0, 3, EXAMPLES))


def data(training=True, repeat=False, batch_size=BATCH, seed=3, recipe="cifar"):
    return make_dataset(
        source(),
        "train",
        batch_size=batch_size,
        image_shape=(4, 4, 1),
        training=training,
        recipe=recipe,
        seed=seed,
        repeat=repeat,
    )


def arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=[EXAMPLES, 4, 4, 1]).astype("float32")
    return x, rng.integers(0, 3, EXAMPLES)


def plain():
    """Data that are not of input_pipeline: a run starts sooner."""
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)


class Breaks(keras.callbacks.Callback):
    """Ends the run, or does something else, once so many batches have been trained."""

    def __init__(self, after, what=None):
        super().__init__()
        self.left, self.what = after, what

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            if self.what is None:
                raise ZeroDivisionError
            self.what()


# A model that is fitted again is not traced again.
towers = functools.cache(multi_gpu_model)


def fit(model, *callbacks, x=None, gpus=2, epochs=3, **options):
    x = plain() if x is None else x
    options |= {"epochs": epochs, "callbacks": list(callbacks)}
    return towers(model, gpus=gpus).fit(x, verbose=0, **options)


def variables(model):
    return *model.variables, *model.optimizer.variables


def values(model):
    return [v.numpy() for v in variables(model)]


@functools.cache
def _made(make, args, options):
    model = make(*args, **dict(options))
    return model, values(model)


def as_new(*args, make=tiny, **options):
    """A model that other tests have traced, with the values that it began with.

    There is one: the next call takes it away from whoever has it.
    """
    model, start = _made(make, args, tuple(options.items()))
    for variable, value in zip(variables(model), start, strict=True):
        variable.assign(value)
    keras.utils.set_random_seed(1)
    return model


def measured():
    """A model with a metric."""
    return tiny(metrics=["accuracy"])


def fit_traced(*callbacks, epochs=3):
    """A fit of a model as good as any."""
    return fit(as_new(), *callbacks, epochs=epochs)


def assert_same(model, wanted):
    for a, b in zip(values(model), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
