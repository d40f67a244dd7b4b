"""Loss, metrics, optimizer and learning rate, as settings describe them.

A schedule of ours is not saved, or the model would not load without this package. In a
saved model, Keras's constant schedule stands for it, at the rate of the last step.
"""

import contextlib
import inspect
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from towers import input_pipeline
from towers.keras_adapter import optimizers
from towers.lifecycle.checkpoints import saved_model
from towers.program import words
from towers.program.progress import Progress
from towers.train import checks
from towers.train.parts.setup import Setup
from towers.train.settings import Settings

_Schedule = keras.optimizers.schedules.LearningRateSchedule
# Examples whose labels are counted at once.
_AT_ONCE = 4096


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


def loss(setup: Setup, logits: bool) -> keras.losses.Loss:
    """Returns the loss of the task, as --label_smoothing and mixing change it.

    Raises:
        ValueError: The labels of this task cannot be smoothed.
    """
    settings, task = setup.settings, setup.task
    smoothing = settings.label_smoothing
    if is_one_hot(setup):
        return keras.losses.CategoricalCrossentropy(logits, smoothing)
    if not smoothing:
        return task.loss(logits)
    if task.probability == "sigmoid":
        return keras.losses.BinaryCrossentropy(logits, smoothing)
    raise ValueError(
        f"Received {settings.as_flag('label_smoothing')} for --task={task.name}; "
        "expected it only where an example has classes or labels, so leave it out."
    )


def is_one_hot(setup: Setup) -> bool:
    """Whether the loss takes a number for each class instead of a class."""
    settings, task = setup.settings, setup.task
    if task is None or setup.defines("loss"):
        return settings.mixes
    of_example = (task.kind, task.probability) == ("class", "softmax")
    return settings.mixes or bool(settings.label_smoothing and of_example)


def metrics(setup: Setup, logits: bool) -> list[keras.metrics.Metric]:
    """Returns the metrics of the task, and those that --metrics names.

    Raises:
        ValueError: A metric is not for a model that returns logits.
    """
    size = setup.facts.target.size
    found = setup.task.metrics(logits, size)
    for name in setup.settings.metric_names:
        make = getattr(keras.metrics, name)
        if not any(isinstance(each, make) for each in found):
            found.append(make(**_options(setup, name, logits, size)))
    return found


def _options(setup, name, logits, size):
    parameters = inspect.signature(getattr(keras.metrics, name)).parameters
    if name == "MeanIoU":
        return {"num_classes": size, "sparse_y_pred": False, "name": "mean_iou"}
    if name == "F1Score" and logits:
        raise ValueError(
            f"Received --metrics=F1Score, which needs probabilities, but the model "
            f"{setup.settings.model} returns logits; expected a model that ends with a "
            "sigmoid, or Precision and Recall."
        )
    if name == "F1Score":
        return {"average": "macro", "threshold": 0.5}
    if "from_logits" in parameters:
        return {"from_logits": logits}
    # Of a logit, the probability is 1/2 at 0.
    return {"thresholds": 0.0} if "thresholds" in parameters and logits else {}


def class_weight(setup: Setup, data: Any) -> dict[int, float] | None:
    """Returns a weight for each class, as `fit` takes them; `None` without.

    Args:
        setup: Of the run.
        data: The training data.

    Raises:
        ValueError: The data have no such class, or no classes.
    """
    settings, target = setup.settings, setup.facts.target
    asked = checks.read_class_weight(settings)
    if asked is None:
        return None
    if target is None or target.kind != "class":
        raise ValueError(
            f"Received {settings.as_flag('class_weight')}, but {setup.facts.name} has "
            "no classes of examples; leave it out."
        )
    if asked == "balanced":
        return _balanced(settings, data, target.size)
    names = {str(label): label for label in range(target.size)}
    names |= {name: label for label, name in enumerate(target.names or ())}
    weights = dict.fromkeys(range(target.size), 1.0)
    for name, weight in asked.items():
        if name not in names:
            raise ValueError(
                f"Received {settings.as_flag('class_weight')}, but {setup.facts.name} "
                f"has no class {name!r}; expected some of {words.listed(names)}."
            )
        weights[names[name]] = weight
    return weights


def _balanced(settings, data, size):
    """As scikit-learn's: classes of which there are few weigh as much as others."""
    source = getattr(data, "source", None)
    if source is None:
        raise ValueError(
            "Received --class_weight=balanced for data of a file of your own, which "
            "are not counted; expected weights, such as --class_weight=0:1,1:5."
        )
    labels = source.batches("train", _AT_ONCE).map(
        lambda numbers, records: source.parse(records)[1], tf.data.AUTOTUNE
    )
    counts = np.zeros(size, np.int64)
    with (
        input_pipeline.blame_records(source),
        Progress("Counting the classes", source.splits["train"], "records") as shown,
    ):
        for some in labels:
            counts += np.bincount(some, minlength=size)
            shown.add(len(some))
    return {
        label: float(counts.sum() / (size * count)) if count else 1.0
        for label, count in enumerate(counts)
    }


def class_weight_text(setup: Setup, weights: dict[int, float]) -> str:
    """Says which weights the classes have."""
    names = setup.facts.class_names or [*map(str, weights)]
    weighted = (f"{names[label]} {weight:.3g}" for label, weight in weights.items())
    return f"Class weights: {words.listed(weighted)}."
