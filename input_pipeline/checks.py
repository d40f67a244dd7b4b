"""Which record is bad: asked before training for labels, after an error for all."""

import contextlib
import itertools
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from input_pipeline.sources.base import BadRecordError, Source, blame

# What TensorFlow raises where a record is bad.
_BAD_RECORD = (
    tf.errors.DataLossError,
    tf.errors.FailedPreconditionError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
)

# Reading this much takes seconds; more than that is sampled.
_SCAN_ALL_BELOW_MB = 256
_SAMPLE_PER_FILE = 1000


def scan_labels(source: Source, split: str) -> None:
    """Finds a label outside [0, num_classes) before training starts.

    No image is decoded. All labels are read where the split's files are smaller than
    256 MB together, and the first 1000 of each file otherwise. Does nothing for
    sources whose labels are right by construction.

    Args:
        source: prepared.
        split: one of ``source.splits``.

    Raises:
        ValueError: a label is out of range, or a file cannot be read; names the file
            and the position.
    """
    if not source.labels_need_checking:
        return
    paths = source.files(split)
    size = sum(tf.io.gfile.stat(path).length for path in paths)
    limit = None if size < _SCAN_ALL_BELOW_MB * 2**20 else _SAMPLE_PER_FILE
    for path in paths:
        read_labels(source, path, limit)


@contextlib.contextmanager
def blame_records(*sources: Source) -> Iterator[None]:
    """Turns TensorFlow's error for a bad record into one that says which it is.

    Args:
        *sources: prepared; what may be read inside.

    Raises:
        BadRecordError: TensorFlow raised an error, and ``find_bad_record`` found the
            reason in a split of a source. Without one, the error is left as it is.
    """
    try:
        yield
    except _BAD_RECORD as error:
        for source in {id(source.origin): source for source in sources}.values():
            for split in source.splits:
                if reason := find_bad_record(source, split):
                    raise BadRecordError(reason) from error
        raise


def assert_labels(labels: tf.Tensor, num_classes: float) -> None:
    """Fails at run time on any device where a label is outside [0, num_classes).

    On a GPU, it would silently give a loss of NaN or 0.
    """
    tf.debugging.Assert(
        tf.reduce_all((labels >= 0) & (labels < num_classes)),
        [f"label outside 0..{num_classes - 1}:", labels],
    )


def find_bad_record(source: Source, split: str) -> str | None:
    """Finds the first record that cannot be read, decoded or learnt from.

    Slow, since it goes over the files one record at a time: to be called after an
    error in the pipeline, which cannot say where the record came from.

    Args:
        source: prepared.
        split: one of ``source.splits``.

    Returns:
        One sentence that names file, position and reason, or None where every record
        is good or the source has no files.
    """
    source = source.origin
    try:
        for path in source.files(split):
            _check_records(source, path)
    except BadRecordError as error:
        return str(error)
    return None


def read_labels(source: Source, path: str, limit: int | None = None) -> np.ndarray:
    """Reads and checks the labels of one file.

    Args:
        source: one with ``labels_need_checking``.
        path: of the file.
        limit: labels to read at most, or None for all.

    Returns:
        int64 [N].

    Raises:
        ValueError: a label is out of range, or a record cannot be read.
    """
    batches = source.labels(path, limit)
    try:
        labels = np.concatenate([np.empty([0], np.int64), *batches])
    except tf.errors.OpError:
        # The batches cannot say which record it was; going one by one can.
        _check_records(source, path)
        raise
    bad = np.flatnonzero((labels < 0) | (labels >= source.num_classes))
    if bad.size:
        where, _ = next(itertools.islice(source.walk(path), int(bad[0]), None))
        _check_label(where, int(labels[bad[0]]), source.num_classes)
    return labels


def _check_records(source: Source, path: str) -> None:
    """Raises a ``BadRecordError`` for the first bad record of a file."""
    for where, record in source.walk(path):
        with blame(where):
            _, label = source.decode(record)
        _check_label(where, int(label), source.num_classes)


def _check_label(where: str, label: int, num_classes: float) -> None:
    if not 0 <= label < num_classes:
        raise BadRecordError(f"{where}: label {label} is outside [0, {num_classes})")
