"""What is odd about the columns of a table is said, whatever reads it."""

import warnings

import pytest

from towers.input_pipeline import measure_scaling, open_source


def _csv(folder, table):
    lines = [
        ",".join(table),
        *(",".join(map(str, row)) for row in zip(*table.values(), strict=True)),
    ]
    (folder / "a.csv").write_text("\n".join([*lines, ""]))
    return f"csv:{folder}/a.csv"


def _parquet(folder, table):
    pa, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pa.table(table), folder / "a.parquet")
    return f"parquet:{folder}/a.parquet"


@pytest.mark.parametrize("write", [_csv, _parquet])
@pytest.mark.parametrize("name", ["", "Unnamed: 0", "__index_level_0__"])
def test_an_index_of_pandas_is_left_out_in_any_order(tmp_path, write, name):
    table = {name: [7, 3, 1, 9] * 5, "x": [1, 2, 3, 5] * 5, "label": [0, 1] * 10}
    spec = write(tmp_path, table)
    source = open_source(spec, eval_fraction=0)
    assert source.image_fields == ["x"] and source.moments.mean == [2.75]
    (note,) = source.notes
    assert note.startswith(f"Left out, because named as ids of rows are: {name!r}. ")
    kept = open_source(spec, eval_fraction=0, feature_columns=[name, "x"])
    assert kept.image_fields == [name, "x"] and kept.notes == ()


COUNTED = [*range(3, 33)]
SHUFFLED = COUNTED[::2] + COUNTED[1::2]


@pytest.mark.parametrize("write", [_csv, _parquet])
@pytest.mark.parametrize(
    "name, values, is_id",
    [
        ("id", COUNTED, True),
        ("PassengerId", COUNTED, True),
        ("row_id", SHUFFLED, True),
        ("customerID", SHUFFLED, True),
        ("index", COUNTED, True),
        ("year", COUNTED, False),
        ("paid", SHUFFLED, False),
        ("user_id", [1, 2, 3] * 10, False),
        ("id", [value + 0.5 for value in COUNTED], False),
    ],
)
def test_ids_are_left_out(tmp_path, write, name, values, is_id):
    table = {name: values, "x": [1, 2, 4] * 10, "label": [0, 1] * 15}
    source = open_source(write(tmp_path, table), eval_fraction=0)
    assert (name not in source.image_fields) == is_id
    assert any("named as ids" in note for note in source.notes) == is_id
    rows = source.in_memory()
    assert rows is None or rows.image_shape == (2 - is_id,)


def test_an_id_is_learnt_from_where_there_is_nothing_else(tmp_path):
    table = {"id": COUNTED, "label": [0, 1] * 15}
    source = open_source(_csv(tmp_path, table), eval_fraction=0)
    assert source.image_fields == ["id"]


def test_another_column_is_no_index(tmp_path):
    table = {"Unnamed": [7, 3] * 10, "x": [1, 2] * 10, "label": [0, 1] * 10}
    assert open_source(_csv(tmp_path, table), eval_fraction=0).notes == ()


PATHS = [f"/a/rather/long/way/to/the/pictures/of/animals/{k}.JPG" for k in range(20)]


@pytest.mark.parametrize(
    "table",
    [
        {"path": PATHS, "label": ["cat", "dog"] * 10},
        {"breed": ["pug", "poodle"] * 10, "path": PATHS},
    ],
)
def test_a_table_of_pictures_is_told_of_class_folders(tmp_path, table):
    said = r"'path' names pictures, .* a folder of its own, and train on folder:DIR"
    with pytest.raises(ValueError, match=said):
        open_source(_csv(tmp_path, table))


def test_pictures_beside_numbers_are_left_out_with_what_to_do(tmp_path):
    table = {"path": PATHS, "width": [1, 2] * 10, "label": ["cat", "dog"] * 10}
    (note,) = open_source(_csv(tmp_path, table), eval_fraction=0).notes
    assert note.startswith(
        "Left out, because neither numbers nor texts that repeat: 'p"
    )
    assert "train on folder:DIR" in note and "categories" not in note


def test_names_that_all_differ_are_classes_where_they_are_asked_for(tmp_path):
    lines = "".join(f"{k},owl {k}\n" for k in range(40))
    (tmp_path / "a.csv").write_text(f"x,name\n{lines}")
    notes = open_source(f"csv:{tmp_path}/a.csv", label_column="name").notes
    assert any(
        note.endswith("'owl 1': each row is a class of its own.") for note in notes
    )


def test_an_empty_column_is_offered_to_no_model(tmp_path):
    table = {"x": [1, 2] * 10, "label": [0, 1] * 10, "": [""] * 20}
    (note,) = open_source(_csv(tmp_path, table), eval_fraction=0).notes
    assert note == "Left out, because their first cells are empty: ''."


def test_a_number_beyond_float32_is_a_bad_record_without_a_warning(tmp_path):
    table = {"x": [1, 2] * 10, "y": [0, 5] * 10, "label": [0, 1] * 10}
    table["x"][4] = "1e300"
    spec = _csv(tmp_path, table)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = open_source(spec, eval_fraction=0, skip_bad=True)
        scaling = measure_scaling(source)
    assert scaling.mean[0] == pytest.approx((9 * 1 + 10 * 2) / 19)
    said = r"line 6: x is 1e\+300, expected a number of at most 3.4e\+38"
    with pytest.raises(ValueError, match=said):
        open_source(spec, eval_fraction=0)
