"""Compares what two runs left, and says it in a table."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from towers.program import words

EQUAL = "equal"
ROUNDING = "equal to rounding"
DIFFERS = "differs"

# Rows of one kind in the printed table, the ones that differ most.
_SHOWN = 6
_NAME_WIDTH = 56


class ReportEntry(NamedTuple):
    """One thing that a run left.

    Attributes:
        kind: What it is: "loss", "metric", "variable", "state", "optimizer" or
            "prediction".
        name: Which of its kind.
        step: After which step, from 0.
        value: The numbers.
    """

    kind: str
    name: str
    step: int
    value: np.ndarray


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing compared.

    Attributes:
        kind: What it is: "loss", "metric", "variable", "state", "optimizer" or
            "prediction".
        name: Which of its kind.
        difference: The largest difference between towers and one device, relative to
            the largest value, at the step where it tells most. Where it is more than
            rounding, the least of several runs on towers.
        rounding: The most that one device differs from itself if the variables that it
            starts from are changed by a tenth of the tolerance, as by rounding.
        verdict: "equal", "equal to rounding" or "differs".
    """

    kind: str
    name: str
    difference: float
    rounding: float
    verdict: str


@dataclasses.dataclass(frozen=True)
class Parity:
    """What a comparison found. `str()` returns the table and the verdict.

    Attributes:
        equal: Whether the towers gave the numbers of one device.
        reasons: Sentences that say why not, and what else is worth knowing.
        rows: What was compared. Empty if the model cannot run on towers.
        towers: Number of towers.
        loss_placement: Where the loss was computed: "tower" or "gathered".
        stages: Number of devices of each tower.
        micro_batches: Parts of a tower's batch that go through its stages.
    """

    equal: bool
    reasons: tuple[str, ...]
    rows: tuple[Row, ...] = ()
    towers: int = 0
    loss_placement: str | None = None
    stages: int = 1
    micro_batches: int = 1

    def __str__(self) -> str:
        return "\n".join([*_table(self.rows), *self._verdict()])

    def _verdict(self):
        if self.loss_placement:
            where = {
                "tower": "on the towers",
                "gathered": "with the rows of all towers",
            }
            yield f"The loss was computed {where[self.loss_placement]}."
        if self.equal:
            give = "gives" if self.towers == 1 else "give"
            yield f"Equal: {self._towers()} {give} the numbers of one device."
        else:
            yield "Not equal."
        yield from self.reasons

    def _towers(self):
        found = words.count(self.towers, "tower")
        if self.stages > 1:
            found += f" of {self.stages} stages"
        if self.micro_batches > 1:
            found += f", in {self.micro_batches} micro-batches,"
        return found


def differences(
    ours: Iterable[ReportEntry], theirs: Sequence[ReportEntry]
) -> list[float]:
    """Returns the largest difference in each entry, relative to the largest value.

    Where a value is only rounding, such as the gradient of a bias before
    BatchNormalization, its own size is no measure. So what is less than a thousandth of
    the largest entry of its group is measured by that thousandth.

    Args:
        ours: What a run left.
        theirs: What it should have left.

    Returns:
        One number for each entry, infinite where shapes or infinite values differ.
    """
    groups = collections.defaultdict(float)
    for entry in theirs:
        groups[_group(entry)] = max(groups[_group(entry)], _size(entry.value))
    return [
        difference(a.value, b.value, groups[_group(b)] / 1000)
        for a, b in zip(ours, theirs, strict=True)
    ]


def difference(ours: np.ndarray, theirs: np.ndarray, least: float = 0.0) -> float:
    """Returns the largest difference over the largest value, or over `least`."""
    ours, theirs = (np.asarray(each, np.float64) for each in (ours, theirs))
    finite = np.isfinite(theirs)
    if ours.shape != theirs.shape or not np.array_equal(finite, np.isfinite(ours)):
        return float("inf")
    gap = _size(ours[finite] - theirs[finite])
    return gap / max(_size(ours), _size(theirs), least) if gap else 0.0


def _group(entry):
    """Entries whose numbers are of one nature."""
    if entry.kind == "variable":
        return entry.kind, entry.step
    # A path ends with the variable's name, an optimizer's with that of the slot.
    end = "_" if entry.kind == "optimizer" else "/"
    return entry.kind, entry.step, entry.name.rpartition(end)[2]


def _size(value):
    value = np.asarray(value, np.float64)
    return float(np.abs(value[np.isfinite(value)]).max(initial=0.0))


def compare(
    entries: Sequence[ReportEntry],
    found: Sequence[float],
    rounding: Sequence[float],
    tolerance: float,
) -> tuple[Row, ...]:
    """Judges differences.

    Args:
        entries: What one device left.
        found: For each entry, the difference that towers make.
        rounding: For each entry, the difference that rounding makes.
        tolerance: The difference up to which entries are equal.

    Returns:
        One row for each thing that has a name, of the step where it differs most.
    """
    before = [0.0, *_of_outputs(entries, rounding)]
    rows = {}
    for entry, gap, noise in zip(entries, found, rounding, strict=True):
        if entry.kind == "metric":
            # A metric may be a count, which the outputs' rounding moves in jumps.
            noise = max(noise, before[entry.step])
        verdict = DIFFERS
        if gap <= tolerance:
            verdict = EQUAL
        elif gap <= 10 * noise:
            verdict = ROUNDING
        row = Row(entry.kind, entry.name, gap, noise, verdict)
        key = entry.kind, entry.name
        rows[key] = max(rows.get(key, row), row, key=_rank)
    return tuple(rows.values())


def _of_outputs(entries, rounding):
    """The rounding of the predictions after each step, as far as it is known."""
    largest = 0.0
    for step in range(entries[-1].step + 1):
        for entry, noise in zip(entries, rounding, strict=True):
            if entry.kind == "prediction" and entry.step == step:
                largest = max(largest, noise)
        yield largest


def _rank(row):
    """How much a row tells: what is far above the rounding, most."""
    order = [EQUAL, ROUNDING, DIFFERS]
    return order.index(row.verdict), row.difference / (row.rounding + 1e-6)


def is_equal(rows: Sequence[Row]) -> bool:
    """Tells whether no row differs by more than rounding."""
    return all(row.verdict != DIFFERS for row in rows)


def _table(rows):
    """Sets rows out in columns, the ones of each kind that differ most."""
    if not rows:
        return []
    kinds = collections.defaultdict(list)
    for row in rows:
        kinds[row.kind].append(row)
    shown = [row for of_kind in kinds.values() for row in _shortened(of_kind)]
    names = [_cut(row.name) for row in shown]
    width = max(map(len, names))
    lines = [f"{'':10}  {'':{width}}  difference  rounding  verdict"]
    for row, name in zip(shown, names, strict=True):
        lines.append(
            f"{row.kind:10}  {name:{width}}  {row.difference:10.1e}  "
            f"{row.rounding:8.1e}  {row.verdict}"
        )
    return lines


def _shortened(rows):
    """The rows that differ most, in order, and one that sums up the others."""
    if len(rows) <= _SHOWN:
        return rows
    ranked = sorted(rows, key=_rank)
    others, most = ranked[: 1 - _SHOWN], ranked[1 - _SHOWN :]
    rest = Row(
        rows[0].kind,
        f"({len(others)} more, at most)",
        max(row.difference for row in others),
        max(row.rounding for row in others),
        others[-1].verdict,
    )
    return [*(row for row in rows if row in most), rest]


def _cut(name):
    """The end of a name, which tells more than its beginning."""
    return name if len(name) <= _NAME_WIDTH else f"...{name[3 - _NAME_WIDTH :]}"
