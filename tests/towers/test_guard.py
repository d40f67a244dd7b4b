"""What the guard takes for finite: each number is looked at, not their sum alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.builders.guard import Guard


def _small(values):
    return tf.split(values, 384)


def _sparse(values):
    return [tf.IndexedSlices(values[:, None], tf.range(384)), None]


def _whole(values):
    return [values]


@pytest.mark.parametrize(
    ("dtype", "large", "gradients"),
    [
        ("float32", 1e36, _small),
        ("bfloat16", 1e36, _sparse),
        ("float64", 1e306, _whole),
    ],
)
def test_only_numbers_that_are_not_finite_stop_a_step(dtype, large, gradients):
    """Finite ones may add up to infinity, or to what is not a number."""
    guard, applied = Guard(), tf.Variable(0)

    @tf.function
    def step(values, loss):
        with guard.before((), loss, gradients(values), None):
            applied.assign_add(1)

    large = tf.constant(large, dtype)
    values = tf.fill([384], large)
    step(values, large)
    assert int(applied) == 1 and guard.caught is None
    for wrong in (np.inf, -np.inf, np.nan):
        bad = tf.cast(wrong, dtype)
        one_bad = tf.tensor_scatter_nd_update(values, [[7]], [bad])
        for arguments in [(one_bad, large), (values, bad)]:
            guard.caught = None
            with pytest.raises(tf.errors.OutOfRangeError):
                step(*arguments)
            assert guard.caught is not None
    assert int(applied) == 1


def test_a_loss_scale_skips_only_what_overflows():
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=2.0
    )
    guard = Guard()
    for large in (1e36, np.inf):
        gradient = tf.fill([384], tf.constant(large, tf.float32))
        with guard.before((), tf.ones([]), [gradient], optimizer):
            pass
    assert guard.caught is None and guard._skipped == (1, 1)
