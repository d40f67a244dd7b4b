"""A CSV file as blocks of whole rows, which pyarrow converts to columns."""

import codecs
import contextlib
import csv
import dataclasses
import functools
import io
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import tensorflow as tf
from pyarrow import compute, types
from pyarrow import csv as arrow_csv

from towers.input_pipeline.local_store.store import StoredFiles
from towers.input_pipeline.sources.files.record import (
    CHANGED,
    BadRecordError,
    fault_of,
)
from towers.input_pipeline.sources.files.stored import StoredFile
from towers.input_pipeline.sources.tables import columns
from towers.input_pipeline.sources.tables.blocks import MISSING, Block, Columns
from towers.program import words
from towers.program.voice import say

# Bytes of a block. Several are read at the same time.
_BLOCK_BYTES = 2**22
# Bytes from which separators and types are inferred, if they have enough rows.
_HEAD_BYTES = 2**18
# The most bytes of a row.
_LONGEST_ROW = 2**26
# Bytes skipped in a compressed file before a line reports that this is slow.
_LONG_TO_UNPACK = 2**26
# The most compressed files that stay open.
_MOST_OPEN = 8
_SEPARATORS = ",;\t|"
_CODECS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bz2",
    b"\x04\x22\x4d\x18": "lz4",
}
# People's forms of numbers, with a decimal comma if it is not the separator.
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|infinity)"
_WITH_COMMA = re.compile(r"\s*[+-]?\d*,\d+\s*")
_WITH_POINT = re.compile(r"\s*[+-]?\d*\.\d+\s*")
_TIME = r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,6})?)?Z?"
_DATE = rf"\d{{4}}-\d\d-\d\d([T ]{_TIME})?"
# For pyarrow, which strips no spaces off these; cell by cell takes 30 times as long.
_MISSING_CELLS = [f"{space}{cell}" for cell in MISSING for space in ("", " ", "  ")]
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")

# Python's limit is for the whole process: several threads read at the same time.
csv.field_size_limit(sys.maxsize)


@dataclasses.dataclass(frozen=True)
class Dialect:
    """The format of a file.

    Attributes:
        separator: the sign between fields.
        decimal: the sign before the fraction of a number.
        codec: pyarrow's name of the file's compression; None: it has none.
        begin: number of bytes of the byte order mark, if there is one.
    """

    separator: str
    decimal: str
    codec: str | None
    begin: int


class CSVFile:
    """A CSV file with a header.

    Args:
        path: the path of the file.
        stored: the files of the data set, if they are read through a store.

    Attributes:
        names: the names of the columns.
        dialect: the format of the file.

    Raises:
        ValueError: the file has no header in UTF-8, or two columns with one name.
    """

    has_types = False

    def __init__(self, path: str, stored: StoredFiles | None = None):
        self.path, self._stored = path, stored
        self._lock = threading.Lock()
        for head, is_cut in self._heads():
            text = _decoded(path, head.removeprefix(codecs.BOM_UTF8))
            separator = _separator(path, text)
            rows = _rows(text, separator, is_cut)
            if len(rows) > columns.SAMPLE:
                break
        if is_cut and not rows:
            raise ValueError(
                f"line 1 of {path} does not end within {words.size(_LONGEST_ROW)}: "
                "expected a header, so look for quotes that do not end"
            )
        # Some spreadsheets end lines by a carriage return alone.
        self._newline = b"\r" if "\n" not in text and "\r" in text else b"\n"
        self.names = _header(path, text, rows)
        self._samples = [row for row in rows[1:] if len(row) == len(self.names)]
        begin = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
        self.dialect = Dialect(
            separator, _decimal(separator, self._samples), self._codec, begin
        )

    @functools.cached_property
    def types(self) -> dict[str, Any]:
        """The columns' types, as pyarrow calls them, inferred from the first rows.

        A column has numbers, dates or truth values if most of its cells have. A column
        without any value has the type null.
        """
        cells = zip(*self._samples, strict=True) if self._samples else ()
        of_cells = {
            name: _type(values, self.dialect.decimal)
            for name, values in zip(self.names, cells, strict=False)
        }
        return {name: of_cells.get(name, pa.null()) for name in self.names}

    @property
    def size(self) -> int:
        """The bytes of the file."""
        if self._stored is not None:
            return self._stored.size(self.path)
        return tf.io.gfile.stat(self.path).length

    def text_type(self, name: str) -> Any:
        """Returns the type of raw cells: bytes, which need not be valid text."""
        del name
        return pa.binary()

    def blocks(self) -> Iterator[tuple[Block, bytes]]:
        """Yields the blocks in order, with their bytes."""
        with self._opened() as file:
            header, rest = self._read_header(file)
            at, line = len(header), header.count(self._newline)
            while piece := file.read(_BLOCK_BYTES):
                rest += piece
                # Quotes at the end may be the first of two, which close no field.
                end, _ = self._end_of_rows(rest.rstrip(b'"'))
                is_long = len(rest) >= _LONGEST_ROW
                # Empty rows wait for rows behind them, unless there are too many.
                if end := self._end_of_filled(rest[:end]) or end * is_long:
                    yield from self._block(rest[:end], at, line)
                    at, line = at + end, line + rest[:end].count(self._newline)
                    rest = rest[end:]
                elif is_long:
                    yield Block(self.path, at, len(rest), line, False), rest
                    return
            end, is_open = self._end_of_rows(rest)
            if not is_open:
                end = self._end_of_filled(rest)
                yield from self._block(rest[:end], at, line)
                self._say_empty(rest[end:])
                return
            yield from self._block(rest[:end], at, line)
            line += rest[:end].count(self._newline)
            yield Block(self.path, at + end, len(rest) - end, line, False), rest[end:]

    def _block(self, data: bytes, at: int, line: int) -> Iterator[tuple[Block, bytes]]:
        """Yields a block, unless it has only empty lines."""
        if data.strip():
            yield Block(self.path, at, len(data), line), data

    def _end_of_filled(self, data: bytes) -> int:
        """Returns the beginning of the empty rows at the end of some rows.

        Such rows have only separators. Programs write them below a table, and nothing
        can be learnt from them.
        """
        end = len(data.rstrip(self._separator.encode() + b" \t\r\n"))
        return (data.find(self._newline, end) + 1 or len(data)) if end else 0

    def _say_empty(self, data: bytes) -> None:
        """Reports how many rows of only separators are left out."""
        if count := data.count(self._separator.encode()):
            rows = -(-count // max(len(self.names) - 1, 1))
            say(
                f"{words.count(rows, 'row')} of nothing but {self._separator!r} at the "
                f"end of {self.path}: left out."
            )

    def _read_header(self, file: Any) -> tuple[bytes, bytes]:
        """Returns the bytes of the header, with its mark, and the bytes behind it."""
        data = b""
        while piece := file.read(_BLOCK_BYTES):
            data += piece
            if end := self._end_of_header(data):
                return data[:end], data[end:]
        return data, b""

    def bytes_of(self, block: Block) -> int:
        """Returns the part of `size` that a block takes; 0 for a compressed file."""
        return block.size if self.dialect.codec is None else 0

    def load(self, block: Block) -> bytes:
        """Reads the bytes of a block.

        A compressed file is read from the end of the last block, or from its beginning.

        Raises:
            BadRecordError: the file cannot be read, or has become shorter.
        """
        if self.dialect.codec is None:
            with self._opened() as file:
                file.seek(block.begin)
                data = file.read(block.size)
        else:
            with self._lock, self._reading():
                data = self._unpack(block)
        if len(data) < block.size:
            raise BadRecordError(f"{self.path} {CHANGED}")
        return data

    def _unpack(self, block: Block) -> bytes:
        at, file = _UNPACKING.pop(self, (0, None))
        if file is None or at > block.begin:
            at, file = 0, self._open()
        if block.begin - at > _LONG_TO_UNPACK:
            _say_slow()
        while piece := file.read(min(block.begin - at, _BLOCK_BYTES)):
            at += len(piece)
        data = file.read(block.size)
        _UNPACKING[self] = at + len(data), file
        # Only so many files stay open. A file that is dropped is closed.
        with _UNPACKING_LOCK:
            if len(_UNPACKING) > _MOST_OPEN:
                _UNPACKING.pop(next(iter(_UNPACKING)))
        return data

    def parse(self, block: Block, data: bytes, types: Mapping[str, Any]) -> Columns:
        """Converts the bytes of a block to columns.

        Args:
            block: the block.
            data: its bytes.
            types: pyarrow's types of the columns that are needed, by their names.

        Returns:
            The columns. Rows of another length and cells of another type are faults.
        """
        if not block.is_whole:
            fault = "opens quotes that do not end"
            if len(data) >= _LONGEST_ROW:
                fault = f"does not end within {words.size(_LONGEST_ROW)}"
            fault += ", so nothing behind it can be read"
            return Columns(block, {}, 1, [0], {0: fault})
        short, read = self._parsed(data, types)
        faults = {row: self._length_fault(count) for row, count in short.items()}
        if read is None:
            # The cells of another type, or without text, have to be named.
            _, raw = self._parsed(data, dict.fromkeys(types, pa.binary()))
            return self._converted(block, raw, types, faults)
        rows = len(next(iter(read.values()))) if read else 0
        return Columns(block, read, rows + len(short), sorted(short), faults)

    def _converted(self, block, raw, types, faults):
        """Converts columns of bytes; `faults` are those of rows that are left out."""
        rows = len(next(iter(raw.values()))) + len(faults)
        read = Columns(block, {}, rows, sorted(faults), faults)
        positions = read.places
        for name, kind in types.items():
            column, wrong = _converted(raw[name], kind, self.dialect.decimal)
            read.values[name] = column
            for row, fault in wrong.items():
                faults.setdefault(int(positions[row]), f"{name} is {fault}")
        return read

    def lines(self, block: Block, data: bytes, rows: Sequence[int]) -> dict[int, int]:
        """Finds the first lines of some rows of a block, counted from 0 in the file."""
        text = data.decode(errors="replace")
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=self._separator)
        wanted, lines, row = {*rows}, {}, 0
        begin = 0
        for fields in reader:
            if len(fields) > 1 or "".join(fields).strip():
                if row in wanted:
                    lines[row] = block.line + begin
                row += 1
            begin = reader.line_num
        return lines

    @property
    def _separator(self) -> str:
        return self.dialect.separator

    def _parsed(self, data, types):
        """Returns wrong lengths of rows, and columns; None if a cell is wrong.

        Rows of only spaces are skipped, as empty ones are.
        """
        short, blank = {}, []

        def skip(row):
            if row.text.strip():
                short[row.number - 1 - len(blank)] = row.actual_columns
            else:
                blank.append(row.number)
            return "skip"

        options = {
            "read_options": arrow_csv.ReadOptions(
                column_names=self.names, use_threads=False, block_size=len(data) + 1
            ),
            "parse_options": arrow_csv.ParseOptions(
                delimiter=self._separator,
                newlines_in_values=True,
                invalid_row_handler=skip,
            ),
            "convert_options": arrow_csv.ConvertOptions(
                column_types=dict(types),
                include_columns=[*types],
                null_values=_MISSING_CELLS,
                true_values=_TRUE,
                false_values=_FALSE,
                decimal_point=self.dialect.decimal,
            ),
        }
        try:
            table = arrow_csv.read_csv(pa.BufferReader(data), **options)
        except pa.ArrowInvalid:
            return short, None
        return short, {name: table[name].combine_chunks() for name in types}

    def _length_fault(self, count):
        counted = words.count(count, "field")
        return f"has {counted}, expected {len(self.names)} as the header"

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        with self._reading(), self._open() as file:
            yield file

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """A context that turns errors of reading into one sentence."""
        try:
            yield
        except (tf.errors.OpError, OSError, pa.ArrowException) as error:
            is_of_tensorflow = isinstance(error, tf.errors.OpError)
            reason = fault_of(error) if is_of_tensorflow else str(error)
            reason = reason.removeprefix(f"{self.path}; ")
            raise BadRecordError(f"{self.path} cannot be read: {reason}") from error

    def _open(self) -> BinaryIO:
        if self._stored is None:
            file = tf.io.gfile.GFile(self.path, "rb")
        else:
            file = io.BufferedReader(StoredFile(self._stored, self.path))
        if self._codec is None:
            return file
        return pa.CompressedInputStream(pa.PythonFile(_Closable(file)), self._codec)

    @functools.cached_property
    def _codec(self) -> str | None:
        with tf.io.gfile.GFile(self.path, "rb") as file:
            begin = file.read(4)
        return next((c for mark, c in _CODECS.items() if begin.startswith(mark)), None)

    def _heads(self) -> Iterator[tuple[bytes, bool]]:
        """Yields the beginning of the file, longer each time, and whether it is cut."""
        with self._opened() as file:
            head = file.read(_HEAD_BYTES)
            while more := file.read(len(head)):
                yield head, True
                if len(head) >= _LONGEST_ROW:
                    return
                head += more
            yield head, False

    def _end_of_header(self, data: bytes) -> int:
        """Returns the end of the first row; 0 if it does not end."""
        # Quotes behind a mark open a field, too.
        at = self.dialect.begin
        data = self._newline * at + data[at:]
        for field in self._quoted.finditer(data):
            if (line := data.find(self._newline, at, field.start())) >= 0:
                return line + 1
            at = field.end()
        return data.find(self._newline, at) + 1

    def _end_of_rows(self, data: bytes) -> tuple[int, bool]:
        """Returns the end of the last whole row, and whether quotes stay open.

        A line break within quotes ends no row. Quotes open a field only at its
        beginning, as in RFC 4180.
        """
        if b'"' not in data:
            return data.rfind(self._newline) + 1, False
        fields = [
            (*field.span(), bool(field[1])) for field in self._quoted.finditer(data)
        ]
        is_open = bool(fields) and not fields[-1][2]
        limit = len(data)
        for begin, end, _ in reversed(fields):
            if (line := data.rfind(self._newline, end, limit)) >= 0:
                return line + 1, is_open
            limit = begin
        return data.rfind(self._newline, 0, limit) + 1, is_open

    @functools.cached_property
    def _quoted(self) -> re.Pattern[bytes]:
        """A pattern of a field in quotes, up to the end of the data if still open."""
        before = re.escape(self.dialect.separator.encode())
        return re.compile(rb"(?<![^\n\r" + before + rb'])"(?:[^"]++|"")*+(")?')


class _Closable(io.RawIOBase):
    """A file of any file system, for pyarrow."""

    def __init__(self, file):
        super().__init__()
        self._file = file

    def readable(self):
        return True

    def read(self, size=-1):
        return self._file.read(size)

    def close(self):
        self._file.close()
        super().close()


# Positions in compressed files, and the files that go on there; the latest is last.
_UNPACKING: dict[CSVFile, tuple[int, BinaryIO]] = {}
_UNPACKING_LOCK = threading.Lock()


@functools.cache
def _say_slow() -> None:
    say(
        "Blocks of compressed CSV files are read out of order, and all before them are "
        "unpacked each time, which is slow: unpack the files, or convert them to "
        "Parquet."
    )


def _decoded(path: str, head: bytes) -> str:
    line = re.split(rb"[\r\n]", head, maxsplit=1)[0]
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: line 1 is not UTF-8: expected a CSV file in UTF-8, so "
            "convert it, such as with iconv -f ISO-8859-1 -t UTF-8, or -f UTF-16"
        ) from error
    return head.decode(errors="replace")


def _separator(path: str, text: str) -> str:
    """Returns the header's most frequent separator, else that of the file name."""
    header = re.sub(r'"[^"]*"', "", re.split(r"[\r\n]", text, maxsplit=1)[0])
    by_name = "\t" if re.search(r"\.(tsv|tab)\b", path.lower()) else ","
    return max(by_name + _SEPARATORS, key=header.count)


def _rows(text: str, separator: str, is_cut: bool) -> list[list[str]]:
    """Returns the first rows with their header, without a row that is cut off."""
    rows = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    for row in reader:
        if row or not rows:
            rows.append(row)
        if len(rows) > columns.SAMPLE + 1:
            break
    else:
        rows = rows[:-1] if is_cut else rows
    return rows[: columns.SAMPLE + 1]


def _header(path: str, text: str, rows: Sequence[Sequence[str]]) -> list[str]:
    names = columns.named([name.strip() for name in rows[0]] if rows else [])
    columns.check_different(path, names)
    if not names or any(re.fullmatch(_NUMBER, name) for name in names):
        line = re.split(r"[\r\n]", text, maxsplit=1)[0]
        raise ValueError(
            f"{path} begins with {line[:60]!r}: expected a header, the names of the "
            "columns, separated by commas"
        )
    return names


def _decimal(separator: str, rows: Sequence[Sequence[str]]) -> str:
    """Returns a comma if numbers are written with one."""
    cells = [cell for row in rows for cell in row]
    commas = sum(bool(_WITH_COMMA.fullmatch(cell)) for cell in cells)
    points = sum(bool(_WITH_POINT.fullmatch(cell)) for cell in cells)
    return "," if separator != "," and commas > points else "."


def _type(cells: Sequence[str], decimal: str) -> Any:
    cells = [cell for cell in map(str.strip, cells) if cell not in MISSING]
    if not cells:
        return pa.null()
    truth = {*_TRUE, *_FALSE}
    # In pyarrow, moments with a time zone have a type of their own.
    zone = "UTC" if all(cell.endswith("Z") for cell in cells) else None
    for kind, fits in (
        (pa.float64(), re.compile(_number(decimal)).fullmatch),
        (pa.timestamp("us", zone), re.compile(_DATE).fullmatch),
        (pa.bool_(), truth.__contains__),
    ):
        if sum(bool(fits(cell)) for cell in cells) > len(cells) / 2:
            return kind
    return pa.string()


def _number(decimal: str) -> str:
    return "(?i)" + _NUMBER.replace(r"\.", re.escape(decimal))


def _converted(raw: Any, kind: Any, decimal: str) -> tuple[Any, dict[int, str]]:
    """Converts a column of bytes to a type.

    Returns:
        The values, null for cells of another type, and the faults by row.
    """
    texts, is_utf8 = _texts(raw)
    cells = compute.utf8_trim_whitespace(texts)
    is_missing = compute.is_in(cells, pa.array(MISSING))
    kind_in_text = kind
    if types.is_floating(kind):
        fits, expected = _matches(cells, _number(decimal)), "a number"
        cells = compute.replace_substring(cells, decimal, ".")
    elif types.is_timestamp(kind):
        fits, expected = _are_dates(cells), "a date such as 2024-05-31"
        cells, kind_in_text = compute.utf8_rtrim(cells, "Z"), pa.timestamp("us")
    elif types.is_boolean(kind):
        truth = pa.array([*_TRUE, *_FALSE])
        fits, expected = compute.is_in(cells, truth), "true or false"
    elif types.is_null(kind):
        expected = "nothing, as in the first rows"
        return pa.nulls(len(cells)), _faults(texts, is_missing, is_utf8, expected)
    else:
        # Raw, as when no cell of the block is bad.
        cells, fits, expected = texts, is_utf8, "text"
    fits = compute.and_(fits, is_utf8)
    values = compute.if_else(fits, cells, None).cast(kind_in_text).cast(kind)
    fits = compute.or_(fits, is_missing)
    return values, _faults(texts, fits, is_utf8, expected)


def _faults(texts: Any, fits: Any, is_utf8: Any, expected: str) -> dict[int, str]:
    faults = {}
    for row in np.flatnonzero(~fits.to_numpy(zero_copy_only=False)).tolist():
        encoding = "" if is_utf8[row].as_py() else " in UTF-8"
        faults[row] = f"{texts[row].as_py()[:60]!r}, expected {expected}{encoding}"
    return faults


def _texts(raw: Any) -> tuple[Any, Any]:
    """Decodes bytes to texts, and tells which of them are UTF-8."""
    try:
        return raw.cast(pa.string()), pa.repeat(True, len(raw))
    except pa.ArrowInvalid:
        cells = raw.to_pylist()
        texts = [cell.decode(errors="replace") for cell in cells]
        pairs = zip(texts, cells, strict=True)
        return pa.array(texts), pa.array(
            [text.encode() == cell for text, cell in pairs]
        )


def _matches(cells: Any, pattern: str) -> Any:
    return compute.match_substring_regex(cells, f"^(?:{pattern})$")


def _are_dates(cells: Any) -> Any:
    """Tells which cells are dates of the calendar."""
    fits = _matches(cells, _DATE)
    days = compute.utf8_slice_codeunits(cells, 0, 10)
    real = [
        day for day in compute.unique(days.filter(fits)).to_pylist() if _is_day(day)
    ]
    return compute.and_(fits, compute.is_in(days, pa.array(real, pa.string())))


def _is_day(day: str) -> bool:
    try:
        np.datetime64(day)
    except ValueError:
        return False
    return True
