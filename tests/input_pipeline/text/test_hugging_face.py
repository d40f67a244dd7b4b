"""--tokenizer=hf:FILE: the ids are those of the package, in order and in a run."""

import argparse
import inspect

import numpy as np
import pytest
import tensorflow as tf

from towers import input_pipeline
from towers.input_pipeline import text, tokenizer_specs

tokenizers = pytest.importorskip("tokenizers")

_TEXT = inspect.getsource(argparse)
_TEXTS = ["", "def f():\n    return 1\n", "Straße 日本", "a\0b", "😀"]
_TEXTS += _TEXT.split("\n")


def _byte_pairs(special_tokens=("<|endoftext|>",)):
    """Trains byte pairs as GPT-2's on the source of a module."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*special_tokens],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([_TEXT], trainer)
    return made


@pytest.fixture(scope="module")
def made():
    return _byte_pairs()


def _open(folder, made):
    made.save(f"{folder}/tokenizer.json")
    return text.open_tokenizer(f"hf:{folder}/tokenizer.json")


def _in_a_map(tokenizer, texts):
    data = tf.data.Dataset.from_tensor_slices(texts).batch(50)
    data = data.map(tokenizer.encode, num_parallel_calls=4)
    return [row for batch in data for row in batch.to_list()]


def test_ids_are_those_of_the_package(tmp_path, made):
    tokenizer = _open(tmp_path, made)
    # One more than in the file, whose id 0 is no padding.
    wanted = [[number + 1 for number in made.encode(one).ids] for one in _TEXTS]
    encoded = tokenizer.encode(tf.constant(_TEXTS))
    assert encoded.dtype == tf.int32
    assert encoded.to_list() == wanted == _in_a_map(tokenizer, _TEXTS)
    assert [tokenizer.decode(ids) for ids in wanted] == _TEXTS
    assert (tokenizer.size, tokenizer.end) == (401, 1)
    assert max(map(max, filter(None, wanted))) < tokenizer.size
    assert tokenizer.decode([*wanted[1], 0, tokenizer.end, 10**6]) == _TEXTS[1]
    assert tokenizer.encode(tf.constant([], tf.string)).to_list() == []


def test_padding_ends_and_what_surrounds_a_text(tmp_path):
    made = _byte_pairs(["<pad>", "<s>"])
    made.enable_padding(length=50)
    made.enable_truncation(2)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer = _open(tmp_path, made)
    (ids,) = tokenizer.encode(tf.constant(["def f(): return 1"])).to_list()
    assert len(ids) > 2
    assert not {0, 1} & {*ids}
    assert tokenizer.decode(ids) == "def f(): return 1"
    # Without an end in the file, it is an id more.
    assert (tokenizer.size, tokenizer.end) == (401, 400)


def test_what_is_saved_is_loaded(tmp_path, made):
    tokenizer = _open(tmp_path, made)
    tokenizer.save(f"{tmp_path}/saved")
    (tmp_path / "saved").rename(tmp_path / "moved")
    (tmp_path / "tokenizer.json").unlink()
    loaded = text.load(f"{tmp_path}/moved")
    assert loaded.fingerprint == tokenizer.fingerprint
    ids = [one.encode(tf.constant(_TEXTS)).to_list() for one in (loaded, tokenizer)]
    assert ids[0] == ids[1]
    other = _open(tmp_path, _byte_pairs(["</s>"]))
    assert other.fingerprint != tokenizer.fingerprint


def test_rows_continue_where_they_were(tmp_path, made):
    spec = _open(tmp_path, made).name
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(_TEXT[number * 9000 :])

    def batches(skipped):
        source = input_pipeline.open_source(
            f"text:{tmp_path}/*.txt", tokenizer=spec, sequence_length=16
        )
        source.prepare()
        data = input_pipeline.make_dataset(
            source, "train", 4, seed=1, start_record=4 * skipped
        )
        return [x.numpy() for x, _ in data.take(20 - skipped)]

    np.testing.assert_array_equal(batches(0)[7:], batches(7))


def test_what_is_no_tokenizer_is_said(tmp_path, monkeypatch):
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"be read \(.*\): expected a tokenizer\.json"):
        text.open_tokenizer(f"hf:{file}")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(file))
    with pytest.raises(ValueError, match="is empty: expected a trained tokenizer"):
        text.open_tokenizer(f"hf:{file}")
    with pytest.raises(ValueError, match=r"has no file 'none\.json'"):
        tokenizer_specs.check("hf:none.json")
    monkeypatch.setattr(tokenizer_specs.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="needs tokenizers, which is not installed: p"):
        tokenizer_specs.check(f"hf:{file}")
