"""Metrics of Keras that --metrics may name, and for which tasks; without TensorFlow."""

import difflib
from collections.abc import Mapping, Sequence

_OF_CLASSES = (
    *("SparseCategoricalCrossentropy", "SparseTopKCategoricalAccuracy"),
    *("SparseCategoricalAccuracy", "MeanIoU"),
)
_OF_LABELS = (
    *("AUC", "Precision", "Recall", "F1Score", "BinaryCrossentropy"),
    *("TruePositives", "TrueNegatives", "FalsePositives", "FalseNegatives"),
)
_OF_NUMBERS = (
    *("MeanSquaredError", "RootMeanSquaredError", "MeanAbsoluteError"),
    *("MeanAbsolutePercentageError", "MeanSquaredLogarithmicError"),
    *("LogCoshError", "CosineSimilarity", "R2Score"),
)
# Names of classes of keras.metrics, by the task.
METRICS: Mapping[str, Sequence[str]] = {
    "regression": _OF_NUMBERS,
    "binary": _OF_LABELS,
    "multilabel": _OF_LABELS,
    **dict.fromkeys(
        (
            *("classification", "segmentation", "text_classification"),
            *("tagging", "language_model"),
        ),
        _OF_CLASSES,
    ),
}
# As Keras calls some of them, too.
_SHORT = {
    **{"mse": "MeanSquaredError", "rmse": "RootMeanSquaredError"},
    **{"mae": "MeanAbsoluteError", "mape": "MeanAbsolutePercentageError"},
    **{"msle": "MeanSquaredLogarithmicError", "logcosh": "LogCoshError"},
}
# What takes one-hot labels, and what takes the numbers of classes in its place.
_SPARSE = {
    "categoricalaccuracy": "SparseCategoricalAccuracy",
    "categoricalcrossentropy": "SparseCategoricalCrossentropy",
    "topkcategoricalaccuracy": "SparseTopKCategoricalAccuracy",
    "onehotiou": "MeanIoU",
    "onehotmeaniou": "MeanIoU",
}
_ACCURACY = ("accuracy", "acc", "binaryaccuracy")
# What is learnt from data sets of some kinds, without --task.
_TASK_OF = {
    **dict.fromkeys(("digits", "synthetic", "zipf"), "classification"),
    **{"text": "language_model", "conll": "tagging"},
}


def canonical(asked: str) -> str:
    """Returns the name of a metric as Keras spells it.

    Raises:
        ValueError: There is none of the name, or none that needs no arguments.
    """
    known = {name.lower(): name for names in METRICS.values() for name in names}
    plain = asked.lower().replace("_", "")
    if plain in known:
        return known[plain]
    if plain in _SHORT:
        return _SHORT[plain]
    if plain in _SPARSE:
        raise ValueError(
            f"Received --metrics={asked}, which takes one-hot labels; expected "
            f"--metrics={_SPARSE[plain]}, as labels are class numbers."
        )
    if plain in _ACCURACY:
        raise ValueError(
            f"Received --metrics={asked}, but every task that has classes or labels "
            "measures accuracy already; expected other metrics, so leave it out."
        )
    near = [known[name] for name in difflib.get_close_matches(plain, known)]
    raise ValueError(
        f"Received --metrics={asked}; expected metrics of keras.metrics, such as "
        f"{', '.join(near or known.values())}."
    )


def check(names: Sequence[str], task: str) -> None:
    """Checks that metrics, as Keras spells them, are for a task.

    Raises:
        ValueError: One is not.
    """
    for name in names:
        if name not in METRICS[task]:
            of_two = METRICS[task] is _OF_CLASSES and name in _OF_LABELS
            raise ValueError(
                f"Received --metrics={name} for --task={task}; expected some of "
                f"{', '.join(METRICS[task])}, or metrics that a file of your own "
                f"defines{', or --task=binary for two classes' if of_two else ''}."
            )


def task_of(dataset: str, text_column: str | None) -> str | None:
    """Tells the task of a data set where its kind tells it; else `None`."""
    kind = dataset.partition(":")[0]
    if text_column is not None and kind != "conll":
        return "text_classification"
    return _TASK_OF.get(kind)
