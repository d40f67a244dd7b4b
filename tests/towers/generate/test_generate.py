"""towers.generate: tokens are drawn as asked, and a run's model is found."""

import dataclasses
import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import warm
from towers import models
from towers.generate import arguments, sampling
from towers.input_pipeline.text import ByteTokenizer, WordTokenizer
from towers.predict.trained import Trained
from towers.train.outputs.preprocessing import Preprocessing

LENGTH = 4


def bigrams(table):
    """A model whose logits of the next token are a row of a table."""
    size = len(table)
    inputs = keras.Input((LENGTH,), dtype="int32")
    layer = keras.layers.Embedding(size, size)
    model = keras.Model(inputs, layer(inputs))
    layer.set_weights([np.asarray(table, np.float32)])
    return model


def drawn(model, count, begun=(1,), length=LENGTH, **options):
    options = {"temperature": 1.0, "seeds": [options.pop("seed", 0)], **options}
    columns = sampling.tokens(model, begun, length, **options)
    return [int(column[0]) for column in itertools.islice(columns, count)]


def test_the_likeliest_token():
    # 1 is followed by 3, 3 by 2, 2 by 1; padding is likeliest everywhere.
    table = np.zeros((5, 5))
    table[:, 0] = 9
    table[1, 3] = table[3, 2] = table[2, 1] = 5
    expected = [3, 2, 1, 3, 2, 1, 3]
    model = bigrams(table)
    assert drawn(model, 7, temperature=0) == expected
    assert drawn(model, 7, top_k=1) == expected
    assert drawn(model, 7, temperature=0.01) == expected
    # More tokens than the model reads.
    assert drawn(model, 1, begun=[3, 3, 3, 3, 1], temperature=0) == [3]
    # Where 0 is a token, too.
    assert drawn(model, 2, temperature=0, has_padding=False) == [0, 0]


@pytest.mark.slow
def test_tokens_are_drawn_by_their_probabilities():
    probabilities = np.array([0, 0.5, 0.3, 0.15, 0.05])
    model = bigrams(np.tile(np.log(probabilities + 1e-9), (5, 1)))
    found = drawn(model, 400, seed=3)
    shares = np.bincount(found, minlength=5) / 400
    np.testing.assert_allclose(shares, probabilities, atol=0.08)
    assert found == drawn(model, 400, seed=3)
    assert found[:50] != drawn(model, 50, seed=2**32 - 1)
    colder = drawn(model, 200, temperature=0.5)
    squares = probabilities**2 / (probabilities**2).sum()
    shares = np.bincount(colder, minlength=5) / 200
    np.testing.assert_allclose(shares, squares, atol=0.11)
    assert {*drawn(model, 100, top_k=2)} == {1, 2}
    assert {*drawn(model, 20, top_k=99)} <= {1, 2, 3, 4}
    # Nothing is divided by what float32 takes for 0.
    assert drawn(model, 5, temperature=1e-45) == drawn(model, 5, temperature=0)


def test_probabilities_are_drawn_from_as_logits():
    model = bigrams(np.log(np.tile([0.2, 0.4, 0.1, 0.2, 0.1], (5, 1))))
    outputs = keras.layers.Softmax()(model.output)
    told = keras.Model(model.input, outputs)
    assert drawn(model, 30) == drawn(told, 30, from_logits=False)


class FixedModel:
    """Says that letters follow one another, and the end after "e"."""

    def __init__(self):
        self.windows = []

    def __call__(self, window, training):
        assert training is False
        following = tf.where(window == 1 + ord("e"), ByteTokenizer.end, window + 1)
        return tf.one_hot(following, ByteTokenizer.size) * 50


def trained(task="language_model", model=None):
    known = Preprocessing(task=task, from_logits=True, input="tokens", shape=(LENGTH,))
    return Trained(model or FixedModel(), known, None, tokenizer=ByteTokenizer())


def test_a_text_goes_on_to_its_end():
    assert sampling.generate(trained(), "xyzab") == "xyzabcde"
    assert sampling.generate(trained(), "xyzab", max_tokens=2) == "xyzabcd"


def test_texts_of_one_batch_end_where_each_ends():
    table = np.full((ByteTokenizer.size, ByteTokenizer.size), -99.0)
    # "a" or the end.
    table[:, [1 + ord("a"), ByteTokenizer.end]] = 0, -1
    model = trained(model=bigrams(table))
    seeds = sampling.seeds_of(2**32 - 3, 8)
    assert seeds == [2**32 - 3, 2**32 - 2, 2**32 - 1, 0, 1, 2, 3, 4]
    texts = sampling.generate_samples(model, "b", seeds=seeds, temperature=1)
    assert texts == [
        sampling.generate(model, "b", seed=seed, temperature=1) for seed in seeds
    ]
    assert len({*texts}) > 2
    assert all(re.fullmatch("ba*", text) for text in texts)


def test_a_prompt_in_no_encoding():
    assert sampling.generate(trained(), "\udcffab", max_tokens=1) == "\ufffdabc"
    with pytest.raises(ValueError, match="The prompt is not UTF-8 at byte 0, expected"):
        known = dataclasses.replace(trained(), tokenizer=WordTokenizer(["a"]))
        sampling.generate(known, "\udcff")


def test_without_a_prompt_a_document_begins():
    table = np.zeros((ByteTokenizer.size, ByteTokenizer.size))
    table[ByteTokenizer.end, 1 + ord("a")] = table[1 + ord("a"), 1 + ord("b")] = 99
    table[1 + ord("b"), ByteTokenizer.end] = 99
    assert sampling.generate(trained(model=bigrams(table))) == "ab"


def test_only_language_models_write():
    with pytest.raises(ValueError, match="of the task tagging; expected a language_mo"):
        sampling.generate(trained(task="tagging"))


@pytest.fixture
def model_dir(tmp_path):
    """Of a run of a tiny language model."""
    facts = models.Facts(
        input_shape=(LENGTH,),
        num_outputs=ByteTokenizer.size,
        task="language_model",
        vocabulary_size=ByteTokenizer.size,
        sequence_length=LENGTH,
    )
    options = {"layers": 1, "width": 4, "heads": 1}
    model = models.build("transformer_lm", facts, options=options)
    model.save(tmp_path / "model.keras")
    ByteTokenizer().save(str(tmp_path / "tokenizer"))
    trained().preprocessing.save(str(tmp_path))
    return tmp_path


def test_the_command_writes_a_text(model_dir):
    """In a process that has not built the model: its layers are found by name."""
    flags = "--prompt=def", "--max_tokens=5", "--seed=1"
    done = warm.run("towers.generate", str(model_dir), *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def")
    assert len(done.stdout) > len("def\n")


def test_the_command_writes_several_texts(model_dir):
    flags = "--prompt=def", "--max_tokens=9", "--seed=7", "--temperature=2"
    several = warm.run("towers.generate", str(model_dir), *flags, "--num_samples=2")
    assert several.returncode == 0, several.stderr
    alone = [
        warm.run("towers.generate", str(model_dir), *flags, f"--seed={seed}").stdout
        for seed in (7, 8)
    ]
    assert several.stdout == f"--- seed 7\n{alone[0]}--- seed 8\n{alone[1]}"
    assert alone[0] != alone[1]


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--temperature=-1", "--temperature=-1.0; expected at least 0"),
        ("--temperature=nan", "--temperature=nan; expected at least 0"),
        ("--top_k=0", "--top_k=0; expected at least 1"),
        ("--max_tokens=0", "--max_tokens=0; expected at least 1"),
        ("--num_samples=0", "--num_samples=0; expected at least 1"),
        ("--max_tokens=x", "Received --max_tokens=x; expected a whole number"),
        ("--seed=4294967296", "--seed=4294967296; expected 0 to 4294967295"),
        ("--promt=x", r"no such flag \(did you mean --prompt\?\)"),
        ("--checkpoint=best", "has no best.keras; expected the model_dir of a run"),
    ],
)
def test_bad_arguments(model_dir, flag, message):
    with pytest.raises(ValueError, match=message):
        arguments.read(["", str(model_dir), flag], "")


def test_the_run_of_another_task(model_dir):
    trained(task="tagging").preprocessing.save(str(model_dir))
    with pytest.raises(ValueError, match="with --task=tagging; expected one with --ta"):
        arguments.read(["", str(model_dir)], "")
