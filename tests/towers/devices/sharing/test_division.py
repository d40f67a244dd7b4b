"""towers.devices.sharing.division: how many places each run should hold, and which."""

import dataclasses
import random

import pytest

from towers.devices.sharing.division import SharingRun, divide, fits


def run(minimum, limit, places, held="", filled="", waits=False) -> SharingRun:
    """Makes a run; each place is a letter."""
    lists = (tuple(letters) for letters in (places, held, filled))
    return SharingRun("", 1, 0.0, "", minimum, limit, *lists, waits)


def aims(*runs: SharingRun) -> list[str]:
    named = [dataclasses.replace(each, token=str(i)) for i, each in enumerate(runs)]
    return ["".join(places) for places in divide(named)]


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ([(1, 8)], [8]),
        ([(1, 5)], [5]),
        ([(1, 99)], [8]),
        ([(1, 8), (1, 8)], [4, 4]),
        ([(1, 8), (1, 8), (1, 8)], [3, 3, 2]),
        ([(1, 2), (1, 8)], [2, 6]),
        # All places count, not only those above the minimum.
        ([(3, 8), (1, 8)], [4, 4]),
        ([(6, 8), (1, 8)], [6, 2]),
        ([(2, 3), (1, 8), (2, 4)], [3, 3, 2]),
        ([(4, 8), (4, 8)], [4, 4]),
    ],
)
def test_what_is_left_goes_to_whoever_has_fewest(wishes, expected):
    found = aims(*(run(*wish, "abcdefgh") for wish in wishes))
    assert [*map(len, found)] == expected


def test_a_run_keeps_what_it_has():
    first, second = run(1, 4, "abcd", held="dca"), run(1, 4, "abcd", held="b")
    # It gives up what it got last.
    assert aims(first, second) == ["cd", "ab"]
    assert aims(run(1, 4, "abcd", held="c")) == ["abcd"]
    assert aims(run(1, 2, "abcd", held="c")) == ["ac"]


def test_free_places_come_before_what_others_give_up():
    first, second = run(1, 2, "abcd", held="ab"), run(1, 2, "abcd")
    assert aims(first, second) == ["ab", "cd"]
    three = run(1, 3, "abcd", held="abc")
    assert aims(three, second) == ["ab", "cd"]


def test_runs_of_some_places_only():
    assert aims(run(1, 1, "ab"), run(1, 1, "a")) == ["b", "a"]
    # The first moves, as only it can.
    assert aims(run(1, 1, "ab", held="a"), run(1, 1, "a")) == ["b", "a"]
    # Over a third.
    assert aims(
        run(1, 1, "ab", held="a"), run(1, 1, "bc", held="b"), run(1, 1, "a")
    ) == ["b", "c", "a"]


def test_filled_places_are_left_above_the_minimum():
    assert aims(run(1, 4, "abcd", held="abcd", filled="b")) == ["acd"]
    assert aims(run(1, 4, "abcd", held="abcd", filled="abcd")) == ["a"]
    assert aims(run(3, 4, "abcd", held="abcd", filled="bcd")) == ["abc"]
    # It got a filled one before the second could have its only one.
    first, second = run(1, 2, "abc", filled="b"), run(1, 1, "a", filled="a")
    assert aims(first, second) == ["c", "a"]
    # Others are larger than their minimum, so it need not have filled ones.
    assert aims(
        run(1, 4, "abcd", held="abc", filled="d"),
        run(1, 4, "abcd", held="d", filled="d"),
    ) == ["ab", "c"]


def test_minimums_that_fit():
    assert fits([run(2, 2, "abcd"), run(2, 4, "abcd")])
    assert not fits([run(2, 2, "abcd"), run(3, 4, "abcd")])
    assert fits([run(1, 2, "ab"), run(2, 2, "bc")])
    # Five places, but the second can use three, of which the first needs one.
    assert not fits([run(2, 2, "ab"), run(1, 1, "c"), run(3, 3, "bde"), run(1, 1, "d")])
    # Filled or not: the driver does not tell for how long.
    assert fits([run(2, 2, "ab", filled="ab")])


def randomly(rng: random.Random, same_places: bool) -> list[SharingRun]:
    """Makes runs whose minimums fit, in any state in which they may be."""
    places = "abcdefghij"[: rng.randint(1, 10)]
    filled = {place for place in places if rng.random() < 0.25}
    runs = []
    for index in range(rng.randint(1, 6)):
        mine = [p for p in places if same_places or rng.random() < 0.6] or ["a"]
        minimum = rng.randint(1, min(3, len(mine)))
        limit = rng.randint(minimum, len(mine) + 2)
        new = run(minimum, limit, mine, filled=filled.intersection(mine))
        new = dataclasses.replace(new, token=str(index))
        runs += [new] if fits([*runs, new]) else []
    held = [[] for _ in runs]
    for place in rng.sample(places, len(places)):
        users = [i for i, each in enumerate(runs) if place in each.places]
        if users and rng.random() < 0.9:
            held[rng.choice(users)].append(place)
    return [
        dataclasses.replace(each, waits=True)
        if len(places) < each.minimum
        else dataclasses.replace(each, held=tuple(places))
        for each, places in zip(runs, held, strict=True)
    ]


def move(runs: list[SharingRun], index: int) -> None:
    """Lets a run take what it should hold, as far as that is free."""
    mine = runs[index]
    taken = {p for i, each in enumerate(runs) if i != index for p in each.held}
    free = [place for place in divide(runs)[index] if place not in taken]
    if mine.waits and len(free) < mine.minimum:
        return
    rest = [place for place in mine.held if place not in free]
    free += rest[: max(mine.minimum - len(free), 0)]
    kept = [place for place in mine.held if place in free]
    held = tuple(dict.fromkeys((*kept, *free)))
    runs[index] = dataclasses.replace(mine, held=held, waits=False)


@pytest.mark.slow
@pytest.mark.parametrize("same_places", [True, False])
def test_all_arrive_from_any_state(same_places):
    rng = random.Random(1)
    for _ in range(600):
        runs = randomly(rng, same_places)
        for each, places in zip(runs, divide(runs), strict=True):
            assert each.minimum <= len(places) <= each.limit
            assert {*places} <= {*each.places}
            assert len(places) == each.minimum or not {*places} & {*each.filled}
        for _ in range(12):
            for index in rng.sample(range(len(runs)), len(runs)):
                move(runs, index)
        found = [{*each.held} for each in runs]
        assert found == [{*places} for places in divide(runs)]
        assert sum(map(len, found)) == len(set().union(*found))
