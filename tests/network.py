"""A network of hosts on one machine, each in a network namespace, without being root.

A process of ours is the switch among them. It has rate and delay, and cables that can
be cut: the ends are not told. (`tc netem` could delay, but not all kernels have it.)
It needs `unshare`, `nsenter`, `ip`, /dev/net/tun and user namespaces.
"""

import contextlib
import ctypes
import fcntl
import functools
import heapq
import itertools
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
# A TAP device whose frames begin with a header, and have up to 64 KB (checksums and
# segments of TCP are left to the receiver, as virtual machines do).
_TAP, _OFFLOADED, _HEADER = 0x0002 | 0x1000 | 0x4000, 0x01 | 0x02 | 0x04, 10
_FRAME = 2**17
_PR_SET_TIMERSLACK = 29


@functools.cache
def why_not() -> str | None:
    """Says why this machine has no such networks; `None` if it has."""
    try:
        with Network(1):
            return None
    except (OSError, RuntimeError) as error:
        return f"no network of namespaces: {error}"


class Network:
    """Hosts that reach one another, and nothing else.

    Attributes:
        addresses: Of each host, whose interface is called "eth0".
    """

    def __init__(self, hosts: int, mbit: float = 1000, delay_ms: float = 0):
        """Takes how many hosts, and the rate and delay of each host's cable."""
        self.addresses = [_address(host) for host in range(hosts)]
        self._hosts, self._started = hosts, []
        self._line = mbit * 1e6 / 8, delay_ms / 1000

    def __enter__(self) -> "Network":
        bytes_per_s, delay_s = self._line
        self._switch = subprocess.Popen(
            [
                *("unshare", "--user", "--map-root-user", "--net"),
                *(sys.executable, "-S", __file__),
                *map(str, (self._hosts, bytes_per_s, delay_s)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._handles = self._switch.stdout.readline().split()
        if not self._handles:
            _, error = self._switch.communicate()
            raise RuntimeError(error.strip().rpartition("\n")[2])
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # The namespaces end with the last process in them.
        self._switch.communicate()

    def start(
        self, host: int, command: Sequence[str], **options: object
    ) -> subprocess.Popen:
        """Starts a command on a host; its process is killed at the end, if need be.

        `options` are those of `subprocess.Popen`.
        """
        enter = ["nsenter", f"--user=/proc/{self._switch.pid}/ns/user"]
        enter += [f"--net={self._handles[host]}", "--preserve-credentials", "--"]
        # If this process is killed, too.
        enter += ["setpriv", "--pdeathsig", "KILL", "--"]
        process = subprocess.Popen([*enter, *command], process_group=0, **options)
        self._started.append(process)
        return process

    def cut(self, host: int) -> None:
        """Cuts a host off: what it sends, and is sent, is lost from now on."""
        self._tell(f"-{host}")

    def mend(self, host: int) -> None:
        """Joins a host again."""
        self._tell(f"+{host}")

    def _tell(self, change: str) -> None:
        print(change, file=self._switch.stdin, flush=True)
        assert self._switch.stdout.readline() == f"{change}\n"


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


class _Switch:
    def __init__(self, taps: list[int], bytes_per_s: float, delay_s: float):
        self._taps = taps
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        # When the cable to the switch, and from it, is free again.
        self._sends, self._receives = [0.0] * len(taps), [0.0] * len(taps)
        self._whole = set(range(len(taps)))
        # When to write which frame to whom; the number keeps the order.
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()

    def run(self) -> None:
        """Works until the standard input ends."""
        while True:
            wait = None
            if self._under_way:
                wait = max(0, self._under_way[0][0] - time.monotonic())
            ready, _, _ = select.select([0, *self._taps], [], [], wait)
            self._deliver()
            for descriptor in ready:
                if descriptor:
                    self._take(self._taps.index(descriptor))
                elif not self._obey(os.read(0, 2**10).decode()):
                    return

    def _obey(self, changes: str) -> bool:
        for change in changes.splitlines():
            host = int(change[1:])
            (self._whole.add if change[0] == "+" else self._whole.discard)(host)
            print(change, flush=True)
        return bool(changes)

    def _take(self, sender: int) -> None:
        frame = os.read(self._taps[sender], _FRAME)
        to = frame[_HEADER : _HEADER + 6]
        # Broadcasts ask for addresses.
        receivers = range(len(self._taps)) if to[0] & 1 else [to[-1] - 1]
        seconds = (len(frame) - _HEADER) / self._bytes_per_s
        sent = max(time.monotonic(), self._sends[sender]) + seconds
        self._sends[sender] = sent
        for receiver in {*receivers} & self._whole - {sender}:
            received = max(sent, self._receives[receiver] + seconds)
            self._receives[receiver] = received
            arrives = received + self._delay_s, next(self._numbers), receiver, frame
            if sender in self._whole:
                heapq.heappush(self._under_way, arrives)

    def _deliver(self) -> None:
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, _, receiver, frame = heapq.heappop(self._under_way)
            if receiver in self._whole:
                os.write(self._taps[receiver], frame)


def _make_host(host: int) -> int:
    """Makes a namespace, enters it, and returns the other end of its interface."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET) failed")
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _OFFLOADED)
    for words in (
        "link set lo up",
        f"link set eth0 address 02:00:00:00:00:{host + 1:02x} up",
        f"address add {_address(host)}/24 dev eth0",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    return tap


def _main() -> None:
    hosts, bytes_per_s, delay_s = sys.argv[1:]
    # Timers are exact to a microsecond, instead of 50.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
    taps, names = [], []
    for host in range(int(hosts)):
        taps.append(_make_host(host))
        handle = os.open("/proc/self/ns/net", os.O_RDONLY)
        names.append(f"/proc/{os.getpid()}/fd/{handle}")
    print(*names, flush=True)
    _Switch(taps, float(bytes_per_s), float(delay_s)).run()


if __name__ == "__main__":
    _main()
