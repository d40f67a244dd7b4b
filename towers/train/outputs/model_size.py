"""Says how large a model is."""

import shutil

import keras

from towers.keras_adapter.variables import bytes_of
from towers.program import words

# What Keras lays its summary out for, where there is no terminal.
_WIDTH = 80


def size_text(model: keras.Model) -> str:
    """Returns the number of a model's parameters, and the memory that they take."""
    size = sum(map(bytes_of, model.weights))
    return f"{words.count(model.count_params(), 'parameter')} ({words.size(size)})"


def summary_text(model: keras.Model) -> str:
    """Returns a model's size and Keras's summary, as lines for a font of one width."""
    # Keras counts the optimizer's variables among the parameters.
    lines = [size_text(model)]
    width = min(_WIDTH, shutil.get_terminal_size().columns)
    model.summary(line_length=width, print_fn=lines.append)
    return "\n".join(lines)
