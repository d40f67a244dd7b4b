"""Meets the other hosts as training does, and measures what lies between them."""

import dataclasses
import json
import os
import socket
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from towers.cluster import addresses, environment, rendezvous
from towers.doctor import cluster, process, reach
from towers.doctor.finding import Check, Finding, note, ok, wrong
from towers.hosts.group import Membership, ProcessPlace
from towers.program import words

# Shorter than a check may take; whoever starts hosts by hand needs some time.
_JOIN_S = 50.0
_CONNECT_S = 55.0
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
        OSError: They do not meet, or do not connect.
        ValueError: They do not fit together.
    """
    membership = rendezvous.meet(place)
    found = _connect(membership, told, measures=False)
    if "told" not in found:
        raise ConnectionError(found["error"])
    return dict(zip(membership.names, found["told"], strict=True))


def _connect(membership, told, measures):
    """Returns what `network.py` has found, by name."""
    options = dataclasses.asdict(membership)
    options = {name: options[name] for name in ("rank", "addresses", "names")}
    options = json.dumps({**options, "told": told, "measures": measures})
    command = [sys.executable, "-m", "towers.doctor.network", options]
    # It would take the memory of GPUs, which others may use.
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "1"}
    out, log, code = process.run(command, _CONNECT_S, environ)
    # Of a process that was killed, the last line may be a part of one.
    whole = out.split("\n")[:-1]
    found = dict(json.loads(line) for line in whole if line.startswith('["'))
    if not found:
        ports = words.all_of(membership.addresses)
        late = f"not all hosts connect within {_CONNECT_S:g} s; let all reach {ports}"
        *_, last = log.strip().splitlines() or [""]
        found["error"] = late if code is None else f"no connection ({code}): {last}"
    return found


class BetweenHosts:
    """What lies between this host and others, which do all this at the same time."""

    def __init__(self, place: ProcessPlace):
        """Takes the place of this process among them."""
        self._place = place
        self._membership: Membership | None = None
        self._found: dict[str, Any] = {}

    def checks(self) -> Iterator[tuple[str, Check]]:
        """The checks and their names, in the order in which all hosts make them."""
        yield "names", self.names
        yield "hosts", self.meet
        yield "reach", self.reach
        yield "connection", self.connect
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
        """Meets the hosts, which compare their versions and tokens."""
        try:
            membership = rendezvous.meet(self._place)
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

    def connect(self) -> Finding:
        """Connects the hosts by TensorFlow, as training does."""
        if self._membership is None:
            return note("not connected, as the hosts have not met")
        self._found = _connect(self._membership, None, measures=True)
        if (error := self._found.get("error")) is not None:
            return wrong(error)
        return ok("TensorFlow connects all hosts")

    def clocks(self) -> Finding:
        """Compares the hosts' clocks."""

        def compare(times):
            apart = max(times) - min(times)
            names = self._membership.names
            if apart > _CLOCKS_S:
                first, last = (names[times.index(f(times))] for f in (max, min))
                return note(
                    f"that of {first} is {apart:,.1f} s ahead of that of {last}, so "
                    "their logs do not fit together; set both by NTP",
                    seconds=apart,
                )
            return ok(f"they differ by {1000 * apart:,.1f} ms at most", seconds=apart)

        return self._judged("clocks", compare)

    def latency(self) -> Finding:
        """Says how long it takes to add 16 bytes."""

        def judge(seconds):
            ms = 1000 * statistics.median(seconds)
            text = f"adding 16 bytes takes {ms:,.2f} ms"
            if ms <= _FAR_MS:
                return ok(text, ms=ms)
            return note(
                f"{text}, more than {_FAR_MS:g}: each step takes so much longer at "
                "least; use hosts that are nearer to one another",
                ms=ms,
            )

        return self._judged("latency", judge)

    def bandwidth(self) -> Finding:
        """Says how long it takes to add 100 MB."""

        def judge(seconds):
            ms = 1000 * min(seconds)
            rate = 100_000 / ms
            text = f"adding 100 MB takes {ms:,.0f} ms: {rate:,.0f} MB/s"
            if rate >= _SLOW_MB_S:
                return ok(text, mb_per_s=rate)
            return note(
                f"{text}, less than {_SLOW_MB_S:g}: gradients will take long; name a "
                "faster network by --interface or TOWERS_INTERFACE",
                mb_per_s=rate,
            )

        return self._judged("bandwidth", judge)

    def _judged(self, name, judge):
        if name in self._found:
            return judge(self._found[name])
        if "told" in self._found:
            return wrong("not measured, as it takes too long, or hosts have failed")
        return note("not measured, as the hosts are not connected")
