"""What is written is read, or nothing is."""

import os
import zlib

import pytest

from towers.input_pipeline.local_store import packs
from towers.input_pipeline.local_store.packs import Entry, Key, Packs

TAG, OTHER = 7, 8


def entries(*numbers, size=1000, stamp=5):
    return [
        Entry(Key(number, number + 1), stamp, bytes([number % 256]) * size)
        for number in numbers
    ]


def opened(folder, limit=10**6):
    said = []
    found = Packs(str(folder), limit, said.append)
    found.tags.add(TAG)
    return found, said


def test_reads_what_another_has_written(tmp_path):
    first, _ = opened(tmp_path)
    second, said = opened(tmp_path)
    assert second.read(Key(3, 4), 5) is None
    assert first.write(entries(1, 3, 2**64 - 2), TAG)
    second.look(now_s=10**9)
    for entry in entries(1, 3, 2**64 - 2):
        assert second.read(entry.key, 5) == entry.data
        assert second.has(entry.key, 5)
    assert second.read(Key(2, 3), 5) is None
    # Half of a key is not enough.
    assert second.read(Key(3, 5), 5) is None
    assert not said


def test_many_packs(tmp_path):
    written, _ = opened(tmp_path)
    for number in range(300):
        assert written.write(entries(number, size=10), TAG)
    # More than are kept open.
    read, _ = opened(tmp_path)
    for number in range(300):
        assert read.read(Key(number, number + 1), 5) == bytes([number % 256]) * 10


def test_the_newest_counts(tmp_path):
    written, _ = opened(tmp_path)
    written.write(entries(1), TAG)
    written.write([Entry(Key(1, 2), 6, b"new")], TAG)
    for read in (written, opened(tmp_path)[0]):
        assert read.read(Key(1, 2), 6) == b"new"


def test_another_state_of_the_data_is_not_read(tmp_path):
    written, said = opened(tmp_path)
    written.write(entries(1, 2), TAG)
    assert written.read(Key(1, 2), 6) is None
    assert len(os.listdir(tmp_path)) == 1
    # When nothing of a pack is good, it goes.
    assert written.read(Key(2, 3), 6) is None
    assert not os.listdir(tmp_path) and not said


@pytest.mark.parametrize("at", range(0, 1000, 111))
def test_a_damaged_entry_is_told_and_not_read(tmp_path, at):
    opened(tmp_path)[0].write(entries(1, 2), TAG)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    read, said = opened(tmp_path)
    assert read.read(Key(1, 2), 5) is None
    assert read.read(Key(2, 3), 5) == entries(2)[0].data
    (line,) = said
    assert f"{path}: an entry at byte 0 is damaged (its checksum differs)" in line
    read.write(entries(1), TAG)
    assert read.read(Key(1, 2), 5) == entries(1)[0].data


def test_no_pack_of_wrong_bytes_is_taken(tmp_path):
    """Cut off anywhere, and with any byte of its table changed."""
    opened(tmp_path)[0].write(entries(1, 2, size=20), TAG)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        read, said = opened(tmp_path)
        assert read.read(Key(1, 2), 5) is None and len(said) == 1
        assert said[0].startswith(f"{path} is left out: ")
    for at in range(40, len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        read, said = opened(tmp_path)
        assert read.read(Key(1, 2), 5) is None and len(said) == 1


def test_the_form_of_a_pack(tmp_path):
    """Written down, as packs of today are to be read by later versions."""
    opened(tmp_path)[0].write([Entry(Key(1, 2), 3, b"data")], TAG)
    (path,) = tmp_path.iterdir()
    row = b"".join(number.to_bytes(8, "little") for number in (1, 2, 3, 0))
    row += (4).to_bytes(4, "little") + zlib.crc32(b"data").to_bytes(4, "little")
    end = TAG.to_bytes(8, "little") + (1).to_bytes(4, "little")
    crc = zlib.crc32(row + end).to_bytes(4, "little")
    assert path.read_bytes() == b"data" + row + b"TOWPACK1" + end + crc


def test_never_takes_more_than_its_limit(tmp_path):
    written, _ = opened(tmp_path, limit=5000)
    other, _ = opened(tmp_path, limit=5000)
    fitted = [
        (written, other)[number % 2].write(entries(number), TAG) for number in range(9)
    ]
    assert fitted == [True] * 4 + [False] * 5
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5000


def test_two_who_write_at_once_stay_below_the_limit(tmp_path, monkeypatch):
    written, _ = opened(tmp_path, limit=2000)
    monkeypatch.setattr(written, "_make_room", lambda size: True)  # nobody was there
    opened(tmp_path, limit=2000)[0].write(entries(1), TAG)
    assert not written.write(entries(2), TAG)
    assert len([*tmp_path.iterdir()]) == 1


def test_what_nobody_uses_makes_room(tmp_path):
    for tag in (TAG, OTHER):
        opened(tmp_path)[0].write(entries(tag, size=2000), tag)
    written, _ = opened(tmp_path, limit=5000)
    assert not written.write(entries(1, size=2000), TAG)
    assert written.room() < 3000
    long_ago = os.stat(tmp_path).st_mtime - packs.UNUSED_S - 60
    for path in tmp_path.iterdir():
        os.utime(path, (long_ago, long_ago))
    assert written.room() > 4900
    assert written.write(entries(1, size=2000), TAG)
    assert written.read(Key(OTHER, OTHER + 1), 5) is None
    assert written.read(Key(TAG, TAG + 1), 5) is not None


def test_to_read_is_to_use(tmp_path):
    opened(tmp_path)[0].write(entries(1), OTHER)
    (path,) = tmp_path.iterdir()
    os.utime(path, (0, 0))
    read, _ = opened(tmp_path)
    read.read(Key(1, 2), 5)
    assert path.stat().st_mtime > 0


def test_a_pack_that_was_removed_is_not_there(tmp_path):
    opened(tmp_path)[0].write(entries(1), TAG)
    read, said = opened(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    assert read.read(Key(1, 2), 5) is None and not said


def test_what_was_left_half_written_is_removed(tmp_path):
    old, new = tmp_path / ".a.pack.part", tmp_path / ".b.pack.part"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    read, said = opened(tmp_path)
    assert not old.exists() and new.exists() and not said
    assert read.read(Key(1, 2), 5) is None


def test_a_pack_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    written, _ = opened(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space"):
        written.write(entries(1), TAG)
    assert not os.listdir(tmp_path)
