"""What a model is to learn: for each name of --task, a frozen value.

A task knows its loss and metrics, which output it expects of a model, and how to read a
prediction from one.

So loss, metrics, logs and predictions agree. Metrics are of Keras's own classes, so
that `model.keras` opens without this package.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.targets import IGNORED, Target, TargetKind
from towers.program import words
from towers.train.parts.facts import DataFacts

losses, metrics = keras.losses, keras.metrics

# Of which logs less is better, and of which more, by how their names end.
_LESS = ("loss", "mae", "mse", "rmse", "perplexity", "bits_per_byte")
_MORE = ("accuracy", "auc", "iou")


class Decode(Protocol):
    """Makes predictions of what a model returns."""

    def __call__(
        self, scores: np.ndarray, names: Sequence[str]
    ) -> Sequence[dict[str, Any]]:
        """Returns a prediction for each example.

        Args:
            scores: What the model returned for some examples, [B, ...]; probabilities
                where the task has some.
            names: Of the classes, numbers or labels.
        """


@dataclasses.dataclass(frozen=True)
class Task:
    """What a model is to learn.

    Attributes:
        name: As --task names it.
        kind: What the data give for an example.
        loss: Makes the loss, of whether the model returns logits.
        metrics: Makes the metrics, of whether it returns logits, and the number of
            classes, numbers or labels. Their names are those of the logs.
        probability: What makes probabilities of logits; `None` where there are none.
        each: What the output has a value for.
        decoded: Makes predictions; see `decode`.
        weighted: Whether the metrics count what the sample weights say, as where
            padding has none.
    """

    name: str
    kind: TargetKind
    loss: Callable[[bool], keras.losses.Loss]
    metrics: Callable[[bool, int], list[keras.metrics.Metric]]
    probability: str | None
    each: str
    decoded: Decode
    weighted: bool = False

    @property
    def of_classes(self) -> bool:
        """Tells whether the model chooses one of several classes."""
        return self.probability == "softmax"

    def outputs(self, facts: DataFacts) -> int:
        """Returns how many values a model is to return, for each that has some."""
        return 1 if self.name == "binary" else facts.target.size

    def output_shape(self, facts: DataFacts) -> tuple[int | None, ...]:
        """Returns the shape of the output that is expected, with the batch."""
        inner = facts.target_shape if self.of_classes else ()
        return (None, *inner, self.outputs(facts) or None)

    def fits(self, shape: Sequence[int | None], facts: DataFacts) -> bool:
        """Tells whether an output of some shape is what is expected.

        Of classes there may be more than the data have.
        """
        *outer, size = self.output_shape(facts)
        if not self.of_classes and size == 1 and tuple(shape[1:]) == ():
            return True
        if len(shape) != len(outer) + 1:
            return False
        pairs = zip(shape[:-1], outer, strict=True)
        same = all(None in pair or pair[0] == pair[1] for pair in pairs)
        found = shape[-1] or 0
        return same and (
            found >= (size or 1) if self.of_classes else size in (None, found)
        )

    def target(self, y: tf.Tensor) -> tf.Tensor:
        """Returns what the data give, on a tower, as the loss takes it."""
        if self.name == "binary":
            return tf.reshape(tf.cast(y, tf.float32), [-1, 1])
        # A tag of padding is -1; its weight is 0, but no loss may read it.
        return tf.maximum(y, 0) if self.kind == "tags" else y

    def logs(
        self, values: Mapping[str, Any], bytes_per_token: Mapping[str, float]
    ) -> dict[str, float]:
        """Returns what else is logged, by name.

        Args:
            values: What Keras logs.
            bytes_per_token: Of the text that a loss is of, by the loss's name, as far
                as they are known.
        """
        if self.kind != "tokens":
            return {}
        found = {}
        for name in values.keys() & {"loss", "val_loss", "train_loss"}:
            loss = float(values[name])
            found[name.replace("loss", "perplexity")] = _exp(loss)
            if size := bytes_per_token.get(name):
                found[name.replace("loss", "bits_per_byte")] = loss / math.log(2) / size
        return found

    def decode(
        self,
        outputs: np.ndarray,
        names: Sequence[str] | None = None,
        from_logits: bool = True,
    ) -> Sequence[dict[str, Any]]:
        """Reads predictions from what a model returned.

        Args:
            outputs: What it returned for some examples, [B, ...].
            names: Of the classes, numbers or labels; those without one are numbered.
            from_logits: Whether these are logits; see `returns_logits`.

        Returns:
            For each example, values by name: `class`, its `probability`, and the
            `probabilities` of all classes; `value`, or one for each number; `labels`
            and `probabilities`; `mask`, `tags` or `tokens`.
        """
        scores = np.asarray(outputs, np.float32)
        if from_logits and self.probability:
            activation = getattr(keras.activations, self.probability)
            scores = np.asarray(activation(tf.constant(scores)))
        count = 2 if self.name == "binary" else scores.shape[-1]
        return self.decoded(scores, all_names(names, count))


def all_names(names: Sequence[str] | None, count: int) -> Sequence[str]:
    """Names of what a model has outputs for, which may be more than the data have."""
    names = names or ()
    return [*names, *map(str, range(len(names), count))]


def _exp(value):
    return math.exp(value) if value < 700 else math.inf


def _of_class(scores, names):
    best = scores.argmax(axis=-1)
    return [
        {
            "class": names[label],
            "probability": float(row[label]),
            "probabilities": dict(zip(names, row.tolist(), strict=False)),
        }
        for row, label in zip(scores, best, strict=True)
    ]


def _of_two(scores, names):
    second = scores.reshape(len(scores), 1)
    return _of_class(np.concatenate([1 - second, second], axis=1), names)


def _numbers(scores, names):
    rows = scores.reshape(len(scores), -1)
    if rows.shape[1] == 1:
        return [{"value": float(row[0])} for row in rows]
    return [dict(zip(names, map(float, row), strict=True)) for row in rows]


def _labels(scores, names):
    return [
        {
            "labels": [names[i] for i in np.flatnonzero(row >= 0.5)],
            "probabilities": dict(zip(names, map(float, row), strict=True)),
        }
        for row in scores
    ]


def _mask(scores, names):
    return [{"mask": mask} for mask in scores.argmax(axis=-1)]


def _tags(scores, names):
    return [{"tags": [names[i] for i in row]} for row in scores.argmax(axis=-1)]


def _tokens(scores, names):
    return [{"tokens": row.tolist()} for row in scores.argmax(axis=-1)]


def _crossentropy(logits):
    return losses.SparseCategoricalCrossentropy(from_logits=logits)


def _pixel_crossentropy(logits):
    return losses.SparseCategoricalCrossentropy(
        from_logits=logits, ignore_class=IGNORED
    )


def _mean_crossentropy(logits):
    # Per token that counts: padding changes neither the sum nor what it is divided by.
    return losses.SparseCategoricalCrossentropy(
        from_logits=logits, reduction="mean_with_sample_weight"
    )


def _binary_crossentropy(logits):
    return losses.BinaryCrossentropy(from_logits=logits)


def _accuracy(logits, size):
    return [metrics.SparseCategoricalAccuracy("accuracy")]


def _of_numbers(logits, size):
    return [metrics.MeanAbsoluteError("mae"), metrics.RootMeanSquaredError("rmse")]


def _of_labels(logits, size):
    # Keras's BinaryAccuracy takes no threshold of logits.
    accuracy = metrics.MeanMetricWrapper(
        metrics.binary_accuracy, name="accuracy", threshold=0.0 if logits else 0.5
    )
    return [metrics.AUC(name="auc", from_logits=logits), accuracy]


def _of_pixels(logits, size):
    # Keras's accuracy ignores no class: a pixel without one has the weight 0.
    iou = metrics.MeanIoU(
        size, name="mean_iou", ignore_class=IGNORED, sparse_y_pred=False
    )
    return [iou, *_accuracy(logits, size)]


_CLASSES = (_crossentropy, _accuracy, "softmax", "class", _of_class)
_ALL = (
    Task("classification", "class", *_CLASSES),
    Task(
        *("regression", "numbers", lambda _: losses.MeanSquaredError()),
        *(_of_numbers, None, "number", _numbers),
    ),
    Task(
        *("binary", "class", _binary_crossentropy, _of_labels),
        *("sigmoid", "second class", _of_two),
    ),
    Task(
        *("multilabel", "labels", _binary_crossentropy, _of_labels),
        *("sigmoid", "label", _labels),
    ),
    Task(
        *("segmentation", "mask", _pixel_crossentropy, _of_pixels),
        *("softmax", "class and pixel", _mask, True),
    ),
    Task("text_classification", "class", *_CLASSES),
    Task(
        *("tagging", "tags", _mean_crossentropy, _accuracy),
        *("softmax", "class and token", _tags, True),
    ),
    Task(
        *("language_model", "tokens", _mean_crossentropy, _accuracy),
        *("softmax", "token of the vocabulary, at each position", _tokens, True),
    ),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _ALL}


def better(log: str) -> str:
    """Tells whether less ("min") or more ("max") of a log is better; else "auto"."""
    for mode, ends in (("min", _LESS), ("max", _MORE)):
        if any(log == end or log.endswith(f"_{end}") for end in ends):
            return mode
    return "auto"


def choose(asked: str | None, facts: DataFacts) -> Task | None:
    """Returns the task that is asked for, or else that the data are for.

    Args:
        asked: As --task says.
        facts: Of the data; without a target, only what is asked for is known.

    Returns:
        The task; `None` if neither tells.

    Raises:
        ValueError: The data are not for the task.
    """
    target = facts.target
    if asked is None:
        if target is None:
            return None
        if target.kind == "class" and facts.input_kind == "tokens":
            return TASKS["text_classification"]
        return next(task for task in _ALL if task.kind == target.kind)
    task = TASKS[asked]
    if target is None:
        return task
    if target.kind != task.kind:
        fit = [each.name for each in _ALL if each.kind == target.kind]
        raise ValueError(
            f"Received --task={asked}, but {facts.name} has {described(target)}; "
            f"expected --task={' or '.join(fit)}, or other data."
        )
    if task.name == "binary" and target.size != 2:
        raise ValueError(
            f"Received --task=binary, but {facts.name} has {described(target)}; "
            "expected two, so use --task=classification."
        )
    return task


def described(target: Target) -> str:
    """Says what is to be given for an example."""
    noun = {
        "class": ("class", "classes"),
        "numbers": ("number to predict", "numbers to predict"),
        "labels": ("label", "labels"),
        "mask": ("class of pixels", "classes of pixels"),
        "tags": ("tag", "tags"),
        "tokens": ("token in the vocabulary", "tokens in the vocabulary"),
    }[target.kind]
    return words.count(target.size, *noun) if target.size else noun[1]
