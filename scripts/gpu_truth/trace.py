"""Reads from a profile what a GPU did in some steps."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

_DEVICE = re.compile(r"/device:GPU:\d+$")
_COPY = re.compile(r"memcpy\s*(H2D|D2H|D2D|P2P)", re.IGNORECASE)
_BYTES = re.compile(r"size:(\d+)")


@dataclasses.dataclass(frozen=True)
class Event:
    """What a GPU did; times in microseconds."""

    name: str
    start: float
    end: float
    copy: str | None = None
    bytes: int = 0


def events(space: Any) -> dict[str, list[Event]]:
    """Returns what each GPU of an `XSpace` did, in order."""
    found = {}
    for plane in space.planes:
        if not _DEVICE.match(plane.name):
            continue
        names = {key: each.name for key, each in plane.event_metadata.items()}
        stats = {key: each.name for key, each in plane.stat_metadata.items()}
        # Other lines sum up the streams.
        streams = [line for line in plane.lines if line.name.startswith("Stream")]
        found[plane.name] = sorted(
            (
                _event(names[event.metadata_id], line, event, stats)
                for line in streams
                for event in line.events
            ),
            key=lambda event: event.start,
        )
    return found


def _event(name, line, event, stats):
    start = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
    copy = _COPY.search(name)
    details = " ".join(
        stat.str_value or stats.get(stat.ref_value, "")
        for stat in event.stats
        if stats[stat.metadata_id] == "memcpy_details"
    )
    size = _BYTES.search(details)
    return Event(
        name,
        start,
        start + event.duration_ps / 1e6,
        copy and copy[1].upper(),
        int(size[1]) if size else 0,
    )


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns spans of time without those that overlap."""
    found = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def total(spans: Sequence[tuple[float, float]]) -> float:
    """Returns how long spans last that do not overlap."""
    return sum(end - start for start, end in spans)


def read(found: Sequence[Event], steps: int) -> dict:
    """Sums up what one GPU did: per step, times in milliseconds."""
    kernels = [event for event in found if event.copy is None]
    computing = merged((event.start, event.end) for event in kernels)
    busy = merged((event.start, event.end) for event in found)
    gaps = sorted(
        (
            (after[0] - before[1], before[1], after[0])
            for before, after in pairwise(busy)
        ),
        reverse=True,
    )
    copies = {}
    for kind in ("H2D", "D2H", "D2D", "P2P"):
        of_kind = [event for event in found if event.copy == kind]
        if of_kind:
            spans = merged((event.start, event.end) for event in of_kind)
            alone = total(merged([*computing, *spans])) - total(computing)
            copies[kind] = {
                "count": len(of_kind) / steps,
                "mb": sum(event.bytes for event in of_kind) / steps / 1e6,
                "ms": total(spans) / steps / 1e3,
                "ms_while_computing": (total(spans) - alone) / steps / 1e3,
            }
    by_name = {}
    for event in kernels:
        count, us = by_name.get(event.name, (0, 0.0))
        by_name[event.name] = count + 1, us + event.end - event.start
    longest = sorted(by_name.items(), key=lambda item: -item[1][1])[:15]
    return {
        "launches": len(kernels) / steps,
        "span_ms": (busy[-1][1] - busy[0][0]) / steps / 1e3,
        "computing_ms": total(computing) / steps / 1e3,
        "idle_ms": sum(gap for gap, *_ in gaps) / steps / 1e3,
        "copies": copies,
        "largest_gaps": [
            {
                "ms": gap / 1e3,
                "after": next(e.name for e in found if e.end == before)[:90],
                "before": next(e.name for e in found if e.start == after)[:90],
            }
            for gap, before, after in gaps[:5]
        ],
        "longest_kernels": [
            {"name": name[:90], "count": count / steps, "ms": us / steps / 1e3}
            for name, (count, us) in longest
        ],
    }
