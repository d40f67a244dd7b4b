"""Keras's own tests of its trainer, whose models train on two towers."""

import contextlib
import functools
import importlib.util
import pathlib
import re
import types
from collections.abc import Iterator
from unittest import mock

import keras

import towers
from towers.model.tower_model import TowerModel

# The methods that compute; all others are the model's own.
_METHODS = (
    *("fit", "evaluate", "predict"),
    *("train_on_batch", "test_on_batch", "predict_on_batch"),
)


def source() -> pathlib.Path:
    """Returns the path of Keras's tests, which its wheel contains."""
    (folder,) = importlib.util.find_spec("keras").submodule_search_locations
    return pathlib.Path(folder, "src/trainers/trainer_test.py")


def load() -> types.ModuleType:
    """Returns the module of Keras's tests, with Keras models.

    Some of theirs are no `keras.Model`, but a layer and a trainer; here they are both.
    """
    text = source().read_text()
    text = re.sub(r"(?m)^import jax$", "", text)
    text = re.sub(r"(?m)^ +@pytest.mark.requires_trainable_backend$", "", text)
    text = text.replace("(Trainer, layers.Dense)", "(layers.Dense, keras.Model)")
    text = text.replace("(Trainer, layers.Layer)", "(keras.Model)")
    text = re.sub(r"layers\.Layer\.__init__\(self", "keras.Model.__init__(self", text)
    text = text.replace("self.layers", "self.own_layers")
    text = re.sub(r"(?m)^ +Trainer\.__init__\(self\)$", "", text)
    module = types.ModuleType("keras_trainer_test")
    exec(compile(text, str(source()), "exec"), vars(module))
    return module


@contextlib.contextmanager
def on_towers(gpus: int) -> Iterator[list[keras.Model]]:
    """Inside, models train, evaluate and predict on towers.

    Yields the models that did.
    """
    models: list[keras.Model] = []
    proxies: dict[int, TowerModel] = {}

    def through(name, original):
        @functools.wraps(original)
        def method(self, *args, **kwargs):
            if type(self) is TowerModel:
                return original(self, *args, **kwargs)
            if id(self) not in proxies:
                proxies[id(self)] = towers.multi_gpu_model(self, gpus=gpus)
                models.append(self)
            return getattr(proxies[id(self)], name)(*args, **kwargs)

        return method

    with contextlib.ExitStack() as patches:
        for name in _METHODS:
            by = through(name, getattr(keras.Model, name))
            patches.enter_context(mock.patch.object(keras.Model, name, by))
        yield models
