"""The optimizer and its learning rate, as settings describe them.

A schedule of ours is not saved, or the model would not load without this package. In a
saved model, Keras's constant schedule stands for it, at the rate of the last step.
"""

import contextlib
import inspect
import math
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from towers.keras_adapter import optimizers
from towers.lifecycle.checkpoints import saved_model
from towers.train.settings import Settings

_Schedule = keras.optimizers.schedules.LearningRateSchedule


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
    if settings.clip_norm is not None:
        options["global_clipnorm"] = settings.clip_norm
    if settings.accumulate_steps > 1:
        options["gradient_accumulation_steps"] = settings.accumulate_steps
    if settings.ema is not None:
        options |= {"use_ema": True, "ema_momentum": settings.ema}
    return make(**options)


def learning_rate(
    settings: Settings, examples: int | None, steps_per_batch: int
) -> float | _Schedule:
    """Builds the learning rate's schedule, over all the steps of the run.

    Args:
        settings: The schedule, and how long to train.
        examples: Examples in an epoch, if known.
        steps_per_batch: Steps of the optimizer for a global batch.
    """
    # A schedule counts what is accumulated, too.
    warm_up = settings.warmup_steps * settings.accumulate_steps
    if settings.lr_schedule == "constant":
        rate = settings.learning_rate
        return WarmUp(warm_up, rate) if warm_up else rate
    steps = _steps(settings, examples, steps_per_batch)
    if warm_up >= steps:
        raise ValueError(
            f"Received {settings.as_flag('warmup_steps')} for a run of {steps:,} "
            "steps; expected fewer, so that the learning rate can fall."
        )
    rate = _falling(settings, steps - warm_up)
    return WarmUp(warm_up, rate) if warm_up else rate


def scale_rate(model: keras.Model, by: float) -> None:
    """Multiplies the learning rate, as batches are larger by this factor.

    See Goyal et al. 2017, Accurate, Large Minibatch SGD, section 2.1.

    Raises:
        ValueError: The optimizer has a schedule.
    """
    rate = optimizers.learning_rate_variable(model.optimizer)
    if not isinstance(rate, keras.Variable):
        raise ValueError(
            "Received --elastic_batch=per_tower and an optimizer with a schedule of "
            "the learning rate, which counts steps, although their number would "
            "change with that of the towers; expected a number."
        )
    if by != 1:
        rate.assign(rate.value * by)


def _steps(settings, examples, steps_per_batch):
    """How many a schedule counts in the whole run."""
    if settings.max_train_steps is not None:
        return settings.max_train_steps * settings.accumulate_steps
    if examples is None:
        raise ValueError(
            f"Received --lr_schedule={settings.lr_schedule} for data of unknown "
            "size; expected a length to fit it to, so give --max_train_steps."
        )
    batches = settings.train_epochs * math.ceil(examples / settings.batch_size)
    return batches * steps_per_batch


def _falling(settings, steps):
    schedules, high = keras.optimizers.schedules, settings.learning_rate
    if settings.lr_schedule == "cosine":
        return schedules.CosineDecay(high, steps)
    if settings.lr_schedule == "linear":
        return schedules.PolynomialDecay(high, steps, end_learning_rate=0.0)
    # As the CIFAR experiments of He et al. 2015, section 4.2.
    return schedules.PiecewiseConstantDecay(
        [steps // 2, steps * 3 // 4], [high, high / 10, high / 100]
    )


@keras.saving.register_keras_serializable("towers")
class WarmUp(_Schedule):
    """Rises linearly from 0, and then follows a learning rate from its beginning.

    Keras's `CosineDecay` has this built in; its other schedules do not.
    """

    def __init__(self, steps: int, after: float | _Schedule):
        """Initializes the schedule.

        Args:
            steps: Steps of the rise.
            after: What follows; a schedule counts from the end of the rise.
        """
        self._steps, self._after = steps, after

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate of a step."""
        after = self._after if callable(self._after) else lambda step: self._after
        step = ops.cast(step, "float32")
        rising = ops.minimum(step / self._steps, 1.0)
        # The end of the rise is the beginning of what follows.
        return rising * after(ops.maximum(step - self._steps, 0.0))

    def get_config(self) -> dict[str, Any]:
        """Returns what it was made of."""
        return {"steps": self._steps, "after": self._after}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WarmUp":
        """Makes one of what `get_config` has returned."""
        after = keras.saving.deserialize_keras_object(config["after"])
        return cls(config["steps"], after)


@contextlib.contextmanager
def kept_rate(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside, a schedule that Keras does not have is a constant one of its own.

    A model that is saved there is loaded without this package; its learning rate is
    that of its last step.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    schedule = optimizers.learning_rate_variable(inner)
    if not isinstance(schedule, WarmUp):
        yield
        return
    rate = float(inner.learning_rate)
    inner.learning_rate = keras.optimizers.schedules.PolynomialDecay(rate, 1, rate)
    try:
        yield
    finally:
        inner.learning_rate = schedule


@contextlib.contextmanager
def averaged(settings: Settings, model: keras.Model) -> Iterator[None]:
    """Inside, a model with --ema has the averages of its weights for weights."""
    optimizer, weights = model.optimizer, model.trainable_variables
    # Before the first step, averages are 0.
    if settings.ema is None or not int(optimizer.iterations):
        yield
        return
    now = saved_model.copies(weights)
    optimizer.finalize_variable_values(weights)
    try:
        yield
    finally:
        for variable, value in zip(weights, now, strict=True):
            variable.assign(value)
