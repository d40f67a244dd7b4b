"""Decides where a model's loss is computed: on the towers, or on gathered outputs.

A loss that is a mean over examples is the weighted sum of its shares' losses, so it can
stay on the towers. A loss that looks at several examples at once cannot be cut. Only
what is known to be such a mean is ever cut; everything else is gathered.
"""

from typing import Any

import keras

# Keras's losses that give one value for each example (or each of its positions),
# whatever the rest of the batch holds. Dice, Tversky and Circle look at all of it.
_BY_EXAMPLE = {
    keras.losses.binary_crossentropy,
    keras.losses.binary_focal_crossentropy,
    keras.losses.categorical_crossentropy,
    keras.losses.categorical_focal_crossentropy,
    keras.losses.categorical_generalized_cross_entropy,
    keras.losses.categorical_hinge,
    keras.losses.cosine_similarity,
    keras.losses.hinge,
    keras.losses.huber,
    keras.losses.kl_divergence,
    keras.losses.log_cosh,
    keras.losses.mean_absolute_error,
    keras.losses.mean_absolute_percentage_error,
    keras.losses.mean_squared_error,
    keras.losses.mean_squared_logarithmic_error,
    keras.losses.poisson,
    keras.losses.sparse_categorical_crossentropy,
    keras.losses.squared_hinge,
}
# Divided by the number of values: the shares' losses weigh as much as their examples.
_MEANS = {"sum_over_batch_size", "mean"}


def is_separable(model: keras.Model) -> bool:
    """Tells whether the loss of a batch is the mean of its examples' losses.

    Losses that layers add (`add_loss`, regularizers) are always taken as means over the
    examples, or independent of them, as Keras's own are. The outputs are not looked at;
    with a mask, or only one axis, even these losses count examples unequally.

    Args:
        model: A compiled model whose loss has been built.

    Returns:
        True if each tower may compute the loss of its own share.
    """
    if type(model).compute_loss is not keras.Model.compute_loss:
        return False
    if model._compile_loss is None:
        return True
    return all(_is_mean(loss) for loss in _losses(model))


def _losses(model: keras.Model) -> list[Any]:
    """The built loss objects, one for each output that has one."""
    return [entry.loss for entry in model._compile_loss._flat_losses]


def _is_mean(loss: Any) -> bool:
    function = getattr(loss, "fn", None)
    return (
        # A subclass may have a `call` of its own, about which nothing is known.
        type(loss).call is keras.losses.MeanSquaredError.call
        and function in _BY_EXAMPLE
        and loss.reduction in _MEANS
        # Ignoring a class masks values, so a share counts less than its examples.
        and loss._fn_kwargs.get("ignore_class") is None
        # Any other axis could be that of the examples.
        and loss._fn_kwargs.get("axis", -1) == -1
    )
