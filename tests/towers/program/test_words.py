"""Numbers with their nouns."""

import pytest

from towers.program import words


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (1, ("epoch",), "1 epoch"),
        (0, ("epoch",), "0 epochs"),
        (1437, ("step",), "1,437 steps"),
        (1, ("class", "classes"), "1 class"),
        (2, ("class", "classes"), "2 classes"),
    ],
)
def test_one_and_more(number, noun, said):
    assert words.count(number, *noun) == said


@pytest.mark.parametrize(
    ("names", "said"),
    [("", ""), ("a", "a"), ("abc", "a, b, c"), ("abcde", "a, b, c and 2 more")],
)
def test_of_many_names_the_first_are_listed(names, said):
    assert words.listed(iter(names), most=3) == said
    assert words.listed(map(str, range(10_000))).endswith(", 9 and 9,990 more")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (12_800, "12.5 KB"),
        (3 * 2**20, "3.0 MB"),
        (2**30, "1,024.0 MB"),
    ],
)
def test_no_size_is_nothing(number, said):
    assert words.size(number) == said


def test_only_so_many_are_named():
    names = [f"h{i}" for i in range(1000)]
    assert words.all_of(names) == "h0, h1, h2, h3, h4, h5, h6 and 993 more"
    assert words.all_of(names[:3]) == "h0, h1 and h2"
