"""What a run keeps does not grow with what it has done."""

import gc
import os
import tracemalloc

import keras
import pytest
import tensorflow as tf

import towers
from tests.small import tiny
from tests.towers.lifecycle.runs import arrays
from towers import callbacks, multi_gpu_model
from towers.monitoring.tensorboard.callback import TensorBoard

EPOCHS = 6
# The number of batches of each, which a run has to know, and a little by chance.
MOST_BYTES_AN_EPOCH = 400
# Keras keeps its own history, and TensorFlow has caches.
OURS = [
    tracemalloc.Filter(True, os.path.join(os.path.dirname(towers.__file__), "*")),
    tracemalloc.Filter(True, __file__),
]


class Traced(keras.callbacks.Callback):
    """Measures what our lines keep after some epochs, and after three times as many."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 == EPOCHS // 2:
            tracemalloc.start()
        if epoch + 1 == EPOCHS:
            self.before = self._traced()
        if epoch + 1 == 3 * EPOCHS:
            self.after = self._traced()

    def _traced(self):
        gc.collect()
        traces = tracemalloc.take_snapshot().filter_traces(OURS).traces
        return sum(trace.size for trace in traces)


class Keeps(keras.callbacks.Callback):
    """Keeps the logs of each batch, as nobody should."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))


@pytest.fixture(autouse=True)
def _trace_no_more():
    yield
    tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], [Keeps()]], ids=["nobody", "one"])
def test_whether_somebody_keeps_a_history(tmp_path, others):
    model = multi_gpu_model(tiny(), gpus=2, variable_update="parameter_server")
    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(2)
    traced = Traced()
    watched = callbacks.Checkpoint(tmp_path / "run"), TensorBoard(str(tmp_path), 100)
    model.fit(
        data,
        validation_data=data,
        epochs=3 * EPOCHS,
        verbose=0,
        shuffle=False,
        callbacks=[*watched, *others, traced],
    )
    grown = (traced.after - traced.before) / (2 * EPOCHS)
    assert (grown > MOST_BYTES_AN_EPOCH) == bool(others), grown
