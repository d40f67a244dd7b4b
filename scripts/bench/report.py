"""Tables and a plot of what a race measured."""

import contextlib
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from towers.doctor.gpus import seen
from towers.keras_adapter.versions import installed

from .contenders import parse
from .works import WORKS

COLUMNS = (
    "work",
    "contender",
    "ms a step",
    "images/s",
    "first step s",
    "peak host MB",
    "peak device MB",
    "its time / ours",
)
SCALING_COLUMNS = (
    "work",
    "contender",
    "towers",
    "images/s",
    "speed-up",
    "efficiency",
)


def machine() -> str:
    """Says in a line what this is measured on."""
    packages = "tensorflow", "keras", "jax", "torch"
    versions = [
        f"{name} {version}" for name in packages if (version := installed(name))
    ]
    parts = [f"{os.cpu_count()} CPUs ({_cpu()})", *_gpus(), *versions]
    return f"{time.strftime('%Y-%m-%d')}: {', '.join(parts)}"


def show(
    results: Iterable[dict],
    columns: Sequence[str],
    cells: Callable[[dict], Sequence[object]],
    machine: str,
    path: str | None,
) -> list[dict]:
    """Prints a table of results as they come, and writes them.

    Args:
        results: What is measured, one by one.
        columns: Of the table.
        cells: Makes a line of the table of a result.
        machine: What it is measured on.
        path: A file to append a line of JSON for each result to, or None.

    Returns:
        The results.
    """
    print(f"{machine}\n\n{head(columns)}", flush=True)
    found = []
    for result in results:
        found.append(result)
        print(row(cells(result)), flush=True)
        if path:
            with open(path, "a") as file:
                file.write(json.dumps(result | {"machine": machine}) + "\n")
    return found


def head(columns: Sequence[str]) -> str:
    """Returns the first two lines of a table in Markdown."""
    return f"{row(columns)}\n{'|'.join(['', *['---'] * len(columns), ''])}"


def row(cells: Iterable[object]) -> str:
    """Returns a line of a table in Markdown; a cell of None is a dash."""
    return f"| {' | '.join('-' if cell is None else str(cell) for cell in cells)} |"


def cells(result: dict) -> list[str | None]:
    """Returns the cells of a result, for `COLUMNS`."""

    def number(name, form):
        return None if result[name] is None else format(result[name], form)

    return [
        f"{result['work']}, {result['towers']} x {WORKS[result['work']].examples}",
        parse(result["contender"]).label,
        number("step_ms", ".2f"),
        number("examples_per_sec", ",.0f"),
        number("first_step_s", ".1f"),
        number("host_mb", ",.0f"),
        number("device_mb", ",.0f"),
        number("ratio", ".2f"),
    ]


def scaling(results: Sequence[dict]) -> list[dict]:
    """Computes how contenders gain by towers.

    Args:
        results: Results of races with several numbers of towers.

    Returns:
        For each work and contender, and each number of towers that it has run with, the
        `speedup` of its examples a second against the fewest towers, and its
        `efficiency`: that, over how many times as many towers there are.
    """
    groups = {}
    for result in results:
        groups.setdefault((result["work"], result["contender"]), []).append(result)
    rows = []
    for group in groups.values():
        group.sort(key=lambda result: result["towers"])
        first = group[0]
        for result in group:
            speedup = result["examples_per_sec"] / first["examples_per_sec"]
            efficiency = speedup * first["towers"] / result["towers"]
            kept = ("work", "contender", "towers", "examples_per_sec")
            rows.append(
                {name: result[name] for name in kept}
                | {"speedup": speedup, "efficiency": efficiency}
            )
    return rows


def scaling_table(rows: Sequence[dict]) -> Iterator[str]:
    """Yields the lines of the table of what `scaling` computed."""
    yield head(SCALING_COLUMNS)
    for each in rows:
        yield row(
            [
                each["work"],
                parse(each["contender"]).label,
                each["towers"],
                f"{each['examples_per_sec']:,.0f}",
                f"{each['speedup']:.2f}",
                f"{each['efficiency']:.0%}",
            ]
        )


def plot(rows: Sequence[dict], path: str) -> None:
    """Draws what `scaling` computed: speed-up over towers, a picture for each work."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(each["work"] for each in rows))
    figure, all_axes = pyplot.subplots(
        1, len(names), figsize=(6 * len(names), 5), squeeze=False
    )
    for name, axes in zip(names, all_axes[0], strict=True):
        lines = {}
        for each in rows:
            if each["work"] == name:
                lines.setdefault(each["contender"], []).append(each)
        for contender, line in lines.items():
            axes.plot(
                [each["towers"] for each in line],
                [each["speedup"] for each in line],
                marker="o",
                label=parse(contender).label,
            )
        towers = sorted({each["towers"] for line in lines.values() for each in line})
        ideal = [count / towers[0] for count in towers]
        axes.plot(towers, ideal, ":", color="gray", label="ideal")
        axes.set(title=name, xlabel="towers", xticks=towers, ylabel="speed-up")
        axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> list[str]:
    names = [card.name for card in seen.look().cards]
    return [f"{names.count(name)} {name}" for name in dict.fromkeys(names)]
