"""Errors about shapes: the sentence names the part of the program that they are in."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import towers
from towers.tower.errors import ModelError

ROWS = 9
X = np.ones((ROWS, 5, 3), "float32")


def _model():
    return keras.Sequential([keras.Input((5, 3)), layers.Dense(1)])


def _of_four_steps(y, y_pred):
    return keras.ops.mean(y[:, :4] - y_pred)


# Shapes of y and of sample_weight, what is compiled, and the place that is named.
WHOLE = {
    "a weight for each row, losses for each step": ((5, 1), (), {}, ", in its loss"),
    "targets of another length": ((4, 1), None, {}, ", in its loss"),
    "weights of another length": ((5, 1), (4,), {}, ", in its loss"),
    "a metric of another length": ((5, 1), None, {"metrics": [_of_four_steps]}, ""),
}


@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE)
def test_where_one_device_cannot_either_no_layer_is_blamed(case):
    of_y, of_weight, compiled, where = case
    y = np.ones((ROWS, *of_y), "float32")
    weight = None if of_weight is None else np.ones((ROWS, *of_weight), "float32")
    plain, parallel = _model(), towers.multi_gpu_model(_model(), gpus=2)
    for model in plain, parallel:
        model.compile("sgd", "mse", **compiled)
    with pytest.raises(Exception, match="must be equal"):
        plain.train_on_batch(X, y, sample_weight=weight)
    sentence = rf"a whole batch{where} \(.*; expected y and sample_weight"
    with pytest.raises(ModelError, match=sentence):
        parallel.train_on_batch(X, y, sample_weight=weight)


def test_lengths_that_are_known_in_the_graph_only():
    def batches():
        yield X, np.ones((ROWS, 4, 1), "float32")

    of_y = tf.TensorSpec((None, None, 1))
    data = tf.data.Dataset.from_generator(
        batches, output_signature=(tf.TensorSpec((None, 5, 3)), of_y)
    )
    parallel = towers.multi_gpu_model(_model(), gpus=2)
    parallel.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"in its loss .*; expected y and sample_w"):
        parallel.fit(data, verbose=0)
