"""Writes the page that sums up what was found."""

import json
import pathlib
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

from ..bench import report
from . import run
from .parts import Machine, Part


def write(folder: pathlib.Path, parts: Sequence[Part], machine: Machine) -> None:
    """Writes `README.md` of all parts that have run."""
    lines = [
        "# Towers on GPUs",
        "",
        f"{report.machine()}; {machine.gpus} x {machine.name}, {machine.memory_mb:,} "
        f"MB, driver {machine.driver}.",
        "",
        report.head(["part", "shows", "ended", "seconds"]),
        *(report.row(_ended(folder, part)) for part in parts),
    ]
    for part in parts:
        lines += _found(folder / part.name)
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def _ended(folder, part):
    result = run.result(folder, part)
    seconds = result and f"{result['seconds']:.0f}"
    if not result:
        ended = "not run"
    elif result["exit_code"] is None:
        ended = f"ended after {result['limit_s']:.0f} s"
    else:
        ended = "well" if result["exit_code"] == 0 else f"code {result['exit_code']}"
    return part.name, part.about, ended, seconds or None


def _found(place: pathlib.Path) -> Iterator[str]:
    """Yields the section of a part, if there is something to tell."""
    for name, lines in [
        ("figures.jsonl", _figures),
        ("junit.xml", _tests),
        ("trace.json", _text),
        ("second_start.txt", _text),
        ("decoding.json", _text),
        ("run/summary.json", _summary),
    ]:
        if (place / name).exists():
            yield from ("", f"## {place.name}", "", *lines(place / name))
    left_out = [
        line for line in _lines(place / "log.txt") if " is left out of " in line
    ]
    if left_out:
        yield from ("", *left_out)


def _lines(path):
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _figures(path):
    yield report.head(report.COLUMNS)
    for line in _lines(path):
        yield report.row(report.cells(json.loads(line)))


def _tests(path):
    cases = list(ET.parse(path).getroot().iter("testcase"))
    failed = [
        (case, each)
        for case in cases
        for each in case
        if each.tag in ("failure", "error")
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    yield f"{len(cases)} tests, {len(failed)} failed, {skipped} skipped."
    for case, each in failed:
        line = (each.get("message") or "").splitlines()[:1]
        yield f"- {case.get('name')}: {''.join(line)[:300]}"


def _summary(path):
    summary = json.loads(path.read_text())
    return "```", *summary["measured"].splitlines(), "```"


def _text(path):
    return "```", *_lines(path), "```"
