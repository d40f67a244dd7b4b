"""Says how training scales: a table, a law, a recommendation and a chart."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from towers.program import whole_file, words
from towers.scaling import law
from towers.scaling.measure import Trial, medians
from towers.scaling.network import Network

# Fewer towers are recommended if they reach so much of the highest speed.
_AS_FAST = 0.95
# A smaller part of a step, shown as 0%, limits nothing.
_NO_PART = 0.005

_HEAD = ("towers", "batch", "examples/sec", "speed-up", "efficiency")
_PARTS = {
    "input": ("wait for input", "waiting for input"),
    "copy": ("copy", "copying batches to the towers"),
    "compute": ("compute", "computing"),
    "reduce": ("reduce, update", "adding gradients and updating the variables"),
    "python": ("Python", "Python, which calls each step"),
}


@dataclasses.dataclass(frozen=True)
class ScalingReport:
    """What was measured, as far as it has come.

    Attributes:
        tried: What was measured, in order: at least one trial fits.
        batch_size: Examples in a global batch.
        more_hosts: Predict the speed of up to so many hosts; `None` for none.
        network: What would connect them.
        stopped: Whether it was stopped before it was over.
        devices_flag: Returns the flag of towers.train for a number of towers.
    """

    tried: Sequence[Trial]
    batch_size: int
    more_hosts: int | None = None
    network: Network = dataclasses.field(default_factory=Network)
    stopped: bool = False
    devices_flag: Callable[[int], str] = "--num_gpus={}".format

    def __str__(self) -> str:
        note = self.tried[0].note
        parts = [
            [*([note] if note else []), *self._table()],
            [self._amdahl()] if self.law else [],
            self._of_hosts(),
            [self.recommendation, *self._stopped()],
        ]
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    @property
    def rows(self) -> list[Trial]:
        """The medians of what was measured, by number of towers."""
        return medians(self.tried)

    @property
    def best(self) -> Trial:
        """The trial that is recommended: the fewest towers that are about as fast.

        More towers have to be faster by more than the error of the measurement.
        """
        fitting = [each for each in self.rows if each.fits]
        most = max(fitting, key=lambda each: each.examples_per_sec)
        enough = [
            x
            for x in fitting
            if x.examples_per_sec + math.hypot(x.error, most.error)
            >= _AS_FAST * most.examples_per_sec
        ]
        fewest = min(each.count for each in enough)
        same = [each for each in enough if each.count == fewest]
        return max(same, key=lambda each: each.examples_per_sec)

    @property
    def law(self) -> law.Amdahl | None:
        """Amdahl's law for towers with equal parts of a batch."""
        return law.fit(
            [
                (each.count, self.batch_size / each.examples_per_sec)
                for each in self.tried
                if each.fits and each.is_even
            ]
        )

    @property
    def recommendation(self) -> str:
        """Says how many towers to use, and why, in a sentence or two."""
        best, rows = self.best, [each for each in self.rows if each.fits]
        flags = self.devices_flag(best.count)
        if not best.is_even:
            flags += f" --split_ratios={','.join(map(str, best.split_ratios))}"
        said = f"Recommended: {words.count(best.count, 'tower')} ({flags})"
        less, more = _neighbours(best, rows)
        if more is not None:
            said += f"; {_adds(best, more)}"
            if (reason := _reason(best, more)) and _gain(best, more) < 0.02:
                said += f", because {reason}"
        elif less is not None:
            said += f"; compared with {less.count}, {_adds(less, best)}"
        unfit = [each for each in self.rows if not each.fits]
        if unfit:
            said += f"; {words.count(unfit[0].count, 'tower')} did not fit: "
            said += unfit[0].why
        return f"{said}."

    def as_dict(self) -> dict[str, Any]:
        """The same for machines: figures by name, as JSON has them."""
        best, found = self.best, self.law
        return {
            "recommended": best.count,
            "split_ratios": [*best.split_ratios],
            "recommendation": self.recommendation,
            "batch_size": self.batch_size,
            "serial_fraction": found and found.serial_fraction,
            "serial_fraction_error": found and found.error,
            "stopped": self.stopped,
            "trials": [dataclasses.asdict(each) for each in self.rows],
            "hosts": {
                str(count): {"no_overlap": slow, "full_overlap": fast}
                for count, slow, fast in self.predicted()
            },
        }

    def predicted(self) -> list[tuple[int, float, float]]:
        """Predicts examples/sec of more hosts, by the model of docs/scale/scaling.md.

        The batch stays, so each host computes its part of it.

        Returns:
            For each number of hosts the speed if gradients are added after computing,
            and if they are added meanwhile.
        """
        if self.more_hosts is None:
            return []
        best = self.best
        step_s = self.batch_size / best.examples_per_sec
        divided_s = step_s * best.parts_ms["compute"] / sum(best.parts_ms.values())
        found, hosts = [], 2
        while hosts <= self.more_hosts:
            sum_s = self.network.sum_s(hosts, best.gradient_bytes)
            alone_s = step_s - divided_s + divided_s / hosts
            after_s, meanwhile_s = alone_s + sum_s, max(alone_s, sum_s)
            found.append(
                (hosts, self.batch_size / after_s, self.batch_size / meanwhile_s)
            )
            hosts *= 2
        return found

    def plot(self, path: str) -> None:
        """Draws speed-up and the parts of a step by the number of towers."""
        from matplotlib.figure import Figure

        rows = [each for each in self.rows if each.fits and each.is_even]
        counts = [each.count for each in rows]
        figure = Figure(figsize=(7, 6), layout="constrained")
        above, below = figure.subplots(2, sharex=True)
        first = rows[0].examples_per_sec / counts[0]
        above.plot(
            counts, [x.examples_per_sec / first for x in rows], "o-", label="measured"
        )
        above.plot(counts, counts, ":", color="gray", label="ideal")
        if found := self.law:
            fitted = [self.batch_size / found.step_s(n) / first for n in counts]
            above.plot(counts, fitted, "--", label="Amdahl's law")
        above.set(ylabel="speed-up", ylim=(0, None))
        bottom = [0.0] * len(rows)
        for name, (short, _) in _PARTS.items():
            heights = [each.parts_ms.get(name, 0.0) for each in rows]
            below.bar(counts, heights, 0.6, bottom, label=short)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        below.set(ylabel="a step, ms", xlabel="towers", xticks=counts)
        for axes in (above, below):
            axes.legend(fontsize="small")
            axes.grid(alpha=0.3)
        whole_file.save_figure(path, figure)

    def _table(self):
        rows = self.rows
        parts = [name for name in _PARTS if any(name in x.parts_ms for x in rows)]
        memory = f"{rows[0].memory} MB"
        head = (*_HEAD, *(f"{_PARTS[name][0]}, ms" for name in parts), memory)
        first = next(each for each in rows if each.fits)
        return words.aligned([head, *(_row(each, first, parts) for each in rows)])

    def _amdahl(self):
        found = self.law
        fraction, error = found.serial_fraction, found.error
        said = f"{fraction:.0%}"
        if error is not None:
            said += f" (+/- {error:.0%})"
        # Within two standard errors, it may be nothing, and the bound any.
        if error is not None and 2 * error >= max(fraction, 2 * _NO_PART):
            return (
                "Amdahl's law: it cannot be told from these measurements which part "
                "of a step does not become shorter with more towers, nor how high the "
                f"speed-up can be (found {said} of a step with one tower); "
                "measure longer (--seconds, --rounds)."
            )
        said = (
            f"Amdahl's law: {said} of a step with one tower does not become shorter "
            "with more towers"
        )
        if fraction < _NO_PART:
            return f"{said}."
        return f"{said}, so the speed-up is at most {1 / fraction:,.1f}."

    def _of_hosts(self):
        predicted = self.predicted()
        if not predicted:
            return []
        one = self.best.examples_per_sec
        head = ("hosts", "examples/sec", "speed-up", "if all overlaps", "speed-up")
        rows = [
            (f"{n}", f"{a:,.1f}", f"{a / one:.2f}", f"{b:,.1f}", f"{b / one:.2f}")
            for n, a, b in predicted
        ]
        size = words.size(self.best.gradient_bytes)
        each = words.count(self.best.count, "tower")
        return [
            f"Predicted, not measured: hosts with {each} each, the same batch, {size} "
            f"of gradients, {self.network.gbit:g} Gbit/s and "
            f"{self.network.delay_ms:g} ms from host to host (docs/scale/scaling.md).",
            *words.aligned([head, *rows]),
        ]

    def _stopped(self):
        return ["It was stopped before all was measured."] if self.stopped else []


def _row(each, first, parts):
    ratios = "" if each.is_even else f" ({':'.join(map(str, each.split_ratios))})"
    name, sizes = f"{each.count}{ratios}", "+".join(map(str, each.sizes))
    if not each.fits:
        return name, sizes, "does not fit", *[""] * (len(parts) + 3)
    up = each.examples_per_sec / first.examples_per_sec
    return (
        *(name, sizes, f"{each.examples_per_sec:,.1f}", f"{up:.2f}"),
        f"{up * first.count / each.count:.0%}",
        *(f"{each.parts_ms[part]:,.1f}" for part in parts),
        f"{each.peak_memory_mb:,.0f}",
    )


def _neighbours(best, rows):
    """The trials with fewer and with more towers that are next to the best, if any."""
    fewer = [each for each in rows if each.count < best.count]
    more = [each for each in rows if each.count > best.count]
    return (fewer[-1] if fewer else None), (more[0] if more else None)


def _gain(one, other):
    return other.examples_per_sec / one.examples_per_sec - 1


def _adds(one, other):
    """Says how much faster other towers are than fewer ones."""
    extra, gain = other.count - one.count, _gain(one, other)
    who = "another tower" if extra == 1 else f"{extra} more towers"
    end = "s" if extra == 1 else ""
    if gain < -0.005:
        return f"{who} make{end} training {-gain:.0%} slower"
    return f"{who} add{end} {max(gain, 0.0):.0%}"


def _reason(one, other):
    """Says what becomes longer with more towers, or does not become shorter."""
    longer = {}
    for name, ms in other.parts_ms.items():
        ideal = one.parts_ms.get(name, 0.0)
        if name == "compute":
            ideal *= one.count / other.count
        longer[name] = ms - ideal
    if not longer or max(longer.values()) <= 0:
        return ""
    name = max(longer, key=longer.__getitem__)
    said = _PARTS[name][1]
    before, now = one.parts_ms.get(name, 0.0), other.parts_ms[name]
    return f"{said} takes {now:,.1f} ms of a step instead of {before:,.1f}"
