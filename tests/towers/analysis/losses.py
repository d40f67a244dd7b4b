"""Where towers compute each class of `keras.losses`: the table of losses.txt.

Each row is a loss with a reduction, and with a mask or weights; it has an outcome for
outputs of 2, 3 and 4 axes. Outcomes are found out as towers do it.

    .venv/bin/python -m tests.towers.analysis.losses

finds out all of them anew, and writes the table.
"""

import inspect
import pathlib
import re
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.analysis.loss_graph import LossGraph
from towers.analysis.rules import NoRuleError, Rules, TotalsWanted
from towers.collectives import reduce
from towers.keras_adapter.layers import set_tag

TABLE = pathlib.Path(__file__).with_name("losses.txt")
ROWS, PART = 8, 3
SHAPES = {2: (ROWS, 4), 3: (ROWS, 5, 4), 4: (ROWS, 3, 3, 4)}
REDUCTIONS = "sum_over_batch_size", "sum", "mean_with_sample_weight"
WITH = (
    "nothing",
    "example weights",
    "element weights",
    "mask",
    "mask, example weights",
    "mask, element weights",
)
# What else than its defaults a class is tried with, with the first reduction.
ARGUMENTS = {
    "BinaryCrossentropy": ["from_logits=True, label_smoothing=0.1"],
    "CategoricalCrossentropy": ["from_logits=True", "label_smoothing=0.1", "axis=1"],
    "CosineSimilarity": ["axis=1", "axis=0"],
    "Dice": ["axis=-1", "axis=0"],
    "SparseCategoricalCrossentropy": [
        "from_logits=True",
        "ignore_class=0",
        "from_logits=True, ignore_class=0",
    ],
    "Tversky": ["axis=-1"],
}
# Their outputs have one number of axes.
RANKS = {"CTC": 3, "Circle": 2}


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        kind: The name of a class of `keras.losses`.
        arguments: What it is made with besides its reduction, as Python.
        reduction: Its reduction.
        given: What it is given besides targets and outputs: of `WITH`.
        outcomes: Where it is computed, for outputs of 2, 3 and 4 axes: "tower";
            "tower, totals", if towers exchange totals first; "gathered", and the type
            of the operation that is the reason; "impossible", since Keras fails.
    """

    kind: str
    arguments: str
    reduction: str
    given: str
    outcomes: tuple[str, str, str]

    def __str__(self):
        return " | ".join([*self[:4], *self.outcomes])


class Found(NamedTuple):
    """What was read of a loss.

    Attributes:
        rules: The rule that it follows, if it can be put together.
        graph: The loss that takes totals, if it does.
        reason: Why it cannot be put together, if it cannot.
    """

    rules: Rules
    graph: LossGraph | None = None
    reason: str = ""


def table() -> list[Row]:
    """Reads the table: a line a row, its cells between bars."""
    cells = [line.split(" | ") for line in TABLE.read_text().splitlines()]
    return [Row(*each[:4], tuple(each[4:])) for each in cells]


def classes() -> dict[str, type]:
    """Returns every class of `keras.losses`, by its name."""
    base = keras.losses.Loss
    return {
        name: kind
        for name, kind in vars(keras.losses).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base
    }


def made(row: Row) -> keras.losses.Loss:
    """Makes the loss of a row."""
    code = f"kind({row.arguments + ', ' * bool(row.arguments)}reduction=reduction)"
    return eval(code, {"kind": classes()[row.kind], "reduction": row.reduction})


def batch(row: Row, rank: int) -> list[np.ndarray | None]:
    """Makes targets, outputs, mask and weights, `None` for what is not given."""
    random = np.random.default_rng(0)
    shape = SHAPES[rank]
    outputs = random.dirichlet(np.ones(4), shape[:-1]).astype("float32")
    targets = random.dirichlet(np.ones(4), shape[:-1]).astype("float32")
    if row.kind.startswith("Sparse") or "Generalized" in row.kind:
        targets = random.integers(0, 4, shape[:-1])
    elif row.kind == "Circle":
        targets = random.integers(0, 3, ROWS)
    elif row.kind == "CTC":
        targets = random.integers(1, 4, (ROWS, 2))
    elif "Hinge" in row.kind:
        targets = np.sign(targets - 0.3)
    mask = random.random(shape[:-1]) < 0.6
    weights = None
    if "weights" in row.given:
        by_example = (ROWS, *[1] * (rank - 2))
        size = by_example if "example" in row.given else shape[:-1]
        weights = random.uniform(0.5, 2, size).astype("float32")
        weights[0] = 0
    return [targets, outputs, mask if "mask" in row.given else None, weights]


def outcome(row: Row, rank: int) -> str:
    """Finds out where towers compute the loss of a row, for outputs of that rank."""
    if row.given.endswith("element weights") and rank == 2:
        return "impossible"  # an element is an example
    if RANKS.get(row.kind, rank) != rank:
        return "impossible"
    try:
        whole(row, rank)
    except Exception:
        return "impossible"
    found = read(row, rank)
    if found.reason:
        *_, operation = re.findall(r"\((\w+)\)", found.reason)
        return f"gathered ({operation})"
    return "tower" if found.graph is None else "tower, totals"


def read(row: Row, rank: int) -> Found:
    """Reads the loss of a row as a tower does that is traced."""
    loss, found = made(row), []

    @tf.function(autograph=False)
    def trace(local, factor):
        y, x, mask, weights = local
        rules, graph, reason = Rules(2), None, ""
        with rules.reading(_given(local)):
            outputs = x * factor  # which a variable decides, too
            value = _called(loss, y, outputs, mask, weights)
            try:
                rules.read_losses([value], outputs, [mask, y, weights])
                rules.part("loss", value, tf.ones([]))
            except TotalsWanted as wanted:
                graph = wanted.graph
                rules = Rules(2, loss_graph=graph)
            except NoRuleError as error:
                reason = str(error)
        found.append(Found(rules, graph, reason))

    specs = [
        None if a is None else tf.TensorSpec([None, *a.shape[1:]], a.dtype)
        for a in batch(row, rank)
    ]
    trace.get_concrete_function(specs, tf.TensorSpec([]))
    return found[0]


def whole(row: Row, rank: int) -> list[np.ndarray]:
    """Returns the value and the gradient for the outputs that Keras computes."""
    y, outputs, mask, weights = map(_tensor, batch(row, rank))
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        # What a layer returns, which may have a mask, is another tensor.
        value = _called(made(row), y, tf.identity(outputs), mask, weights)
    return [value.numpy(), tape.gradient(value, outputs).numpy()]


def in_parts(row: Row, rank: int) -> list[np.ndarray]:
    """Returns the same, added up from what two towers compute of uneven local batches.

    Raises:
        AssertionError: Towers cannot compute it.
    """
    loss, found = made(row), read(row, rank)
    assert not found.reason, found.reason

    @tf.function(autograph=False)
    def compute(local_batches):
        fractions = [tf.constant(n / ROWS) for n in (PART, ROWS - PART)]
        totals, values, gradients = [], [], []
        if found.graph is not None:
            parts = [found.graph.totals_of(_given(local)) for local in local_batches]
            totals = reduce.combine_totals(parts, fractions, found.graph.kinds)
        for (y, outputs, mask, weights), fraction in zip(
            local_batches, fractions, strict=True
        ):
            if found.graph is None:
                value = _called(loss, y, tf.identity(outputs), mask, weights)
            else:
                (value,) = found.graph.values(outputs, [mask, y, weights], totals)
            values.append(found.rules.part("loss", value, fraction))
            gradients += tf.gradients(values[-1], outputs)
        return tf.add_n(values), tf.concat(gradients, 0)

    arrays = batch(row, rank)
    local_batches = [
        [None if array is None else _tensor(array[rows]) for array in arrays]
        for rows in (slice(PART), slice(PART, None))
    ]
    return [each.numpy() for each in compute(local_batches)]


def _called(loss, y, outputs, mask, weights):
    set_tag(outputs, "_keras_mask", mask)
    return loss(y, outputs, sample_weight=weights)


def _given(local_batch):
    return [each for each in local_batch if each is not None]


def _tensor(array):
    return None if array is None else tf.convert_to_tensor(array)


def rows() -> list[Row]:
    """Returns all rows, without outcomes."""
    found = []
    for kind in sorted(classes()):
        for reduction in REDUCTIONS:
            others = ARGUMENTS.get(kind, []) if reduction == REDUCTIONS[0] else []
            found += [
                Row(kind, arguments, reduction, given, ("", "", ""))
                for arguments in ("", *others)
                for given in WITH
            ]
    return found


def outcomes(row: Row) -> tuple[str, ...]:
    """Finds out all three outcomes of a row."""
    return tuple(outcome(row, rank) for rank in SHAPES)


if __name__ == "__main__":
    filled = [row._replace(outcomes=outcomes(row)) for row in rows()]
    TABLE.write_text("".join(f"{row}\n" for row in filled))
