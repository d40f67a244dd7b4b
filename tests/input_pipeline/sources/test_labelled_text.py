import csv

import numpy as np
import pytest

from towers import input_pipeline
from towers.input_pipeline import text
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.sources.files.record import BadRecordError

_TEXTS = ['good, "really"', "bad\nand long", "", "so so", "Größe 😀"]
_LABELS = ["pos", "neg", "neg", "so", "pos"]


def _write_csv(path, columns):
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _write_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    if isinstance(columns, dict):
        columns = pyarrow.table(columns)
    parquet.write_table(columns, path, row_group_size=2)


_WRITE = {"csv": _write_csv, "parquet": _write_parquet}


def _open(folder, columns, kind="csv", **options):
    _WRITE[kind](folder / f"a.{kind}", columns)
    options = {
        "text_column": "text",
        "sequence_length": 8,
        "eval_fraction": 0,
        **options,
    }
    return input_pipeline.open_source(f"{kind}:{folder}/*.{kind}", **options)


def _read(source, split="train", **options):
    """Texts and targets of each row, which is checked to be padded at its end."""
    data = input_pipeline.make_dataset(source, split, 2, **options)
    found = []
    for xs, ys in data.as_numpy_iterator():
        assert xs.dtype == np.int32 and xs.shape[1:] == source.image_shape
        for x, y in zip(xs, ys, strict=True):
            assert not x[np.count_nonzero(x) :].any()
            found.append((source.tokenizer.decode(x), y.tolist()))
    return found


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_texts_and_names_of_classes(tmp_path, kind):
    columns = {"label": _LABELS, "id": [*range(5)], "text": _TEXTS}
    source = _open(tmp_path, columns, kind, sequence_length=20)
    assert source.class_names == source.target.names == ("neg", "pos", "so")
    assert (source.input_kind, source.target.kind) == ("tokens", "class")
    wanted = [*zip(_TEXTS, [1, 0, 0, 2, 1], strict=True)]
    assert _read(source, training=False) == wanted
    shuffled = _read(source, seed=1)
    assert sorted(shuffled) == sorted(wanted)
    assert _read(source, seed=1, start_record=2) == shuffled[2:]


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(
    "columns, options, kind, wanted",
    [
        ({"stars": [5, 1, 0]}, {}, "class", [5, 1, 0]),
        ({"stars": [5, 1, 0]}, {"num_classes": 9}, "class", [5, 1, 0]),
        ({"stars": [1.5, 2.0, -1.0]}, {}, "numbers", [[1.5], [2.0], [-1.0]]),
        ({"stars": [5, 1, 3]}, {"target": "numbers"}, "numbers", [[5], [1], [3]]),
        (
            {"toxic": [0, 1, 1], "spam": [1, 0, 1]},
            {"label_column": "toxic,spam"},
            *("labels", [[0, 1], [1, 0], [1, 1]]),
        ),
    ],
)
@pytest.mark.parametrize("file", ["csv", "parquet"])
def test_targets(tmp_path, file, columns, options, kind, wanted):
    columns = {"text": ["a", "b", "c"], **columns}
    source = _open(tmp_path, columns, file, **options)
    assert source.target.kind == kind
    assert source.target.size == (
        options.get("num_classes") or np.max(wanted) + 1
        if kind == "class"
        else len(wanted[0])
    )
    found = _read(source, training=False)
    assert found == [*zip("abc", wanted, strict=True)]


def test_texts_that_are_cut_off_are_said(tmp_path):
    source = _open(tmp_path, {"text": ["123456789", "12345678"], "label": [0, 1]})
    assert _read(source, training=False) == [("12345678", 0), ("12345678", 1)]
    assert "1 text of 2 are cut off after 8 tokens" in source.notes[-1]


def test_a_tokenizer_makes_the_tokens(tmp_path):
    words = text.WordTokenizer(["good", "bad"])
    columns = {"text": ["good bad", "other"], "label": [0, 1]}
    source = _open(tmp_path, columns, tokenizer=words)
    assert _read(source, training=False) == [("good bad", 0), ("<unk>", 1)]
    assert source.tokenizer is words


@pytest.mark.slow
def test_what_is_held_out(tmp_path):
    columns = {"text": [f"t{k}" for k in range(40)], "label": [*range(2)] * 20}
    source = _open(tmp_path, columns, eval_fraction=None)
    train, test = _read(source), _read(source, "test")
    assert (len(train), len(test)) == (36, 4)
    assert sorted(train + test) == sorted(zip(*columns.values(), strict=True))
    # The same rows as of a table of numbers.
    _write_csv(tmp_path / "a.csv", {"number": [*range(40)], "label": columns["label"]})
    numbers = input_pipeline.open_source(f"csv:{tmp_path}/a.csv")
    held = input_pipeline.make_dataset(numbers, "test", 9).as_numpy_iterator()
    assert [f"t{int(x)}" for batch, _ in held for (x,) in batch] == [t for t, _ in test]
    _write_csv(tmp_path / "valid.csv", {"text": ["v"], "label": [1]})
    by_name = _open(tmp_path, columns, eval_fraction=None)
    assert by_name.splits == {"train": 40, "test": 1}
    assert _read(by_name, "test") == [("v", 1)]


_BAD = b'text,label\ngood,0\n"of\ntwo",x\nthree,1,2\nnone,\n\xff,1\nlast,1\na,\xff\n'


_FAULTS = {
    "line 5": "has 3 fields, expected 2 as the header",
    "line 6": "nothing in the column 'label', expected a value",
    "line 9": "label is not UTF-8",
    "line 3": "label is 'x', expected a number",
}
_NO_TEXT = {"line 7": "text is not UTF-8; --tokenizer=bytes reads any"}


@pytest.mark.parametrize(
    "tokenizer, faults, good",
    [
        ("bytes", _FAULTS, {"good": 0, "\ufffd": 1, "last": 1}),
        (text.WordTokenizer(["good"]), _FAULTS | _NO_TEXT, {"good": 0, "<unk>": 1}),
    ],
    ids=["bytes", "words"],
)
def test_bad_rows(tmp_path, tokenizer, faults, good):
    (tmp_path / "a.csv").write_bytes(_BAD)
    options = {"text_column": "text", "eval_fraction": 0, "target": "numbers"}
    options |= {"tokenizer": tokenizer, "sequence_length": 8}
    spec = f"csv:{tmp_path}/a.csv"
    with pytest.raises(BadRecordError, match=r"a\.csv: line 5: has 3 fields"):
        input_pipeline.open_source(spec, **options)
    source = input_pipeline.open_source(spec, **options, skip_bad=True)
    found = quarantine.inspect(source, ["train"], most=9)
    assert {bad.place: bad.fault for bad in found.bad["train"]} == faults
    assert found.splits == source.splits == {"train": len(good)}
    without = source.without(found.bad, found.splits)
    wanted = [(name, [value]) for name, value in good.items()]
    assert _read(without, training=False) == wanted


@pytest.mark.parametrize(
    "content, line, fault, good",
    [
        (b'text,label\na,0\nb,"1\nc,1\nd,0\n', 3, "opens quotes that do not en", "a"),
        (b'text,label\na,0\n"b,1\nc,1\n', 3, "nothing behind it can be read", "a"),
    ],
)
def test_a_quote_that_does_not_end_is_bad(tmp_path, content, line, fault, good):
    (tmp_path / "a.csv").write_bytes(content)
    options = {"text_column": "text", "eval_fraction": 0, "target": "class"}
    spec = f"csv:{tmp_path}/a.csv"
    fault = f"line {line}: .*{fault}"
    with pytest.raises(BadRecordError, match=fault):
        input_pipeline.open_source(spec, **options)
    source = input_pipeline.open_source(spec, **options, skip_bad=True)
    assert [text for text, _ in _read(source, training=False)] == [*good]


def test_odd_columns_of_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    with pytest.raises(
        BadRecordError, match=r"row 0: text is \['a'\], expected a text"
    ):
        _open(tmp_path, {"text": [["a"]], "label": ["x"]}, "parquet")
    none = pyarrow.table({"text": ["a"], "label": ["x"]}).slice(1)
    with pytest.raises(ValueError, match="has no row in its split train"):
        _open(tmp_path, none, "parquet")
    columns = [pyarrow.array([name]) for name in "abx"]
    table = pyarrow.Table.from_arrays(columns, names=["text", "text", "label"])
    with pytest.raises(ValueError, match=r"two columns 'text': expected different"):
        _open(tmp_path, table, "parquet")


def test_what_is_wrong_is_said(tmp_path):
    columns = {"text": ["a", "b"], "label": [0, 1]}
    with pytest.raises(ValueError, match="did you mean 'text'"):
        _open(tmp_path, columns, text_column="txt")
    with pytest.raises(ValueError, match=r"received tokenizer for .* without text_col"):
        _open(tmp_path, columns, text_column=None, tokenizer="bytes")
    with pytest.raises(ValueError, match="received text_column and feature_columns"):
        _open(tmp_path, columns, feature_columns=["a"])
    with pytest.raises(ValueError, match="has no row in its split train"):
        _open(tmp_path, {"text": [], "label": []})
    with pytest.raises(ValueError, match="label_column is 'text', but"):
        _open(tmp_path, columns, label_column="text")
    with pytest.raises(
        ValueError, match=r"class_names has 3 names, but csv:.* has 2 cl"
    ):
        _open(tmp_path, columns, class_names=("a", "b", "c"), num_classes=2)
    _write_csv(tmp_path / "valid.csv", columns)
    with pytest.raises(ValueError, match="held out by their names"):
        _open(tmp_path, columns, eval_fraction=0.1)
    with pytest.raises(ValueError, match="whose texts are read once: expected one of"):
        _open(tmp_path, columns, local_store=object())
    with pytest.raises(ValueError, match="by --text_column"):
        _open(tmp_path, columns, text_column=None, sequence_length=None)
