"""What a process knows of the hosts that train together."""

import dataclasses

# As torchrun's `join_timeout`.
JOIN_SECONDS = 600.0


class HostFailedError(RuntimeError):
    """Another host of those that train together has failed; this one cannot go on."""


class HostsDifferError(ValueError):
    """Hosts that train together were not given the same."""


class SignalReceived(Exception):
    """A host has received a signal to stop, for which all stop at the same batch.

    Attributes:
        number: That of the signal.
    """

    def __init__(self, number: int):
        super().__init__(f"A host has received signal {number}.")
        self.number = number


class HostsChange(Exception):
    """Hosts come or go, for which all stop at the same batch."""


@dataclasses.dataclass(frozen=True)
class ProcessPlace:
    """What a process knows of its place before it has met the others.

    Attributes:
        rank: Its number among the hosts, from 0.
        count: How many hosts there are.
        coordinator: Where the first host listens for the others, as "host:port".
        token: What all hosts know and strangers do not; `None` if anybody may join.
        join_seconds: How long to wait for the others.
        interface: The network interface or address for what hosts send one another;
            `None` for the one that reaches the coordinator.
        addresses: Of each host, "host:port" where it listens for the others, if that
            is known before they meet, as by TF_CONFIG.
        generation: How often all hosts have started anew.
    """

    rank: int
    count: int
    coordinator: str
    token: str | None = dataclasses.field(repr=False)
    join_seconds: float = JOIN_SECONDS
    interface: str | None = None
    addresses: tuple[str, ...] | None = None
    generation: int = 0


@dataclasses.dataclass(frozen=True)
class ElasticPlace:
    """What a process knows that is to train with hosts which come and go.

    Attributes:
        coordinator: Where the coordinator listens, as "host:port".
        token: What all hosts know and strangers do not.
        slot: What the launcher calls this process; hosts begin in this order.
        join_seconds: How long to try to reach the coordinator.
        interface: As of `ProcessPlace`.
        restarted: Whether others have begun before this process was started, as where
            it takes the place of one that has failed.
    """

    coordinator: str
    token: str = dataclasses.field(repr=False)
    slot: int
    join_seconds: float = JOIN_SECONDS
    interface: str | None = None
    restarted: bool = False


@dataclasses.dataclass(frozen=True)
class Membership:
    """What all hosts know once they have met.

    Attributes:
        rank: The number of this host among the hosts, from 0.
        addresses: Of each host, "host:port" where it listens for the others.
        names: What to call each in sentences, such as "host 1 (nodeB, pid 4711)".
        generation: How often all hosts have started anew, or other hosts have met.
        token: As of `ProcessPlace`.
        elastic: Whether a host that loses others may leave them and go on with those
            that remain, instead of to end.
    """

    rank: int
    addresses: tuple[str, ...]
    names: tuple[str, ...]
    generation: int = 0
    token: str | None = dataclasses.field(default=None, repr=False)
    elastic: bool = False

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return len(self.addresses)

    @property
    def processes(self) -> frozenset[str]:
        """The names of its hosts without their ranks, which change."""
        named = (f"host {rank} " for rank in range(len(self.names)))
        return frozenset(map(str.removeprefix, self.names, named))

    @property
    def count_here(self) -> int:
        """How many of them are on this machine, by their addresses."""
        machines = [address.rpartition(":")[0] for address in self.addresses]
        return machines.count(machines[self.rank])
