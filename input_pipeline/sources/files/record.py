"""A record of a file, and what may be wrong with it."""

import dataclasses
from typing import Any

import tensorflow as tf

# More records than a file has; where files are read from front to back, the records of
# the n-th of a split are numbered from n times this.
FILE = 2**40
# Said of a file of which places are known that may no longer hold.
CHANGED = (
    "has changed since the run began: expected files that stay as they are while they "
    "are read, so run again once nobody writes to them"
)


@dataclasses.dataclass(frozen=True)
class Record:
    """One record of a file, or what is found in its place.

    Attributes:
        path: the file.
        place: the position in it, a phrase; empty where the file is the record.
        number: the record's own, as ``Source.batches`` counts.
        raw: the raw record; None where there is none.
        fault: why it cannot be used, a phrase; empty if nothing is known against it.
        gap: in bytes, where it begins and ends, if it cannot even be read.
        count: records that it stands for; None for all that may follow in the file.
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
        """File and position."""
        return f"{self.path}: {self.place}" if self.place else self.path

    def __str__(self) -> str:
        """One sentence that names file, position and reason."""
        behind = "" if self.count is not None else ", and nothing behind it can be read"
        return f"{self.where}: {self.fault}{behind}"

    def with_raw(self, raw: Any) -> "Record":
        """The same, read."""
        return dataclasses.replace(self, raw=raw)

    def with_fault(self, fault: str, **facts: Any) -> "Record":
        """The same, found bad."""
        return dataclasses.replace(self, raw=None, fault=fault, **facts)


# What TensorFlow raises while it reads a bad record.
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
    """What one of ``FAULTS`` says, in a phrase."""
    if isinstance(error, UnicodeDecodeError):
        # TensorFlow puts the record's own bytes into some messages.
        return "cannot be parsed"
    # Without the op's name around it.
    message = error.message.removeprefix("{{function_node __wrapped__")
    message = message.rpartition("}} ")[2].partition(" [Op:")[0]
    # TensorFlow's file system in memory says nothing.
    reason = message.partition("\n")[0].strip() or type(error).__name__
    lost = isinstance(error, tf.errors.DataLossError)
    return f"corrupted: {reason}" if lost else reason
