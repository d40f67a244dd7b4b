"""What is odd about labels is said, whatever reads them."""

import numpy as np
import pytest

from tests.towers.train.runs import png, write_folder, write_tfrecord
from towers.input_pipeline import open_source
from towers.input_pipeline.sources.targets import Target

RARE = ["a", "b"] * 20 + ["c"]


def _csv(path, labels, header="x,y,label"):
    rows = [f"{k % 7},{k * k % 5},{label}" for k, label in enumerate(labels)]
    path.write_text("\n".join([header, *rows, ""]))
    return f"csv:{path}"


def _rows(folder, **labels):
    for split, of_split in labels.items():
        _csv(folder / f"{split}.csv", of_split)
    return open_source(f"csv:{folder}")


def _texts(folder, **labels):
    for split, of_split in labels.items():
        _csv(folder / f"{split}.csv", of_split, "x,text,label")
    return open_source(f"csv:{folder}", text_column="text")


def _sentences(folder, **labels):
    for split, of_split in labels.items():
        lines = [f"word {label}\n\n" for label in of_split]
        (folder / f"{split}.conll").write_text("".join(lines))
    return open_source(f"conll:{folder}")


READERS = (_rows, _texts, _sentences)


@pytest.mark.parametrize("reader", READERS)
def test_a_class_that_validation_lacks_is_said(tmp_path, reader):
    source = reader(tmp_path, train=RARE, test=["a", "b"])
    said = (
        "The class 'c' has no example in the validation data, which so tells nothing "
        "about it."
    )
    assert said in source.notes


@pytest.mark.parametrize("reader", READERS)
def test_a_class_that_training_lacks_is_said(tmp_path, reader):
    source = reader(tmp_path, train=["a", "b"] * 10, test=["a", "c", "d"])
    said = (
        "2 classes, such as 'c', have no example to train on, but some in the "
        "validation data: the model cannot learn them."
    )
    assert said in source.notes


@pytest.mark.parametrize("reader", READERS)
def test_nothing_is_said_of_classes_that_both_splits_have(tmp_path, reader):
    source = reader(tmp_path, train=["a", "b"], test=["b", "a"])
    assert not any("no example" in note for note in source.notes)


def test_a_class_that_the_held_out_rows_lack_is_said(tmp_path):
    source = open_source(_csv(tmp_path / "rows.csv", RARE))
    assert source.splits["test"] > 0
    assert any("have no example in the validation" in note for note in source.notes)


def test_a_class_of_one_picture_is_not_in_validation(tmp_path):
    write_folder(tmp_path, cat=20, dog=20, fox=1)
    notes = open_source(f"folder:{tmp_path}").notes
    assert any("The class 'fox' has no example in the valid" in note for note in notes)


def test_labels_of_records_are_named_by_their_numbers(tmp_path):
    for split, labels in {"train": [0, 1, 2], "test": [0, 1]}.items():
        write_tfrecord(tmp_path / f"{split}.tfrecord", map(png, labels), labels)
    notes = open_source(f"tfrecord:{tmp_path}").notes
    assert any("The class 2 has no example in the valid" in note for note in notes)


@pytest.mark.parametrize("reader", [_rows, _texts])
def test_numbers_of_classes_that_do_not_begin_at_0_are_said(tmp_path, reader):
    notes = reader(tmp_path, train=[1, 2] * 10, test=[1, 2]).notes
    assert any(
        "The labels are 1 to 2: 3 classes, and 0 never" in note for note in notes
    )


@pytest.mark.parametrize("text_column", [None, "y"])
def test_a_constant_number_to_predict_is_said(tmp_path, text_column):
    spec = _csv(tmp_path / "rows.csv", ["3.5"] * 30, "x,y,price")
    options = {"text_column": text_column} if text_column else {}
    notes = open_source(spec, target="numbers", label_column="price", **options).notes
    said = (
        "All values to predict of 'price' are 3.5: there is nothing to learn about it."
    )
    assert said in notes


def test_a_label_that_never_holds_is_said(tmp_path):
    rows = [f"{k % 3},{k % 2},0" for k in range(30)]
    (tmp_path / "rows.csv").write_text("\n".join(["x,rain,snow", *rows, ""]))
    notes = open_source(f"csv:{tmp_path}/rows.csv", label_column="rain,snow").notes
    said = [note for note in notes if note.startswith("All values to predict")]
    assert [note.split(": ")[0] for note in said] == [
        "All values to predict of 'snow' are 0"
    ]


def test_a_negative_class_is_said_with_what_to_do(tmp_path):
    spec = _csv(tmp_path / "rows.csv", [-1, 1] * 10)
    said = r"line 2: label -1 is negative, expected a whole number from 0: number the"
    with pytest.raises(ValueError, match=said):
        open_source(spec)


def test_a_number_that_float32_cannot_hold_is_no_missing_number():
    fault = Target("numbers", 1, ("price",)).fault(np.array([1e300]), "price")
    assert fault == (
        "price is 1e+300, expected a number of at most 3.4e+38, which float32 holds"
    )
    fault = Target("numbers", 1, ("price",)).fault(np.array([np.inf]), "price")
    assert fault == "price is inf, expected a number"
