"""Random numbers: Keras's seeds, and the generators that all layers share."""

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import random as keras_random
from keras.src.random import seed_generator
from tensorflow.python.ops import stateful_random_ops

from towers.keras_adapter.patching import Target

NEXT_SEED = Target(keras.random.SeedGenerator, "next", unless_replaced=True)
"""`SeedGenerator.next(ordered)`, from which every random layer takes its seed."""

CAST_SEED = Target(keras_random, "_cast_seed")
"""`_cast_seed(seed)`: makes of a Keras seed what TensorFlow's operations take."""

# Keras gives it a name since 3.13.
_SHARED = "global_seed_generator"


def cast_seed(seed: tf.Tensor) -> tf.Tensor:
    """Returns what TensorFlow's random operations take for a seed of Keras's."""
    return keras_random._cast_seed(seed)


def shared_generator(create: bool = False) -> keras.random.SeedGenerator | None:
    """Returns the generator that layers without a seed of their own share.

    Args:
        create: Whether to create it if Keras has not done so yet. Keras then draws a
            number of Python's `random`.
    """
    if create:
        return seed_generator.global_seed_generator()
    return global_state.get_global_attribute(_SHARED)


def shared_tf_generator() -> tf.random.Generator | None:
    """Returns TensorFlow's global generator, if it was created already."""
    return stateful_random_ops.global_generator
