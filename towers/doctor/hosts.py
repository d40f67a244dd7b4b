"""Meets the other hosts as training does, and measures what lies between them."""

import json
import os
import socket
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from towers.cluster import addresses, environment, rendezvous
from towers.cluster.communicator import Communicator
from towers.cluster.links import Links
from towers.doctor import cluster, reach
from towers.doctor.finding import Check, Finding, note, ok, wrong
from towers.hosts.group import HostsDifferError, Membership, ProcessPlace
from towers.program import words

# Shorter than a check may take; whoever starts hosts by hand needs some time.
_JOIN_S = 50.0
_TIMES, _LARGE_BYTES, _LARGE_TIMES = 100, 100 * 10**6, 3
# What is worth a word: ordinary networks do better.
_FAR_MS, _SLOW_MB_S, _CLOCKS_S = 5.0, 100.0, 1.0


def place(
    hosts: str, host_rank: int | None, environ: Mapping[str, str] = os.environ
) -> ProcessPlace:
    """Returns the place that flags, or the environment, give this process.

    Args:
        hosts: Addresses with commas between, or "auto" for what a launcher says.
        host_rank: Which of the addresses is this host's; `None` to find out.
        environ: The environment, whose TOWERS_TOKEN counts.

    Raises:
        ValueError: They give none.
    """
    if hosts == "auto":
        found = environment.find(environ)
        if found is None:
            raise ValueError(
                "Received --hosts=auto in a process that no launcher has started with "
                "others; expected addresses, such as --hosts=node0:8476,node1:8476."
            )
        if found.mpi is not None:
            raise ValueError(
                f"Received --hosts=auto and {found.mpi}={found.rank}; expected hosts "
                "that MPI has not started, as it has its own checks and no addresses."
            )
        return found
    listed = tuple(hosts.split(","))
    bad = [each for each in listed if not addresses.is_address(each)]
    if bad or len({*listed}) < 2 or len({*listed}) < len(listed):
        raise ValueError(
            f"Received --hosts={hosts}; expected an address with a port for each of "
            "two hosts or more, such as --hosts=node0:8476,node1:8476."
        )
    if host_rank is None:
        host_rank = _own(listed)
    if not 0 <= host_rank < len(listed):
        raise ValueError(
            f"Received --host_rank={host_rank} for {len(listed)} hosts; expected 0 to "
            f"{len(listed) - 1}."
        )
    token = environ.get("TOWERS_TOKEN")
    return ProcessPlace(
        *(host_rank, len(listed), listed[0], token), _JOIN_S, addresses=listed
    )


def _own(listed):
    """Which of the addresses is this machine's."""
    mine = []
    for k, each in enumerate(listed):
        try:
            address = addresses.resolved(addresses.split(each)[0])
            addresses.held_port(address).close()
        except OSError:
            continue
        mine.append(k)
    if len(mine) == 1:
        return mine[0]
    which = "several" if mine else "none"
    raise ValueError(
        f"Received --hosts={','.join(listed)}, but {which} of these addresses are on "
        "this machine; expected --host_rank as well, the place of this host in that "
        "list, from 0."
    )


def gather(place: ProcessPlace, told: Any) -> dict[str, Any]:
    """Returns what each host tells, by its name; all hosts call it at the same time.

    Args:
        place: The place of this process among them.
        told: What this host tells, as JSON may have it.

    Raises:
        OSError: They do not meet, or one fails.
        ValueError: They do not fit together.
    """
    membership = rendezvous.meet(place)
    communicator = Communicator(Links(membership))
    every = communicator.all_gather(json.dumps(told).encode(), "what hosts tell")
    read = [json.loads(bytes(each)) for each in every]
    # Nobody leaves before all have read.
    communicator.all_reduce(np.zeros(1), "the end")
    communicator.close()
    return dict(zip(membership.names, read, strict=True))


class BetweenHosts:
    """What lies between this host and others, which do all this at the same time."""

    def __init__(self, place: ProcessPlace):
        """Takes the place of this process among them."""
        self._place = place
        self._membership: Membership | None = None
        self._communicator: Communicator | None = None

    def checks(self) -> Iterator[tuple[str, Check]]:
        """The checks and their names, in the order in which all hosts make them."""
        yield "names", self.names
        yield "hosts", self.meet
        yield "reach", self.reach
        yield "clocks", self.clocks
        yield "latency", self.latency
        yield "bandwidth", self.bandwidth

    def names(self) -> Finding:
        """Checks whether the hosts' names are known here."""
        listed = [*(self._place.addresses or [self._place.coordinator])]
        if doubts := cluster.unknown(listed, 5.0):
            return wrong("; ".join(doubts), addresses=listed)
        shown = {each: addresses.resolved(addresses.split(each)[0]) for each in listed}
        text = ", ".join(f"{name} is {address}" for name, address in shown.items())
        return ok(f"this is host {self._place.rank} on {socket.gethostname()}; {text}")

    def meet(self) -> Finding:
        """Meets the hosts, which compare their versions and tokens, and connects."""
        try:
            membership = rendezvous.meet(self._place)
            self._communicator = Communicator(Links(membership))
        except (OSError, ValueError) as error:
            return wrong(str(error))
        self._membership = membership
        listed = dict(zip(membership.names, membership.addresses, strict=True))
        text = ", ".join(f"{name} at {each}" for name, each in listed.items())
        text = f"{words.count(membership.count, 'host')} of one version meet: {text}"
        if self._place.token is None:
            return note(
                f"{text}; without a token, anybody may: set the same TOWERS_TOKEN on "
                "all",
                hosts=listed,
            )
        return ok(text, hosts=listed)

    def reach(self) -> Finding:
        """Says who may reach a port of this host, besides the other hosts."""
        if self._membership is None:
            return note("not looked at, as the hosts have not met")
        hosts = [addresses.split(each)[0] for each in self._membership.addresses]
        return reach.check(sorted({*map(addresses.resolved, hosts)}))

    def clocks(self) -> Finding:
        """Compares the hosts' clocks."""

        def compare(comm):
            comm.all_reduce(np.zeros(2), "clocks")
            told = comm.all_gather(json.dumps(time.time()).encode(), "clocks")
            times = [json.loads(bytes(each)) for each in told]
            apart = max(times) - min(times)
            names = self._membership.names
            if apart > _CLOCKS_S:
                return note(
                    f"that of {names[int(np.argmax(times))]} is {apart:,.1f} s ahead "
                    f"of that of {names[int(np.argmin(times))]}, so their logs do not "
                    "fit together; set both by NTP",
                    seconds=apart,
                )
            return ok(f"they differ by {1000 * apart:,.1f} ms at most", seconds=apart)

        return self._connected(compare)

    def latency(self) -> Finding:
        """Measures how long it takes to add 16 bytes."""

        def measure(comm):
            small = np.zeros(4, np.float32)
            found = [_seconds(comm, small, "latency") for _ in range(_TIMES)]
            ms = 1000 * statistics.median(found)
            text = f"adding 16 bytes takes {ms:,.2f} ms"
            advice = (
                f"more than {_FAR_MS:g}: each step takes so much longer at least; use "
                "hosts that are nearer to one another"
            )
            return _judged(text, ms > _FAR_MS, advice, ms=ms)

        return self._connected(measure)

    def bandwidth(self) -> Finding:
        """Measures how long it takes to add 100 MB."""

        def measure(comm):
            large = np.ones(_LARGE_BYTES // 4, np.float32)
            count = self._place.count
            found = [_seconds(comm, large, "bandwidth") for _ in range(_LARGE_TIMES)]
            total = comm.all_reduce(large, "bandwidth")
            if not (total == count).all():
                return wrong("the sum of 100 MB is not that of all hosts")
            rate = _LARGE_BYTES / min(found) / 10**6
            text = f"adding 100 MB takes {1000 * min(found):,.0f} ms: {rate:,.0f} MB/s"
            advice = (
                f"less than {_SLOW_MB_S:g}: gradients will take long; name a faster "
                "network by --interface or TOWERS_INTERFACE"
            )
            return _judged(text, rate < _SLOW_MB_S, advice, mb_per_s=rate)

        return self._connected(measure)

    def _connected(self, measure):
        if self._communicator is None:
            return note("not measured, as the hosts have not met")
        try:
            return measure(self._communicator)
        except (OSError, HostsDifferError) as error:
            return wrong(str(error))


def _judged(text, too_bad, advice, **figures):
    if too_bad:
        return note(f"{text}, {advice}", **figures)
    return ok(text, **figures)


def _seconds(comm, array, purpose):
    begun_s = time.perf_counter()
    comm.all_reduce(array, purpose)
    return time.perf_counter() - begun_s
