"""Stores entries in packs: files of a folder, with a checksum for each entry.

A pack is written under another name, renamed when it is whole, and never changed. So a
process that is killed leaves only whole packs, and processes of several machines share
a folder without a lock or a server. A pack ends with the table of its entries.
"""

import contextlib
import os
import secrets
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_SUFFIX = ".pack"
_MAGIC = b"TOWPACK1"
# After the table: magic, tag, number of entries, checksum of the table and of these.
_FOOTER = struct.Struct("<8sQII")
_CHECKED = struct.Struct("<QI")
_ENTRY = np.dtype(
    [
        *(("key", "<u8"), ("check", "<u8"), ("stamp", "<u8"), ("offset", "<u8")),
        *(("length", "<u4"), ("crc", "<u4")),
    ]
)
_ROW = np.dtype([*_ENTRY.descr, ("pack", "<u4")])

# A pack that has not been used for this long may make room for others.
UNUSED_S = 24 * 3600
# No writer takes this long for one pack.
_ABANDONED_S = 600
# The interval for finding new packs of other processes.
_LOOK_S = 2.0
_MOST_OPEN = 128


class Key(NamedTuple):
    """The key of an entry: 16 bytes of a hash, as two numbers."""

    key: int
    check: int


class Entry(NamedTuple):
    """Stored bytes, and the state of the data that they belong to.

    Attributes:
        key: the key of the entry.
        stamp: changes with the data.
        data: the stored bytes.
    """

    key: Key
    stamp: int
    data: bytes


class Taken(NamedTuple):
    """The bytes that the files of a folder take.

    Attributes:
        ours: the packs of the data sets that are read.
        others: all other files that have to stay.
        disk: what all files of the folder could take without a limit.
    """

    ours: int
    others: int
    disk: int


class Packs:
    """The packs of a folder.

    Args:
        folder: the folder, which is created.
        limit_bytes: the most bytes of all files of the folder.
        tell: receives a sentence about damaged files.

    Attributes:
        tags: kinds of packs that never make room for others.

    Raises:
        OSError: the folder cannot be created or listed.
    """

    def __init__(self, folder: str, limit_bytes: int, tell: Callable[[str], None]):
        os.makedirs(folder, exist_ok=True)
        self.folder, self._limit, self._tell = folder, limit_bytes, tell
        self.tags: set[int] = set()
        self._lock = threading.RLock()
        # Packs are numbered in the order of discovery; each has a number of good
        # entries.
        self._names: list[str] = []
        self._left: list[int] = []
        self._tag_of: dict[str, int] = {}
        self._known, self._used = set(), set()
        self._gone: set[int] = set()
        self._bad: set[tuple[int, int]] = set()
        self._table = _Table()
        self._files: dict[int, int] = {}
        self._looked_s = 0.0
        self._remove_abandoned()
        self.look()

    def look(self, now_s: float | None = None) -> None:
        """Takes packs that other processes have written, at most every 2 s."""
        with self._lock:
            now_s = time.monotonic() if now_s is None else now_s
            if self._looked_s and now_s < self._looked_s + _LOOK_S:
                return
            self._looked_s = now_s
            packs = (name for name in os.listdir(self.folder) if _is_pack(name))
            # The names of newer packs sort last.
            for name in sorted(set(packs) - self._known):
                self._take_over(name)

    def read(self, key: Key, stamp: int) -> bytes | None:
        """Returns the entry for this state of the data; None if there is none.

        A damaged entry counts as missing, and is reported.
        """
        with self._lock:
            row = self._find(key)
            if row is None:
                return None
            pack, offset = int(row["pack"]), int(row["offset"])
            if row["stamp"] != stamp:
                self._leave_out(pack, offset)
                return None
            file = self._open(pack)
        if file is None:
            return None
        try:
            data = os.pread(file, int(row["length"]), offset)
        except OSError as error:
            data, why = b"", error.strerror
        else:
            why = "its checksum differs"
        finally:
            os.close(file)
        if len(data) == row["length"] and zlib.crc32(data) == row["crc"]:
            return data
        self._leave_out(pack, offset)
        self._tell(
            f"{os.path.join(self.folder, self._names[pack])}: an entry at byte "
            f"{offset} is damaged ({why}), so it is fetched again."
        )
        return None

    def has(self, key: Key, stamp: int) -> bool:
        """Tells whether there is an entry for this state of the data."""
        with self._lock:
            row = self._find(key)
            return row is not None and row["stamp"] == stamp

    def write(self, entries: Sequence[Entry], tag: int) -> bool:
        """Writes a pack of entries.

        Args:
            entries: the entries, at least one.
            tag: the kind of the pack.

        Returns:
            Whether there was room for the pack.

        Raises:
            OSError: it cannot be written, for example on a full disk.
        """
        table, offset = [], 0
        for key, stamp, data in entries:
            table.append((*key, stamp, offset, len(data), zlib.crc32(data)))
            offset += len(data)
        rows = np.array(table, _ENTRY)
        end = _end(rows, tag)
        size = offset + len(end)
        if not self._make_room(size):
            return False
        name = f"{time.time_ns():020d}-{secrets.token_hex(6)}{_SUFFIX}"
        path = os.path.join(self.folder, name)
        part = os.path.join(self.folder, f".{name}.part")
        try:
            with open(part, "xb") as file:
                file.writelines(data for _, _, data in entries)
                file.write(end)
            # Others may have written at the same time: then neither pack is kept.
            if self._size() > self._limit:
                return False
            with self._lock:
                os.rename(part, path)
                self._known.add(name)
                self._add(name, tag, rows)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)
        return True

    def room(self) -> int:
        """Returns the bytes for packs of ``tags``, including existing ones."""
        taken = self.taken()
        return max(min(self._limit, taken.disk) - taken.others, 0)

    def taken(self) -> Taken:
        """Returns the bytes that the folder takes now, and could take.

        Raises:
            OSError: the folder is gone.
        """
        with self._lock:
            sizes = self._sizes()
            ours = sum(size for name, (size, _) in sizes.items() if self._is_ours(name))
            others = sum(
                size
                for name, (size, used_s) in sizes.items()
                if not self._is_ours(name) and not self._may_go(name, used_s)
            )
        disk = os.statvfs(self.folder)
        total = sum(size for size, _ in sizes.values())
        return Taken(ours, others, disk.f_bavail * disk.f_frsize + total)

    def _make_room(self, size: int) -> bool:
        """Removes packs that have not been used for long, if that makes room."""
        with self._lock:
            sizes = self._sizes()
            over = sum(size for size, _ in sizes.values()) + size - self._limit
            old = [name for name in sizes if self._may_go(name, sizes[name][1])]
            if over > sum(sizes[name][0] for name in old):
                return False
            for name in sorted(old, key=lambda name: sizes[name][1]):
                if over <= 0:
                    break
                self._remove(name)
                over -= sizes[name][0]
        return True

    def _may_go(self, name: str, used_s: float) -> bool:
        """Tells whether a pack, last used at a time, may make room for others."""
        unused = time.time() > used_s + UNUSED_S
        return unused and name in self._known and not self._is_ours(name)

    def _is_ours(self, name: str) -> bool:
        return self._tag_of.get(name) in self.tags

    def _sizes(self) -> dict[str, tuple[int, float]]:
        """Returns the bytes of each file in the folder, and when it was last used."""
        sizes = {}
        with os.scandir(self.folder) as files:
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    stat = file.stat()
                    sizes[file.name] = stat.st_size, stat.st_mtime
        return sizes

    def _size(self) -> int:
        return sum(size for size, _ in self._sizes().values())

    def _find(self, key: Key) -> np.void | None:
        row = self._table.find(key)
        if row is None or int(row["pack"]) in self._gone:
            return None
        position = int(row["pack"]), int(row["offset"])
        return None if position in self._bad else row

    def _open(self, pack: int) -> int | None:
        """Returns a descriptor for the caller; None if the pack is removed."""
        if pack not in self._files:
            path = os.path.join(self.folder, self._names[pack])
            try:
                self._files[pack] = os.open(path, os.O_RDONLY)
            except OSError:
                self._gone.add(pack)
                return None
            if pack not in self._used:
                self._used.add(pack)
                # Marks the pack as used.
                with contextlib.suppress(OSError):
                    os.utime(path)
            if len(self._files) > _MOST_OPEN:
                os.close(self._files.pop(next(iter(self._files))))
        return os.dup(self._files[pack])

    def _leave_out(self, pack: int, offset: int) -> None:
        """Leaves out a bad entry, and removes a pack without good entries."""
        with self._lock:
            if (pack, offset) in self._bad:
                return
            self._bad.add((pack, offset))
            self._left[pack] -= 1
            if not self._left[pack]:
                self._gone.add(pack)
                self._remove(self._names[pack])

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.folder, name))

    def _take_over(self, name: str) -> None:
        self._known.add(name)
        path = os.path.join(self.folder, name)
        try:
            tag, rows = _read_end(path)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._tell(f"{path} is left out: {error}.")
            return
        self._add(name, tag, rows)

    def _add(self, name: str, tag: int, rows: np.ndarray) -> None:
        placed = np.zeros(len(rows), _ROW)
        for field in _ENTRY.names:
            placed[field] = rows[field]
        placed["pack"] = len(self._names)
        self._names.append(name)
        self._tag_of[name] = tag
        self._left.append(len(rows))
        self._table.add(placed)

    def _remove_abandoned(self) -> None:
        """Removes half-written files of processes that were killed."""
        for name, (_, changed_s) in self._sizes().items():
            abandoned = time.time() > changed_s + _ABANDONED_S
            if name.startswith(".") and name.endswith(".part") and abandoned:
                self._remove(name)


class _Table:
    """Entries by key: sorted parts of growing size, of which newer ones count.

    An entry takes 44 bytes, where a dict takes some 200.
    """

    def __init__(self):
        self._parts: list[np.ndarray] = []

    def add(self, rows: np.ndarray) -> None:
        """Adds rows, which replace rows with the same keys."""
        self._parts.append(_sorted(rows))
        while len(self._parts) > 1 and len(self._parts[-2]) < 2 * len(self._parts[-1]):
            newer, older = self._parts.pop(), self._parts.pop()
            self._parts.append(_sorted(np.concatenate([newer, older])))

    def find(self, key: Key) -> np.void | None:
        """Returns the newest row of a key."""
        for rows in reversed(self._parts):
            index = np.searchsorted(rows["key"], np.uint64(key.key))
            if index < len(rows) and rows["key"][index] == key.key:
                row = rows[index]
                return row if row["check"] == key.check else None
        return None


def _sorted(rows: np.ndarray) -> np.ndarray:
    """Sorts rows by their keys; of equal keys, the first row stays."""
    _, first = np.unique(rows["key"], return_index=True)
    return rows[first]


def _end(rows: np.ndarray, tag: int) -> bytes:
    table = rows.tobytes()
    crc = zlib.crc32(_CHECKED.pack(tag, len(rows)), zlib.crc32(table))
    return table + _FOOTER.pack(_MAGIC, tag, len(rows), crc)


def _read_end(path: str) -> tuple[int, np.ndarray]:
    """Returns the tag and the table of a pack.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no pack, or damaged.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        # Opening a pipe would wait for a writer.
        raise ValueError("it is no regular file")
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _FOOTER.size, 0))
        footer = file.read()
        if len(footer) != _FOOTER.size:
            raise ValueError("it is too short for a pack")
        magic, tag, count, crc = _FOOTER.unpack(footer)
        begin = size - _FOOTER.size - count * _ENTRY.itemsize
        if magic != _MAGIC or begin < 0:
            raise ValueError("it does not end as a pack does")
        file.seek(begin)
        table = file.read(count * _ENTRY.itemsize)
    if zlib.crc32(_CHECKED.pack(tag, count), zlib.crc32(table)) != crc:
        raise ValueError("the table of its entries is damaged (its checksum differs)")
    return tag, np.frombuffer(table, _ENTRY)


def _is_pack(name: str) -> bool:
    return name.endswith(_SUFFIX) and not name.startswith(".")
