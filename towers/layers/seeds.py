"""The random seeds of a model: each tower's own, and where they are computed.

A model draws random numbers by a counter of its own, which is a variable. TensorFlow's
random operations read their seed in the host's memory, also on a GPU.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from towers.devices import HOST
from towers.keras_adapter.patching import patched
from towers.keras_adapter.randomness import CAST_SEED, NEXT_SEED, cast_seed
from towers.layers.variables import not_trained, seed_ids


def of_tower(
    model: keras.Model, state: Sequence[tf.Tensor], tower: int
) -> list[tf.Tensor]:
    """Gives a tower random seeds of its own.

    The first tower keeps the model's seeds, so that one tower draws what plain Keras
    draws. All others add a constant to the key and leave the counter, which every tower
    advances alike.

    Args:
        model: The model that `state` belongs to.
        state: Values of `variables.not_trained`.
        tower: Index of the tower.

    Returns:
        The state, with each random seed's changed.
    """
    if tower == 0:
        return list(state)
    seeds = seed_ids(model)
    # Odd and large: towers and neighbouring seeds do not meet.
    shift = [tower * 0x9E3779B1, 0]
    return [
        value + tf.constant(shift, value.dtype) if id(variable) in seeds else value
        for variable, value in zip(not_trained(model), state, strict=True)
    ]


def own_seeds(model: keras.Model, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the random seeds among values of `variables.not_trained`."""
    ids = seed_ids(model)
    variables = zip(not_trained(model), state, strict=True)
    return [value for variable, value in variables if id(variable) in ids]


class _Here(threading.local):
    """What a thread has asked for.

    Attributes:
        on_the_host: Whether seeds are computed on the host.
        sent: By id of a seed's value, it and what random operations take, which was
            sent to the tower.
        drawn: By id of a value that was drawn, it and what was sent.
    """

    def __init__(self):
        self.on_the_host = False
        self.sent: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
        self.drawn: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}


_here = _Here()


@contextlib.contextmanager
def on_the_host() -> Iterator[None]:
    """Inside, seeds are computed on the host, whatever draws from them.

    On a GPU, the host would have to wait for each of them.
    """
    before, _here.on_the_host = _here.on_the_host, True
    try:
        with (
            patched(NEXT_SEED, _next_on_the_host),
            patched(CAST_SEED, _cast_on_the_host),
        ):
            yield
    finally:
        _here.on_the_host = before


@contextlib.contextmanager
def sent_together(model: keras.Model, state: Sequence[tf.Tensor]) -> Iterator[None]:
    """Inside, the model is called once, with seeds that go to a GPU in one piece.

    Args:
        model: The model that `state` belongs to.
        state: Values of `variables.not_trained`.
    """
    own = own_seeds(model, state) if _here.on_the_host else ()
    before = _here.sent, _here.drawn
    _here.sent, _here.drawn = {}, {}
    if own:
        with tf.device(HOST):
            whole = cast_seed(tf.stack(own))
        # In int32, this is done in the host's memory, also on a GPU.
        sent = zip(own, tf.unstack(whole), strict=True)
        _here.sent = {id(value): (value, each) for value, each in sent}
    try:
        yield
    finally:
        _here.sent, _here.drawn = before


def _next_on_the_host(keras_next, generator, *args, **kwargs):
    # It was assigned if the generator was drawn from before, or by the layer itself.
    _, sent = _here.sent.get(id(generator.state.value), (None, None))
    with tf.device(HOST):
        value = keras_next(generator, *args, **kwargs)
    if sent is not None:
        _here.drawn[id(value)] = value, sent
    return value


def _cast_on_the_host(keras_cast, seed):
    if id(seed) in _here.drawn:
        return _here.drawn[id(seed)][1]
    with tf.device(HOST):
        return keras_cast(seed)
