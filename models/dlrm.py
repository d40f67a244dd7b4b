"""The deep learning recommendation model.

Naumov et al.: "Deep Learning Recommendation Model for Personalization and
Recommendation Systems", 2019 (https://arxiv.org/abs/1906.00091). Numbers pass through a
perceptron, each id is looked up in its own table; the dot product of each pair of these
vectors, and the numbers' vector, pass through another perceptron.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops


@keras.saving.register_keras_serializable(package="towers")
class DotInteraction(keras.layers.Layer):
    """The dot products of all pairs of some vectors [batch, width]."""

    def call(self, inputs: Sequence[Any]):
        """Returns [batch, pairs]."""
        vectors = ops.stack(inputs, axis=1)
        count = len(inputs)
        products = ops.matmul(vectors, ops.transpose(vectors, (0, 2, 1)))
        one, other = np.tril_indices(count, -1)
        products = ops.reshape(products, (-1, count * count))
        return ops.take(products, one * count + other, axis=1)

    def compute_output_shape(self, input_shape):
        """Returns the shape of the products."""
        count = len(input_shape)
        return (input_shape[0][0], count * (count - 1) // 2)


def build(
    input_shape: Mapping[str, Sequence[int]],
    table_sizes: Mapping[str, int],
    num_outputs: int,
    *,
    width: int = 32,
    bottom: Sequence[int] = (512, 256),
    top: Sequence[int] = (512, 256),
) -> keras.Model:
    """Builds the network.

    Args:
        input_shape: Shape of each column, by name. Columns that have no table are
            numbers.
        table_sizes: Number of ids of each column of ids, by its name.
        num_outputs: Number of logits.
        width: Numbers in a row of a table.
        bottom: Units of the hidden layers for numbers.
        top: Units of the hidden layers behind the interactions.

    Returns:
        A model from a dict of columns to float32 logits [batch, num_outputs].
    """
    inputs = {
        name: keras.Input(
            tuple(shape), dtype="int64" if name in table_sizes else None, name=name
        )
        for name, shape in input_shape.items()
    }
    vectors = []
    numbers = [inputs[name] for name in inputs if name not in table_sizes]
    if numbers:
        x = (
            keras.layers.Concatenate(name="dlrm_numbers")(numbers)
            if len(numbers) > 1
            else numbers[0]
        )
        vectors.append(_perceptron(x, (*bottom, width), "bottom"))
    written = _written(table_sizes)
    for name, size in table_sizes.items():
        limit = size**-0.5
        table = keras.layers.Embedding(
            size,
            width,
            embeddings_initializer=keras.initializers.RandomUniform(-limit, limit),
            name=f"dlrm_table_{written[name]}",
        )
        vectors.append(table(inputs[name]))
    x = vectors[0]
    if len(vectors) > 1:
        products = DotInteraction(name="dlrm_interaction")(vectors)
        # Beside the numbers' vector, if there is one.
        x = (
            keras.layers.Concatenate(name="dlrm_joined")([x, products])
            if numbers
            else products
        )
    logits = keras.layers.Dense(num_outputs, dtype="float32", name="dlrm_logits")(
        _perceptron(x, top, "top")
    )
    return keras.Model(inputs, logits, name="dlrm")


def _written(columns):
    """The names of columns as parts of layers' names, where few signs are allowed."""
    names = {}
    for column in columns:
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", column)
        while name in names.values():
            name += "_"
        names[column] = name
    return names


def _perceptron(x, widths, name):
    # Not by Keras's own names, which may be those of columns, such as "dense".
    for number, units in enumerate(widths):
        x = keras.layers.Dense(
            units,
            activation="relu",
            kernel_initializer="he_normal",
            name=f"dlrm_{name}_{number}",
        )(x)
    return x
