"""What a search for the batch size says: a table, three sentences, a picture."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from towers.collectives import batch
from towers.find_batch_size import search
from towers.find_batch_size.search import Probe
from towers.program import whole_file, words

_HEAD = "batch", "per tower", "examples/sec", "step ms", "peak MB", "fits"


@dataclasses.dataclass(frozen=True)
class SearchReport:
    """A search, as far as it has come.

    Attributes:
        tried: What was tried, in order; at least one batch size fits.
        towers: The towers' devices; those of one tower's stages are one name.
        split_ratios: How much of a batch each tower gets, relative to the others.
        memory: Whose memory was measured, "GPU" or "process".
        most: The largest size that might be tried, `None` for any.
        learning_rate: That of the first size that was tried.
        note: What else is to be known; may be empty.
        stopped: Whether it was stopped before it was over.
        micro_batches: Parts that each tower computes its batch in.
    """

    tried: Sequence[Probe]
    towers: Sequence[str]
    split_ratios: Sequence[int]
    memory: str
    most: int | None
    learning_rate: float
    note: str = ""
    stopped: bool = False
    micro_batches: int = 1

    def __str__(self) -> str:
        whose = "the fullest GPU" if self.memory == "GPU" else "the whole process"
        lines = [
            f"Towers: {', '.join(self.towers)}; peak MB are of {whose}.",
            *([self.note] if self.note else []),
            "",
            *table(self._ordered(), self.split_ratios),
            "",
            self._largest(),
            self._fastest(),
            self._advice(),
        ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The same for machines: figures by name, as JSON has them."""
        end = search.too_large(self.tried)
        return {
            "largest": search.largest(self.tried).batch_size,
            "too_large": end and end.batch_size,
            "fastest": search.fastest(self.tried).batch_size,
            "towers": list(self.towers),
            "split_ratios": list(self.split_ratios),
            "micro_batches": self.micro_batches,
            "memory": self.memory,
            "stopped": self.stopped,
            "probes": [dataclasses.asdict(probe) for probe in self._ordered()],
        }

    def plot(self, path: str) -> None:
        """Draws examples/sec and peak memory by the batch size, as PNG or SVG."""
        from matplotlib.figure import Figure

        fitting = [probe for probe in self._ordered() if probe.fits]
        best, end = search.fastest(self.tried), search.too_large(self.tried)
        figure = Figure(figsize=(7, 6), layout="constrained")
        above, below = figure.subplots(2, sharex=True)
        for axes, name, label in (
            (above, "examples_per_sec", "examples/sec"),
            (below, "peak_memory_mb", f"peak memory of the {self.memory}, MB"),
        ):
            values = {probe.batch_size: getattr(probe, name) for probe in fitting}
            axes.plot(list(values), list(values.values()), "o-")
            axes.plot(best.batch_size, values[best.batch_size], "o", markersize=10)
            axes.set(ylabel=label, ylim=(0, 1.1 * max(values.values())))
            axes.grid(alpha=0.3)
            if end:
                axes.axvline(end.batch_size, color="tab:red", linestyle="--")
        above.set_title(f"fastest: {best.batch_size:,}", color="tab:orange")
        if end:
            below.set_title(f"{end.batch_size:,} does not fit", color="tab:red")
        # From one size to its double is a step of the search.
        below.set_xscale("log", base=2)
        below.xaxis.set_major_formatter("{x:,.0f}")
        below.set_xlabel("global batch")
        whole_file.save_figure(path, figure)

    def _ordered(self):
        return sorted(self.tried, key=lambda probe: probe.batch_size)

    def _largest(self):
        size, end = search.largest(self.tried).batch_size, search.too_large(self.tried)
        each = _per_tower(size, self.split_ratios)
        in_parts = self.micro_batches > 1
        each += " per tower" + f", in {self.micro_batches} micro-batches" * in_parts
        text = f"Largest that fits: {size:,} ({each})"
        if end:
            text += f"; {end.batch_size:,} does not ({end.why})"
        if self.stopped:
            return f"{text}; the search was stopped before it was over."
        if end:
            return f"{text}."
        unit = search.unit(self.split_ratios)
        if self.most is not None and size + unit > self.most:
            return f"{text}; nothing larger was tried, as --max_batch_size says."
        return f"{text} of those tried; with larger ones, examples/sec had fallen off."

    def _fastest(self):
        best, first = search.fastest(self.tried), self.tried[0]
        text = (
            f"Fastest: {best.batch_size:,}, {best.examples_per_sec:,.1f} examples/sec"
        )
        if not first.fits:
            return f"{text}."
        if best is first:
            return (
                f"{text}; the search began with this size, and found no faster one, "
                "larger or smaller."
            )
        ratio = best.examples_per_sec / first.examples_per_sec
        return f"{text}, {ratio:.2f} times those of a batch of {first.batch_size:,}."

    def _advice(self):
        best, first = search.fastest(self.tried), self.tried[0]
        text = (
            "If you change the batch size, scale the learning rate; Goyal et al. 2017 "
            "(arXiv:1706.02677) scale that of SGD in proportion, after a warm-up"
        )
        if best is first:
            return f"{text}."
        rate = self.learning_rate * best.batch_size / first.batch_size
        return f"{text}: --learning_rate={rate:g} for {best.batch_size:,}."


def table(probes: Sequence[Probe], split_ratios: Sequence[int]) -> list[str]:
    """Sets batch sizes out in a table in Markdown, numbers to the right."""
    return words.aligned([_HEAD, *(_row(probe, split_ratios) for probe in probes)])


def _row(probe, split_ratios):
    sizes = f"{probe.batch_size:,}", _per_tower(probe.batch_size, split_ratios)
    if not probe.fits:
        return *sizes, "-", "-", "-", "no"
    figures = probe.examples_per_sec, probe.step_ms
    return (
        *sizes,
        *(f"{x:,.1f}" for x in figures),
        f"{probe.peak_memory_mb:,.0f}",
        "yes",
    )


def _per_tower(size, split_ratios):
    sizes = batch.cut(size, split_ratios)
    return "+".join(map(str, sizes)) if len(set(sizes)) > 1 else f"{sizes[0]:,}"
