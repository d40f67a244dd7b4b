"""Keras's `fit`: what it tells callbacks."""

import keras

_TELLS_FIRST = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 11)


def batches_done(model: keras.Model, batch: int) -> int:
    """Returns how many batches of an epoch are done when Keras says that some are.

    Keras 3.10 names the first of a call's `steps_per_execution` batches, as it does in
    `on_train_batch_begin`; later versions name the last one. The last call of an epoch
    may have fewer batches, which no version says.

    Args:
        model: The model that is trained or evaluated.
        batch: The batch that Keras names in `on_train_batch_end` or
            `on_test_batch_end`.
    """
    return batch + (model.steps_per_execution if _TELLS_FIRST else 1)
