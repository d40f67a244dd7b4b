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

# Keras gives it a name since 3.13.
_SHARED = "global_seed_generator"


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


def random_states() -> dict[str, Any]:
    """Returns those of each generator that all share, as JSON.

    Layers' own are variables of the model.

    Keras and TensorFlow make theirs when they are first asked for a number.
    """
    kind, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    found = {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), *rest],
    }
    if (shared := shared_generator()) is not None:
        found["keras"] = shared.state.numpy().tolist()
    if (shared := shared_tf_generator()) is not None:
        found["tensorflow"] = [shared.algorithm, shared.state.numpy().tolist()]
    return found


def set_random_states(states: Mapping[str, Any]) -> None:
    """Gives generators the states that `random_states` has returned."""
    if "keras" in states:
        # To make one, Keras draws a number of Python's.
        shared = shared_generator(create=True)
        shared.state.assign(states["keras"])
    if "tensorflow" in states:
        algorithm, state = states["tensorflow"]
        if shared_tf_generator() is None:
            made = tf.random.Generator.from_state(state, algorithm)
            tf.random.set_global_generator(made)
        shared_tf_generator().reset(state)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leaves random numbers as they were, whoever draws some meanwhile."""
    found = random_states()
    try:
        yield
    finally:
        set_random_states(found)
