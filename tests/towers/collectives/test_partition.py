"""Who owns which part of the variables."""

import math

import pytest

from towers.collectives.partition import Extent, partition


def _extent(*shape, unit=16, bytes_each=4):
    return Extent(shape, bytes_each * math.prod(shape), unit)


# Of a transformer: a table cut by rows, kernels and biases.
MODEL = [
    _extent(8000, 64, unit=64),
    *[_extent(64, 256), _extent(256), _extent(256, 64), _extent(64)] * 4,
    _extent(64, 8000),
    _extent(8000),
]


@pytest.mark.parametrize("owners", [1, 2, 3, 4, 7])
def test_parts_are_as_large_and_cover_each_number_once(owners):
    found, loads = partition(MODEL, owners), [0] * owners
    for extent, parts in zip(MODEL, found, strict=True):
        edges = [0, *[part.stop for part in parts]]
        assert [part.start for part in parts] == edges[:-1]
        assert edges[-1] == extent.size
        for part in parts:
            assert math.prod(part.shape) == part.stop - part.start
            assert part.whole == (part.shape == extent.shape)
            loads[part.owner] += part.stop - part.start
    # Each border is as near as a unit, here a row.
    assert max(loads) - min(loads) <= 2 * 64
    assert sum(len(parts) > 1 for parts in found) <= owners - 1


def test_a_part_of_a_table_has_whole_rows():
    first, second = partition([_extent(10, 3, unit=3)], 2)[0]
    assert (first.shape, second.shape) == ((5, 3), (5, 3))
    assert first.has_rows and second.start == 15


def test_what_stays_whole_is_balanced_and_the_rest_fills_up():
    whole = [_extent(n, unit=0) for n in (50, 30, 20, 60)]
    found = partition([*whole, _extent(160)], 2)
    assert all(len(parts) == 1 for parts in found[:4])
    loads = [0, 0]
    for parts in found:
        for part in parts:
            loads[part.owner] += part.stop - part.start
    assert loads == [160, 160]


def test_one_variable_larger_than_a_share_leaves_the_rest_to_the_others():
    found = partition([_extent(1000, unit=0), _extent(160), _extent(160)], 3)
    assert [{part.owner for part in parts} for parts in found] == [{0}, {1}, {2}]


def test_there_may_be_more_owners_than_numbers():
    found = partition([_extent(3), _extent()], 4)
    assert [len(parts) for parts in found] == [1, 1]
