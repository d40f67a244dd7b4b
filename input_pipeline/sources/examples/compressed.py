"""Reads TFRecord files that are compressed as a whole, from front to back.

Their first bytes identify them: GZIP and ZLIB begin with their own marks. No record can
be read by its position, and nothing behind damage can be read.
"""

import concurrent.futures
import itertools
import zlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from towers.input_pipeline.sources.files.record import FAULTS, Record, fault_of

_GZIP = b"\x1f\x8b\x08"
# The first bytes, by the level of compression.
_ZLIB = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
# zlib's own number for both.
_EITHER = 32 + zlib.MAX_WBITS
_AT_ONCE = 2**20
_HEAD = 2**12
_FRAME = 12
# Far files answer at the same time.
_THREADS = 16


def kinds(paths: Sequence[str]) -> dict[str, str]:
    """Returns the compression of compressed files, "GZIP" or "ZLIB", by their paths."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        kinds_of = zip(paths, pool.map(_kind, paths), strict=True)
    return {path: kind for path, kind in kinds_of if kind}


def _kind(path: str) -> str:
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            head = file.read(_HEAD)
    except tf.errors.OpError:  # reported when it is read
        return ""
    kind = "GZIP" if head.startswith(_GZIP) else "ZLIB" if head[:2] in _ZLIB else ""
    return kind if kind and _begins_with_a_record(head) else ""


def _begins_with_a_record(head: bytes) -> bool:
    """Tells whether a file's first bytes, decompressed, are a record's length."""
    inflate = zlib.decompressobj(_EITHER)
    try:
        plain = inflate.decompress(head, _FRAME)
    except zlib.error:
        return False
    # No record has 4 GB; a file without records decompresses to nothing.
    return plain[4:8] == bytes(4) if plain else inflate.eof


def walk(path: str, kind: str) -> Iterator[Record]:
    """Reads a file as ``framing.walk``; a bad record stands for all that follow it.

    Args:
        path: the path of the file.
        kind: the compression.
    """
    records = iter(tf.data.TFRecordDataset(path, kind))
    for number in itertools.count():
        record = Record(path, f"record {number}", number)
        try:
            serialized = next(records, None)
        except FAULTS as error:
            yield record.with_fault(fault_of(error), gap=(0, 0), count=None)
            return
        if serialized is None:
            # TensorFlow takes compressed data that are cut off between two records for
            # whole.
            if not is_whole(path):
                fault = "corrupted: the compressed data are truncated"
                yield record.with_fault(fault, gap=(0, 0), count=None)
            return
        yield record.with_raw(serialized)


def is_whole(path: str) -> bool:
    """Tells whether a file's compressed data are complete and undamaged."""
    inflate, is_begun = zlib.decompressobj(_EITHER), False
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            while data := file.read(_AT_ONCE):
                while data:
                    if inflate.eof:  # several streams may follow one another
                        inflate = zlib.decompressobj(_EITHER)
                    inflate.decompress(data)
                    data, is_begun = inflate.unused_data, True
    except zlib.error:
        return False
    return inflate.eof or not is_begun
