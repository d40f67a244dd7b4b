"""What hosts tell of themselves, and what has to be the same on all."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import os
import platform
import socket
from collections.abc import Coroutine, Sequence
from typing import Any

from towers.cluster import addresses
from towers.hosts.group import Membership, ProcessPlace
from towers.keras_adapter.versions import installed
from towers.program import voice, words

# Most time for what takes milliseconds.
ANSWER_S = 10.0
# Until it is said who is waited for.
QUIET_S = 10.0
_PACKAGES = {"tensorflow": "tensorflow", "keras": "keras", "towers": "keras-towers"}


class RendezvousError(OSError):
    """The hosts cannot train together: they differ, or one cannot listen or connect."""


class HostsMissingError(RendezvousError):
    """Other hosts did not come, have gone, or have begun another generation."""


@dataclasses.dataclass(frozen=True)
class HostDescription:
    """What a host tells of itself.

    Attributes:
        rank: Its number.
        count: How many hosts it expects.
        generation: How often it has started anew.
        node: The name of its machine.
        pid: Its process.
        address: "host:port" where it listens for the others.
        versions: Of Python, TensorFlow, Keras and Towers.
    """

    rank: int
    count: int
    generation: int
    node: str
    pid: int
    address: str
    versions: dict[str, str]

    @classmethod
    def here(cls, place: ProcessPlace, address: str) -> "HostDescription":
        """Returns what this process tells."""
        return cls(
            *(place.rank, place.count, place.generation),
            *(socket.gethostname(), os.getpid(), address, versions()),
        )

    @classmethod
    def heard(cls, message: dict[str, Any]) -> "HostDescription":
        """Returns what a process has told of itself, of which all is checked.

        Raises:
            ValueError: No host tells this.
        """
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        kinds["versions"] = dict
        if message.keys() != kinds.keys() or not all(
            type(message[name]) is kind for name, kind in kinds.items()
        ):
            raise ValueError("it tells something else of itself than a host does")
        of_host = message["versions"]
        if of_host.keys() != versions().keys() or not all(
            isinstance(each, str) for each in of_host.values()
        ):
            raise ValueError("it tells no versions")
        if min(message["rank"], message["generation"]) < 0 or message["count"] < 1:
            raise ValueError("its numbers are of no host")
        if not addresses.is_address(message["address"]):
            raise ValueError("it listens at no address")
        return cls(**message)

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        return f"host {self.rank} ({self.node}, pid {self.pid})"


def own_address(
    place: ProcessPlace, reached_by: str, held: contextlib.ExitStack
) -> str:
    """Returns where this host shall listen for the others.

    Args:
        place: The host's.
        reached_by: The IP address by which this host reaches the first one.
        held: Keeps the port free until it is closed.
    """
    if place.addresses is not None:
        return place.addresses[place.rank]
    host = reached_by
    if place.interface is not None:
        host = addresses.of_interface(place.interface)
    port = held.enter_context(addresses.held_port(host)).getsockname()[1]
    return addresses.joined(host, port)


def warn_of_token(host: str, warned: set[str]) -> None:
    """Says that a process has another token, once for each host; notes it in a set."""
    if host not in warned:
        warned.add(host)
        voice.warn(
            f"A process on {host} has another token, and was turned away; give all "
            "hosts the same TOWERS_TOKEN."
        )


def warn_of_stranger(host: str, warned: set[str]) -> None:
    """Says that a process says what no host says, once for each machine."""
    if f"stranger on {host}" not in warned:
        warned.add(f"stranger on {host}")
        voice.warn(
            f"A process on {host} sent a message that no host of Towers sends; its "
            "connection was closed."
        )


def difference(hosts: Sequence[HostDescription]) -> str | None:
    """Says in a sentence what is not the same on all hosts, but has to be."""
    by_count = _by(hosts, lambda host: host.count)
    if len(by_count) > 1:
        found = words.all_of(f"{count} on {names}" for count, names in by_count.items())
        return f"Hosts expect different numbers of hosts: {found}; give all the same."
    ranks = collections.Counter(host.rank for host in hosts)
    if twice := [rank for rank, times in ranks.items() if times > 1]:
        names = words.all_of(host.name for host in hosts if host.rank == twice[0])
        return (
            f"{words.count(ranks[twice[0]], 'process', 'processes')} are host "
            f"{twice[0]}: {names}; give each host a number of its own, from 0 to "
            f"{hosts[0].count - 1}."
        )
    for package in _PACKAGES:
        by_version = _by(hosts, lambda host, of=package: host.versions[of])
        if len(by_version) > 1:
            found = words.all_of(
                f"{each} on {names}" for each, names in by_version.items()
            )
            return (
                f"Hosts have different versions of {package}: {found}; install the "
                "same one on all."
            )
    return None


def _by(hosts, value) -> dict[Any, str]:
    """The names of hosts by a value of each."""
    found: dict[Any, list[str]] = {}
    for host in sorted(hosts, key=lambda host: host.rank):
        found.setdefault(value(host), []).append(host.name)
    return {each: words.all_of(names) for each, names in found.items()}


def membership(place: ProcessPlace, listed: dict[str, list[str]]) -> Membership:
    """Returns what a host knows, by what the first host has told all."""
    listed = {name: tuple(listed[name]) for name in ("addresses", "names")}
    return Membership(place.rank, **listed, generation=place.generation)


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of Python and of what has to be the same on all hosts."""
    found = {"python": platform.python_version()}
    for name, package in _PACKAGES.items():
        found[name] = installed(package) or "unknown"
    return found


def numbered(ranks: Sequence[int]) -> str:
    """Names hosts by their numbers, such as "hosts 1 and 3"."""
    noun = "host" if len(ranks) == 1 else "hosts"
    return f"{noun} {words.all_of(map(str, ranks))}"


async def within(seconds: float, *actions: Coroutine) -> None:
    """Does several things at once, as far as they can be done in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*actions, return_exceptions=True)
