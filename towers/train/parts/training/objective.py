"""What flags of training change of a task: loss, metrics, and weights of classes."""

import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import input_pipeline
from towers.program import words
from towers.program.progress import Progress
from towers.train import checks
from towers.train.parts.setup import Setup

# Examples whose labels are counted at once.
_AT_ONCE = 4096


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
