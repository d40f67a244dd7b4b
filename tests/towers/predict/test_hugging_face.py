"""A run with --tokenizer=hf:FILE predicts and writes text, and has no SavedModel."""

import numpy as np
import pytest
import tensorflow as tf

from tests.towers.predict.runs import finished, predicted
from towers.export import saved_model
from towers.generate import sampling
from towers.predict.trained import load_model

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def tokenizer_flag(tmp_path):
    """The flag for a file that is trained on a few words."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["good day", "bad luck"], trainer)
    made.save(f"{tmp_path}/tokenizer.json")
    return f"--tokenizer=hf:{tmp_path}/tokenizer.json"


_SMALL = "--sequence_length=6", "--width=8", "--layers=1", "--heads=1"


def test_texts_are_predicted_and_not_exported(tmp_path, tokenizer_flag):
    lines = "".join(
        f"{'good day' if k % 2 else 'bad luck'},{k % 2}\n" for k in range(8)
    )
    (tmp_path / "mail.csv").write_text("text,spam\n" + lines)
    flags = f"--dataset=csv:{tmp_path}/mail.csv", "--text_column=text", *_SMALL
    flags = *flags, "--label_column=spam", "--model=transformer_encoder"
    run = tmp_path / "run"
    run.mkdir()
    job = finished(*flags, tokenizer_flag, model_dir=run)
    # The run has its own.
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "lines.txt").write_text("good day\nbad luck\n")
    rows = predicted(run, tmp_path / "lines.txt")
    texts = tf.constant(["good day", "bad luck"])
    tokens = job.data.source.tokenizer.encode(texts).to_tensor(shape=[None, 6])
    expected = tf.nn.softmax(job.model(tokens)).numpy()[:, 1]
    scores = [float(row["probability_1"]) for row in rows]
    np.testing.assert_allclose(scores, expected, rtol=1e-4)
    with pytest.raises(ValueError, match="tokenizer=hf:FILE, which runs outside of Te"):
        saved_model.write(load_model(str(run)), str(tmp_path / "exported"))


def test_texts_are_written(tmp_path, tokenizer_flag):
    (tmp_path / "a.txt").write_text("good day\nbad luck\n" * 20)
    flags = f"--dataset=text:{tmp_path}/a.txt", "--model=transformer_lm", *_SMALL
    run = tmp_path / "run"
    run.mkdir()
    finished(*flags, tokenizer_flag, model_dir=run)
    (tmp_path / "tokenizer.json").unlink()
    texts = sampling.generate_samples(
        load_model(str(run)), "good", seeds=[0, 1], max_tokens=9
    )
    assert all(text.startswith("good") for text in texts)
    assert texts[0] != texts[1]
