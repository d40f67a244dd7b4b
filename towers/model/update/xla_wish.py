"""What the user wants of XLA."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.keras_adapter.models import compile_config


class XlaWish:
    """What `compile` was told of XLA, by the argument `jit_compile`."""

    def __init__(self, model: keras.Model):
        self._model = model
        # What was told, and what shows whether that was the last time.
        self._told = self._config = None

    def tell(self, jit_compile: Any) -> None:
        """Is told the wish, when the model has been compiled with it."""
        self._told, self._config = jit_compile, compile_config(self._model)

    def wanted(self, say: Callable[[Sequence[str]], None]) -> bool | None:
        """Tells whether XLA is to compile towers and update; `None`: what is faster.

        Keras's own "auto" turns it on as soon as there is a GPU. Towers would be
        compiled for each device and each size of a local batch, so here it is tried.
        """
        model, told = self._model, self._told
        wanted = model.compiled and model.jit_compile
        if self._config is not compile_config(model):
            # Compiled without us: Keras keeps only what it has made of the wish.
            told = wanted
            if wanted and tf.config.list_physical_devices("GPU"):
                told = "auto"
                line = (
                    f"Model '{model.name}' was compiled before multi_gpu_model() got "
                    "it, and Keras turns XLA on by itself where there is a GPU, so "
                    "the towers go without; if XLA is wanted, compile what "
                    "multi_gpu_model() returns, with jit_compile=True."
                )
                say([line])
        if told is None or told == "auto":
            return None
        return bool(told and wanted)
