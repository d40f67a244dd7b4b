"""Recurrent layers read their weights before the loop, and not in it."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from towers.keras_adapter.layers import stateless_scope_here
from towers.keras_adapter.variables import swapped_values, value_behind

# They assign no weight. Those of a user's might.
_CELLS = (keras.layers.GRUCell, keras.layers.LSTMCell, keras.layers.SimpleRNNCell)
_LAYERS = (
    *(keras.layers.ConvLSTM1D, keras.layers.ConvLSTM2D, keras.layers.ConvLSTM3D),
    *(keras.layers.GRU, keras.layers.LSTM, keras.layers.SimpleRNN),
)


@contextlib.contextmanager
def read_before(layer: keras.layers.Layer) -> Iterator[None]:
    """Inside, a recurrent layer may be called: it reads its weights here, once.

    Keras's loop would read them in each of its steps, which a tower on another device
    would have to wait for. Layers whose cells are not Keras's own are left as they are.
    """
    if not layer.built or not _is_kerass(layer) or stateless_scope_here() is not None:
        yield
        return
    weights = layer.weights
    values = [tf.convert_to_tensor(value_behind(weight)) for weight in weights]
    with swapped_values(weights, values):
        yield


def _is_kerass(layer):
    if type(layer) in _LAYERS:
        return True
    cell = layer.cell if type(layer) is keras.layers.RNN else None
    cells = cell.cells if type(cell) is keras.layers.StackedRNNCells else [cell]
    return all(type(each) in _CELLS for each in cells)
