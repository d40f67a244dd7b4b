"""A language model: which byte comes next?

    towers train --model=examples/language_model.py --task=language_model

Without --dataset, the data are the sources of Python's library: `text:python` reads
them and packs them into rows of tokens. The model returns values for each token of the
vocabulary, at each position.
"""

import keras


def build(vocabulary_size, sequence_length, num_outputs):
    """Layers of causal convolutions: no position sees those after it."""
    inputs = keras.Input((sequence_length,), dtype="int32")
    x = keras.layers.Embedding(vocabulary_size, 64)(inputs)
    for dilation in (1, 2, 4, 8):
        y = keras.layers.Conv1D(
            64, 2, padding="causal", dilation_rate=dilation, activation="relu"
        )(x)
        x = keras.layers.LayerNormalization()(keras.layers.Add()([x, y]))
    return keras.Model(inputs, keras.layers.Dense(num_outputs)(x))
