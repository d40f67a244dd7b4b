"""Confines the server that TensorFlow starts to one address.

Whoever reaches TensorFlow's server can execute code, and it listens on all interfaces,
whatever the cluster's addresses say. While it starts, TensorFlow's libraries call a
function of ours in the place of `bind`.
"""

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from towers.cluster import relocations

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_BIND = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True
)
# What libraries call has to live as long as they may call it: a thread may have read
# an entry before it was restored.
_alive: list[object] = []

_LISTEN = "0A"


class NotConfinedError(RuntimeError):
    """TensorFlow's server listens, or would listen, elsewhere than it should."""


@contextlib.contextmanager
def confined(address: str, library: str = "/tensorflow/") -> Iterator[None]:
    """Confines TCP sockets that libraries bind meanwhile to all interfaces.

    Call `check` afterwards.

    Args:
        address: The only address to bind such sockets to.
        library: A part of the paths of the libraries, which have to be loaded.

    Raises:
        NotConfinedError: If this is not possible here.
    """
    bind = _BIND(_binder(ipaddress.ip_address(address)))
    _alive.append(bind)
    pointer = ctypes.cast(bind, ctypes.c_void_p).value
    assert pointer is not None
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(relocations.replaced("bind", library, pointer))
        except OSError as error:
            raise NotConfinedError(
                f"the server cannot be confined to {address}, because {error}; shut "
                "its port by a firewall"
            ) from error
        yield


def check(port: int, address: str) -> None:
    """Checks that this process listens on a port, and there on one address only.

    Args:
        port: A TCP port.
        address: The only address to listen on.

    Raises:
        NotConfinedError: If it does not.
    """
    wanted = ipaddress.ip_address(address)
    found = [at for at, its_port in _listening() if its_port == port]
    if not found:
        raise NotConfinedError(
            f"this process was expected to listen on {address}, port {port}, but "
            "/proc/self/net does not show that it listens there"
        )
    for at in found:
        if at != wanted:
            raise NotConfinedError(
                f"this process was to listen on {address} only, but listens on {at}, "
                f"port {port}, where others may reach it"
            )


def _binder(address: _Address) -> Callable[[int, int, int], int]:
    libc = ctypes.CDLL(None, use_errno=True)

    def bind(descriptor: int, pointer: int, length: int) -> int:
        # An error must not leave here: the caller would take it for success.
        try:
            requested = ctypes.string_at(pointer, length)
            if _is_tcp(descriptor):
                requested = _redirected(requested, address)
            return libc.bind(descriptor, requested, len(requested))
        except BaseException:
            ctypes.set_errno(errno.EADDRNOTAVAIL)
            return -1

    return bind


def _is_tcp(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as opened:
        return opened.type == socket.SOCK_STREAM


def _redirected(requested: bytes, address: _Address) -> bytes:
    """Returns a `sockaddr` with a wildcard replaced by the address."""
    (family,) = struct.unpack_from("=H", requested)
    if family == socket.AF_INET:
        kind, start, end = ipaddress.IPv4Address, 4, 8
    elif family == socket.AF_INET6:
        kind, start, end = ipaddress.IPv6Address, 8, 24
    else:
        return requested
    if not _plain(kind(requested[start:end])).is_unspecified:
        return requested
    if kind is ipaddress.IPv6Address and address.version == 4:
        # A socket of both kinds has IPv4 addresses in this form.
        address = ipaddress.IPv6Address(f"::ffff:{address}")
    return requested[:start] + kind(address.packed).packed + requested[end:]


def _listening() -> Iterator[tuple[_Address, int]]:
    """Yields where this process listens: addresses with ports."""
    own = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(link))
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in own:
                    at, port = fields[1].split(":")
                    yield _read_address(at), int(port, 16)


def _read_address(text: str) -> _Address:
    # Words of four bytes, each in the machine's order.
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return _plain(ipaddress.ip_address(packed))


def _plain(address: _Address) -> _Address:
    """Returns an IPv4 address in the place of one that is mapped to IPv6."""
    return getattr(address, "ipv4_mapped", None) or address
