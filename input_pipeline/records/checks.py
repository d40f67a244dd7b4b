"""Finds bad records: by labels before training, in all ways after an error.

TensorFlow's errors do not name the bad record, and `ignore_errors` drops whole batches.
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

# TensorFlow's errors for a bad record.
BAD_RECORD = (
    tf.errors.DataLossError,
    tf.errors.FailedPreconditionError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    UnicodeDecodeError,
)
_CHANGED = re.compile(r"[^\[\]\n]+ " + re.escape(CHANGED))

# TensorFlow's message for more, or fewer, records than were counted.
ANOTHER_COUNT = "Input dataset was expected to contain"

# Reading this much takes no time; of more, only a sample is checked.
_SCAN_ALL_BELOW_MB = 16
# Below this, the lengths of records are read.
_CHECK_ENDS_BELOW_MB = 256
_SAMPLE_PER_FILE, _SAMPLED_FILES = 100, 100
# Files whose sizes are requested at once.
_AT_ONCE = 16


def check_image_shape(source: Source, shape: Sequence[int]) -> None:
    """Checks that a source's examples can be made in a shape.

    Raises:
        ValueError: the shape is no shape of an image, or not that of the source's rows
            of numbers, or its channels do not convert.
    """
    own = tuple(source.image_shape)
    try:
        wanted = tuple(operator.index(number) for number in shape)
    except TypeError:
        wanted = ()
    if len(own) == 1:
        if wanted != own:
            raise ValueError(
                f"image_shape is {shape}, but {source.name} has rows of {own[0]} "
                f"numbers, which stay as they are: expected {own}"
            )
        return
    if len(wanted) != 3 or min(wanted) < 1:
        raise ValueError(
            f"image_shape is {shape}, expected height, width and channels, such as "
            f"(224, 224, {own[-1]})"
        )
    if own[-1] is not None and {wanted[-1], own[-1]} not in ({own[-1]}, {1, 3}):
        raise ValueError(
            f"image_shape is {shape}, but the images of {source.name} have {own[-1]} "
            "channels, and only 1 and 3 convert into each other: expected "
            f"{(*wanted[:2], own[-1])}"
        )


def scan_labels(source: Source, split: str) -> None:
    """Finds a label outside [0, num_classes) before training starts.

    No image is decoded. All labels are read if the split's files are smaller than 16 MB
    together, otherwise the first 100 of 100 files: the others are checked while they
    are trained on, see ``assert_good``. The ends of files are checked if they are
    smaller than 256 MB together, also of sources whose labels are right by
    construction. The log names empty files.

    Args:
        source: a prepared source.
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
    """A context that turns TensorFlow's error for a bad record into one that names it.

    Args:
        *sources: prepared sources that may be read in the context.

    Raises:
        BadRecordError: TensorFlow raised an error, and ``find_bad_record`` found the
            reason in a split of a source. Without a reason, the error is left as it is.
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
    """Makes an error from the first bad record of some sources."""
    for source in {id(source.origin): source for source in sources}.values():
        for split in source.splits:
            if record := next(find_bad_records(source, split), None):
                return blame(record, check_records(source.origin, record.path))
    return None


def assert_good(
    images: Any, labels: tf.Tensor, target: Target, may_be_missing: bool = False
) -> None:
    """Fails at run time, on any device, if an example cannot be learnt from.

    Missing numbers are NaN.

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
        # For NaN, this is false.
        good = tf.abs(numbers) <= LARGEST
        if may_be_missing:
            good |= tf.math.is_nan(numbers)
        finite = tf.reduce_all(good)
        tf.debugging.Assert(finite, ["a number is not finite"])


def find_bad_records(source: Source, split: str) -> Iterator[Record]:
    """Yields the records of a split that cannot be read, decoded or learnt from.

    It is slow, as it reads the files one record at a time: call it after an error in
    the pipeline, which cannot name the record. Records that are passed over already are
    left out.
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
    """Describes where the first bad record of a split is, and why it is bad.

    Returns:
        One sentence, or None if every record is good or the source has no files.
    """
    record = next(find_bad_records(source, split), None)
    return record and str(record)
