"""What hosts compare before they compute: it has to be the same on all of them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from towers.collectives.world import World
from towers.hosts.membership import HostsDifferError
from towers.program import words

_LONGEST = 60


def check(hosts: World, value: Mapping[str, Any]) -> None:
    """Refuses hosts that were given different values.

    Args:
        hosts: All call it together.
        value: What this host was given, by names that make a phrase: of {"fit":
            {"epochs": 2}} the "epochs of fit". They end in what JSON can hold.

    Raises:
        HostsDifferError: On all hosts alike.
    """
    text = json.dumps(value, sort_keys=True).encode()
    # A model may be large, and nearly always all have the same.
    if len({*hosts.exchange(hashlib.sha256(text).hexdigest())}) > 1:
        raise HostsDifferError(difference(hosts.names, hosts.exchange(dict(value))))


def difference(names: Sequence[str], values: Sequence[Mapping[str, Any]]) -> str:
    """Says in a sentence what some hosts have that others have not.

    Args:
        names: What to call each host.
        values: What each was given; see `check`.
    """
    given = [dict(_leaves(value)) for value in values]
    keys = dict.fromkeys(key for each in given for key in each)
    different = [key for key in keys if len({each.get(key) for each in given}) > 1]
    by_value: dict[str, list[str]] = {}
    for name, each in zip(names, given, strict=True):
        said = each.get(different[0], "none")
        by_value.setdefault(_short(said), []).append(name)
    found = words.all_of(
        f"{said} on {words.all_of(which)}" for said, which in by_value.items()
    )
    more = len(different) - 1
    others = f", and in {more} more" if more else ""
    return (
        f"Hosts differ in {' of '.join(reversed(different[0]))}: {found}{others}; "
        "hosts that train together have to run the same program with the same "
        "arguments and the same data."
    )


def _leaves(value, path=()):
    """Yields paths to the ends of a nest of mappings, and JSON of what is there."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(each, (*path, str(key)))
    else:
        text = json.dumps(value, sort_keys=True)
        yield path, "none" if text == "null" else text


def _short(text):
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
