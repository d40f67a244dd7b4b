"""Losses on towers: where they are computed, and that they are those of one device."""

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.towers.analysis import losses
from towers.analysis.rules import NoRuleError, Rules

TABLE = losses.table()
# A mask, and weights of elements: what most of them need totals for.
MOST = "mask, element weights"
SAMPLE = [
    row
    for row in TABLE
    if (row.given, row.arguments, row.reduction) == (MOST, "", losses.REDUCTIONS[0])
]
# Of those that towers compute, each with the number of axes of its outputs.
ON_TOWERS = [
    (row, rank)
    for row in TABLE
    for rank, outcome in zip(losses.SHAPES, row.outcomes, strict=True)
    if outcome.startswith("tower")
]
QUICK = [
    ("BinaryCrossentropy", "sum_over_batch_size", "mask", 3),
    ("CategoricalFocalCrossentropy", "sum_over_batch_size", "element weights", 4),
    ("Huber", "mean_with_sample_weight", "example weights", 2),
    ("SparseCategoricalCrossentropy", "mean_with_sample_weight", MOST, 3),
    ("Dice", "sum", MOST, 4),
]


def _is_quick(row, rank):
    return (row.kind, row.reduction, row.given, rank) in QUICK


def test_each_class_is_in_the_table():
    # A new one has to be tried: run `losses` as a program.
    assert [row[:4] for row in TABLE] == [row[:4] for row in losses.rows()]


@pytest.mark.slow
def test_a_sample_of_outcomes():
    assert {row.kind for row in SAMPLE} == losses.classes().keys()
    for row in SAMPLE:
        rank = losses.RANKS.get(row.kind, 3)
        found = losses.outcome(row, rank)
        assert found == row.outcomes[rank - 2], str(row)


@pytest.mark.slow
@pytest.mark.parametrize("kind", dict.fromkeys(row.kind for row in TABLE))
def test_outcomes(kind):
    for row in TABLE:
        if row.kind == kind:
            assert losses.outcomes(row) == row.outcomes, str(row)


def test_only_what_couples_examples_is_gathered():
    gathered = {
        (row.kind, row.arguments)
        for row in TABLE
        if any(outcome.startswith("gathered") for outcome in row.outcomes)
    }
    # A ratio of sums over all pixels, of all examples; pairs; a norm over examples. CTC
    # has a gradient of its own, which no loss that takes totals can copy.
    assert gathered == {
        ("CTC", ""),
        ("Circle", ""),
        ("CosineSimilarity", "axis=0"),
        ("Dice", ""),
        ("Dice", "axis=0"),
        ("Tversky", ""),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "quick",
        *dict.fromkeys(row.kind for row, _ in ON_TOWERS),
    ],
)
def test_parts_add_up_to_the_whole(kind):
    for row, rank in ON_TOWERS:
        if not (_is_quick(row, rank) if kind == "quick" else row.kind == kind):
            continue
        ours, theirs = losses.in_parts(row, rank), losses.whole(row, rank)
        for a, b in zip(ours, theirs, strict=True):
            largest = max(np.abs(b).max(), 1e-30)
            assert np.abs(a - b).max() <= 1e-5 * largest, (str(row), rank)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, p: ops.mean((y - ops.mean(y)) * p) / ops.std(y),
        lambda y, p: ops.sum(p) / ops.sum(ops.square(y - ops.mean(y))),
        lambda y, p: ops.mean(p / ops.max(y - ops.mean(y))),
    ],
)
def test_a_total_that_takes_another_is_refused(loss):
    """Towers exchange totals once, so the inner one would be a local batch's."""
    refused = pytest.raises(NoRuleError, match="a total of the batch that another")

    @tf.function(autograph=False)
    def trace(y, x, factor):
        rules, outputs = Rules(2), x * factor
        with rules.reading([y, x]), refused:
            rules.read_losses([loss(y, outputs)], outputs, [y])

    rows = tf.TensorSpec([None, 4])
    trace.get_concrete_function(rows, rows, tf.TensorSpec([]))
