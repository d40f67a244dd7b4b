"""Chooses what a report draws of a run."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

import markupsafe
import numpy as np

from towers.report import charts
from towers.report.read import RunRecord, Series

# They stand in Keras's logs beside what is learned.
_SPEEDS = "examples_per_sec", "learning_rate"
# The parts of a step, one after the other.
_PARTS = ("input", "copy", "compute", "reduce", "python")


@dataclasses.dataclass(frozen=True)
class Figure:
    """A chart, as the element `<svg>`, with its caption."""

    caption: str
    svg: markupsafe.Markup


@dataclasses.dataclass(frozen=True)
class Measure:
    """What is measured of devices.

    Attributes:
        name: What people call it.
        sum_up: Makes one number of those of a run.
        form: How that is written.
        drawn: Whether there is a chart of it.
    """

    name: str
    sum_up: Callable[[np.ndarray], float]
    form: str = "{:,.0f}"
    drawn: bool = False


_MEASURES = {
    "memory_mb": Measure("memory, MB", np.mean, drawn=True),
    "peak_memory_mb": Measure("peak, MB", np.max),
    "limit_mb": Measure("limit, MB", np.max),
    "used_mb": Measure("nvidia-smi, MB", np.max),
    "rss_mb": Measure("resident, MB", np.mean, drawn=True),
    "peak_rss_mb": Measure("peak resident, MB", np.max),
    "utilization": Measure("utilisation", np.mean, "{:.0%}", drawn=True),
    # Of the samples of each interval.
    "utilization_median": Measure("median", np.median, "{:.0%}"),
    "utilization_p10": Measure("10th percentile", np.median, "{:.0%}"),
    "utilization_min": Measure("least", np.min, "{:.0%}"),
    "load": Measure("load", np.mean, "{:.1f}"),
    "temperature_c": Measure("temperature, °C", np.max, drawn=True),
    "power_w": Measure("power, W", np.mean, drawn=True),
}


def learning(run: RunRecord) -> Iterator[Figure]:
    """Draws the loss, the metrics and the learning rate.

    Over epochs, of which training's value is the mean; over steps while there is at
    most one epoch, and more than one step.
    """
    parts, x_label = _with_prefix(run, "epoch_"), "epoch"
    batches = _with_prefix(run, "batch_")
    if _points(parts) < 2 and _points(batches) > _points(parts):
        parts, x_label = batches, "step"
    names = {name: None for part in parts.values() for name in part}
    for name in sorted(names, key=lambda name: name != "loss"):
        curves = {kind: part[name] for kind, part in parts.items() if name in part}
        yield _lines(in_words(name), curves, x_label=x_label)
    rate = run.train.scalars.get("batch_learning_rate")
    if rate is not None:
        yield _lines("Learning rate", {"train": rate}, from_zero=True)


def results(run: RunRecord) -> dict[str, float]:
    """Returns the figures that the run ended with, or has come to, by name."""
    if run.summary:
        best = run.summary.get("best")
        is_last = not best or best["epoch"] == run.summary.get("epochs")
        which = "" if is_last else ", last epoch"
        found = {
            f"{kind} {name.removeprefix(prefix).replace('_', ' ')}{which}": value
            for prefix, kind in (("val_", "validation"), ("train_", "train"))
            for name, value in run.summary.items()
            if name.startswith(prefix)
        }
        if best:
            kind = "validation" if best["monitor"].startswith("val_") else "train"
            name = best["monitor"].removeprefix("val_").replace("_", " ")
            found[f"{kind} {name}, best epoch: {best['epoch']}"] = best["value"]
        return found
    parts = _with_prefix(run, "epoch_")
    kind = "validation" if parts["validation"] else "train"
    return {
        f"{kind} {name}, epoch {found.steps[-1]}": found.last
        for name, found in parts[kind].items()
    }


def towers(scalars: Mapping[str, Series]) -> dict[str, Series]:
    """Returns each tower's examples per second, by the tower's name."""
    return _towers("examples_per_sec/", scalars)


def speed(run: RunRecord) -> Iterator[Figure]:
    """Draws throughput, a step's time in its parts, waiting and staleness."""
    scalars = run.train.scalars
    rates = towers(scalars)
    if "examples_per_sec" in scalars:
        rates = {"all": scalars["examples_per_sec"], **rates}
    if rates:
        yield _lines("Examples per second", rates, from_zero=True)
    times = _below("step_ms/", scalars)
    if parts := {name: times[name] for name in _PARTS if name in times}:
        yield Figure(
            f"Time of a step, ms: {_mean_step(run, parts)}",
            markupsafe.Markup(charts.stacked("Time of a step", parts)),
        )
    if computing := _towers("step_ms/", scalars):
        yield _lines("Time that a tower computes, ms", computing, from_zero=True)
    if "waiting" in scalars:
        waiting = {"waiting": scalars["waiting"]}
        caption = "Share of the towers' time spent waiting for input"
        yield _lines(caption, waiting, from_zero=True, percent=True)
    if staleness := _below("towers/staleness_", scalars):
        yield _lines("Staleness of updates", staleness, from_zero=True)


def _mean_step(run, parts):
    """Says how long a step takes: as the text does, where there is one."""
    if known := run.summary.get("step_ms"):
        whole = sum(known.values())
        scope = " in the last part" if len(run.train.sessions) > 1 else ""
    else:
        # A value is the mean of the steps since the last one.
        whole = sum(
            np.average(part.values, weights=np.diff(part.steps, prepend=0))
            for part in parts.values()
        )
        scope = ""
    return f"{whole:,.1f} on average{scope}, without the first steps"


def devices(scalars: Mapping[str, Series]) -> Iterator[Figure]:
    """Draws what was measured of devices, a curve for each."""
    found = _devices(scalars)
    for tag, measure in _MEASURES.items():
        curves = {name: series[tag] for name, series in found.items() if tag in series}
        if curves and measure.drawn:
            caption = in_words(measure.name)
            if len(curves) == 1:
                caption += f": {next(iter(curves))}"
            percent = "%" in measure.form
            yield _lines(caption, curves, from_zero=True, percent=percent)


def device_table(scalars: Mapping[str, Series]) -> list[list[str]]:
    """Sums up what was measured of devices: a head, and a row for each."""
    found = _devices(scalars)
    tags = [tag for tag in _MEASURES if any(tag in each for each in found.values())]
    rows = [
        [name, *(_cell(series.get(tag), _MEASURES[tag]) for tag in tags)]
        for name, series in found.items()
    ]
    return rows and [["device", *(_MEASURES[tag].name for tag in tags)], *rows]


def in_words(tag: str) -> str:
    """Makes a caption of a name."""
    words = tag.replace("_", " ")
    return words[:1].upper() + words[1:]


def _points(parts):
    return max((len(series.steps) for series in parts["train"].values()), default=0)


def _with_prefix(run, prefix):
    """What was learned, by the name in Keras's logs, of both parts of the run."""
    return {
        kind: {
            name: series
            for name, series in _below(prefix, events.scalars).items()
            if name not in _SPEEDS
        }
        for kind, events in (("train", run.train), ("validation", run.validation))
    }


def _below(prefix, scalars):
    return {
        tag.removeprefix(prefix): series
        for tag, series in scalars.items()
        if tag.startswith(prefix)
    }


def _towers(prefix, scalars):
    found = _below(f"{prefix}tower_", scalars)
    return {f"tower {k}": found[k] for k in sorted(found, key=int)}


def _devices(scalars):
    """What was measured of each device, by its name."""
    found = {}
    for tag, series in sorted(scalars.items()):
        if match := re.fullmatch(r"device/(.+)/(\w+)", tag):
            found.setdefault(match[1], {})[match[2]] = series
    return found


def _cell(series, measure):
    return "" if series is None else measure.form.format(measure.sum_up(series.values))


def _lines(caption, curves, **options):
    return Figure(caption, markupsafe.Markup(charts.lines(caption, curves, **options)))
