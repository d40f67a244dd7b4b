"""What towers make of each class of `keras.metrics`: the table of metrics.txt.

Whether a metric adds up is measured here: what a batch adds to its variables has to be
what its parts add, from nothing and from whatever was there. What towers make of it is
read as they do it.

    .venv/bin/python -m tests.towers.analysis.metrics

finds out all outcomes anew, and writes the table.
"""

import inspect
import pathlib
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from towers.analysis.rules import Rules
from towers.keras_adapter.models import compiled_metrics
from towers.tower import metrics

TABLE = pathlib.Path(__file__).with_name("metrics.txt")
ROWS, PART, CLASSES = 8, 3, 3
_random = np.random.default_rng(0)


def _batch(kind):
    outputs = _random.dirichlet(np.ones(CLASSES), ROWS).astype("float32")
    labels = _random.integers(0, CLASSES, ROWS)
    if kind == "labels":
        return labels, outputs
    if kind == "classes":
        return np.eye(CLASSES, dtype="float32")[labels], outputs
    if kind == "binary":
        return (labels[:, None] > 0).astype("float32"), outputs[:, :1]
    numbers = _random.normal(size=(2, ROWS, CLASSES)).astype("float32")
    numbers[0, ::2] = numbers[1, ::2]  # for accuracy
    return numbers[0], numbers[1]


# Targets and outputs of two batches, by their kind.
BATCHES = {
    kind: [_batch(kind), _batch(kind)]
    for kind in ("labels", "classes", "binary", "numbers")
}
BATCHES["single numbers"] = [(y[:, 0], p[:, 0]) for y, p in BATCHES["numbers"]]


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        kind: The name of a class of `keras.metrics`.
        arguments: What it is made with, as Python.
        batch: What it is updated with: a key of `BATCHES`, or "values" for a metric
            of values, which `compile` does not take.
        outcome: "proved", by reading its graph; "trusted", since it was measured;
            "gathered"; "values".
    """

    kind: str
    arguments: str
    batch: str
    outcome: str

    def __str__(self):
        return " | ".join(self)


def table() -> list[Row]:
    """Reads the table: a line a row, its cells between bars."""
    return [Row(*line.split(" | ")) for line in TABLE.read_text().splitlines()]


def classes() -> dict[str, type]:
    """Returns every class of `keras.metrics`, by its name."""
    base = keras.metrics.Metric
    return {
        name: kind
        for name, kind in vars(keras.metrics).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base
    }


def made(row: Row, name: str = "metric") -> keras.metrics.Metric:
    """Makes the metric of a row."""
    names = {"kind": classes()[row.kind], "losses": keras.losses, "own_name": name}
    return eval(
        f"kind({row.arguments + ', ' * bool(row.arguments)}name=own_name)", names
    )


def adds_up(row: Row, weighted: bool) -> bool:
    """Measures whether a batch adds to a metric's variables what its parts add."""
    metric = made(row)
    batches = BATCHES["numbers" if row.batch == "values" else row.batch]
    weights = np.linspace(0, 2, ROWS, dtype="float32") if weighted else None
    first, second = slice(PART), slice(PART, None)

    def updated(before, batch, rows=slice(None)):
        for variable, value in zip(metric.variables, before, strict=True):
            variable.assign(value)
        arrays = [each[rows] for each in batch]
        if row.batch == "values":
            arrays = arrays[:1]
        part = None if weights is None else weights[rows]
        metric.update_state(*arrays, sample_weight=part)
        return [variable.numpy() for variable in metric.variables]

    updated([v.numpy() for v in metric.variables], batches[0])  # builds it
    nothing = [np.zeros_like(variable.numpy()) for variable in metric.variables]
    parts = [updated(nothing, batches[1], rows) for rows in (first, second)]
    for before in nothing, updated(nothing, batches[0]):
        whole = updated(before, batches[1])
        for old, a, b, new in zip(before, *parts, whole, strict=True):
            if not np.allclose(old + a + b, new, rtol=1e-5, atol=1e-6):
                return False
    return True


def reasons(
    made: Sequence[keras.metrics.Metric], batch: str, trusted: bool = True
) -> dict[str, str]:
    """Reads metrics as a tower does; returns why some are gathered, by name.

    Args:
        made: The metrics, of different names.
        batch: What they are updated with: a key of `BATCHES`.
        trusted: Whether Keras's own need not be read.
    """
    y, outputs = BATCHES[batch][0]
    model = keras.Sequential([keras.Input(outputs.shape[1:])])
    model.compile(loss="mse", metrics=[*made])
    compiled_metrics(model).build(tf.constant(y), tf.constant(outputs))
    found = {}

    @tf.function(autograph=False)
    def trace(y, x):
        rules = Rules(2)
        with rules.reading((x, y)):
            outputs = tf.identity(x)
            rules.look_at(outputs)
            metrics.changes(model, rules, y, outputs, None)
        found.update({m.name: r for m, r in metrics.refused(model, rules).items()})

    specs = [tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in (y, outputs)]
    if trusted:
        trace.get_concrete_function(*specs)
    else:
        with mock.patch.object(metrics, "is_additive", lambda *_: False):
            trace.get_concrete_function(*specs)
    return found


def outcome(row: Row) -> str:
    """Finds out what towers make of the metric of a row."""
    if row.batch == "values":
        return "values"
    if not reasons([made(row)], row.batch, trusted=False):
        return "proved"
    return "gathered" if reasons([made(row)], row.batch) else "trusted"


if __name__ == "__main__":
    filled = [row._replace(outcome=outcome(row)) for row in table()]
    TABLE.write_text("".join(f"{row}\n" for row in filled))
