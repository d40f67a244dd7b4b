"""K x N to N: the towers' parts become one set of gradients, one state.

Each tower's part is already divided by the global weight (see `tower.py`), so reducing
is nothing but adding. On which device is the caller's choice: these functions run where
they are called.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.dependence import Dependence

Gradient = tf.Tensor | tf.IndexedSlices | None


def sum_gradients(towers: Sequence[Sequence[Gradient]]) -> list[Gradient]:
    """Adds the gradients of all towers, variable by variable.

    Args:
        towers: K x N gradients, in the same order on each tower. A sparse gradient
            (`tf.IndexedSlices`) stays sparse; those of 16 bits are added in float32;
            `None`, for a variable that does not touch the loss, adds nothing.

    Returns:
        N sums.
    """
    return [add(gradients) for gradients in zip(*towers, strict=True)]


def add(gradients: Sequence[Gradient]) -> Gradient:
    """Adds gradients of one variable; see `sum_gradients`."""
    gradients = [gradient for gradient in gradients if gradient is not None]
    if len(gradients) < 2:
        return gradients[0] if gradients else None
    first = gradients[0]
    sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
    if any(sparse) and not all(sparse):
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
    elif all(sparse):
        # Adding sparse gradients is joining them: rows that several towers touched
        # appear several times, as within one batch.
        return tf.IndexedSlices(
            values=tf.concat([g.values for g in gradients], axis=0),
            indices=tf.concat([g.indices for g in gradients], axis=0),
            dense_shape=first.dense_shape,
        )
    if first.dtype in (tf.float16, tf.bfloat16):
        total = tf.add_n([tf.cast(gradient, tf.float32) for gradient in gradients])
        return tf.cast(total, first.dtype)
    return tf.add_n(gradients)


def combine_states(
    towers: Sequence[Sequence[tf.Tensor | None]],
    fractions: Sequence[tf.Tensor],
    rules: Sequence[Dependence | None],
) -> list[tf.Tensor | None]:
    """Combines what the towers made of the model's variables.

    What no example touches is the same on all towers, and the first one's is taken (of
    a random seed, too, of which each tower has its own). A sum over examples is the sum
    of the towers'. A mean is theirs, weighted by their shares. For a moving mean
    m <- a m + (1 - a) mean(share) that is what one device does, to the last digit of
    the sum; for BatchNormalization's moving variance it is, by design, the mean of the
    shares' variances, without the variance between shares, which is what the towers
    normalised by.

    Args:
        towers: K x M new values; `None` for a variable that no tower changed.
        fractions: Each tower's part of the global batch, float32 scalars that sum
            to 1.
        rules: M rules, `None` for what did not change.

    Returns:
        M combined values, `None` where nothing changed.
    """
    by_variable = zip(*towers, strict=True)
    return [
        _combine(values, fractions, rule)
        for values, rule in zip(by_variable, rules, strict=True)
    ]


def _combine(values, fractions, rule):
    first = values[0]
    if first is None or len(values) == 1 or rule is Dependence.NONE:
        return first
    if rule is Dependence.SUM:
        return tf.add_n(values)
    if not first.dtype.is_floating:
        return first  # only where the user has waived the rules: integers have no mean
    weighted = [
        value * tf.cast(fraction, value.dtype)
        for value, fraction in zip(values, fractions, strict=True)
    ]
    return tf.add_n(weighted)
