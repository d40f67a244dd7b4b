"""Files by their names, by patterns, and in folders."""

import pytest

from tests.variants import slow
from towers.input_pipeline import open_source
from towers.input_pipeline.convert.conversion import convert
from towers.input_pipeline.sources.files.file_source import group_by_split

ROWS = "a,label\n1,0\n2,1\n"
TAGS = "Ann PER\nsings O\n\n"
# What Spark, and others, write beside files of data.
HIDDEN = "_SUCCESS", "_metadata", ".part-0.crc"


def _write(kind, path):
    """Writes a file of some kind, whatever its name."""
    if kind == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"a": [1, 2], "label": [0, 1]}), path)
    elif kind == "tfrecord":
        folder = path.parent / "converted"
        (path.parent / "rows.txt").write_text(ROWS)
        source = open_source(f"csv:{path.parent}/rows.txt", eval_fraction=0)
        convert(source, str(folder), shards=1)
        (file,) = folder.glob("train-*")
        file.rename(path)
        (path.parent / "rows.txt").unlink()
    else:
        path.write_text({"csv": ROWS, "conll": TAGS, "text": "some words\n"}[kind])


def _is_counted(notes, count, first):
    """Tells whether exactly one note says how many files are left out."""
    said = f"{count} file{'s' * (count > 1)} left out, such as {first}: "
    return [note.startswith(said) for note in notes].count(True) == 1


OPENED = pytest.mark.parametrize(
    "kind", ["csv", slow("parquet"), slow("tfrecord"), slow("conll"), slow("text")]
)
NAMES = "i[1].csv", "what?.csv", "a*b.csv", "_x.csv", "[a-b]{c}.csv"


@pytest.mark.parametrize("name", NAMES)
@OPENED
def test_a_file_that_is_there_is_no_pattern(tmp_path, kind, name):
    (tmp_path / "data [2]").mkdir()
    path = tmp_path / "data [2]" / name
    _write(kind, path)
    # Which the pattern would match.
    (tmp_path / "data [2]" / "i1.csv").write_text("other")
    source = open_source(f"{kind}:{path}")
    assert {file for split in source.splits for file in source.files(split)} <= {
        str(path)
    }


@OPENED
def test_files_that_describe_a_folder_are_no_data(tmp_path, kind):
    folder = tmp_path / "data [2]"
    folder.mkdir()
    _write(kind, folder / "part-0")
    for name in HIDDEN:
        (folder / name).write_text("nothing")
    expected = {"train": [f"{folder}/part-0"]}
    files, notes = group_by_split(kind, str(folder))
    assert (files, notes) == (expected, ())
    open_source(f"{kind}:{folder}")
    for name in HIDDEN:
        files = {"train": [f"{folder}/{name}"]}
        assert group_by_split(kind, f"{folder}/{name}") == (files, ())


def test_patterns_leave_hidden_files_out_unless_they_are_asked_for(tmp_path):
    for name in ("a.csv", *HIDDEN):
        (tmp_path / name).write_text(ROWS)
    files, notes = group_by_split("csv", f"{tmp_path}/*")
    assert (files, notes) == ({"train": [f"{tmp_path}/a.csv"]}, ())
    asked = [f"{tmp_path}/_SUCCESS", f"{tmp_path}/_metadata"]
    assert group_by_split("csv", f"{tmp_path}/_*") == ({"train": asked}, ())
    with pytest.raises(ValueError, match="no file matches"):
        group_by_split("csv", f"{tmp_path}/none-[1].csv")


@pytest.mark.parametrize("pattern", ["_runs*/a.csv", ".runs*/*.csv", "_*/*.csv"])
def test_a_hidden_folder_that_a_pattern_names_is_read(tmp_path, pattern):
    for name in ("_runs1", ".runs1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.csv").write_text(ROWS)
    folder = f"{pattern[0]}runs1"
    expected = {"train": [f"{tmp_path}/{folder}/a.csv"]}
    assert group_by_split("csv", f"{tmp_path}/{pattern}") == (expected, ())


@OPENED
def test_files_that_are_left_out_are_counted(tmp_path, kind):
    _write(kind, tmp_path / "a")
    for name in ("_table.csv", "x.json", "dataset_info.json", ".hidden"):
        (tmp_path / name).write_text("{}")
    notes = open_source(f"{kind}:{tmp_path}").notes
    assert _is_counted(notes, 2, tmp_path / "_table.csv")


@pytest.mark.parametrize("name", ["_table.csv", "x.json"])
def test_no_file_is_left(tmp_path, name):
    (tmp_path / name).write_text(ROWS)
    said = f"1 file left out, such as {tmp_path}/{name}: .* such as _[*] or [*].json"
    with pytest.raises(ValueError, match=said):
        group_by_split("csv", str(tmp_path))
    expected = {"train": [f"{tmp_path}/{name}"]}
    for pattern in (name, "*.json" if name == "x.json" else "_*"):
        assert group_by_split("csv", f"{tmp_path}/{pattern}") == (expected, ())
