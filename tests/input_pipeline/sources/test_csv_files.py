"""CSV files as people have them: separators, quotes, compression, what is missing."""

import bz2
import concurrent.futures
import csv
import gzip
import io
import random
import re
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from towers.input_pipeline import make_dataset, measure_scaling, open_source
from towers.input_pipeline.sources.files.record import BadRecordError
from towers.input_pipeline.sources.tables import csv_file
from towers.input_pipeline.sources.tables.columns import SAMPLE
from towers.input_pipeline.sources.tables.csv_file import CSVFile
from towers.input_pipeline.sources.tables.opened import open_table, text_rows


def _rows(path, names=None):
    table = CSVFile(str(path))
    return [
        (row.place, *row.values) if not row.fault else (row.place, row.fault)
        for row in text_rows(table, names or table.names)
    ]


@pytest.mark.parametrize("size", [1, 3, 16, 2**22])
def test_blocks_end_where_rows_do(tmp_path, monkeypatch, size):
    monkeypatch.setattr(csv_file, "_BLOCK_BYTES", size)
    text = (
        '\ufeff"a\nb",c\r\n1,"x\n\ny"\r\n\r\n2,z\n3,"q ""w"""\n4,5" pipe\n5\n"6,6",7\n'
    )
    (tmp_path / "a.csv").write_bytes(text.encode())
    assert _rows(tmp_path / "a.csv") == [
        ("line 3", "1", "x\n\ny"),
        ("line 7", "2", "z"),
        ("line 8", "3", 'q "w"'),
        ("line 9", "4", '5" pipe'),
        ("line 10", "has 1 field, expected 2 as the header"),
        ("line 11", "6,6", "7"),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_what_python_writes_is_read(tmp_path, monkeypatch, seed):
    draw = random.Random(seed)
    monkeypatch.setattr(csv_file, "_BLOCK_BYTES", draw.randrange(1, 40))
    signs = ["a", "b", " ", ",", ";", '"', "\n", "\r\n", "é", "'"]
    rows = [
        ["".join(draw.choices(signs, k=draw.randrange(1, 6))) for _ in range(3)]
        for _ in range(30)
    ]
    written = io.StringIO(newline="")
    style = {"lineterminator": draw.choice(["\n", "\r\n"])}
    csv.writer(written, **style).writerows([["x", "y", "z"], *rows])
    (tmp_path / "a.csv").write_bytes(written.getvalue().encode())
    assert [list(row[1:]) for row in _rows(tmp_path / "a.csv")] == rows


def test_quotes_that_do_not_end_hide_no_row_in_silence(tmp_path):
    (tmp_path / "a.csv").write_text('a,b\n1,2\n3,"4\n5,6\n7,8\n')
    fault = "opens quotes that do not end, so nothing behind it can be read"
    assert _rows(tmp_path / "a.csv") == [("line 2", "1", "2"), ("line 3", fault)]


@pytest.mark.parametrize(
    ("text", "separator", "decimal"),
    [
        ("a,b\n1.5,2\n", ",", "."),
        ("a;b\n1,5;2\n", ";", ","),
        ("a;b\n1.5;2\n", ";", "."),
        ("a\tb\n1,5\t2\n", "\t", ","),
        ("a|b\n1.5|x,y\n", "|", "."),
        ('"a;c",b\n1.5,2\n', ",", "."),
    ],
)
def test_the_header_tells_the_separator(tmp_path, text, separator, decimal):
    (tmp_path / "a.csv").write_text(text)
    table = CSVFile(str(tmp_path / "a.csv"))
    assert (table.dialect.separator, table.dialect.decimal) == (separator, decimal)
    ((block, data),) = table.blocks()
    (first, *_) = table.names
    read = table.parse(block, data, {first: pa.float64()})
    assert read.values[first].to_pylist() == [1.5]


PACK = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "zstd": lambda data: pa.compress(data, "zstd", asbytes=True),
}


@pytest.mark.parametrize("pack", PACK.values(), ids=PACK)
def test_compressed_files_are_told_by_their_bytes(tmp_path, pack):
    text = "a,label\n" + "".join(f"{k},{k % 2}\n" for k in range(100))
    (tmp_path / "a.csv").write_bytes(pack(text.encode()))
    source = open_source(f"csv:{tmp_path}/a.csv", eval_fraction=0)
    ((x, y),) = make_dataset(source, "train", 100, training=False)
    np.testing.assert_array_equal(x[:, 0], np.arange(100))
    np.testing.assert_array_equal(y, np.arange(100) % 2)


def _mixed(folder, **options):
    lines = ["age,when,member,label"]
    for k in range(40):
        age = "NA" if k % 4 == 0 else k
        lines.append(f"{age},2024-01-{k % 28 + 1:02},{str(k % 2 == 0).lower()},{k % 2}")
    (folder / "a.csv").write_text("\n".join(lines))
    return open_source(f"csv:{folder}/a.csv", eval_fraction=0, **options)


def test_rows_of_spaces_are_no_rows(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,0\n  \n2,1\n3\n")
    source = open_source(f"csv:{tmp_path}/a.csv", skip_bad=True, eval_fraction=0)
    # The row is too short.
    (bad,) = [each for each in source.walk(f"{tmp_path}/a.csv") if each.fault]
    assert bad.place == "line 5" and len(source.numbers("train")) == 3


def test_dates_and_truth_values_are_numbers(tmp_path):
    source = _mixed(tmp_path)
    rows = np.concatenate([x for x, _ in _parsed(source)])
    assert rows[:3, 1].tolist() == [19723, 19724, 19725]
    assert rows[:3, 2].tolist() == [1, 0, 1]


def _parsed(source):
    for _, records in source.batches("train", 16):
        x, y = source.parse(records)
        yield x.numpy(), y.numpy()


@pytest.mark.parametrize("missing", ["mean", "median"])
def test_missing_numbers_are_filled_and_marked(tmp_path, missing):
    source = _mixed(tmp_path, missing=missing)
    assert source.missing_columns == ("age",)
    scaling = measure_scaling(source, standardize=False)
    ((x, _),) = make_dataset(source, "train", 40, training=False, scaling=scaling)
    there = [k for k in range(40) if k % 4]
    expected = np.mean(there) if missing == "mean" else np.median(there)
    np.testing.assert_allclose(x[::4, 0], np.full(10, expected), rtol=1e-6)
    np.testing.assert_array_equal(x[:, 3], [k % 4 == 0 for k in range(40)])
    assert scaling.all_names == ("age", "when", "member", "age is missing")
    scaled = measure_scaling(source)
    assert type(scaled).from_json(scaled.to_json()) == scaled
    # What is missing takes no part in them.
    assert scaled.mean[0] == pytest.approx(np.mean(there))
    assert scaled.std[0] == pytest.approx(np.std(there))


def test_missing_numbers_may_be_bad_records(tmp_path):
    with pytest.raises(ValueError, match=r"line 2: nothing in the column 'age': write"):
        _mixed(tmp_path, missing="fail")


def test_long_fields_are_read_whatever_other_threads_do(tmp_path):
    (tmp_path / "a.csv").write_text(f"a,b\n{'x' * 200_000},1\n")
    _rows(tmp_path / "a.csv")
    assert csv.field_size_limit() == sys.maxsize


def _wide(cells):
    return ",".join(cells) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        _wide(f"column_{k:07}" for k in range(20_000)) + _wide(["1.5"] * 20_000) * 3,
        _wide("abcdefgh") + _wide(["1." + "5" * 2**16] * 8) * 3,
        _wide("abé") + _wide(["1", "2", "é" * 2**17]) * 3,
    ],
    ids=["header", "rows", "signs of two bytes"],
)
def test_rows_of_any_length_tell_the_types(tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    table = CSVFile(str(tmp_path / "a.csv"))
    assert table.names == text.partition("\n")[0].split(",")
    assert [*table.types.values()][:2] == [pa.float64()] * 2
    assert pa.null() not in table.types.values()
    for row in text_rows(table, table.names[:1]):
        assert not row.fault


def test_the_last_of_the_first_rows_is_not_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_file, "_HEAD_BYTES", 2 * (SAMPLE + 1) + 2)
    (tmp_path / "a.csv").write_text("a\n" + "1\n" * (SAMPLE - 1) + "12345,6\n" * 9)
    table = CSVFile(str(tmp_path / "a.csv"))
    assert len(table._samples) == SAMPLE - 1


def test_a_header_that_does_not_end_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_file, "_HEAD_BYTES", 16)
    monkeypatch.setattr(csv_file, "_LONGEST_ROW", 64)
    (tmp_path / "a.csv").write_text('a,"b\n' + "1,2\n" * 99)
    with pytest.raises(ValueError, match=r"line 1 of .* does not end within 64 bytes"):
        CSVFile(str(tmp_path / "a.csv"))


def test_a_row_group_that_cannot_be_read_is_no_text(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"a": ["x" * 99] * 9}), path, compression="gzip")
    data = bytearray(path.read_bytes())
    data[20:60] = b"\0" * 40
    path.write_bytes(data)
    rows = [*text_rows(open_table(str(path)), ["a"])]
    assert len(rows) == 9
    assert all(row.fault.startswith("cannot be read: ") for row in rows)


@pytest.mark.parametrize("row", ['"' + "x,1\n" * 99, "x" * 500], ids=["quotes", "line"])
def test_a_row_that_is_too_long_ends_the_reading(tmp_path, monkeypatch, row):
    monkeypatch.setattr(csv_file, "_BLOCK_BYTES", 16)
    monkeypatch.setattr(csv_file, "_LONGEST_ROW", 64)
    (tmp_path / "a.csv").write_text("a,b\n1,2\n" + row)
    table = CSVFile(str(tmp_path / "a.csv"))
    assert sum(len(data) for _, data in table.blocks()) < 100
    fault = "does not end within 64 bytes, so nothing behind it can be read"
    assert _rows(tmp_path / "a.csv") == [("line 2", "1", "2"), ("line 3", fault)]


def test_rows_of_nothing_do_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_file, "_BLOCK_BYTES", 16)
    monkeypatch.setattr(csv_file, "_LONGEST_ROW", 64)
    (tmp_path / "a.csv").write_text("a,b\n1,2\n" + ",\n" * 99 + "3,4\n")
    table = CSVFile(str(tmp_path / "a.csv"))
    blocks = [data for _, data in table.blocks()]
    assert max(map(len, blocks)) <= 80
    assert b"".join(blocks) == b"1,2\n" + b",\n" * 99 + b"3,4\n"


class _Counted(io.BytesIO):
    """Counts what is read."""

    count = 0

    def read(self, size=-1):
        data = super().read(size)
        _Counted.count += len(data)
        return data


def _packed(folder, monkeypatch, rows=200):
    monkeypatch.setattr(csv_file, "_BLOCK_BYTES", 64)
    text = "a,label\n" + "".join(f"{k:06},{k % 2}\n" for k in range(rows))
    (folder / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    return CSVFile(str(folder / "a.csv.gz")), text.encode()


def test_blocks_of_a_compressed_file_are_unpacked_once(tmp_path, monkeypatch):
    table, text = _packed(tmp_path, monkeypatch)
    blocks = [block for block, _ in table.blocks()]
    assert len(blocks) > 20
    monkeypatch.setattr(table, "_open", lambda: _Counted(text))
    _Counted.count = 0
    for block in blocks:
        assert table.load(block) == text[block.begin :][: block.size]
    assert _Counted.count == len(text)


def test_blocks_of_a_compressed_file_are_read_in_any_order(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(csv_file, "_LONG_TO_UNPACK", 100)
    csv_file._say_slow.cache_clear()
    caplog.set_level("INFO")
    table, text = _packed(tmp_path, monkeypatch)
    blocks = [block for block, _ in table.blocks()] * 3
    random.Random(0).shuffle(blocks)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for block, data in zip(blocks, pool.map(table.load, blocks), strict=True):
            assert data == text[block.begin :][: block.size]
    (line,) = [line for line in caplog.messages if "out of order" in line]
    assert line.endswith("unpack the files, or convert them to Parquet.")


def test_few_compressed_files_stay_open(tmp_path, monkeypatch):
    for place in range(20):
        (tmp_path / str(place)).mkdir()
        table, _ = _packed(tmp_path / str(place), monkeypatch)
        table.load(next(table.blocks())[0])
    assert len(csv_file._UNPACKING) == csv_file._MOST_OPEN


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_file_that_is_shorter_than_it_was_has_changed(tmp_path, pack):
    path, text = tmp_path / "a.csv", b"a,label\n" + b"1,2\n" * 9
    path.write_bytes(pack(text))
    table = CSVFile(str(path))
    ((block, _),) = table.blocks()
    path.write_bytes(pack(text[:12]))
    with pytest.raises(BadRecordError, match=r"a\.csv has changed since"):
        table.load(block)
    path.write_bytes(pack(text[:4]))
    with pytest.raises(BadRecordError, match=r"a\.csv (has changed|cannot be read)"):
        table.load(block)


@pytest.mark.parametrize("size", [100, 2**19], ids=["head", "rows"])
def test_a_compressed_file_that_is_cut_is_one_sentence(tmp_path, size):
    draw = random.Random(0)
    text = "a,label\n" + "".join(f"{draw.random()},{k % 2}\n" for k in range(60_000))
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(text.encode(), 1)[:size])
    with pytest.raises(ValueError, match=r"a\.csv\.gz cannot be read: \w"):
        open_source(f"csv:{path}")
    with pytest.raises(ValueError, match=r"a\.csv\.gz cannot be read: \w"):
        _rows(path, ["a"])


_NUMBERS = [
    "1",
    " +1.5 ",
    "-.5",
    "1.",
    "1e5",
    "2E-3",
    "inf",
    "-Infinity",
    "+INF",
    "NA ",
]
_DATES = ["2024-02-29", "2024-01-01T10:00", "2024-01-01 10:00:01.25 ", "n/a"]


@pytest.mark.parametrize(
    ("kind", "good", "bad", "expected"),
    [
        (pa.float64(), _NUMBERS, ["abc", "1_0", "0x1", "1,5", "--1"], "a number"),
        (
            pa.timestamp("us"),
            [*_DATES, "2024-01-01T10:00Z"],
            ["2023-02-29", "0000-00-00", "2024-01-01 25:00", "abc"],
            "a date such as 2024-05-31",
        ),
        (
            pa.timestamp("us", "UTC"),
            _DATES,
            ["2024-13-01"],
            "a date such as 2024-05-31",
        ),
        (pa.bool_(), ["true", " False", "TRUE", "?"], ["1", "yes"], "true or false"),
        (pa.null(), ["", " NA"], ["5"], "nothing, as in the first rows"),
    ],
    ids=str,
)
def test_only_bad_cells_of_a_block_are_faults(tmp_path, kind, good, bad, expected):
    cells = [cell for k, cell in enumerate(good) for cell in (cell, *bad[k : k + 1])]
    cells += bad[len(good) :]
    # A row of another length stands first: rows are counted with it.
    text = "a;b\n1\n" + "".join(f"{cell};1\n" for cell in cells)
    (tmp_path / "a.csv").write_text(text)
    table = CSVFile(str(tmp_path / "a.csv"))
    ((block, data),) = table.blocks()
    read = table.parse(block, data, {"a": kind, "b": pa.float64()})
    assert read.faults == {0: "has 1 field, expected 2 as the header"} | {
        row: f"a is {cell!r}, expected {expected}"
        for row, cell in enumerate(cells, 1)
        if cell in bad
    }
    assert read.values["b"].to_pylist() == [1] * len(cells)
    missing = {place for place, cell in enumerate(cells) if cell in ("NA ", "n/a", "?")}
    missing |= {place for place, cell in enumerate(cells) if cell in bad}
    if kind != pa.null():
        nulls = read.values["a"].is_null().to_numpy(zero_copy_only=False)
        assert {*np.flatnonzero(nulls)} == missing


def test_numbers_beside_a_bad_cell_are_what_python_reads(tmp_path):
    (tmp_path / "a.csv").write_text("a\nabc\n" + "\n".join(_NUMBERS[:-1]) + "\n")
    table = CSVFile(str(tmp_path / "a.csv"))
    ((block, data),) = table.blocks()
    read = table.parse(block, data, {"a": pa.float64()})
    assert read.values["a"].to_pylist()[1:] == [*map(float, _NUMBERS[:-1])]


def test_one_bad_cell_makes_no_column_python(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("a,b\n" + "1.5,2\n" * 5000 + "abc,2\n")
    table = CSVFile(str(tmp_path / "a.csv"))
    compiled, compile_pattern = [], re.compile
    types = table.types
    monkeypatch.setattr(
        re, "compile", lambda *a: compiled.append(a) or compile_pattern(*a)
    )
    ((block, data),) = table.blocks()
    compiled.clear()
    read = table.parse(block, data, types)
    assert len(compiled) < 10
    assert read.faults == {5000: "a is 'abc', expected a number"}


def test_cells_that_are_not_utf8_are_faults_of_their_rows(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"a,b\n1,x\n2,\xe9\n\xff,y\n")
    table = CSVFile(str(tmp_path / "a.csv"))
    ((block, data),) = table.blocks()
    read = table.parse(block, data, {"a": pa.float64(), "b": pa.string()})
    assert read.faults == {
        1: "b is '\ufffd', expected text in UTF-8",
        2: "a is '\ufffd', expected a number in UTF-8",
    }
    assert read.values["b"].to_pylist() == ["x", None, "y"]
