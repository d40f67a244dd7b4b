"""Table files as blocks of columns: what CSV and Parquet files have in common."""

import collections
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from towers.machine import limits

T = TypeVar("T")
S = TypeVar("S")

# Cells of a CSV file that hold no number, as pandas has them, and as people write them.
MISSING = (
    *("", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "-NaN", "-nan", "NULL", "null"),
    *("None", "none", "<NA>", "?", "-", "--", ".", "n.a.", "N.A.", "#DIV/0!"),
    *("#VALUE!", "#REF!", "#NUM!"),
)


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of a file that are read together.

    Attributes:
        path: the file.
        begin: the first byte of a CSV file; of a Parquet file, the row group.
        size: bytes; of a Parquet file, rows.
        line: the line that the first row begins in, from 0; nothing of a Parquet file.
        is_whole: whether all quotes that open in it are closed.
    """

    path: str
    begin: int
    size: int
    line: int = 0
    is_whole: bool = True


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a block.

    Attributes:
        block: where the rows are from.
        values: columns by their names, as pyarrow has them. Null where a cell is empty
            or bad.
        rows: how many rows the block has.
        left_out: places in the block of rows that the columns do not have.
        faults: what is wrong with a row, a phrase, by its place in the block.
        fault: why no row of the block can be read; empty if they can.
    """

    block: Block
    values: Mapping[str, Any]
    rows: int
    left_out: Sequence[int] = ()
    faults: Mapping[int, str] = dataclasses.field(default_factory=dict)
    fault: str = ""

    @property
    def places(self) -> np.ndarray:
        """Places in the block of the rows that the columns have."""
        return np.delete(np.arange(self.rows), np.asarray(self.left_out, np.int64))


class TableFile(Protocol):
    """A file with columns.

    Attributes:
        path: of the file.
        names: of the columns.
        types: of the columns by their names, as pyarrow has them.
        size: bytes of the file.
        has_types: whether these are written in the file, and not guessed.
    """

    has_types: bool
    path: str
    names: Sequence[str]
    types: Mapping[str, Any]
    size: int

    def text_type(self, name: str) -> Any:
        """Returns the type as which a column's cells are read as they are written."""

    def blocks(self) -> Iterator[tuple[Block, bytes]]:
        """Yields the blocks in order, with the bytes to `parse`."""

    def bytes_of(self, block: Block) -> int:
        """Returns how much of `size` a block is; 0 if nobody knows."""

    def load(self, block: Block) -> bytes:
        """Reads the bytes of one block."""

    def parse(self, block: Block, data: bytes, types: Mapping[str, Any]) -> Columns:
        """Makes columns of a block's bytes, of these types."""

    def lines(self, block: Block, data: bytes, rows: Sequence[int]) -> dict[int, int]:
        """Finds the lines in which rows of a block begin; none where rows count."""


def read_in_order(items: Iterable[S], read: Callable[[S], T]) -> Iterator[T]:
    """Yields what a function makes of items, in their order, from several threads.

    No more items are asked for than threads can work on, so memory stays bounded.

    Args:
        items: of an iterator that need not be safe for threads.
        read: is called in threads.
    """
    threads = limits.cpu_count()
    waiting = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: [future.cancel() for future in waiting])
            for item in items:
                waiting.append(pool.submit(read, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
