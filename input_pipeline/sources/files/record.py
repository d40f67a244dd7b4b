"""A record of a file, and its possible faults."""

import dataclasses
from typing import Any

import tensorflow as tf

# More records than a file has; in files that are read from front to back, the records
# of the n-th file of a split are numbered from n times this.
FILE = 2**40
# The message for a file whose known places may no longer hold.
CHANGED = (
    "has changed since the run began: expected files that stay as they are while they "
    "are read, so run again once nobody writes to them"
)


@dataclasses.dataclass(frozen=True)
class Record:
    """One record of a file, or the fault in its place.

    Attributes:
        path: the path of the file.
        place: the position in it, a phrase; empty if the file is the record.
        number: the record's number, as ``Source.batches`` counts.
        raw: the raw record; None if there is none.
        fault: why it cannot be used, a phrase; empty if no fault is known.
        gap: the bounds in bytes, if it cannot even be read.
        count: number of records that it stands for; None for all that may follow.
    """

    path: str
    place: str
    number: int
    raw: Any = None
    fault: str = ""
    gap: tuple[int, int] | None = None
    count: int | None = 1

    @property
    def last_number(self) -> int:
        """Number of the last record that it stands for."""
        if self.count is None:
            return self.number // FILE * FILE + FILE - 1
        return self.number + self.count - 1

    @property
    def where(self) -> str:
        """The file, and the position in it."""
        return f"{self.path}: {self.place}" if self.place else self.path

    def __str__(self) -> str:
        """Names file, position and reason in one sentence."""
        behind = "" if self.count is not None else ", and nothing behind it can be read"
        return f"{self.where}: {self.fault}{behind}"

    def with_raw(self, raw: Any) -> "Record":
        """Returns the record with its raw content."""
        return dataclasses.replace(self, raw=raw)

    def with_fault(self, fault: str, **facts: Any) -> "Record":
        """Returns the record with a fault."""
        return dataclasses.replace(self, raw=None, fault=fault, **facts)


# TensorFlow's errors for a bad record.
FAULTS = (tf.errors.OpError, UnicodeDecodeError)


class BadRecordError(ValueError):
    """One record cannot be used; the message names file, position and reason.

    Attributes:
        many: whether most of the records after it cannot be used either, so that the
            fault is not in the record.
    """

    def __init__(self, message: str, many: bool = False):
        super().__init__(message)
        self.many = many


def fault_of(error: Exception) -> str:
    """Describes one of ``FAULTS`` in a phrase."""
    if isinstance(error, UnicodeDecodeError):
        # TensorFlow puts the record's own bytes into some messages.
        return "cannot be parsed"
    # Without the op's name around it.
    message = error.message.removeprefix("{{function_node __wrapped__")
    message = message.rpartition("}} ")[2].partition(" [Op:")[0]
    # TensorFlow's file system in memory has no messages.
    reason = message.partition("\n")[0].strip() or type(error).__name__
    lost = isinstance(error, tf.errors.DataLossError)
    return f"corrupted: {reason}" if lost else reason
