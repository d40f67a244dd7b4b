"""Which record is bad: asked before training for labels, after an error for all.

TensorFlow's errors do not say which record was bad, and `ignore_errors` drops whole
batches.
"""

import concurrent.futures
import contextlib
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers.input_pipeline.sources.base import Source
from towers.input_pipeline.sources.files.bad_records import (
    blame,
    check_records,
    read_labels,
)
from towers.input_pipeline.sources.files.record import (
    CHANGED,
    BadRecordError,
    Record,
    fault_of,
)
from towers.input_pipeline.sources.targets import LARGEST, Target
from towers.program import progress, voice
from towers.program.progress import Progress

# What TensorFlow raises where a record is bad.
BAD_RECORD = (
    tf.errors.DataLossError,
    tf.errors.FailedPreconditionError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    UnicodeDecodeError,
)
_CHANGED = re.compile(r"[^\[\]\n]+ " + re.escape(CHANGED))

# It says so of more records, and of fewer, than were counted.
ANOTHER_COUNT = "Input dataset was expected to contain"

# To read this much takes no time; of more, some records of some files are looked at.
_SCAN_ALL_BELOW_MB = 16
# Of this much, only the lengths of records are read.
_CHECK_ENDS_BELOW_MB = 256
_SAMPLE_PER_FILE, _SAMPLED_FILES = 100, 100
# Files whose sizes are asked for at once.
_AT_ONCE = 16


def check_image_shape(source: Source, shape: Sequence[int]) -> None:
    """Checks that a source's examples can be made in a shape.

    Raises:
        ValueError: it is no shape of an image, or not that of the source's rows of
            numbers, or its channels do not convert.
    """
    own = tuple(source.image_shape)
    try:
        found = tuple(operator.index(number) for number in shape)
    except TypeError:
        found = ()
    if len(own) == 1:
        if found != own:
            raise ValueError(
                f"image_shape is {shape}, but {source.name} has rows of {own[0]} "
                f"numbers, which stay as they are: expected {own}"
            )
        return
    if len(found) != 3 or min(found) < 1:
        raise ValueError(
            f"image_shape is {shape}, expected height, width and channels, such as "
            f"(224, 224, {own[-1]})"
        )
    if own[-1] is not None and {found[-1], own[-1]} not in ({own[-1]}, {1, 3}):
        raise ValueError(
            f"image_shape is {shape}, but the images of {source.name} have {own[-1]} "
            "channels, and only 1 and 3 convert into each other: expected "
            f"{(*found[:2], own[-1])}"
        )


def scan_labels(source: Source, split: str) -> None:
    """Finds a label outside [0, num_classes) before training starts.

    No image is decoded. All labels are read where the split's files are smaller than
    16 MB together, and otherwise the first 100 of 100 files: the others are checked as
    they are trained on, see ``assert_good``. The ends of files are looked at if they
    are smaller than 256 MB together, also of sources whose labels are right by
    construction. An empty file is said in the log.

    Args:
        source: prepared.
        split: one of ``source.splits``.

    Raises:
        ValueError: a label is out of range, or a file cannot be read; names the file
            and the position.
    """
    if not (source.labels_need_checking or source.ends_need_checking):
        return
    paths = source.files(split)
    try:
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            size = sum(stat.length for stat in pool.map(tf.io.gfile.stat, paths))
    except tf.errors.OpError as error:
        raise BadRecordError(f"a file cannot be read: {fault_of(error)}") from error
    checks_ends = size < _CHECK_ENDS_BELOW_MB * 2**20
    limit, of_labels = None, {*paths} if source.labels_need_checking else {}
    if of_labels and size >= _SCAN_ALL_BELOW_MB * 2**20:
        limit = _SAMPLE_PER_FILE
        of_labels = {*paths[:: len(paths) // _SAMPLED_FILES + 1]}
    what = f"Checking the files of {source.name}"
    for path in progress.over(paths, what, len(paths), "files", progress.EARLY_S):
        if checks_ends and not source.is_whole(path):
            for record in source.walk(path):
                if record.fault:
                    raise BadRecordError(str(record))
        if path in of_labels and not len(read_labels(source, path, limit)):
            voice.warn(f"{path} holds no record.")


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
    except BAD_RECORD as error:
        if changed := _CHANGED.search(str(error)):
            raise BadRecordError(changed[0], many=True) from error
        with Progress("Looking for the record that cannot be read"):
            if bad := _first_bad(sources):
                raise bad from error
        if ANOTHER_COUNT in str(error):
            names = " or ".join(dict.fromkeys(source.name for source in sources))
            raise BadRecordError(
                f"the files of {names} hold another number of records than when the "
                "run began: expected files that stay as they are while they are read, "
                "so run again once nobody writes to them",
                many=True,
            ) from error
        raise


def _first_bad(sources: Sequence[Source]) -> BadRecordError | None:
    """Makes an error of the first bad record of some sources."""
    for source in {id(source.origin): source for source in sources}.values():
        for split in source.splits:
            if record := next(find_bad_records(source, split), None):
                return blame(record, check_records(source.origin, record.path))
    return None


def assert_good(
    images: Any, labels: tf.Tensor, target: Target, may_be_missing: bool = False
) -> None:
    """Fails at run time on any device where an example cannot be learnt from.

    Numbers are NaN where they may be missing.

    On a GPU, or under XLA, a label outside [0, num_classes) would silently give a loss
    of NaN or 0; so would a number that is not finite, anywhere.
    """
    if labels.dtype != tf.string:  # masks that have yet to be decoded
        tf.debugging.Assert(
            tf.reduce_all(target.is_good(labels)),
            [f"a label is not {target.expected}:", labels],
        )
    numbers = images.get("dense") if isinstance(images, Mapping) else images
    if numbers is not None and numbers.dtype.is_floating:
        # Of NaN, that is false.
        good = tf.abs(numbers) <= LARGEST
        if may_be_missing:
            good |= tf.math.is_nan(numbers)
        finite = tf.reduce_all(good)
        tf.debugging.Assert(finite, ["a number is not finite"])


def find_bad_records(source: Source, split: str) -> Iterator[Record]:
    """Yields the records of a split that cannot be read, decoded or learnt from.

    Slow, since it goes over the files one record at a time: to be called after an
    error in the pipeline, which cannot say where the record came from. Those that are
    passed over already are left out.
    """
    source = source.origin
    known = {record.number for record in source.passed_over.get(split, ())}
    for record in (source.faults or {}).get(split, ()):
        if record.number not in known:
            known.add(record.number)
            yield record
    for path in source.files(split):
        for record in check_records(source, path, split):
            if record.fault and record.number not in known:
                yield record


def find_bad_record(source: Source, split: str) -> str | None:
    """Says of the first bad record of a split where it is, and why it is one.

    Returns:
        One sentence, or None where every record is good or the source has no files.
    """
    record = next(find_bad_records(source, split), None)
    return record and str(record)
