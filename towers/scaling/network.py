"""Predicts how several hosts scale, by the model of docs/scale/scaling.md."""

import dataclasses

# What the system and Python add to the network's delay, and the time in which a core
# copies and adds a byte: both as measured by scripts/bench_all_reduce.py.
_MESSAGE_S, _BYTE_S = 0.9e-3, 3.2e-9


@dataclasses.dataclass(frozen=True)
class Network:
    """What connects the hosts.

    Attributes:
        delay_ms: Milliseconds that an empty message takes from one host to another.
        gbit: Gigabits per second of each host, each way.
    """

    delay_ms: float = 0.1
    gbit: float = 10.0

    def sum_s(self, hosts: int, size: int) -> float:
        """Returns the seconds in which hosts add an array of `size` bytes."""
        message_s = self.delay_ms / 1000 + _MESSAGE_S
        return sum_s(hosts, size, message_s, max(8e-9 / self.gbit, _BYTE_S))


def sum_s(hosts: int, size: int, message_s: float, byte_s: float) -> float:
    """Returns the seconds in which hosts add an array around a ring.

    Args:
        hosts: Number of hosts.
        size: Bytes of the array.
        message_s: Seconds of an empty message from one host to another.
        byte_s: Seconds of a byte that each host sends while it receives one.
    """
    # Each sends a part of the array, first to be added and then to be kept.
    return 2 * (hosts - 1) * (message_s + size / hosts * byte_s)
