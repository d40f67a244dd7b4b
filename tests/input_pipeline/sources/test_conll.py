import numpy as np
import pytest

from towers import input_pipeline
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.sources.files.record import BadRecordError

_TEXT = """\
-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
German JJ B-NP B-MISC
call NN I-NP O


Peter NNP B-NP B-PER
rejects VBZ B-VP O
"""
_TAGS = ("B-MISC", "B-ORG", "B-PER", "O")


def _open(folder, content=_TEXT, name="a.txt", **options):
    (folder / name).write_text(content, "utf-8")
    options = {"eval_fraction": 0, "sequence_length": 5, **options}
    return input_pipeline.open_source(f"conll:{folder}/*.txt", **options)


def _sentences(source, split="train", **options):
    """Words and tags of each row; rows are checked to be padded as they should be."""
    data = input_pipeline.make_dataset(source, split, 3, **options)
    found = []
    for batch in data.as_numpy_iterator():
        assert [part.dtype for part in batch] == [np.int32, np.int64, np.float32]
        for x, y, weights in zip(*batch, strict=True):
            count = int(weights.sum())
            np.testing.assert_array_equal(weights, [1] * count + [0] * (5 - count))
            assert not x[count:].any() and (y[count:] == -1).all()
            words = source.tokenizer.decode(x[:count])
            found.append((words, [source.class_names[tag] for tag in y[:count]]))
    return found


def test_lines_end_as_on_any_system(tmp_path):
    found = [_open(tmp_path, _TEXT.replace("\n", end)) for end in ("\n", "\r", "\r\n")]
    wanted, *others = [_sentences(source, training=False) for source in found]
    assert others == [wanted, wanted]


def test_words_and_their_tags(tmp_path):
    source = _open(tmp_path)
    assert _sentences(source, training=False) == [
        ("EU rejects German call", ["B-ORG", "O", "B-MISC", "O"]),
        ("Peter rejects", ["B-PER", "O"]),
    ]
    assert source.class_names == source.target.names == _TAGS
    assert (source.target.kind, source.input_kind) == ("tags", "tokens")
    assert source.tokenizer.look_up(["rejects", "never"]) == [3, 1]
    assert source.notes == ("The vocabulary is of the training data: 5 words.",)


def test_long_sentences_become_several_rows(tmp_path):
    lines = [f"w{k} t{k % 3}\n" for k in range(12)]
    source = _open(tmp_path, "".join(lines) + "\nx t0\n")
    words = [" ".join(f"w{k}" for k in range(12)[i : i + 5]) for i in (0, 5, 10)]
    found = _sentences(source, training=False)
    assert [each for each, _ in found] == [*words, "x"]
    shuffled = _sentences(source, seed=1)
    assert sorted(shuffled) == sorted(found)
    assert _sentences(source, seed=1, start_record=2) == shuffled[2:]


_UNIVERSAL = """\
# text = vámonos al mar
1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tvamos\tir\tVERB\t_\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
2.1\tx\tx\tX\t_\t_\t_\t_\t_\t_
3\ten New\ten\tADP\t_\t_\t1\tcase\t_\t_
"""


def test_universal_dependencies(tmp_path):
    source = _open(tmp_path, _UNIVERSAL)
    wanted = [("vamos nos en New", ["VERB", "PRON", "ADP"])]
    assert _sentences(source) == wanted
    source = _open(tmp_path, _UNIVERSAL, text_column="3", label_column=8)
    assert _sentences(source) == [("ir nosotros en", ["root", "obj", "case"])]


def test_what_is_held_out(tmp_path):
    content = "\n".join(f"w{k} t\nx t\n" for k in range(40))
    source = _open(tmp_path, content, eval_fraction=None)
    assert source.splits == {"train": 36, "test": 4}
    train, test = _sentences(source), _sentences(source, "test")
    assert len({words for words, _ in train + test}) == 40 - 4 + 1
    # Words of what is held out are not known.
    assert {words for words, _ in test} == {"<unk> x"}
    assert "10% of the sentences, 4 in all, are held out" in source.notes[0]
    by_name = _open(tmp_path, "x t\n", "valid.txt", eval_fraction=None)
    assert by_name.splits == {"train": 40, "test": 1}
    with pytest.raises(ValueError, match="held out by their names"):
        _open(tmp_path, eval_fraction=0.1)


def test_what_another_source_knows(tmp_path):
    known = _open(tmp_path)
    other = _open(
        tmp_path,
        "Peter O\nnever O\n",
        tokenizer=known.tokenizer,
        class_names=known.class_names,
    )
    assert _sentences(other) == [("Peter <unk>", ["O", "O"])]
    with pytest.raises(ValueError, match="has the class 'X' in the column 'tag'"):
        _open(tmp_path, "Peter X\n", class_names=known.class_names)
    with pytest.raises(ValueError, match="expected words:FILE, or none"):
        _open(tmp_path, tokenizer="bytes")


def test_words_that_are_seen_once_are_not_known(tmp_path):
    content = "often t\n" * 10_000 + "\nonce t\n"
    source = _open(tmp_path, content)
    assert source.tokenizer.words == ["often"]
    assert "1 word that is seen twice or more" in source.notes[0]


_SPACES = _TEXT + "\ngood X X O\n{}good X X O\n\nlast X X O\n"
_TABS = _SPACES.replace(" ", "\t")
_MANY = "has {} columns, expected 4, divided by {}"


@pytest.mark.quick_one_in(5)
@pytest.mark.parametrize(
    "content, bad, fault",
    [
        (_SPACES, "word", "has 1 column, expected 4, divided by spaces or tabs"),
        (_SPACES, "lives VBZ", _MANY.format(2, "spaces or tabs")),
        (_SPACES, "lives VBZ B-VP O O", _MANY.format(5, "spaces or tabs")),
        (_TABS, "lives\tVBZ", _MANY.format(2, "tabs")),
        (_TABS, "lives\tVBZ B-VP\tO", _MANY.format(3, "tabs")),
        (_TABS, "lives VBZ B-VP O", "has 1 column, expected 4, divided by tabs"),
        (_TABS, "\tX\tX\tO", "has an empty word or tag"),
        (_TABS, "word\tX\tX\t", "has an empty word or tag"),
    ],
)
def test_a_bad_sentence(tmp_path, content, bad, fault):
    content, fault = content.format(f"{bad}\n"), f"line 13: {fault}"
    with pytest.raises(BadRecordError, match=f"a.txt: {fault}"):
        _open(tmp_path, content)
    source = _open(tmp_path, content, skip_bad=True)
    found = quarantine.inspect(source, ["train"], most=1)
    (record,) = found.bad["train"]
    assert str(record).startswith(f"{tmp_path}/a.txt: {fault}")
    assert found.splits == source.splits == {"train": 3}
    without = source.without(found.bad, found.splits)
    assert _sentences(without, seed=1) == _sentences(source, seed=1)
    with pytest.raises(BadRecordError, match="more bad records than the 0"):
        quarantine.inspect(source, ["train"], most=0)


def test_a_line_of_spaces_and_tabs_has_the_columns_of_the_others(tmp_path):
    source = _open(tmp_path, _TEXT + "\nshe PRP B-NP O\nlives\tVBZ B-VP O\n")
    assert _sentences(source, training=False)[-1] == ("she lives", ["O", "O"])
    assert source.class_names == _TAGS


def test_each_file_has_its_own_columns(tmp_path):
    (tmp_path / "b.txt").write_text("two\tO\n")
    assert [words for words, _ in _sentences(_open(tmp_path), training=False)] == [
        *("EU rejects German call", "Peter rejects", "two")
    ]


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ValueError, match="'first', expected the number of a column"):
        _open(tmp_path, text_column="first")
    for column in "1", "9":
        wanted = (
            f"has 4 columns, expected a word and its tag in the columns 1 and {column}"
        )
        with pytest.raises(BadRecordError, match=wanted):
            _open(tmp_path, label_column=column)
    with pytest.raises(BadRecordError, match="has 1 column, expected a word and its"):
        _open(tmp_path, "a\nb\n")
    with pytest.raises(BadRecordError, match="line 6: has 9 columns, expected 10"):
        _open(tmp_path, _UNIVERSAL.replace("\tadp\t_", "").replace("\tADP\t_", "\tADP"))
    with pytest.raises(ValueError, match="no sentence in its split train"):
        _open(tmp_path, "\n\n")
    (tmp_path / "a.txt").write_bytes(b"\xff O\n")
    with pytest.raises(BadRecordError, match=r"a\.txt: is not UTF-8 at byte 0"):
        input_pipeline.open_source(f"conll:{tmp_path}/*.txt")
