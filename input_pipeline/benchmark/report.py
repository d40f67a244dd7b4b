"""Reports results of `towers.input_pipeline.benchmark`: tables, advice, a picture."""

from collections.abc import Iterable, Sequence
from typing import Any

from towers.input_pipeline.benchmark import measure
from towers.input_pipeline.pipeline.advice import stage_advice
from towers.machine import limits
from towers.program import whole_file, words

_ADDED = "adds µs per example"
_WORTH = "speed before / after"


def text(results: dict[str, Any]) -> str:
    """Returns the results in tables, and a sentence that sums them up."""
    added = measure.added_seconds(results["stages"])
    rows = [
        (name, f"{rate:,.0f}", f"{1e6 * added[name]:,.1f}")
        for name, rate in results["stages"].items()
    ]
    last, rate = [*results["stages"].items()][-1]
    rows.append(("all", f"{rate:,.0f}", f"{1e6 / rate:,.1f}"))
    shape = results["image_shape"]
    what = f"images of {'x'.join(map(str, shape))}"
    if len(shape) == 1:
        what = f"rows of {shape[0]} numbers"
    versions = results["versions"]
    data = ", ".join(filter(None, (results["dataset"], results["kept"])))
    lines = [
        f"{data}: batches of {results['batch_size']} {what}; TensorFlow "
        f"{versions['tensorflow']}, Python {versions['python']}.",
        f"{rate:,.0f} examples/sec ({1e6 / rate:,.1f} µs per example) behind {last}, "
        f"with {results['cpu_cores']:.1f} of {limits.cpu_count()} cores busy; the "
        "first batch after "
        f"{results['first_batch_s']:.2f} s; at most {results['peak_rss_mb']:,.0f} MB.",
        "",
        *table(("stage", "examples/sec", _ADDED), rows),
        "",
        *table(
            (
                f"{words.count(results['towers'], 'tower')}: ms a batch",
                "time they wait",
            ),
            [(step, f"{share:.1%}") for step, share in results["waiting"].items()],
        ),
        "",
    ]
    if "ablation" in results:
        rows = [(name, f"{times:.2f}") for name, times in results["ablation"].items()]
        lines += [*table(("change", _WORTH), rows), ""]
    return "\n".join([*lines, bottleneck(added, "kept in" in results["kept"])])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligns a table in Markdown: names to the left, numbers to the right."""
    rows = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        " | ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    rule = " | ".join(
        "-" * (width - 1) + ":" if column else "-" * width
        for column, width in enumerate(widths)
    )
    return [f"| {line} |" for line in (lines[0], rule, *lines[1:])]


def bottleneck(added: dict[str, float], kept: bool = False) -> str:
    """Names the stage that adds most to the time of an example, with advice."""
    name = max(added, key=added.get)
    share = added[name] / sum(added.values())
    return (
        f"The bottleneck is {name}, {share:.0%} of the time of an example; for more "
        f"speed, {stage_advice(kept, flags=True)[name]}."
    )


def plot(results: dict[str, Any], path: str) -> None:
    """Draws the stages, and the ablation if there is one, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    added = measure.added_seconds(results["stages"])
    added = {name: 1e6 * seconds for name, seconds in added.items()}
    charts = [("stages", _ADDED, added)]
    if "ablation" in results:
        charts.append(("changes", _WORTH, results["ablation"]))
    figure, all_axes = pyplot.subplots(
        1, len(charts), figsize=(7 * len(charts), 4), squeeze=False
    )
    for (title, label, bars), axes in zip(charts, all_axes[0], strict=True):
        drawn = axes.barh(list(bars), list(bars.values()))
        axes.bar_label(drawn, fmt="{:,.2f}", padding=3)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set(title=title, xlabel=label)
    figure.suptitle(results["dataset"])
    figure.tight_layout()
    whole_file.save_figure(path, figure)
