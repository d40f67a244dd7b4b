"""Keeps parts of far files on a local disk, and reads them ahead of use.

A file is read in blocks of some megabytes. One of many threads reads a block once from
its origin; the block is then kept in packs. Blocks that do not fit are read from their
origin each time. A hash decides which ones these are, so they are spread evenly over an
epoch, and processes that share a store agree on them.
"""

import atexit
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import tensorflow as tf
from absl import logging

from towers.input_pipeline.local_store import notes
from towers.input_pipeline.local_store.ahead import Ahead, Group
from towers.input_pipeline.local_store.packs import Entry, Key, Packs
from towers.input_pipeline.local_store.places import block_bytes
from towers.program import forks

# Enough to hide the latency of an object store.
_THREADS = 32
_AHEAD_BYTES = 192 * 2**20
# For files that are read from front to back.
_BLOCKS_AHEAD, _FILES_AT_ONCE = 32, 16
_IN_ORDER = Group("in order")
# The most that is lost when the process is killed, besides what is being written.
_PACK_BYTES, _PACK_S = 16 * 2**20, 5.0
# If the disk is slower than the network, blocks are stored in a later epoch.
_MOST_UNWRITTEN = 8 * _PACK_BYTES
_SAMPLE = 256
# The most files whose size and time are kept.
_MOST_KNOWN = 2**18


class Block(NamedTuple):
    """A part of a file.

    Attributes:
        path: the path of the file.
        begin: the byte where it begins, a multiple of the file's ``block_bytes``.
        tag: identifies the data set.
    """

    path: str
    begin: int
    tag: int


class LocalStore:
    """A folder with parts of remote files, for several runs, also at the same time.

    Args:
        folder: the folder to keep them in; hosts may share it.
        limit_gb: the most that the folder may take, in GB.
        tell: receives sentences about damage, or a lack of room.

    Raises:
        ValueError: the folder cannot be written to, or the limit is not positive.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        limit_gb: float = 50,
        tell: Callable[[str], None] = logging.warning,
    ):
        self.folder = os.path.abspath(os.path.expanduser(folder))
        if not 0 < limit_gb < math.inf:
            raise ValueError(f"limit_gb is {limit_gb}: expected a number above 0")
        try:
            self._packs = Packs(self.folder, int(limit_gb * 2**30), tell)
        except OSError as error:
            raise ValueError(
                f"the local store {folder} cannot be used ({error.strerror}): choose "
                "another folder"
            ) from error
        self._tell, self._lock = tell, threading.Lock()
        self._fraction, self._total = 1.0, 0
        self._known: dict[str, tuple[int, int]] = {}
        self._ahead = Ahead(self._fetch, _AHEAD_BYTES, _THREADS)
        # Entries to write, by tag; and entries that are not written yet, by key.
        self._pending: dict[int, list[Entry]] = {}
        self._pending_bytes, self._pending_s = 0, 0.0
        self._unwritten: dict[Key, Entry] = {}
        self._unwritten_bytes = 0
        self._takes_more = True
        # The largest pack for which there was no room.
        self._refused_bytes = 0
        self._writer = ThreadPoolExecutor(1, "local_store_writer")
        self._writing: list[Future] = []
        self.remote_bytes = self.remote_blocks = 0
        self._at_exit = forks.at_exit(self.close)

    def open(self, name: str, paths: Sequence[str]) -> "StoredFiles":
        """Returns a data set's files, to be read through the store.

        Args:
            name: the name of the data set.
            paths: the paths of all its files.
        """
        some = paths[:: max(len(paths) // _SAMPLE, 1)]
        with ThreadPoolExecutor(_THREADS) as threads:
            sizes = [size for size, _ in threads.map(self.size_and_stamp, some)]
        size = sum(sizes) * len(paths) // max(len(sizes), 1)
        tag = _number(name)
        with self._lock:
            if tag not in self._packs.tags:
                self._packs.tags.add(tag)
                self._total += size
            room = self._packs.room() * notes.FILLED
            self._fraction = min(room / max(self._total, 1), 1.0)
        ahead = max(_BLOCKS_AHEAD // min(len(paths), _FILES_AT_ONCE), 2)
        note = notes.of_data(name, size, self._fraction, self.folder, some)
        return StoredFiles(self, tag, note, ahead)

    def size_and_stamp(self, path: str) -> tuple[int, int]:
        """Returns the bytes of a file, and a number that changes with it; cached.

        Raises:
            tf.errors.OpError: the file is missing.
        """
        known = self._known.get(path)
        if known is None:
            stat = tf.io.gfile.stat(path)
            stamp = _number(f"{stat.length} {stat.mtime_nsec}")
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[path] = stat.length, stamp
        return known

    def announce(self, block: Block, group: Group | None) -> None:
        """Announces that a block will be read, as one of several that are read in turn.

        Args:
            block: the block.
            group: the group of the block; None for blocks that are read before all
                others.
        """
        self._ahead.announce(block, group)

    def read(self, block: Block) -> bytes:
        """Returns a block, which stays at hand until it is dropped."""
        return self._ahead.get(block)

    def drop(self, block: Block) -> None:
        """Releases a block that is not needed any more in this epoch."""
        self._ahead.drop(block)

    def flush(self) -> None:
        """Writes all pending blocks."""
        self._write_pending()
        with self._lock:
            writing, self._writing = self._writing, []
        for written in writing:
            written.result()

    def close(self) -> None:
        """Writes all pending blocks, and ends all threads; happens at exit, too.

        Reports data that have found no room.
        """
        atexit.unregister(self._at_exit)
        self._ahead.close()
        self.flush()
        # Otherwise the store is closed or has reported this, or nothing was remote.
        if self._takes_more and self.remote_blocks:
            self._tell_of_limit()
        self._takes_more = False
        self._writer.shutdown()

    def _tell_of_limit(self) -> None:
        left = int((1 - self._fraction) * self._total)
        try:
            taken = self._packs.taken()
        except OSError:  # the folder is gone
            return
        size = self._total
        if self._refused_bytes:
            # Others have filled it meanwhile, or the data are larger than estimated.
            left = max(size - taken.ours, self._refused_bytes)
            size = max(size, taken.ours + left)
        if left:
            self._tell(notes.of_limit(self.folder, taken, size, left))

    def _fetch(self, block: Block) -> bytes:
        """Returns a block, from the store if it is there, else from its origin."""
        size, stamp = self.size_and_stamp(block.path)
        length = min(size - block.begin, block_bytes(block.path))
        key = _key(block)
        data = self._stored(key, stamp)
        if data is not None:
            return data
        data = read_range(block.path, block.begin, length)
        with self._lock:
            self.remote_bytes += len(data)
            self.remote_blocks += 1
        self._put(block.tag, Entry(key, stamp, data))
        return data

    def _stored(self, key: Key, stamp: int) -> bytes | None:
        entry = self._unwritten.get(key)
        if entry is not None and entry.stamp == stamp:
            return entry.data
        data = self._packs.read(key, stamp)
        if data is None:
            try:
                self._packs.look()
            except OSError:
                return None
            data = self._packs.read(key, stamp)
        return data

    def _put(self, tag: int, entry: Entry) -> None:
        """Stores a block, if it is one of those that are kept."""
        if entry.key.key >= self._fraction * 2**64 or not self._takes_more:
            return
        with self._lock:
            full = self._unwritten_bytes + len(entry.data) > _MOST_UNWRITTEN
            if full or entry.key in self._unwritten:
                return
            self._unwritten[entry.key] = entry
            self._unwritten_bytes += len(entry.data)
            self._pending.setdefault(tag, []).append(entry)
            if not self._pending_bytes:
                self._pending_s = time.monotonic()
                timer = threading.Timer(_PACK_S, self._write_late)
                timer.daemon = True
                timer.start()
            self._pending_bytes += len(entry.data)
            enough = self._pending_bytes >= _PACK_BYTES
        if enough:
            self._write_pending()

    def _write_late(self) -> None:
        # The entries that it was started for may have been written.
        if time.monotonic() >= self._pending_s + _PACK_S:
            self._write_pending()

    def _write_pending(self) -> None:
        with self._lock:
            pending, self._pending, self._pending_bytes = self._pending, {}, 0
        for tag, entries in pending.items():
            try:
                written = self._writer.submit(self._write, tag, entries)
            except RuntimeError:  # threads have ended, at exit
                self._write(tag, entries)
                continue
            with self._lock:
                under_way = [e for e in self._writing if not e.done() or e.exception()]
                self._writing = [*under_way, written]

    def _write(self, tag: int, entries: list[Entry]) -> None:
        try:
            # Others may have been faster.
            self._packs.look()
            missing = [entry for entry in entries if not self._packs.has(*entry[:2])]
            if missing and self._takes_more:
                if not self._packs.write(missing, tag):
                    size = sum(len(entry.data) for entry in missing)
                    self._refused_bytes = max(self._refused_bytes, size)
        except OSError as error:
            self._takes_more = False
            self._tell(
                f"The local store {self.folder} takes nothing more ({error.strerror}); "
                "what is not there is read from where it lies."
            )
        finally:
            with self._lock:
                for entry in entries:
                    del self._unwritten[entry.key]
                    self._unwritten_bytes -= len(entry.data)


class StoredFiles:
    """The files of a data set, read through a ``LocalStore``.

    Attributes:
        note: a sentence about the part that the store keeps.
    """

    def __init__(self, store: LocalStore, tag: int, note: str, blocks_ahead: int):
        self.store, self._tag, self.note = store, tag, note
        self._blocks_ahead = blocks_ahead

    def announce(self, paths: Iterable[str], group: Group) -> None:
        """Announces that files will be read from their beginnings, in this order."""
        for path in paths:
            self.store.announce(Block(path, 0, self._tag), group)

    def read_file(self, path: str) -> bytes:
        """Returns a file's bytes, which do not stay at hand.

        Raises:
            tf.errors.OpError: it cannot be read.
            ValueError: it changes while it is read.
        """
        size, _ = self.store.size_and_stamp(path)
        step = block_bytes(path)
        blocks = [Block(path, at, self._tag) for at in range(0, max(size, 1), step)]
        for block in blocks[1:]:
            self.store.announce(block, None)
        parts = []
        for block in blocks:
            parts.append(self.store.read(block))
            self.store.drop(block)
        return b"".join(parts)

    def read_at(self, path: str, begin: int, length: int) -> bytes:
        """Returns a part of a file, up to its end; its blocks stay at hand."""
        end, step = min(begin + length, self.size(path)), block_bytes(path)
        first = begin // step * step
        blocks = [Block(path, at, self._tag) for at in range(first, end, step)]
        for block in blocks[1:]:
            self.store.announce(block, None)
        data = b"".join(map(self.store.read, blocks))
        return data[begin - first : max(end - first, 0)]

    def size(self, path: str) -> int:
        """Returns the bytes of a file."""
        return self.store.size_and_stamp(path)[0]

    def read_from(self, path: str, begin: int) -> bytes:
        """Returns the bytes from a position up to the end of its block.

        The block before is released, and the next ones are announced.
        """
        size, step = self.size(path), block_bytes(path)
        at = begin // step * step
        end = min(at + (self._blocks_ahead + 1) * step, size)
        for later in range(at + step, end, step):
            self.store.announce(Block(path, later, self._tag), _IN_ORDER)
        if at:
            self.store.drop(Block(path, at - step, self._tag))
        block = Block(path, at, self._tag)
        data = self.store.read(block)
        if at + step >= size:
            self.store.drop(block)
        return data[begin - at :]


def read_range(path: str, begin: int, length: int) -> bytes:
    """Reads a part of a file from its origin.

    Raises:
        OSError: it cannot be read.
        tf.errors.OpError: a remote file cannot be read.
        ValueError: the file is shorter.
    """
    remote = "://" in path
    with tf.io.gfile.GFile(path, "rb") if remote else open(path, "rb") as file:
        file.seek(begin)
        data = file.read(length)
    if len(data) != length:
        raise ValueError(
            f"{path} has {len(data):,} bytes behind byte {begin:,}, expected "
            f"{length:,}: it was changed while it was read"
        )
    return data


def _key(block: Block) -> Key:
    local = "://" not in block.path
    path = os.path.abspath(block.path) if local else block.path
    text = f"{path}\0{block.begin}\0{block_bytes(path)}"
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return Key(*(int.from_bytes(part, "little") for part in (digest[:8], digest[8:])))


def _number(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
