"""Collectives between hosts: all-reduce, its halves, all-gather, all-to-all, broadcast.

Each host sends and receives as few bytes of a large array as there can be: around a
ring (Patarasuk and Yuan 2009), or by recursive halving and doubling if the hosts are a
power of two, which takes fewer messages. Small arrays travel by recursive doubling
(Thakur, Rabenseifner and Gropp 2005). The order of the additions depends on nothing but
the number of hosts, and all get the same bits.

TensorFlow's own need its server, which listens without authentication, belongs to one
cluster for the life of a process, and takes 1.7 ms for 16 bytes; these take 0.1 ms.
NCCL between hosts is still to come.
"""

import itertools
import threading
from collections.abc import Sequence

import numpy as np

from towers.cluster.links import Links, Message

# Up to here, the number of messages takes longer than the bytes.
_SMALL_BYTES = 2**15
# So that what was received is still in the processor's cache when it is added.
_BLOCK_BYTES = 2**19
# TensorFlow takes an array as it is if it begins at such an address.
_ALIGNMENT = 64
# For a collective in another thread to end once nobody goes on with it.
_CLOSE_S = 10.0


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

    @property
    def doing(self) -> tuple[str, float] | None:
        """The purpose of the present exchange and its start, by `time.monotonic`."""
        return self.links.doing

    @property
    def broken(self) -> Exception | None:
        """The error that has ended the exchanges, if any."""
        return self.links.broken

    def abort(self, message: str) -> None:
        """Ends each wait for other hosts, in any thread, by a `LinkError`."""
        self.links.abort(message)

    def close(self) -> None:
        """Ends what waits, in any thread, and closes the connections."""
        self.abort("This host has left the others.")
        # Who is called by a signal in the middle of a collective gets no lock.
        if self._lock.acquire(timeout=_CLOSE_S):
            self.links.close()
            self._lock.release()

    def all_reduce(
        self, array: np.ndarray, purpose: str, wire: np.dtype | None = None
    ) -> np.ndarray:
        """Returns the sum of an array over all hosts; see `grouped_all_reduce`."""
        return self.grouped_all_reduce([array], purpose, wire)[0]

    def grouped_all_reduce(
        self,
        arrays: Sequence[np.ndarray],
        purpose: str,
        wire: np.dtype | None = None,
    ) -> list[np.ndarray]:
        """Returns the sums of arrays over all hosts, in as few messages as of one.

        Args:
            arrays: Of numbers of one type; of the same shapes and type on all hosts.
            purpose: What they are, in words; the same on all hosts.
            wire: The type in which large arrays travel. They are added in their own
                type, and what a host sends on is rounded. `None`: their own.

        Raises:
            LinkError: A host has ended, or is out of reach.
            HostsDifferError: A host is in another collective.
        """
        flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
        size, own = sum(each.size for each in flat), flat[0].dtype
        wire = wire or own
        if wire != own:
            # Those of another type would be as many bytes.
            purpose = f"{wire.name} of {purpose}"
        with self._lock:
            if size * own.itemsize <= _SMALL_BYTES or self._count == 1:
                totals = self._double_grouped(flat, purpose)
            else:
                edges = [size * k // self._count for k in range(self._count + 1)]
                totals = self._scatter(flat, edges, purpose, wire)
                _round(_cut(totals, *edges[self._rank : self._rank + 2]), wire)
                self._gather(totals, edges, purpose, wire)
        return [
            total.reshape(array.shape)
            for total, array in zip(totals, arrays, strict=True)
        ]

    def reduce_scatter(
        self,
        arrays: Sequence[Sequence[np.ndarray]],
        purpose: str,
        wire: np.dtype | None = None,
    ) -> list[np.ndarray]:
        """Returns the sums over all hosts of those arrays that are this host's.

        Args:
            arrays: For each host, flat arrays of which it is to have the sums.
            purpose: As for `grouped_all_reduce`, as are errors.
            wire: As for `grouped_all_reduce`, but the sums are not rounded.
        """
        flat = list(itertools.chain(*arrays))
        first = sum(map(len, arrays[: self._rank]))
        edges, own = _edges(arrays), flat[0].dtype
        wire = wire or own
        if wire != own:
            purpose = f"{wire.name} of {purpose}"
        with self._lock:
            if edges[-1] * own.itemsize <= _SMALL_BYTES or self._count == 1:
                totals = self._double_grouped(flat, purpose)
            else:
                totals = self._scatter(flat, edges, purpose, wire)
        return totals[first : first + len(arrays[self._rank])]

    def gather_parts(
        self, arrays: Sequence[Sequence[np.ndarray]], purpose: str
    ) -> None:
        """Sends what each host has of arrays to all others, to the bit.

        Args:
            arrays: For each host, flat arrays that it has, and that others have to
                fill. All are of one type, and of the same sizes on all hosts.
            purpose: As for `grouped_all_reduce`, as are errors.
        """
        flat = list(itertools.chain(*arrays))
        with self._lock:
            self._gather(flat, _edges(arrays), purpose, flat[0].dtype)

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

    def all_to_all(
        self,
        arrays: Sequence[Sequence[np.ndarray]],
        purpose: str,
        sizes: Sequence[Sequence[int]] | None = None,
    ) -> list[list[np.ndarray]]:
        """Sends each host arrays of its own, of any sizes, as MPI_Alltoallv does.

        Hosts exchange them pair by pair.

        Args:
            arrays: For each host, flat arrays: as many for each, on all hosts, and of
                the same types.
            purpose: As for `grouped_all_reduce`, as are errors.
            sizes: Of what each host sends this one, if all hosts know that. Else they
                tell one another first.

        Returns:
            What each host has sent this one.
        """
        count, rank, received = self._count, self._rank, [*arrays]
        with self._lock:
            if sizes is None:
                sizes = self._sizes(arrays, f"sizes of {purpose}")
            # All are here, and none has needed these connections before.
            self.links.connect({*range(count)} - {rank} - self.links.peers)
            for step in range(1, count):
                to, source = (rank + step) % count, (rank - step) % count
                pairs = zip(sizes[source], arrays[rank], strict=True)
                received[source] = [aligned(int(n), like.dtype) for n, like in pairs]
                sent = [each for each in arrays[to] if each.size]
                into = [each for each in received[source] if each.size]
                sent, into = [*map(_bytes, sent)], [*map(_bytes, into)]
                sent, into = (Message(sum(map(len, e)), e) for e in (sent, into))
                self._exchange(purpose, to, sent, source, into)
        return received

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

    def _sizes(self, arrays, purpose):
        """Tells each host the sizes of its arrays; returns those of what it sends."""
        sizes = np.zeros((self._count, self._count, len(arrays[0])), np.int64)
        sizes[self._rank] = [[each.size for each in of_host] for of_host in arrays]
        every = self._double(sizes.reshape(-1), purpose).reshape(sizes.shape)
        return every[:, self._rank]

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

    def _double_grouped(self, arrays, purpose):
        joined = np.concatenate(arrays)
        total = self._double(joined, purpose) if joined.size else joined
        return np.split(total, np.cumsum([each.size for each in arrays])[:-1])

    def _scatter(self, arrays, edges, purpose, wire):
        """Adds all that lies between two edges on the host of that number."""
        totals = [aligned(each.size, each.dtype) for each in arrays]
        if self._count == self._power:
            self._scatter_by_halves(arrays, totals, edges, purpose, wire)
            return totals
        count, rank = self._count, self._rank
        # In the first step, the arrays' own parts; then what was added before.
        for step, source in enumerate([arrays] + [totals] * (count - 2)):
            mine, theirs = ((rank - step - k) % count for k in (1, 2))
            mine, theirs = edges[mine : mine + 2], edges[theirs : theirs + 2]
            into = _blocks(_cut(arrays, *theirs), _cut(totals, *theirs), wire)
            self._around(purpose, _sent(_cut(source, *mine), wire), into)
        return totals

    def _scatter_by_halves(self, arrays, totals, edges, purpose, wire):
        """Adds ever smaller parts with ever nearer hosts."""
        source, first, step = arrays, 0, self._power // 2
        while step:
            kept, given = first, first + step
            if self._rank & step:
                kept, given = given, kept
            mine = edges[kept], edges[kept + step]
            theirs = edges[given], edges[given + step]
            into = _blocks(_cut(source, *mine), _cut(totals, *mine), wire)
            sent = _sent(_cut(source, *theirs), wire)
            self._exchange(purpose, self._rank ^ step, sent, self._rank ^ step, into)
            source, first, step = totals, kept, step // 2

    def _gather(self, totals, edges, purpose, wire):
        """Sends what lies between two edges from the host of that number to all."""
        count, rank = self._count, self._rank
        if count == self._power:
            step = 1
            while step < count:
                partner = rank ^ step
                mine, theirs = (each // step * step for each in (rank, partner))
                mine, theirs = (
                    _cut(totals, edges[first], edges[first + step])
                    for first in (mine, theirs)
                )
                sent, into = _sent(mine, wire), _received(theirs, wire)
                self._exchange(purpose, partner, sent, partner, into)
                step *= 2
            return
        for step in range(count - 1):
            mine, theirs = ((rank - step - k) % count for k in (0, 1))
            mine, theirs = edges[mine : mine + 2], edges[theirs : theirs + 2]
            into = _received(_cut(totals, *theirs), wire)
            self._around(purpose, _sent(_cut(totals, *mine), wire), into)

    def _around(self, purpose, sent, into):
        self._exchange(purpose, self._next, sent, self._previous, into)

    def _exchange(self, purpose, to, sent, source, into):
        # Hosts have parts of different sizes; all know which are empty.
        to = to if sent.size else None
        source = source if into.size else None
        self.links.exchange(purpose, to, sent, source, into)


def _edges(arrays):
    """Where each host's arrays begin, and the last one's end, side by side."""
    sizes = [sum(each.size for each in of_host) for of_host in arrays]
    return [0, *itertools.accumulate(sizes)]


def _cut(arrays, begin, end):
    """The numbers from one place to another, as if the arrays lay side by side."""
    parts, first = [], 0
    for each in arrays:
        start, stop = max(begin - first, 0), min(end - first, each.size)
        if start < stop:
            parts.append(each[start:stop])
        first += each.size
    return parts


def _whole(view):
    return Message(len(view), [view])


def _round(parts, wire):
    """Rounds what others will get rounded, so that all hosts have the same bits."""
    for part in parts:
        if wire != part.dtype:
            part[:] = part.astype(wire)


def _sent(parts, wire):
    """What is sent of arrays, in the type in which it travels."""
    blocks = (
        _bytes(block if wire == block.dtype else block.astype(wire))
        for part in parts
        for block in _in_blocks(part, wire)
    )
    return Message(_size(parts, wire), blocks)


def _received(parts, wire):
    """What is filled with numbers that are kept as they are."""
    if all(wire == part.dtype for part in parts):
        return Message(_size(parts, wire), map(_bytes, parts))
    return _blocks([None] * len(parts), parts, wire)


def _blocks(added, totals, wire):
    """What is filled with numbers that are added to arrays, or kept as they are."""

    def parts():
        memory = np.empty(_BLOCK_BYTES // wire.itemsize, wire)
        for mine, total in zip(added, totals, strict=True):
            mine = itertools.repeat(None) if mine is None else _in_blocks(mine, wire)
            for own, into in zip(mine, _in_blocks(total, wire), strict=False):
                received = memory[: into.size]
                yield _bytes(received)
                if own is None:
                    into[:] = received
                else:
                    np.add(own, received, out=into)

    return Message(_size(totals, wire), parts())


def _in_blocks(array, wire):
    size = _BLOCK_BYTES // wire.itemsize
    return (array[start : start + size] for start in range(0, array.size, size))


def _size(parts, wire):
    return sum(part.size for part in parts) * wire.itemsize


def aligned(size: int, dtype: np.dtype) -> np.ndarray:
    """Returns a new flat array that TensorFlow takes without a copy."""
    count = size * np.dtype(dtype).itemsize
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count].view(dtype)


def _bytes(array):
    return memoryview(array.view(np.uint8))
