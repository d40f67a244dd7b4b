"""How a value can depend on the examples of a batch."""

import enum


class Dependence(enum.Enum):
    """How a tensor depends on the examples of a batch.

    Attributes:
        NONE: Not at all.
        ROWS: The first axis is the examples', in order, each with the same number of
            rows; no row depends on another example.
        COLUMNS: Like ROWS, transposed: the second axis is the examples'.
        SHAPE: A vector of integers; the first is the number of rows, no other depends
            on it.
        SIZE: The number of examples, times something that does not depend on them.
        SUM: A sum over the examples.
        MEAN: A mean over the examples, perhaps with something added that does not
            depend on them.
        PACKED: Part of a ragged or sparse tensor of examples.
        COUPLED: On several examples, in a way that is none of these.
        UNKNOWN: In a way that cannot be told.
    """

    NONE = enum.auto()
    ROWS = enum.auto()
    COLUMNS = enum.auto()
    SHAPE = enum.auto()
    SIZE = enum.auto()
    SUM = enum.auto()
    MEAN = enum.auto()
    PACKED = enum.auto()
    COUPLED = enum.auto()
    UNKNOWN = enum.auto()


NONE, ROWS, COLUMNS, SHAPE, SIZE, SUM, MEAN, PACKED, COUPLED, UNKNOWN = Dependence
