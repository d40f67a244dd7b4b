"""Which blocks move, against rules that are checked one by one."""

import numpy as np
import pytest

from towers.sparse.rigl import moved

pytestmark = pytest.mark.quick_one_in(2)


def problem(rows, columns, density, seed):
    """A random layout, magnitudes and gradients."""
    random = np.random.default_rng(seed)
    outputs, inputs = np.nonzero(random.random((columns, rows)) < density)
    return inputs, outputs, random.random(len(inputs)), random.random((rows, columns))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_keeps_the_rules(seed, share):
    sizes = np.random.default_rng(seed).integers(2, 12, 2)
    inputs, outputs, magnitudes, gradients = problem(*sizes, 0.4, seed)
    number = round(share * len(inputs))
    given = [array.copy() for array in (inputs, outputs, magnitudes, gradients)]
    after = moved(inputs, outputs, magnitudes, gradients, number)

    assert len({*zip(after, outputs, strict=True)}) == len(inputs)
    assert sorted(after) == sorted(inputs)
    dropped = np.argsort(magnitudes)[:number]
    assert {*np.flatnonzero(after != inputs)} <= {*dropped}
    again = moved(inputs, outputs, magnitudes, gradients, number)
    np.testing.assert_array_equal(after, again)
    for array, before in zip(
        (inputs, outputs, magnitudes, gradients), given, strict=True
    ):
        np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("seed", range(12))
def test_the_largest_gradient_grows_if_it_can(seed):
    inputs, outputs, magnitudes, gradients = problem(9, 7, 0.35, seed)
    number = len(inputs) // 2
    after = moved(inputs, outputs, magnitudes, gradients, number)
    there = {*zip(inputs.tolist(), outputs.tolist(), strict=True)}
    free = np.argsort(magnitudes)[:number].tolist()

    def can_grow(source, target):
        """Whether two dropped blocks can exchange inputs so that it is there."""
        return any(
            (inputs[taker], outputs[giver]) not in there
            for taker in free
            for giver in free
            if outputs[taker] == target and inputs[giver] == source
        )

    order = np.argsort(-gradients, axis=None)
    places = [np.unravel_index(k, gradients.shape) for k in order]
    dropped = {(inputs[k], outputs[k]) for k in free}
    first = next(p for p in places if p in dropped or (p not in there and can_grow(*p)))
    assert first in {*zip(after, outputs, strict=True)}


def test_moves_by_hand():
    # Blocks at (0, 0) and (1, 1); the gradient wants the other two places.
    after = moved(
        np.array([0, 1]),
        np.array([0, 1]),
        np.array([1.0, 1.0]),
        np.array([[0.0, 5.0], [4.0, 0.0]]),
        2,
    )
    assert after.tolist() == [1, 0]


def test_grows_again_where_the_gradient_stays_largest():
    inputs, outputs = np.array([0, 1]), np.array([0, 1])
    gradients = np.array([[9.0, 5.0], [4.0, 8.0]])
    assert moved(inputs, outputs, np.ones(2), gradients, 2).tolist() == [0, 1]


@pytest.mark.parametrize("number", [0, 1])
def test_nothing_moves_without_another_to_exchange_with(number):
    inputs, outputs, magnitudes, gradients = problem(8, 8, 0.4, 0)
    after = moved(inputs, outputs, magnitudes, gradients, number)
    np.testing.assert_array_equal(after, inputs)


def test_moves_to_large_gradients():
    inputs, outputs, magnitudes, gradients = problem(64, 64, 0.1, 0)
    number = len(inputs) // 3
    after = moved(inputs, outputs, magnitudes, gradients, number)
    dropped = np.argsort(magnitudes)[:number]
    before, grown = (
        gradients[each[dropped], outputs[dropped]].mean() for each in (inputs, after)
    )
    # Those that are dropped have any gradient; most can move to a large one.
    assert before < 0.6 and grown > 0.85
