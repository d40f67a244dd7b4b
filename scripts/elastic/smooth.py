"""A model without kinks, in which rounding stays rounding."""

import keras


def build(input_shape: tuple[int, ...], num_outputs: int) -> keras.Model:
    """Builds it for `--model`."""
    hidden = keras.layers.Dense(64, activation="tanh")
    flat = keras.layers.Flatten()
    layers = keras.Input(input_shape), flat, hidden, keras.layers.Dense(num_outputs)
    return keras.Sequential(layers)
