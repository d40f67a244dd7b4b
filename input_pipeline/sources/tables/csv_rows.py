"""Reads the rows of CSV files one by one, and says which cannot be read."""

import collections
import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class CSVRow(NamedTuple):
    """A row of a CSV file.

    Attributes:
        fields: texts of all columns.
        line: number of its first line, from 1.
        fault: why it cannot be read, or "".
    """

    fields: Sequence[str]
    line: int
    fault: str = ""


def read(lines: Iterable[str]) -> Iterator[CSVRow]:
    """Reads rows, in which quotes may hold commas and line breaks.

    A quote inside of a field, such as ``"5" pipe"``, belongs to the field, as
    pyarrow has it, if the row is one line. In a row of several lines it is a
    fault: a quote that does not end would hide the rows behind it.

    Args:
        lines: of the file, with their ends.
    """
    last = collections.deque(maxlen=1)

    def remembered():
        for line in lines:
            last.append(line)
            yield line

    reader, first = csv.reader(remembered(), strict=True), 1
    while True:
        # What is not used may be longer than the module expects of a field, anywhere.
        before = csv.field_size_limit(sys.maxsize)
        try:
            row = CSVRow(next(reader), first)
        except StopIteration:
            return
        except csv.Error as error:
            row = CSVRow([], first, f"cannot be read: {error}")
            # Behind a row that has ended, the empty line is one of its own.
            rows = [*csv.reader([*last, ""])]
            if reader.line_num == first and len(rows) == 2:
                row = CSVRow(rows[0], first)
        finally:
            csv.field_size_limit(before)
        yield row
        first = reader.line_num + 1
