"""Numbers with their nouns."""

import math

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


def test_a_line_that_is_too_long_is_wrapped_and_indented():
    line = f"  {'word ' * 30}".rstrip()
    first, second = words.wrapped(line).splitlines()
    assert len(first) <= 100 and first.startswith("  word")
    assert second.startswith("    word")
    assert f"{first} {second.strip()}" == line
    assert words.wrapped("short\n  lines") == "short\n  lines"


def test_a_number_stays_beside_its_name_and_its_unit():
    text = "loss 0.5, in all 3,210 examples/sec, and more"
    for width in range(22, len(text)):
        for line in words.wrapped(text, width).splitlines():
            assert not line.rstrip().endswith(("loss", "all", "3,210"))


def test_a_line_breaks_between_two_figures():
    text = "val_loss 0.625, 3,210 examples/sec; 2 s left"
    lines = words.wrapped(text, 22).splitlines()
    assert lines == ["val_loss 0.625,", "  3,210 examples/sec;", "  2 s left"]


def test_a_line_with_a_path_stays_whole():
    line = f"tensorboard --logdir {'/folder' * 20}"
    assert words.wrapped(line) == line


def test_names_of_devices_are_no_paths():
    line = ", ".join(f"/device:CPU:{k}" for k in range(9))
    assert len(words.wrapped(f"Others: {line}.").splitlines()) == 2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *((0.73124, "0.7312"), (0.812, "0.812"), (34.216, "34.22")),
        *((1234.5, "1,234"), (0.00012346, "0.0001235"), (float("nan"), "nan")),
        *((0, "0"), (-12345.6, "-12,346"), (float("inf"), "inf")),
    ],
)
def test_figures(value, said):
    assert words.figure(value) == said


def test_rates():
    assert words.rate(3210.4) == "3,210 examples/sec"
    assert words.rate(1.25, "tokens") == "1.2 tokens/sec"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (48, "48 s"), (65, "1:05"), (3920, "1:05:20")]
)
def test_durations(seconds, said):
    assert words.duration(seconds) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.81234, "0.8123"),
        (1234.5, "1,234"),
        (-1234567.0, "-1,234,567"),
        (1e38, "1e+38"),
        (-2.5e12, "-2.5e+12"),
        (1e-12, "1e-12"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_a_figure_is_short(value, said):
    assert words.figure(value) == said


def test_a_line_may_break_between_two_figures():
    said = words.wrapped(
        "  accuracy 0.8045, val_accuracy 0.9389, 14,077 apples/sec", 40
    )
    assert said.splitlines() == [
        "  accuracy 0.8045, val_accuracy 0.9389,",
        "    14,077 apples/sec",
    ]
