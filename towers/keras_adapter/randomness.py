"""Random numbers: Keras's seeds, and the generators that all layers share."""

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.ops import stateful_random_ops

# Keras has a public function for the shared generator since 3.13.
_SHARED = "global_seed_generator"


def shared_generator(create: bool = False) -> keras.random.SeedGenerator | None:
    """Returns the generator that layers without a seed of their own share.

    Args:
        create: Whether to create it if Keras has not done so yet. Keras then draws a
            number from Python's `random`.
    """
    if create:
        return seed_generator.global_seed_generator()
    return global_state.get_global_attribute(_SHARED)


def shared_tf_generator() -> tf.random.Generator | None:
    """Returns TensorFlow's global generator, if it exists already."""
    return stateful_random_ops.global_generator


def random_states() -> dict[str, Any]:
    """Returns the states of all shared generators, as JSON.

    The generators of layers are variables of the model.

    Keras and TensorFlow create their shared generators at the first draw.
    """
    kind, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    states = {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), *rest],
    }
    if (shared := shared_generator()) is not None:
        states["keras"] = shared.state.numpy().tolist()
    if (shared := shared_tf_generator()) is not None:
        states["tensorflow"] = [shared.algorithm, shared.state.numpy().tolist()]
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restores the states of generators that `random_states` returned."""
    if "keras" in states:
        # To create the generator, Keras draws a number from Python's generator.
        shared = shared_generator(create=True)
        shared.state.assign(states["keras"])
    if "tensorflow" in states:
        algorithm, state = states["tensorflow"]
        if shared_tf_generator() is None:
            generator = tf.random.Generator.from_state(state, algorithm)
            tf.random.set_global_generator(generator)
        shared_tf_generator().reset(state)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restores the states of random generators after the context."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
