"""The ways in which a value can depend on the examples of a batch."""

import enum
from typing import NamedTuple

import tensorflow as tf


class Dependence(enum.Enum):
    """How a tensor depends on the examples of a batch.

    Attributes:
        NONE: Not at all.
        ROWS: The first axis is the examples', in order, each with the same number of
            rows; no row depends on another example.
        COLUMNS: Like ROWS, transposed: the second axis is the examples'.
        LAST: Like ROWS, with the examples at the last axis of three or more.
        SHAPE: A vector of integers; the first is the number of rows, no other depends
            on it.
        TURNED: Like SHAPE, for COLUMNS: the second is the number of columns.
        SIZE: The number of examples, times a factor that does not depend on them.
        SUM: A sum over the examples.
        MEAN: A mean over the examples, perhaps plus a term that does not depend on
            them.
        PACKED: Part of a ragged or sparse tensor of examples.
        OWN: On the rows of a tower, which takes them for the batch; see `rows.py`.
            It is none of the above, and no value of the whole batch.
        COUPLED: On several examples, in a way that is none of these.
        UNKNOWN: In an unknown way.
    """

    NONE = enum.auto()
    ROWS = enum.auto()
    COLUMNS = enum.auto()
    LAST = enum.auto()
    SHAPE = enum.auto()
    TURNED = enum.auto()
    SIZE = enum.auto()
    SUM = enum.auto()
    MEAN = enum.auto()
    PACKED = enum.auto()
    OWN = enum.auto()
    COUPLED = enum.auto()
    UNKNOWN = enum.auto()


(
    NONE,
    ROWS,
    COLUMNS,
    LAST,
    SHAPE,
    TURNED,
    SIZE,
    SUM,
    MEAN,
    PACKED,
    OWN,
    COUPLED,
    UNKNOWN,
) = Dependence


class Edge(NamedTuple):
    """An input of an operation that must be a total of the whole batch.

    Attributes:
        operation: The name of the operation.
        index: The index of the input.
    """

    operation: str
    index: int


class Total(NamedTuple):
    """A total over the local batch, to be replaced by the whole batch's.

    Attributes:
        tensor: The local batch's total.
        kind: How the towers' totals make the whole batch's: SUM, SIZE or MEAN; or
            COUPLED, by the function in `EXTREMES`.
    """

    tensor: tf.Tensor
    kind: Dependence
