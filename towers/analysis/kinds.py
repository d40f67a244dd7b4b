"""The ways in which a tensor can depend on the examples of a batch."""

import enum
from typing import NamedTuple

import tensorflow as tf


class Dependence(enum.Enum):
    """How a tensor depends on the examples of a batch.

    Attributes:
        NONE: The tensor does not depend on any example.
        ROWS: The first axis is the batch axis. The examples are in order, each with the
            same number of rows, and no row depends on another example.
        COLUMNS: Like ROWS, transposed: the second axis is the batch axis.
        LAST: Like ROWS, with the batch axis last, of three or more axes.
        SHAPE: A vector of integers, such as a shape: the first is the number of rows,
            and no other depends on that number.
        TURNED: Like SHAPE, for COLUMNS: the second integer is the number of columns.
        SIZE: The number of examples, times a factor that does not depend on them.
        SUM: A sum over the examples.
        MEAN: A mean over the examples, perhaps plus a term that does not depend on
            them.
        PACKED: A component of a ragged or sparse tensor of examples.
        OWN: A value computed from one tower's rows alone, in none of the forms above;
            the whole batch has no such value. See `rows.py`.
        COUPLED: The tensor mixes several examples, in none of the forms above.
        UNKNOWN: The dependence is not known.
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
    """A tower's total, which the total of the whole batch is to replace.

    Attributes:
        tensor: The total over the local batch.
        kind: How to reduce the towers' totals: as SUM, SIZE or MEAN, or by the function
            in `EXTREMES` if COUPLED.
    """

    tensor: tf.Tensor
    kind: Dependence
