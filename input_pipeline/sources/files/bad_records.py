"""Checks the records of a file one by one, to find bad ones."""

import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from towers.input_pipeline.images import masks
from towers.input_pipeline.images.decode import decode_image
from towers.input_pipeline.sources.base import Source
from towers.input_pipeline.sources.files.record import (
    FAULTS,
    BadRecordError,
    Record,
    fault_of,
)
from towers.input_pipeline.sources.targets import LARGEST, expected_number

# Records after a bad one that tell whether it is one among good ones.
_LOOK_ON = 20
_FEW = 0.25


def check_records(
    source: Source, path: str, split: str | None = None
) -> Iterator[Record]:
    """Decodes one file's records, and yields them with their faults."""
    for record in source.walk(path, split):
        yield _checked(source, record)


def read_labels(
    source: Source, path: str, limit: int | None = None, skip_bad: bool = False
) -> np.ndarray:
    """Reads and checks the targets of one file.

    Args:
        source: a source with ``labels_need_checking``.
        path: the path of the file.
        limit: the most labels to read, or None for all.
        skip_bad: whether to leave out the labels of bad records.

    Returns:
        Int64 labels [N] of classes; other targets as in `Source.target`.

    Raises:
        ValueError: a label is out of range, or a record cannot be read.
    """
    target = source.target
    nothing = np.empty((0, *target.row_shape), target.dtype)
    try:
        labels = np.concatenate([nothing, *source.labels(path, limit)])
    except FAULTS:
        # Batches do not tell which record it was; single records do.
        labels = None
    if labels is not None and np.all(target.is_good(labels)):
        return labels
    good = []
    for record in itertools.islice(check_records(source, path), limit):
        if not record.fault:
            good.append(source.parse_one(record.raw)[1].numpy())
        elif not skip_bad:
            raise blame(record, check_records(source, path))
    return np.stack(good) if good else nothing


def blame(bad: Record, records: Iterable[Record]) -> BadRecordError:
    """Makes an error from a file's first bad record; `records` are all, in order."""
    following = (record for record in records if record.number > bad.number)
    some = [*itertools.islice(following, _LOOK_ON)]
    faults = sum(bool(record.fault) for record in some)
    if faults <= _FEW * len(some):
        return BadRecordError(str(bad))
    count = f"{faults} of the {len(some)} behind it" if len(some) > 1 else "the next"
    return BadRecordError(f"{bad}; and {count} cannot be used either", many=True)


def _checked(source: Source, record: Record) -> Record:
    """Returns the record, with a fault if it cannot be decoded or learnt from."""
    if record.fault:
        return record
    try:
        image, label = source.parse_one(record.raw)
    except FAULTS as error:
        return record.with_fault(source.explain(fault_of(error)))
    if label.dtype == tf.string:
        try:
            encoded = source.load_mask(label)
            if fault := masks.fault(encoded.numpy()):
                return record.with_fault(f"{source.label_field}: {fault}")
            label = masks.decode(encoded)
        except FAULTS as error:
            return record.with_fault(f"{source.label_field}: {fault_of(error)}")
    if fault := source.target.fault(label.numpy(), source.label_field):
        return record.with_fault(fault)
    if source.encoded:
        try:
            decode_image(source.load(image), source.image_shape)
        except FAULTS as error:
            return record.with_fault(f"{source.image_fields[0]}: {fault_of(error)}")
        return record
    row = image.get("dense") if isinstance(image, Mapping) else image
    good = row is None or not row.dtype.is_floating or np.abs(row) <= LARGEST
    if not np.all(good):
        (first, *_) = np.flatnonzero(~good)
        name, value = source.image_fields[first], float(row[first])
        return record.with_fault(
            f"{name} is {value}, expected {expected_number(value)}"
        )
    return record
