"""Tables of the shapes of public ones are opened by the default command."""

import csv
import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

from tests.input_pipeline.sources import public_tables
from tests.limits import HANG_S
from towers.input_pipeline import BadRecordError, open_source
from towers.input_pipeline.sources.tables import csv_file
from towers.input_pipeline.sources.tables.csv_file import CSVFile
from towers.input_pipeline.sources.tables.opened import text_rows


class Read(NamedTuple):
    """What is made of a table.

    Attributes:
        numbers: how many columns of numbers there are.
        categories: columns of categories.
        missing: columns in which a number is missing.
        target: kind of the target, and its size.
        names: of the classes.
        left_out: columns that notes say are left out.
    """

    numbers: int
    categories: str
    missing: str
    target: tuple[str, int]
    names: str = ""
    left_out: str = ""


_KINDS = " ".join(f"Kind{k}" for k in range(39))
_NUMBERS = " ".join(f"Num{k}" for k in range(2, 39))
_READ = {
    "titanic": Read(
        *(4, "Sex Embarked", "Age", ("class", 2), ""),
        "PassengerId Name Ticket Cabin",
    ),
    "adult": Read(
        *(3, "workclass education occupation native-country", ""),
        *(("class", 2), "<=50K >50K"),
    ),
    "wine": Read(4, "", "", ("class", 9)),
    "houses": Read(40, _KINDS, _NUMBERS, ("numbers", 1), "SalePrice", "Id"),
    "bank": Read(4, "job housing month", "", ("class", 2), "no yes"),
    "iris": Read(4, "", "", ("class", 3), "setosa versicolor virginica"),
    "covertype": Read(54, "", "", ("class", 8)),
    "fraud": Read(30, "", "", ("class", 2)),
    "california": Read(
        *(4, "ocean_proximity", "total_bedrooms", ("numbers", 1)),
        "median_house_value",
    ),
    "mushrooms": Read(
        *(0, "cap-shape gill-color veil-type stalk-root", "", ("class", 2), "e p"),
    ),
    "air": Read(4, "Date Time", "", ("numbers", 1), "CO(GT)", "Unnamed: 8"),
    "fires": Read(3, "month day", "", ("numbers", 1), "area"),
    "abalone": Read(2, "Sex", "", ("class", 30)),
    "breast": Read(4, "", "", ("class", 2), "B M", "id"),
    "heart": Read(4, "", "chol ca", ("class", 5)),
    "telco": Read(
        *(4, "gender Contract", "TotalCharges", ("class", 2), "No Yes"),
        "customerID",
    ),
    "spaceship": Read(
        *(3, "HomePlanet", "CryoSleep Age RoomService", ("class", 2), "False True"),
        "PassengerId Cabin Name",
    ),
    "taxi": Read(*(4, "store_and_fwd_flag", "", ("numbers", 1), "trip_duration"), "id"),
    "sales": Read(3, "family", "", ("numbers", 1), "sales", "id"),
    "excel": Read(2, "Straße", "", ("class", 3), "gut mäßig schlecht"),
    "genes": Read(5000, "", "", ("class", 5), "BRCA COAD KIRC LUAD PRAD"),
    "nested": Read(3, "city", "is_new", ("class", 3), "", "tags nothing"),
}


def _write(folder, name):
    """Writes a table; returns its spec, the path of the test file, and its label."""
    table = public_tables.ALL[name]()
    path, test = folder / table.file, folder / f"new-{table.file}"
    path.write_bytes(table.content)
    test.write_bytes(table.test)
    kind = "parquet" if path.suffix == ".parquet" else "csv"
    return f"{kind}:{path}", test, table.label


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("name", _READ)
def test_the_default_command_takes(tmp_path, name):
    spec, _, label = _write(tmp_path, name)
    source, expected = open_source(spec, label_column=label), _READ[name]
    assert len(source.image_fields) == expected.numbers
    assert [*source.vocabularies] == expected.categories.split()
    assert [*source.missing_columns] == expected.missing.split()
    assert (source.target.kind, source.target.size) == expected.target
    assert [*(source.target.names or ())] == expected.names.split()
    notes = [note for note in source.notes if note.startswith("Left out")]
    said = " ".join(note.partition("--feature_columns")[0] for note in notes)
    left_out = [*expected.left_out.replace("Unnamed: ", "Unnamed:").split()]
    assert all(column.replace(":", ": ") in said for column in left_out)
    assert bool(notes) == bool(left_out) or name == "genes"


def test_the_table_of_a_text_names_what_reads_it(tmp_path):
    spec, test, _ = _write(tmp_path, "spam")
    with pytest.raises(ValueError, match="--text_column=message"):
        open_source(spec)
    source = open_source(spec, text_column="message")
    assert source.class_names == ("ham", "spam")
    # Of one column, the header tells no separator, but the name does.
    rows = [*text_rows(CSVFile(str(test)), ["message"])]
    assert len(rows) == 20 and not any(row.fault for row in rows)


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("size", [1, 100, 2**22])
def test_rows_of_nothing_at_the_end_are_said(tmp_path, capsys, monkeypatch, size):
    monkeypatch.setattr(csv_file, "_BLOCK_BYTES", size)
    spec, _, label = _write(tmp_path, "air")
    source = open_source(spec, label_column=label)
    assert sum(source.splits.values()) == public_tables.ROWS
    assert "9 rows of nothing but ';' at the end of" in capsys.readouterr().err


@pytest.mark.parametrize("size", [1, 5, 2**22])
def test_rows_of_nothing_before_others_are_rows(tmp_path, monkeypatch, size):
    monkeypatch.setattr(csv_file, "_BLOCK_BYTES", size)
    (tmp_path / "a.csv").write_text("a,b,label\n1,2,0\n,,\n,,\n,,1\n4,,0\n,,\n")
    with pytest.raises(BadRecordError, match="line 3: nothing in the column 'label'"):
        open_source(f"csv:{tmp_path}/a.csv", eval_fraction=0)
    source = open_source(f"csv:{tmp_path}/a.csv", eval_fraction=0, skip_bad=True)
    assert source.splits == {"train": 5} and len(source.faults["train"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["titanic", "air"])
def test_one_command_trains_and_one_predicts(tmp_path, name):
    spec, test, label = _write(tmp_path, name)
    run = os.path.join(tmp_path, "run")
    train = ["towers.train", f"--dataset={spec}", "--model=mlp", "--train_epochs=1"]
    train += [f"--label_column={label}", f"--model_dir={run}"]
    subprocess.run([sys.executable, "-m", *train], check=True, timeout=HANG_S)
    output = os.path.join(tmp_path, "out.csv")
    predict = ["towers.predict", run, str(test), f"--output={output}"]
    subprocess.run([sys.executable, "-m", *predict], check=True, timeout=HANG_S)
    with open(output, newline="") as file:
        assert len([*csv.DictReader(file)]) == 20


@pytest.mark.parametrize("cell", ["", " ", "?", " ?", " NA", "-", ".", "#DIV/0!"])
def test_missing_cells_are_read_by_column(tmp_path, monkeypatch, cell):
    monkeypatch.setattr(csv_file, "_converted", None)  # what reads cell by cell
    rows = [f"{k}, {cell if k % 5 == 2 else k},{k % 2}" for k in range(20)]
    (tmp_path / "a.csv").write_text("\n".join(["a, b,label", *rows, ""]))
    source = open_source(f"csv:{tmp_path}/a.csv", eval_fraction=0)
    assert list(source.moments.missing) == [0, 4]


@pytest.mark.parametrize("end", ["", " 12:00", "T12:00:00", "T12:00:00Z"])
def test_moments_are_read_by_column(tmp_path, monkeypatch, end):
    monkeypatch.setattr(csv_file, "_converted", None)
    rows = [f"2024-05-{k + 10}{end},{k % 2}" for k in range(20)]
    (tmp_path / "a.csv").write_text("\n".join(["day,label", *rows, ""]))
    source = open_source(f"csv:{tmp_path}/a.csv", eval_fraction=0)
    days = np.datetime64("2024-05-19T12:00") - np.datetime64("1970-01-01T00:00")
    noon = days / np.timedelta64(1, "D") + 0.5 * ("12" in end)
    assert source.moments.mean == pytest.approx([noon], abs=1e-9)


def test_moments_of_which_some_have_no_zone(tmp_path):
    rows = [f"2024-05-{k + 10}T00:00{':00Z' * (k != 7)},{k % 2}" for k in range(20)]
    (tmp_path / "a.csv").write_text("\n".join(["day,label", *rows, ""]))
    source = open_source(f"csv:{tmp_path}/a.csv", eval_fraction=0)
    assert source.moments.count == [20]
    # The first rows tell the type, and a later one is of another.
    lines = [*[rows[0]] * 200, rows[0].replace(":00Z", "")]
    (tmp_path / "b.csv").write_text("\n".join(["day,label", *lines, ""]))
    other = open_source(f"csv:{tmp_path}/b.csv", eval_fraction=0)
    assert other.moments.count == [201] and other.moments.squares == [0]
