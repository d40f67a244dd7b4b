"""Draws curves, as SVG that stands in an HTML page."""

import html
import io
import re
from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, PercentFormatter

from towers.report.read import Series

# Blue and orange first: they differ in grey, and to most eyes.
_COLORS = ("#1f5fa8", "#e07b00", "#2a8c57", "#a8326f", "#6b5bb5", "#8a6d3b", "#4a9fb5")
# Curves may be the same, as two towers' often are. Each is thinner than those below it,
# and only the lowest is solid, so that all can be seen.
_DASHES = ((5, 2.5), (2, 2), (8, 2, 2, 2), (4, 4), (1, 2), (8, 4))
_WIDTHS = (1.4, 3.4)
_MOST_POINTS = 500
_STYLE = {
    # Text stays text: it is small, can be searched, and takes the page's font.
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.prop_cycle": matplotlib.cycler(color=_COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8f98",
    "axes.labelcolor": "#555b66",
    "xtick.color": "#8a8f98",
    "ytick.color": "#8a8f98",
    "xtick.labelcolor": "#555b66",
    "ytick.labelcolor": "#555b66",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.ymargin": 0.08,
    "grid.color": "#e6e8ec",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "lines.linewidth": 1.4,
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def lines(
    name: str,
    curves: Mapping[str, Series],
    *,
    x_label: str = "step",
    from_zero: bool = False,
    percent: bool = False,
) -> str:
    """Draws curves over steps.

    Args:
        name: What is drawn; another one for each chart of a page.
        curves: By what the legend calls them.
        x_label: What steps are.
        from_zero: Whether the axis begins at 0.
        percent: Whether values are shares, 0..1.

    Returns:
        The element `<svg>`.
    """

    def draw(axes):
        widths = np.linspace(*_WIDTHS, max(len(curves), 3))[: len(curves)][::-1]
        for k, (label, series) in enumerate(curves.items()):
            steps, values = _thinned(series.steps, series.values)
            axes.plot(
                steps,
                values,
                label=label,
                gid=_slug(label),
                linewidth=widths[k],
                dashes=_DASHES[(k - 1) % len(_DASHES)] if k else (),
                marker="o" if len(steps) <= 40 else None,
                markersize=2 + 1.5 * widths[k],
            )
        every = {step for series in curves.values() for step in series.steps}
        if len(every) == 1:
            # Matplotlib would show a thousandth of a step on both sides.
            (step,) = every
            axes.set_xlim(step - 1, step + 1)
            axes.set_xticks([step])
        if from_zero:
            axes.update_datalim([(steps[0], 0)])
            axes.autoscale_view()
            axes.set_ylim(bottom=0)
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1))

    return _svg(name, draw, x_label, legend=len(curves) > 1)


def stacked(name: str, parts: Mapping[str, Series]) -> str:
    """Draws parts of a whole, on top of one another.

    Args:
        name: As for `lines`.
        parts: By what the legend calls them, measured at the same steps; each value is
            that of the steps since the last.

    Returns:
        The element `<svg>`.
    """
    common = sorted(set.intersection(*(set(part.steps) for part in parts.values())))
    values = [part.values[np.isin(part.steps, common)] for part in parts.values()]
    steps, values = _thinned(np.array(common), np.array(values))

    def draw(axes):
        # The first value, too, is of the steps before it.
        edges = np.concatenate([[0], steps])
        heights = np.concatenate([values[:, :1], values], axis=1)
        options = {"labels": parts, "step": "pre", "linewidth": 0, "alpha": 0.85}
        for area, label in zip(
            axes.stackplot(edges, heights, **options), parts, strict=True
        ):
            area.set_gid(_slug(label))
        axes.margins(x=0)

    return _svg(name, draw, "step", legend=True)


def _thinned(steps, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Puts means in place of more points than can be seen; values are [..., N]."""
    values = np.where(np.isfinite(values), values, np.nan)
    if len(steps) <= _MOST_POINTS:
        return steps, values
    parts = np.array_split(np.arange(len(steps)), _MOST_POINTS)
    means = [values[..., part].mean(axis=-1) for part in parts]
    return steps[[part[-1] for part in parts]], np.stack(means, axis=-1)


def _svg(name, draw, x_label, legend):
    slug = _slug(name)
    # The salt makes the same run the same page.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": slug}):
        figure = Figure(figsize=(5.4, 2.5), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_xlabel(x_label)
        if not isinstance(axes.xaxis.get_major_locator(), FixedLocator):
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        if legend:
            # Above the curves, where it hides none.
            where = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 5}
            axes.legend(**where, borderaxespad=0.2)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Ids have to be unique in the page that the charts share.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{slug}-", svg)
    label = html.escape(name)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _slug(name):
    return re.sub(r"\W+", "-", name)
