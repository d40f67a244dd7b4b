"""Gives each tower rows of its own in a trace that TensorFlow's profiler has written.

TensorFlow sorts what it records by thread, and each thread works for all towers.
"""

import re

from towers.keras_adapter.runtime import XSpace
from towers.program import whole_file

# Planes of such names are shown besides those of the devices.
_PLANE = "/device:CUSTOM:towers"
# The name of an operation, of its type behind the colon.
_OPERATION = re.compile(r"(?:preprocess/)?(tower_\d+)(?:_\d+)*/(.*):")
# Left behind where TensorFlow copied a function into the graph.
_CALLS = re.compile(r"(?<![^/])(?:(?:Stateful)?PartitionedCall|cond|then|_\d+)/")


def add_towers(path: str) -> None:
    """Adds rows for the towers: for each a row for each thread that worked for it.

    Args:
        path: An `xplane.pb` file.
    """
    with open(path, "rb") as file:
        space = XSpace.FromString(file.read())
    found = {}
    for plane in space.planes:
        names = {
            key: _OPERATION.match(each.name)
            for key, each in plane.event_metadata.items()
        }
        for line in plane.lines:
            for event in line.events:
                if (name := names[event.metadata_id]) is not None:
                    row = found.setdefault((name[1], line.id), (line, []))
                    row[1].append((_CALLS.sub("", name[2]), event))
    _add_plane(space, found)
    # Beside it, so that what the profiler has written outlives a full disk.
    with whole_file.opened(path, "wb") as file:
        file.write(space.SerializeToString())


def _add_plane(space, rows):
    plane = space.planes.add(name=_PLANE, id=1 + max(p.id for p in space.planes))
    keys = {}
    for number, ((tower, _), (line, events)) in enumerate(
        sorted(rows.items(), key=lambda item: item[0]), start=1
    ):
        row = plane.lines.add(
            id=number, name=tower, display_name=tower, timestamp_ns=line.timestamp_ns
        )
        for name, event in events:
            key = keys.setdefault(name, 1 + len(keys))
            row.events.add(
                metadata_id=key,
                offset_ps=event.offset_ps,
                duration_ps=event.duration_ps,
            )
    for name, key in keys.items():
        plane.event_metadata[key].id = key
        plane.event_metadata[key].name = name
