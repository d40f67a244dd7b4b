"""Addresses of hosts: "name:port", or "[::1]:port"."""

import ipaddress
import re
import socket

_ADDRESS = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")


def is_address(text: object) -> bool:
    """Tells whether something is an address with a port."""
    match = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
    return match is not None and 0 < int(match["port"]) < 2**16


def split(address: str) -> tuple[str, int]:
    """Returns the host, without brackets, and the port of an address."""
    match = _ADDRESS.fullmatch(address)
    return match["host"].strip("[]"), int(match["port"])


def joined(host: str, port: int) -> str:
    """Returns the address of a host and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_only_local(host: str) -> bool:
    """Tells whether a host names this machine for itself, as 127.0.0.1 does."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def resolved(host: str) -> str:
    """Returns the first IP address of a host, the IPv4 one if it has both.

    Raises:
        OSError: It is not known here.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return min(found, key=lambda each: each[0] != socket.AF_INET)[4][0]


def of_interface(name: str) -> str:
    """Returns the IP address of a network interface, or the address that was named.

    Raises:
        ValueError: This machine has no such interface, or it has no address.
    """
    import psutil  # not for the doctor, which may have to say that it is missing

    interfaces = psutil.net_if_addrs()
    families = socket.AF_INET, socket.AF_INET6
    if name in interfaces:
        # Of a link only, as fe80::1%eth0 is, others cannot reach it by its text.
        listed = [
            (families.index(each.family), each.address)
            for each in interfaces[name]
            if each.family in families and "%" not in each.address
        ]
        if listed:
            return min(listed, key=lambda pair: pair[0])[1]
    every = {each.address for listed in interfaces.values() for each in listed}
    if name in every:
        return name
    raise ValueError(
        f"Received the interface {name}; expected one of this machine's that has an "
        f"address, or its address: {', '.join(sorted(interfaces))}."
    )


def held_port(address: str) -> socket.socket:
    """Returns a socket that holds a free port of an address until it is closed.

    Raises:
        OSError: The address is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    held = socket.socket(family)
    try:
        held.bind((address, 0))
    except OSError:
        held.close()
        raise
    return held
