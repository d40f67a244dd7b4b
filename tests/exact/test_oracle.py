"""The oracle tells how far one device is from itself."""

import re

from scripts import parity_report
from tests.exact import oracle, table


def case(group, policy):
    return next(
        c for c in table.OF_KERAS_STEPS if c.group == group and c.policy == policy
    )


def test_float32_rounds_little_when_compiled():
    found = oracle.rounding(case("shares", "float32"), "predict 0")
    assert [*found] == ["compiled"]
    assert found["compiled"] < 1e-5


def test_16_bits_round_more_and_the_report_says_so(monkeypatch):
    some = case("mixed precision", "mixed_float16")
    monkeypatch.setattr(parity_report, "CASES", [some])
    record = {"verdict": "differs", "difference": 0.5, "where": "predict 0"}
    *_, row = parity_report._table({str(some): [record]}, {})
    wanted = r"\(predict 0\); one device compiled by (\S+), in float32 by (\S+) \|"
    compiled, in_float32 = map(float, re.search(wanted, row).groups())
    assert compiled < 1e-2
    assert 1e-5 < in_float32 < 0.1


def test_the_summary_counts_the_worst_of_each_case():
    names = [str(c) for c in parity_report.CASES if c.group == "shares"]
    equal = {"verdict": "equal", "difference": 1e-7}
    differs = {"verdict": "differs", "difference": 0.5, "where": "loss"}
    refused = {"verdict": "raises", "message": "ModelError: Model 'm' cannot"}
    crashes = {"verdict": "raises", "message": "TypeError: None"}
    found = [[equal, equal], [equal, differs], [refused], [crashes]]
    towers = dict(zip(names, found, strict=False))
    mirrored = {names[0]: [crashes | {"even": equal}], names[1]: [equal]}
    text = parity_report.summary(towers, mirrored, "2026-01-01", "2026-01-02")
    rows = [line for line in text.splitlines() if "shares" in line or "all" in line]
    assert rows[-2] == "| shares | 4 | 1 | 1 | 1 | 1 | 1 | 0 | 1 | 2 | 0 | 0 |"
    assert rows[-1].replace("*", "") == rows[-2].replace("shares", "all")
    assert "the largest difference is 1.0e-07" in text


def test_the_summary_is_short():
    page = parity_report.ROOT / "PARITY.md"
    assert len(page.read_text().splitlines()) <= 40


def test_a_difference_of_16_bits_may_be_as_large_as_that_of_one_device(monkeypatch):
    some = case("mixed precision", "mixed_float16")
    own = oracle.rounding(some, "predict 0")["in float32"]
    monkeypatch.setattr(type(some), "tolerance", 0.0)
    assert oracle.is_rounding(some, {"predict 0": own})
    assert not oracle.is_rounding(some, {"predict 0": 1.01 * own})
    assert not oracle.is_rounding(some, {"predict 9": 1e-9})
    assert not oracle.is_rounding(case("shares", "float32"), {"predict 0": 0.0})
