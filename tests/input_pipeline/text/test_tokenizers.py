import argparse
import inspect
import struct

import numpy as np
import pytest
import tensorflow as tf

from towers.input_pipeline import text, tokenizer_specs

TEXTS = ["", "def f():\n    return 1\n", "Straße 日本", "a\0b", "😀"]


def _ids(tokenizer, texts):
    return tokenizer.encode(tf.constant(texts)).to_list()


def _in_a_map(tokenizer, texts):
    data = tf.data.Dataset.from_tensor_slices(texts).batch(2).map(tokenizer.encode)
    return [row for batch in data for row in batch.to_list()]


def test_bytes_are_ids_and_text_again():
    tokenizer = text.open_tokenizer("bytes")
    wanted = [[byte + 1 for byte in one.encode()] for one in TEXTS]
    assert _ids(tokenizer, TEXTS) == wanted == _in_a_map(tokenizer, TEXTS)
    assert [tokenizer.decode(ids) for ids in wanted] == TEXTS
    assert tokenizer.encode(tf.constant(TEXTS)).dtype == tf.int32
    assert max(map(max, wanted[1:])) < tokenizer.end < tokenizer.size
    # Padding, ends and halves of characters, as in what a model gives.
    assert tokenizer.decode([98, 0, tokenizer.end, 99, 0xF0 + 1]) == "ab\ufffd"
    assert tokenizer.decode(np.array([[98], [99]])) == "ab"


def test_words_are_ids_and_words_again():
    tokenizer = text.WordTokenizer.of("the cat saw the dog".split())
    texts = ["the dog", "", "a cat  saw\nCat"]
    # The most frequent word is the first; the others are in order.
    wanted = [[3, 5], [], [1, 4, 6, 1]]
    assert _ids(tokenizer, texts) == wanted == _in_a_map(tokenizer, texts)
    assert [tokenizer.look_up(one.split()) for one in texts] == wanted
    assert tokenizer.decode([3, 1, 2, 0, 5]) == "the <unk> dog"
    assert tokenizer.size == 7
    assert _ids(text.WordTokenizer([]), ["a b"]) == [[1, 1]]
    with pytest.raises(ValueError, match="the word 'a' twice"):
        text.WordTokenizer(["b", "a", "a"])


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("kind", ["bytes", "words", "sentencepiece", "wordpiece"])
def test_what_is_saved_is_loaded(tmp_path, kind):
    tokenizer = {
        "bytes": lambda: text.open_tokenizer("bytes"),
        "words": lambda: text.WordTokenizer(["cat", "日本"]),
        "sentencepiece": lambda: _sentencepiece(tmp_path),
        "wordpiece": lambda: _wordpiece(tmp_path, _PIECES),
    }[kind]()
    tokenizer.save(f"{tmp_path}/new/saved")
    (tmp_path / "new/saved").rename(tmp_path / "moved")
    loaded = text.load(f"{tmp_path}/moved")
    assert type(loaded) is type(tokenizer)
    assert (loaded.size, loaded.end) == (tokenizer.size, tokenizer.end)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert _ids(loaded, ["cat 日本"]) == _ids(tokenizer, ["cat 日本"]) != [[]]


def test_a_tokenizer_of_other_words_has_another_fingerprint():
    one, other = text.WordTokenizer(["a"]), text.WordTokenizer(["b"])
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint == text.WordTokenizer(["a"], "words:moved").fingerprint


# Of a SentencePiece model: the kinds of its pieces, and what each costs.
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3
_MODEL = [
    *[("<unk>", 0, _UNKNOWN), ("<s>", 0, _CONTROL), ("</s>", 0, _CONTROL)],
    *[("▁cat", -1, _NORMAL), ("▁", -3, _NORMAL), ("c", -4, _NORMAL)],
    *[("at", -2, _NORMAL), ("日本", -2, _NORMAL)],
]


def _sentencepiece(folder, pieces=_MODEL, more=b""):
    """Writes a model as SentencePiece does, in the format of protocol buffers."""

    def field(number, content):
        return bytes([number << 3 | 2, len(content)]) + content

    model = b"".join(
        field(
            1,
            field(1, piece.encode())
            + b"\x15"
            + struct.pack("<f", score)
            + bytes([0x18, kind]),
        )
        for piece, score, kind in pieces
    )
    (folder / "some.model").write_bytes(model + more)
    pytest.importorskip("tensorflow_text")
    return text.open_tokenizer(f"sentencepiece:{folder}/some.model")


def test_sentencepiece(tmp_path):
    tokenizer = _sentencepiece(tmp_path)
    # One more than in the file, whose id 0 is no padding.
    texts = ["cat cat", "c at", ""]
    wanted = [[4, 4], [5, 6, 5, 7], []]
    assert _ids(tokenizer, texts) == wanted == _in_a_map(tokenizer, texts)
    assert (tokenizer.size, tokenizer.end) == (9, 3)
    assert [tokenizer.decode(ids) for ids in wanted] == texts
    assert tokenizer.decode([4, 0, tokenizer.end, 4, 10**6]) == "cat cat"


def test_sentencepiece_with_padding_and_without_an_end(tmp_path):
    pieces = [("<pad>", 0, _CONTROL), ("<unk>", 0, _UNKNOWN), ("▁cat", -1, _NORMAL)]
    tokenizer = _sentencepiece(tmp_path, pieces)
    assert _ids(tokenizer, ["cat"]) == [[2]]
    assert (tokenizer.size, tokenizer.end) == (4, 3)
    assert tokenizer.decode([2, 3, 0]) == "cat"


# Of byte pairs; and with spaces as they are.
_PAIRS, _KEPT = b"\x12\x02\x18\x02", b"\x1a\x02\x20\x00"
_LETTERS = [(each, -i, _NORMAL) for i, each in enumerate("▁abc")]
_OF_PAIRS = [("<unk>", 0, _UNKNOWN), ("▁a", 0, _NORMAL), ("bc", 0, _NORMAL), *_LETTERS]


@pytest.mark.parametrize(
    ("pieces", "more", "once"),
    [
        (_OF_PAIRS, _PAIRS, True),
        # Unigrams; spaces are kept; pieces reach beyond a word, and do not begin it.
        (_OF_PAIRS, b"", False),
        (_OF_PAIRS, _PAIRS + _KEPT, False),
        ([*_OF_PAIRS, ("▁a▁", 0, _NORMAL)], _PAIRS, False),
        ([*_OF_PAIRS, ("a\tb", 0, _NORMAL)], _PAIRS, False),
        ([each for each in _OF_PAIRS if each[0] != "▁"], _PAIRS, False),
    ],
)
def test_words_are_encoded_once(tmp_path, pieces, more, once):
    tokenizer = _sentencepiece(tmp_path, pieces, more)
    assert (tokenizer._tokenize != tokenizer._pieces.tokenize) == once
    texts = ["", " ", "abc cab", "  abc  a\tb abc\n", "x x", "abc"]
    wanted = tokenizer._pieces.tokenize(tf.constant(texts)).to_list()
    wanted = [[number + 1 for number in row] for row in wanted]
    assert _ids(tokenizer, texts) == wanted == _in_a_map(tokenizer, texts)


def test_byte_pairs_of_real_text_are_those_of_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    content = inspect.getsource(argparse).replace("\n\n", "\n\v\n\u3000\r\n")
    (tmp_path / "text.txt").write_text(content)
    sentencepiece.SentencePieceTrainer.train(
        input=f"{tmp_path}/text.txt",
        model_prefix=f"{tmp_path}/pairs",
        vocab_size=500,
        model_type="bpe",
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=f"{tmp_path}/pairs.model")
    tokenizer = text.open_tokenizer(f"sentencepiece:{tmp_path}/pairs.model")
    assert tokenizer._tokenize != tokenizer._pieces.tokenize
    marks = "a \u0301b\u00a8c \u00b4 d\u0085e\u2028f\x01 \x01\x1c g"
    texts = [content, content[::-1], marks, marks[::-1], *TEXTS, *content.split("\n")]
    wanted = [[number + 1 for number in ids] for ids in theirs.encode(texts)]
    assert _ids(tokenizer, texts) == wanted


_PIECES = ["[PAD]", "[UNK]", "[SEP]", "cat", "##s", ".", "日", "本"]


def _wordpiece(folder, pieces):
    pytest.importorskip("tensorflow_text")
    (folder / "vocab.txt").write_text("\n".join(pieces), "utf-8")
    return text.open_tokenizer(f"wordpiece:{folder}/vocab.txt")


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    "pieces, wanted, size, end",
    [
        (_PIECES, [[3, 4, 5], [3, 1], [6, 7]], 8, 2),
        # A capital letter: as it is written. Without padding, one more.
        (["[UNK]", "Cats", ".", "cat", "##s"], [[2, 3], [4, 1], [1, 1]], 7, 6),
    ],
)
def test_wordpiece(tmp_path, pieces, wanted, size, end):
    tokenizer = _wordpiece(tmp_path, pieces)
    texts = ["Cats.", "cat dog", "日本"]
    assert _ids(tokenizer, texts) == wanted == _in_a_map(tokenizer, texts)
    assert (tokenizer.size, tokenizer.end) == (size, end)
    assert tokenizer.decode(wanted[0]).lower() == "cats ."


@pytest.mark.parametrize(
    "spec, words",
    [
        ("byte", r"did you mean bytes\? expected one of bytes, sentencepiece:FILE"),
        ("bytes:x", "unknown tokenizer 'bytes:x'"),
        ("wordpiece:", "did you mean wordpiece:FILE"),
        ("words:missing.txt", "has no file 'missing.txt'"),
    ],
)
def test_a_spec_is_checked(spec, words):
    with pytest.raises(ValueError, match=words):
        tokenizer_specs.check(spec)


def test_a_mark_at_the_beginning_is_no_word(tmp_path):
    (tmp_path / "words.txt").write_bytes(b"\xef\xbb\xbfgood\r\nday\r\n")
    assert text.open_tokenizer(f"words:{tmp_path}/words.txt").words == ["good", "day"]


def test_what_is_no_vocabulary_is_said(tmp_path):
    file = tmp_path / "file"
    # TensorFlow 2.22 has a text for it, and 2.21 none.
    said = "words:ram://none' cannot be read: (NotFoundError|Could not open ram://none)"
    with pytest.raises(ValueError, match=said):
        text.open_tokenizer("words:ram://none")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8: expected a word in each line"):
        text.open_tokenizer(f"words:{file}")
    with pytest.raises(
        ValueError, match=r"tokenizer\.json cannot be read \(.*\): expected"
    ):
        text.load(str(tmp_path))
    pytest.importorskip("tensorflow_text")
    with pytest.raises(ValueError, match=r"expected the \.model file that"):
        text.open_tokenizer(f"sentencepiece:{file}")
    file.write_text("a\nb\n")
    with pytest.raises(ValueError, match=r"has no \[UNK\]: expected a piece in each"):
        text.open_tokenizer(f"wordpiece:{file}")


def test_a_missing_package_is_said(tmp_path, monkeypatch):
    (tmp_path / "some.model").touch()
    monkeypatch.setattr(tokenizer_specs.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'tensorflow-text<3,>=2\.19'"):
        tokenizer_specs.check(f"sentencepiece:{tmp_path}/some.model")
