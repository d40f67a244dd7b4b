"""``folder:`` of texts: a folder of .txt files for each class."""

import numpy as np
import pytest

from towers import input_pipeline
from towers.input_pipeline import text
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.sources.files.record import BadRecordError

_TEXTS = {
    "train/neg/0.txt": "bad,\nand long",
    "train/neg/1.txt": "",
    "train/pos/0.txt": "Größe 😀",
    "train/pos/1.TXT": "good",
    "train/pos/10.txt": "so so",
    "test/neg/0.txt": "worse",
    "test/pos/0.txt": "better",
}


def _write(folder, texts):
    for name, content in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _open(folder, texts=_TEXTS, **options):
    _write(folder, texts)
    options = {"sequence_length": 16, **options}
    return input_pipeline.open_source(f"folder:{folder}", **options)


def _read(source, split="train", **options):
    data = input_pipeline.make_dataset(source, split, 2, **options)
    return [
        (source.tokenizer.decode(x), int(y))
        for xs, ys in data.as_numpy_iterator()
        for x, y in zip(xs, ys, strict=True)
    ]


@pytest.mark.slow
def test_texts_and_their_folders(tmp_path):
    source = _open(tmp_path)
    assert source.class_names == ("neg", "pos") and source.num_classes == 2
    assert (source.input_kind, source.target.kind) == ("tokens", "class")
    values = [*_TEXTS.values()]
    wanted = [*zip(values[:5], [0, 0, 1, 1, 1], strict=True)]
    assert _read(source, training=False) == wanted
    assert _read(source, "test") == [*zip(values[5:], [0, 1], strict=True)]
    shuffled = _read(source, seed=1)
    assert shuffled != wanted and sorted(shuffled) == sorted(wanted)
    assert _read(source, seed=1, start_record=2) == shuffled[2:]
    widths = {
        x.shape[1]
        for x, _ in input_pipeline.make_dataset(
            source, "train", 2, group_by_length=True
        ).as_numpy_iterator()
    }
    assert len(widths) > 1


def test_a_fraction_of_each_class_is_held_out(tmp_path):
    texts = {f"{name}/{k}.txt": f"{name} {k}" for name in "ab" for k in range(10)}
    source = _open(tmp_path, texts)
    assert _read(source, "test") == [("a 9", 0), ("b 9", 1)]
    assert "10% of the files of each class, 2 in all, are" in source.notes[-1]
    none = _open(tmp_path, {}, eval_fraction=0, local_store=object())
    assert none.splits == {"train": 20}
    assert none.notes[-1].endswith("has texts, which are read once: no store is used.")
    _write(tmp_path, {"train/a/0.txt": "a", "test/a/0.txt": "a"})
    with pytest.raises(ValueError, match="test is held out by its name: leave it out"):
        _open(tmp_path, {}, eval_fraction=0.5)


def test_a_fraction_of_the_good_files_is_held_out(tmp_path):
    texts = {f"{name}/{k}.txt": f"{name} {k}" for name in "ab" for k in range(11)}
    texts |= {"a/0.txt": b"\xff", "b/9.txt": b"\xff"}
    words = text.WordTokenizer([*"ab", *map(str, range(11))])
    source = _open(tmp_path, texts, tokenizer=words, skip_bad=True)
    # In the order of names, 10 is behind 1.
    assert _read(source, "test") == [("a 9", 0), ("b 8", 1)]
    assert source.splits == {"train": 18, "test": 2}


def test_what_is_left_out_is_said(tmp_path):
    """As of the aclImdb reviews, which have texts without a label."""
    others = {"train/unsup/0.txt": "?", "train/urls.txt": "", "train/pos/0.feat": ""}
    source = _open(tmp_path, _TEXTS | others | {"README": ""}, sequence_length=4)
    left, unknown, cut = source.notes
    assert left == (
        "2 files left out: 1 .feat, 1 .txt beside the class folders; files are read if "
        "they are .txt files."
    )
    assert "test has no class 'unsup', but" in unknown
    assert "5 texts of 8 are cut off after 4 tokens" in cut


def test_bad_texts(tmp_path):
    words = text.WordTokenizer(["good", "so"])
    bad = {"train/neg/2.txt": b"\xff"}
    message = r"neg/2\.txt: is not UTF-8 at byte 0, expected text; --tokenizer=bytes"
    with pytest.raises(BadRecordError, match=message):
        _open(tmp_path, _TEXTS | bad, tokenizer=words)
    source = _open(tmp_path, {}, tokenizer=words, skip_bad=True)
    found = quarantine.inspect(source, ["train", "test"], 9)
    (record,) = found.bad["train"]
    assert record.path == f"{tmp_path}/train/neg/2.txt" and not found.bad["test"]
    kept = source.without(found.bad, found.splits)
    wanted = ["<unk> <unk> <unk>", "", "<unk> <unk>", "good", "so so"]
    assert [each for each, _ in _read(kept, training=False)] == wanted
    assert source.splits == kept.splits == {"train": 5, "test": 2}
    # Bytes are bytes.
    assert len(_read(_open(tmp_path, {}))) == 6
    _write(tmp_path, {f"test/{name}/0.txt": b"\xff" for name in ("neg", "pos")})
    with pytest.raises(ValueError, match="has no text in its split test; the first"):
        _open(tmp_path, {}, tokenizer=words, skip_bad=True)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ({"a/0.txt": "", "b/0.png": ""}, {}, r"b has no \.txt file directly in it, on"),
        ({"a/0.png": "", "b/0.txt": ""}, {}, "b has no JPEG.* in it, only 1 .txt"),
        (
            {"a/0.txt": "", "a/1.txt": "", "a/0.png": ""},
            {},
            "a has 2 texts and 1 picture: expected one of the two, so move the others",
        ),
        (
            {"a/0.txt": "", "b/0.txt": "", "b/0.png": ""},
            {},
            "has 2 texts and 1 picture: expected one of the two",
        ),
        (
            {"a/0.png": "", "b/0.png": ""},
            {"tokenizer": "bytes"},
            "received tokenizer for .* whose class folders have no texts",
        ),
        ({"a/0.txt": "", "b/0.txt": ""}, {"num_classes": 3}, "has 2 class folders"),
        ({"a/0.txt": "", "b/0.txt": ""}, {"target": "numbers"}, "class or mask for a"),
    ],
)
def test_what_is_no_folder_of_texts(tmp_path, texts, options, message):
    _write(tmp_path, texts)
    with pytest.raises(ValueError, match=message):
        input_pipeline.open_source(f"folder:{tmp_path}", **options)


def test_texts_beside_pictures_are_left_out(tmp_path):
    """Captions, say."""
    _write(
        tmp_path, {f"{name}/0.{kind}": "" for name in "ab" for kind in ("png", "txt")}
    )
    source = input_pipeline.open_source(f"folder:{tmp_path}", eval_fraction=0)
    assert source.input_kind == "image" and source.splits == {"train": 2}
    assert np.any(["2 files left out: 2 .txt" in note for note in source.notes])
