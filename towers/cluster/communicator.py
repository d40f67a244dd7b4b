"""Collectives between hosts: all-reduce, all-gather and broadcast.

Each host sends and receives as few bytes of a large array as there can be: around a
ring (Patarasu and Yuan 2009), or by recursive halving and doubling if the hosts are a
power of two, which takes fewer messages. Small arrays travel by recursive doubling
(Thakur, Rabenseifner and Gropp 2005). The order of the additions depends on nothing but
the number of hosts, and all get the same bits.
"""

import threading

import numpy as np

from towers.cluster.links import Links, Message

# Up to here, the number of messages takes longer than the bytes.
_SMALL_BYTES = 2**15
# So that what was received is still in the processor's cache when it is added.
_BLOCK_BYTES = 2**19
# TensorFlow takes an array as it is if it begins at such an address.
_ALIGNMENT = 64


class Communicator:
    """The collectives of a host.

    Every host has to call the same ones, one after another.
    """

    def __init__(self, links: Links):
        """Connects the hosts.

        Raises:
            LinkError: A host cannot be reached.
        """
        self.links = links
        self._rank, self._count = links.rank, links.count
        self._next, self._previous = (
            (self._rank + step) % self._count for step in (1, -1)
        )
        # Those that double: a power of two.
        self._power = 1 << (self._count.bit_length() - 1)
        self._lock = threading.Lock()
        links.connect(self._peers() - {self._rank})

    def all_reduce(
        self, array: np.ndarray, purpose: str, wire: np.dtype | None = None
    ) -> np.ndarray:
        """Returns the sum of an array over all hosts.

        Args:
            array: Of numbers; of the same shape and type on all hosts.
            purpose: What it is, in words; the same on all hosts.
            wire: The type in which large arrays travel. It is added in its own type,
                and what a host sends on is rounded. `None`: the array's own.

        Raises:
            LinkError: A host has ended, or is out of reach.
            HostsDifferError: A host is in another collective.
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        if not flat.size:
            return array
        with self._lock:
            if flat.nbytes <= _SMALL_BYTES or self._count == 1:
                total = self._double(flat, purpose)
            elif self._count == self._power:
                total = self._halve(flat, purpose, wire or flat.dtype)
            else:
                total = self._reduce_in_ring(flat, purpose, wire or flat.dtype)
        return total.reshape(array.shape)

    def all_gather(self, data: bytes | memoryview, purpose: str) -> list[memoryview]:
        """Returns the bytes that each host has, of any number; as `all_reduce`."""
        sizes = np.zeros(self._count, np.int64)
        sizes[self._rank] = len(data)
        with self._lock:
            sizes = self._double(sizes, f"sizes of {purpose}")
            whole = memoryview(aligned(int(sizes.sum()), np.uint8))
            ends = np.cumsum(sizes)
            parts = [
                whole[end - size : end] for end, size in zip(ends, sizes, strict=True)
            ]
            parts[self._rank][:] = data
            for step in range(self._count - 1):
                mine = parts[(self._rank - step) % self._count]
                other = parts[(self._rank - step - 1) % self._count]
                self._around(purpose, _whole(mine), _whole(other))
        return parts

    def broadcast(self, data: memoryview, purpose: str) -> None:
        """Sends the first host's bytes to all others, which have as many to fill."""
        with self._lock:
            for start in range(0, len(data), _BLOCK_BYTES):
                block = _whole(data[start : start + _BLOCK_BYTES])
                if self._rank > 0:
                    self.links.exchange(purpose, source=self._previous, into=block)
                if self._rank < self._count - 1:
                    self.links.exchange(purpose, to=self._next, sent=block)

    def _peers(self):
        """The hosts with which this one exchanges anything."""
        peers = {self._next, self._previous}
        if self._rank >= self._power:
            return peers | {self._rank - self._power}
        if self._rank + self._power < self._count:
            peers.add(self._rank + self._power)
        step = 1
        while step < self._power:
            peers.add(self._rank ^ step)
            step *= 2
        return peers

    def _double(self, array, purpose):
        """Adds in as many exchanges as the number of hosts has bits."""
        total, other = aligned(array.size, array.dtype), np.empty_like(array)
        total[:] = array
        mine, theirs = _whole(_bytes(total)), _whole(_bytes(other))
        exchange = self.links.exchange
        if self._rank >= self._power:
            # Those beyond a power of two have another add for them.
            partner = self._rank - self._power
            exchange(purpose, partner, mine)
            exchange(purpose, source=partner, into=mine)
            return total
        beyond = self._rank + self._power
        if beyond < self._count:
            exchange(purpose, source=beyond, into=theirs)
            total += other
        step = 1
        while step < self._power:
            partner = self._rank ^ step
            exchange(purpose, partner, mine, partner, theirs)
            total += other
            step *= 2
        if beyond < self._count:
            exchange(purpose, beyond, mine)
        return total

    def _halve(self, array, purpose, wire):
        """Adds ever smaller parts with ever nearer hosts, then collects the sums."""
        total = aligned(array.size, array.dtype)
        source, begin, end, step = array, 0, array.size, self._power // 2
        done = []
        while step:
            middle = (begin + end) // 2
            kept, given = slice(begin, middle), slice(middle, end)
            if self._rank & step:
                kept, given = given, kept
            partner = self._rank ^ step
            into = _blocks(source[kept], total[kept], wire)
            self.links.exchange(
                purpose, partner, _sent(source[given], wire), partner, into
            )
            done.append((partner, kept, given))
            source, begin, end, step = total, kept.start, kept.stop, step // 2
        _round(total[kept], wire)
        for partner, kept, given in reversed(done):
            into = _received(total[given], wire)
            self.links.exchange(
                purpose, partner, _sent(total[kept], wire), partner, into
            )
        return total

    def _reduce_in_ring(self, array, purpose, wire):
        """Adds part by part around the ring, and sends the sums around it."""
        count, rank = self._count, self._rank
        total = aligned(array.size, array.dtype)
        edges = [array.size * k // count for k in range(count + 1)]
        parts = [slice(*edges[k : k + 2]) for k in range(count)]
        # In the first step, the array's own part; then what was added before.
        for step, source in enumerate([array] + [total] * (count - 2)):
            mine, theirs = (parts[(rank - step - k) % count] for k in (0, 1))
            into = _blocks(array[theirs], total[theirs], wire)
            self._around(purpose, _sent(source[mine], wire), into)
        _round(total[parts[(rank + 1) % count]], wire)
        for step in range(count - 1):
            mine, theirs = (parts[(rank + 1 - step - k) % count] for k in (0, 1))
            into = _received(total[theirs], wire)
            self._around(purpose, _sent(total[mine], wire), into)
        return total

    def _around(self, purpose, sent, into):
        # Hosts have parts of different sizes; all know which are empty.
        to = self._next if sent.size else None
        source = self._previous if into.size else None
        self.links.exchange(purpose, to, sent, source, into)


def _whole(view):
    return Message(len(view), [view])


def _round(array, wire):
    """Rounds what others will get rounded, so that all hosts have the same bits."""
    if wire != array.dtype:
        array[:] = array.astype(wire)


def _sent(array, wire):
    """What is sent of an array, in the type in which it travels."""
    if wire == array.dtype:
        return _whole(_bytes(array))
    size = _BLOCK_BYTES // wire.itemsize
    starts = range(0, array.size, size)
    blocks = (_bytes(array[start : start + size].astype(wire)) for start in starts)
    return Message(array.size * wire.itemsize, blocks)


def _received(array, wire):
    """What is filled with numbers that are kept as they are."""
    if wire == array.dtype:
        return _whole(_bytes(array))
    return _blocks(None, array, wire)


def _blocks(added, total, wire):
    """What is filled with numbers that are added to an array, or kept as they are."""
    size = _BLOCK_BYTES // wire.itemsize

    def parts():
        block = np.empty(min(size, total.size), wire)
        for start in range(0, total.size, size):
            place = slice(start, min(start + size, total.size))
            received = block[: place.stop - start]
            yield _bytes(received)
            if added is None:
                total[place] = received
            else:
                np.add(added[place], received, out=total[place])

    return Message(total.size * wire.itemsize, parts())


def aligned(size: int, dtype: np.dtype) -> np.ndarray:
    """Returns a new flat array that TensorFlow takes without a copy."""
    count = size * np.dtype(dtype).itemsize
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count].view(dtype)


def _bytes(array):
    return memoryview(array.view(np.uint8))
