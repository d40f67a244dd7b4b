"""A connection through memory that two processes of one machine share.

Over a socket, even one to the same machine, the kernel copies all bytes twice.

The memory has no name, so nothing is left behind, and only processes of the same user
can open it. It is for x86 only, as Python has no means to put writes in order
elsewhere.
"""

import contextlib
import mmap
import os
import platform
import secrets
import socket
import struct
from collections.abc import Callable

# Memory that one end writes and the other reads: a ring of bytes, small enough for a
# processor's cache. Before it are the numbers of bytes written and read until now, in
# lines of the cache of their own, and what proves that both ends have the same memory.
_RING_BYTES, _PART_BYTES, _BEGIN = 2**21, 2**19, 256
_WRITTEN, _READ = 0, 8
_PROOF = slice(128, 144)
# The process that has made the memory, its file there, and the proof.
_OFFER = struct.Struct(">QQ16s")
_YES, _NO = b"y", b"n"
# Processors that show others what is written in the order in which it was written:
# Python has no means to ask the others to.
_ORDERED = "x86_64", "AMD64"


class SharedMemoryConnection:
    """Sends and receives as a socket does that does not block.

    It wakes the other end, by a byte through a socket, when it has sent something, and
    each time it has received a part of the ring. The socket also tells it that the
    other end is gone.
    """

    def __init__(self, wakes: socket.socket, out: mmap.mmap, into: mmap.mmap):
        """Takes a socket, and the memory that this end and the other one write."""
        self._wakes = wakes
        self._memories = out, into
        self._out, self._in = memoryview(out), memoryview(into)
        # Processors write and read such a number as a whole.
        self._out_counts, self._in_counts = self._out.cast("Q"), self._in.cast("Q")

    def fileno(self) -> int:
        """Returns the file that can be read once the other end wakes this one."""
        return self._wakes.fileno()

    def send(self, buffer: memoryview) -> int:
        """Sends some of the bytes; returns how many.

        Raises:
            BlockingIOError: The other end has to receive before.
            OSError: It is gone.
        """
        counts = self._out_counts
        written = counts[_WRITTEN]
        free = self._some(lambda: _RING_BYTES - written + counts[_READ])
        if not free:
            raise BrokenPipeError("the other end is closed")
        place, count = _place(written, min(free, len(buffer)))
        self._out[place] = buffer[:count]
        # After the bytes; see `_ORDERED`.
        counts[_WRITTEN] = written + count
        self._wake()
        return count

    def recv_into(self, buffer: memoryview) -> int:
        """Receives some bytes; returns how many, and 0 if the other end is closed.

        Raises:
            BlockingIOError: There are none yet.
        """
        counts = self._in_counts
        read = counts[_READ]
        there = self._some(lambda: counts[_WRITTEN] - read)
        if not there:
            return 0
        place, count = _place(read, min(there, len(buffer)))
        buffer[:count] = self._in[place]
        counts[_READ] = read + count
        if read // _PART_BYTES < counts[_READ] // _PART_BYTES:
            self._wake()
        return count

    def shutdown(self, how: int) -> None:
        """Tells the other end that no more is sent."""
        self._wakes.shutdown(how)

    def close(self) -> None:
        """Closes it; the memory goes with the last of the two processes."""
        self._wakes.close()
        for view in (self._out_counts, self._in_counts, self._out, self._in):
            view.release()
        for memory in self._memories:
            memory.close()

    def _some(self, count: Callable[[], int]) -> int:
        """Returns how many bytes there are, 0 only where the other end is closed."""
        if found := count():
            return found
        # Before the count, so that none is missed.
        try:
            closed = not self._wakes.recv(4096)
        except BlockingIOError:
            closed = False
        found = count()
        if not found and not closed:
            raise BlockingIOError
        return found

    def _wake(self):
        # If the socket is full, the other end will wake. That it is gone is told to
        # whoever waits for it.
        with contextlib.suppress(OSError):
            self._wakes.send(b"!")


def _place(count, most):
    """Where the next bytes are in the memory, and how many lie side by side."""
    start = count % _RING_BYTES
    # In parts, so that the other end may begin.
    size = min(most, _PART_BYTES, _RING_BYTES - start)
    return slice(_BEGIN + start, _BEGIN + start + size), size


def share(connection: socket.socket) -> SharedMemoryConnection | None:
    """Agrees with the other end of a socket, which does the same, on shared memory.

    Args:
        connection: A socket that blocks, of which both ends are trusted.

    Returns:
        A connection; `None` if the two processes cannot share memory.
    """
    with contextlib.ExitStack() as opened:
        out, file, proof = _made(opened)
        connection.sendall(_OFFER.pack(os.getpid() if out else 0, file, proof))
        into = _other(*_OFFER.unpack(read(connection, _OFFER.size)))
        connection.sendall(_YES if out and into else _NO)
        if read(connection, 1) != _YES or not (out and into):
            return None
    return SharedMemoryConnection(connection, out, into)


def read(connection: socket.socket, count: int) -> bytes:
    """Reads so many bytes from a socket that blocks."""
    parts = b""
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        parts += part
    return parts


def _made(opened):
    """Makes memory to write, with its file, which stays open for a while."""
    if platform.machine() not in _ORDERED or not hasattr(os, "memfd_create"):
        return None, 0, b""
    proof = secrets.token_bytes(16)
    try:
        file = os.memfd_create("towers")
        opened.callback(os.close, file)
        os.truncate(file, _BEGIN + _RING_BYTES)
        memory = mmap.mmap(file, _BEGIN + _RING_BYTES)
    except OSError:
        return None, 0, b""
    memory[_PROOF] = proof
    return memory, file, proof


def _other(process, file, proof):
    """Opens the memory that the other end writes, if it is within reach."""
    if not process:
        return None
    try:
        with open(f"/proc/{process}/fd/{file}", "r+b", buffering=0) as opened:
            memory = mmap.mmap(opened.fileno(), _BEGIN + _RING_BYTES)
    except (OSError, ValueError):
        return None
    # In a container, the number of a process is another's outside.
    return memory if memory[_PROOF] == proof else None
