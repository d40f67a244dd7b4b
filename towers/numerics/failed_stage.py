"""Finds the error of a failed stage, which TensorFlow does not pass on.

The batch is computed again, op by op, on the host. No variable changes.

When a function fails, TensorFlow cancels the operations that wait for its results
before they receive its error. An error of the device alone, such as running out of
memory, is not found, as it does not occur on the host.
"""

import keras
import tensorflow as tf

from towers.builders.builder import Builder
from towers.collectives import batch
from towers.devices.names import HOST
from towers.keras_adapter.layers import call_model
from towers.keras_adapter.models import compute_loss
from towers.numerics.search import variables_of
from towers.tower import eager


def reason(builder: Builder, step: str) -> Exception | None:
    """Computes the last batch again, part by part, until a part fails.

    Args:
        builder: The builder whose step has failed.
        step: "train", "test" or "predict".

    Returns:
        The error; `None` if nothing fails, or the batch is not known.
    """
    try:
        for data in builder.context.last_batch.take(step):
            _compute(builder, step, data)
    except Exception as error:  # any error of a user's layer
        return error
    return None


def _compute(builder, step, data):
    training = step == "train"
    if step == "predict":
        data = (data, None, None)
    data = keras.utils.unpack_x_y_sample_weight(data)
    preprocess = builder.context.preprocess
    # Only this host computes again: the other hosts need not have failed.
    with tf.device(HOST):
        parts = builder.pieces.batches.cut(data)
    for part in parts:
        if batch.batch_size(part):
            with tf.device(HOST), eager.aside(builder.model):
                inputs = part if preprocess is None else preprocess(part, training)
                _compute_part(builder.model, step, *inputs)


def _compute_part(model, step, x, y=None, sample_weight=None):
    variables = variables_of(model)
    values = [tf.convert_to_tensor(variable.value) for variable in variables]
    mapping = [*zip(variables, values, strict=True)]
    training = step == "train"
    with (
        tf.GradientTape() as tape,
        keras.StatelessScope(mapping, collect_losses=True),
    ):
        params = values[: len(model.trainable_variables)]
        tape.watch(params)
        outputs = call_model(model, x, training)
        if step == "predict":
            return
        loss = compute_loss(model, x, y, outputs, sample_weight, training=training)
        with tape.stop_recording():
            model.compute_metrics(x, y, outputs, sample_weight)
    if training:
        tape.gradient(loss, params)
