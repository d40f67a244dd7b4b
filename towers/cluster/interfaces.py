"""Finds the address of a network interface of this machine."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_GLOBAL = 0x00  # The scope of IPv6 addresses that hold beyond one link.
_LOOPBACK = 0x10


def interface_address(wanted: str) -> str:
    """Returns the address of an interface of this machine.

    Args:
        wanted: Its name, such as "eth0", or one of its addresses.

    Raises:
        ValueError: If this machine has no such interface.
    """
    found = addresses()
    try:
        address = ipaddress.ip_address(wanted)
    except ValueError:
        if found.get(wanted):
            return found[wanted][0]
        what = "has no address" if wanted in found else "is no interface here"
        raise ValueError(f"--interface={wanted} {what}; {_choice(found)}") from None
    if address.is_unspecified:
        raise ValueError(
            f"--interface={wanted} means all interfaces, where whoever reaches one can "
            f"execute code; {_choice(found)}"
        )
    if not _is_here(address):
        raise ValueError(
            f"--interface={wanted} is no address of this machine; {_choice(found)}"
        )
    return str(address)


def addresses() -> dict[str, list[str]]:
    """Returns the addresses of each interface, IPv4 first."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name, its in found.items():
            # An interface without an address raises an error.
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, request)
                its.append(socket.inet_ntoa(answer[20:24]))
    # The file is missing where the system has no IPv6.
    with contextlib.suppress(FileNotFoundError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) in (_GLOBAL, _LOOPBACK):
                its = found.setdefault(name, [])
                its.append(str(ipaddress.ip_address(bytes.fromhex(digits))))
    return found


def _choice(found: dict[str, list[str]]) -> str:
    listed = [f"{name} ({', '.join(its)})" for name, its in found.items() if its]
    return f"this machine has {', '.join(listed)}"


def _is_here(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with contextlib.suppress(OSError), socket.socket(family) as tried:
        tried.bind((str(address), 0))
        return True
    return False
