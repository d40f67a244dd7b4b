"""The optimizer and its learning rate, as settings describe them."""

import inspect
import math

import keras

from towers.train.settings import Settings


def build_optimizer(
    settings: Settings, examples: int | None, steps_per_batch: int
) -> keras.optimizers.Optimizer:
    """Builds the optimizer.

    Args:
        settings: Which, and how it is to learn.
        examples: Examples in an epoch, if known.
        steps_per_batch: Steps of the optimizer for a global batch.
    """
    make = getattr(keras.optimizers, settings.optimizer_class)
    options = {"learning_rate": learning_rate(settings, examples, steps_per_batch)}
    if "momentum" in inspect.signature(make).parameters:
        options["momentum"] = settings.momentum
    if settings.weight_decay:
        options["weight_decay"] = settings.weight_decay
    return make(**options)


def learning_rate(
    settings: Settings, examples: int | None, steps_per_batch: int
) -> float | keras.optimizers.schedules.LearningRateSchedule:
    """Builds the learning rate's schedule, over all the steps of the run.

    Args:
        settings: The schedule, and how long to train.
        examples: Examples in an epoch, if known.
        steps_per_batch: Steps of the optimizer for a global batch.
    """
    high = settings.learning_rate
    if settings.lr_schedule == "constant":
        return high
    steps = settings.max_train_steps
    if steps is None:
        if examples is None:
            raise ValueError(
                f"Received --lr_schedule={settings.lr_schedule} for data of unknown "
                "size; expected a length to fit it to, so give --max_train_steps."
            )
        batches = settings.train_epochs * math.ceil(examples / settings.batch_size)
        steps = batches * steps_per_batch
    schedules = keras.optimizers.schedules
    if settings.lr_schedule == "cosine":
        return schedules.CosineDecay(high, steps)
    if settings.lr_schedule == "linear":
        return schedules.PolynomialDecay(high, steps, end_learning_rate=0.0)
    # As the CIFAR experiments of He et al. 2015, section 4.2.
    return schedules.PiecewiseConstantDecay(
        [steps // 2, steps * 3 // 4], [high, high / 10, high / 100]
    )
