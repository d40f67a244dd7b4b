"""Says in one HTML page how a run went."""

import base64
import dataclasses
import datetime
import os
import re
import struct
import textwrap
from collections.abc import Iterator

import jinja2
import markupsafe
import numpy as np
from tensorboard import plugin_util

from towers.program import object_store, words
from towers.report import figures
from towers.report.read import Events, RunRecord

_TEMPLATE = os.path.join(os.path.dirname(__file__), "page.html")
# Narrower pictures are magnified.
_SMALL = 96


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture, with what stands below it.

    Attributes:
        url: The picture itself.
        width: In pixels of the page.
        small: Whether it is magnified.
        text: What stands below it.
        alt: What it shows, for those who do not see it.
    """

    url: str
    width: int
    small: bool
    text: str
    alt: str


def render(run: RunRecord) -> str:
    """Writes the page of a run: HTML that refers to nothing outside of itself."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    with open(_TEMPLATE, encoding="utf-8") as file:
        template = environment.from_string(file.read())
    scalars = run.train.scalars
    return template.render(
        title=_title(run),
        model_dir=_place(run),
        status=_status(run),
        made=f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        cards=list(_cards(run)),
        verdict=_verdict(run.summary),
        notes=list(_notes(run)),
        # Each with its table.
        sections=[
            ("Learning", list(figures.learning(run)), []),
            ("Speed", list(figures.speed(run)), []),
            ("Devices", list(figures.devices(scalars)), figures.device_table(scalars)),
        ],
        pictures=list(_groups(run.train, run.summary.get("best"))),
        texts={tag: _text(run.train, tag) for tag in ("model", "devices", "versions")},
        flags=run.flags,
    )


def _title(run):
    pairs = (line.partition("=") for line in run.flags.splitlines())
    flags = {name.removeprefix("--"): value for name, _, value in pairs}
    if {"model", "dataset"} <= flags.keys():
        return f"{flags['model']} on {flags['dataset']}"
    return os.path.basename(_place(run))


def _place(run):
    is_address = object_store.scheme(run.model_dir)
    return run.model_dir if is_address else os.path.abspath(run.model_dir)


def _status(run):
    if run.running:
        return f"Still running: step {run.step:,}."
    if run.summary:
        return (
            f"Finished: {words.count(run.summary['epochs'], 'epoch')}, "
            f"{words.count(run.step, 'step')}."
        )
    return f"Not finished, and not running: last heard of at step {run.step:,}."


def _cards(run: RunRecord) -> Iterator[tuple[str, str]]:
    """The headline figures, each before its name."""
    for name, value in sorted(figures.results(run).items()):
        yield f"{value:.4f}", name
    scalars = run.train.scalars
    rate = run.summary.get("examples_per_sec")
    if rate is None and "examples_per_sec" in scalars:
        rate = scalars["examples_per_sec"].last
    if rate is not None:
        yield f"{rate:,.1f}", "examples/sec"
    if tokens := run.summary.get("tokens_per_sec"):
        yield f"{tokens:,.0f}", "tokens/sec"
    waiting, part = run.summary.get("waiting"), "last part"
    if waiting is None and "waiting" in scalars:
        waiting, part = np.mean(scalars["waiting"].values), "all parts"
    if waiting is not None:
        scope = f", {part}" if len(run.train.sessions) > 1 else ""
        yield f"{waiting:.0%}", f"of the time waiting{scope}"
    if towers := run.summary.get("towers") or figures.towers(scalars):
        yield str(len(towers)), "tower" if len(towers) == 1 else "towers"
    if "parameters" in scalars:
        yield f"{scalars['parameters'].last:,.0f}", "parameters"
    if sessions := run.train.sessions:
        seconds = sum(end - begin for begin, end in sessions)
        yield _duration(seconds), _in_parts(len(sessions))


def _verdict(summary):
    """What the last part of the run has come to, as its figures are of that, too."""
    if not summary.get("verdict"):
        return ""
    measured = textwrap.indent(summary.get("measured") or "", "    ")
    return _markdown(f"{summary['verdict']}\n\n{measured}")


def _in_parts(sessions):
    return "training" if sessions == 1 else f"training, in {sessions} parts"


def _duration(seconds):
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _notes(run: RunRecord) -> Iterator[str]:
    """What a reader of the figures has to know."""
    if run.ended_at is not None:
        yield (
            f"The run ended at step {run.ended_at:,} and has gone on since: the "
            "figures are those of its last epoch, not of summary.json."
        )
    elif not run.summary:
        yield "There is no summary.json yet: the figures are those of the last epoch."
    if not run.validation.scalars:
        yield "Nothing was validated meanwhile: the curves are of training only."
    if bad := run.summary.get("bad_records"):
        yield f"{bad:,} bad records were passed over: bad_records.json lists them."
    for kind, events in (("training", run.train), ("validation", run.validation)):
        loss = events.scalars.get("batch_loss")
        if loss is not None and not np.isfinite(loss.values).all():
            step = loss.steps[np.argmin(np.isfinite(loss.values))]
            yield f"The loss of {kind} is not finite at step {step:,}."


def _groups(
    events: Events, best: dict[str, object] | None
) -> Iterator[tuple[str, list[Picture], markupsafe.Markup]]:
    """The pictures of each tag, with its caption, and a table that belongs to them."""
    for tag in events.images:
        name = figures.in_words(tag)
        if best and tag in ("misclassified", "confusion"):
            name += ", by the best model"
        yield name, _pictures(events, tag), _text(events, f"{tag}_counts")


def _pictures(events, tag):
    """A tag's pictures, with what the list in Markdown says of each.

    Now one picture has all, with its captions drawn; earlier runs have several without.
    """
    lists = (events.texts.get(f"{tag}_{of}", "") for of in ("as", "labels"))
    lines = re.findall(r"^\d+\. (.*)$", "\n".join(lists), re.MULTILINE)
    pngs = events.images[tag]
    name = figures.in_words(tag)
    if len(lines) == len(pngs):
        texts, descriptions = lines, lines
    else:
        texts, descriptions = [""] * len(pngs), ["; ".join(lines)] * len(pngs)
    pictures = []
    for png, text, description in zip(pngs, texts, descriptions, strict=True):
        # Where each PNG file has it.
        (width,) = struct.unpack(">I", png[16:20])
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        small = width < _SMALL
        alt = ": ".join(filter(None, [name, description]))
        pictures.append(Picture(url, max(width, _SMALL), small, text, alt))
    return pictures


def _text(events, tag):
    return _markdown(events.texts.get(tag, ""))


def _markdown(text):
    """A text as TensorBoard shows it: Markdown, with no HTML of its own."""
    return markupsafe.Markup(plugin_util.markdown_to_safe_html(text))
