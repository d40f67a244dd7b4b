"""Times the text pipeline against its peers, alternately, the pipeline alone.

    python -m scripts.bench_text
    python -m scripts.bench_text --tokenizer=pieces --files='data/*.txt'

Each reads the same files, the sources of Python by default, and yields shuffled batches
of tokens and the tokens that follow them. In each round, every one reads in turn, so a
drift of the machine's speed meets all of them. Reported are medians of tokens a second:
`epoch 1` from nothing, with all that is done once; `later` in the epochs behind it; and
the median over rounds of our speed over theirs. Nothing else may run meanwhile.

    ours        open_source, prepare, make_dataset
    tf_data     by hand: whole files are read and tokenised in `map`, a file's ids are
                cut into rows by `batch`, rows are shuffled and batched
    tf_lines    as in tutorials: TextLineDataset, lines are tokenised, joined and packed
    tf_rows     by hand, as all fits into memory: tokenised once in NumPy, rows are
                shuffled and batched by tf.data
    hugging_face    `datasets` and `tokenizers`: tokenised and packed once by `map`,
                read as NumPy; both have to be installed

--tokenizer=pieces has 8,000 pieces that SentencePiece learns first (for Hugging Face,
`tokenizers` learns as many); it needs tensorflow-text and sentencepiece.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from scripts.race import alternate, ratio
from towers import input_pipeline
from towers.input_pipeline import text

AUTO = tf.data.AUTOTUNE
BUFFER = 10_000
PIECES = 8000
SEED = 1


class Ours:
    """What this project has."""

    def __init__(self, job: argparse.Namespace, tokenizer: text.Tokenizer):
        source = input_pipeline.open_source(
            f"text:{job.pattern}",
            tokenizer=tokenizer,
            sequence_length=job.sequence_length,
        )
        source.prepare()
        self._data = input_pipeline.make_dataset(source, "train", job.batch_size)

    def epoch(self) -> Iterator:
        """Yields the batches of an epoch."""
        return iter(self._data)


def plainly(tokenizer: text.Tokenizer) -> Callable[[tf.Tensor], tf.RaggedTensor]:
    """Returns what encodes texts by TensorFlow alone, as others would call it."""
    if tokenizer.name == "bytes":
        return tokenizer.encode
    import tensorflow_text

    _, model = tokenizer.file()
    return tensorflow_text.SentencepieceTokenizer(model).tokenize


class OfTensorFlow:
    """A pipeline of tf.data, written by hand."""

    def __init__(self, job: argparse.Namespace, tokenizer: text.Tokenizer):
        self._job, self._end = job, tokenizer.end
        self._encode = plainly(tokenizer)
        self._data = (
            self._rows()
            .map(lambda row: (row[:-1], tf.cast(row[1:], tf.int64)), AUTO)
            .shuffle(BUFFER, seed=SEED)
            .batch(job.batch_size)
            .prefetch(AUTO)
        )

    def epoch(self) -> Iterator:
        """See `Ours.epoch`."""
        return iter(self._data)

    def _rows(self):
        files = tf.data.Dataset.from_tensor_slices(self._job.files)
        files = files.shuffle(len(self._job.files), seed=SEED)
        rows = files.map(self._ids, AUTO).flat_map(tf.data.Dataset.from_tensor_slices)
        return rows.batch(self._job.sequence_length + 1, drop_remainder=True)

    def _ids(self, path):
        ids = self._encode(tf.io.read_file(path)[None])[0]
        return tf.concat([ids, [self._end]], 0)


class OfLines(OfTensorFlow):
    """A pipeline as in tutorials."""

    def _rows(self):
        lines = tf.data.TextLineDataset(self._job.files)
        ids = lines.map(lambda line: self._encode(line[None])[0], AUTO)
        return ids.unbatch().batch(self._job.sequence_length + 1, drop_remainder=True)


class OfRows(OfTensorFlow):
    """Rows that were made once."""

    def _rows(self):
        ids = []
        for path in self._job.files:
            with open(path, "rb") as file:
                found = self._encode(tf.constant([file.read()])).values
            ids += [found.numpy(), [self._end]]
        ids, length = np.concatenate(ids).astype(np.int32), self._job.sequence_length
        rows = ids[: len(ids) // (length + 1) * (length + 1)]
        return tf.data.Dataset.from_tensor_slices(rows.reshape(-1, length + 1))


class OfHuggingFace:
    """The libraries `datasets` and `tokenizers`."""

    def __init__(self, job: argparse.Namespace, tokenizer: text.Tokenizer):
        import datasets

        datasets.disable_progress_bars()
        datasets.disable_caching()
        self._job, length = job, job.sequence_length + 1
        learnt = job.learnt

        def pack(batch):
            found = learnt.encode_batch_fast(batch["text"])
            end = [PIECES]
            ids = np.concatenate([each for one in found for each in (one.ids, end)])
            rows = ids[: len(ids) // length * length].reshape(-1, length)
            return {"ids": rows.astype(np.int32)}

        texts = []
        for path in job.files:
            with open(path, "rb") as file:
                texts.append(file.read().decode("utf-8", "replace"))
        data = datasets.Dataset.from_dict({"text": texts})
        options = {"batched": True, "batch_size": 100, "remove_columns": ["text"]}
        self._data = data.map(pack, **options).with_format("numpy")

    def epoch(self) -> Iterator:
        """See `Ours.epoch`."""
        shuffled = self._data.shuffle(seed=SEED)
        for batch in shuffled.iter(self._job.batch_size):
            yield batch["ids"][:, :-1], batch["ids"][:, 1:].astype(np.int64)


CONTENDERS: dict[str, Callable] = {
    "ours": Ours,
    "tf_data": OfTensorFlow,
    "tf_lines": OfLines,
    "tf_rows": OfRows,
    "hugging_face": OfHuggingFace,
}


def read(batches: Iterator, seconds: float) -> tuple[int, float]:
    """Reads for some seconds, or to the end; returns tokens and seconds."""
    begin, tokens = time.perf_counter(), 0
    for x, _ in batches:
        tokens += int(np.prod(x.shape))
        if time.perf_counter() - begin > seconds:
            break
    return tokens, time.perf_counter() - begin


def measure(
    name: str, job: argparse.Namespace, tokenizer: text.Tokenizer
) -> tuple[float, float]:
    """Tokens a second of one contender: in its first epoch, and later."""
    begin = time.perf_counter()
    contender = CONTENDERS[name](job, tokenizer)
    tokens, _ = read(contender.epoch(), np.inf)
    first = tokens / (time.perf_counter() - begin)
    later = itertools.chain.from_iterable(contender.epoch() for _ in itertools.count())
    read(later, job.seconds / 4)  # its buffers fill
    tokens, seconds = read(later, job.seconds)
    return first, tokens / seconds


def learn_pieces(files: list[str], folder: str) -> text.Tokenizer:
    """Learns a SentencePiece model of the files."""
    import sentencepiece

    prefix = os.path.join(folder, "pieces")
    sentencepiece.SentencePieceTrainer.train(
        input=",".join(files),
        model_prefix=prefix,
        vocab_size=PIECES,
        model_type="bpe",
        minloglevel=2,
    )
    return text.open_tokenizer(f"sentencepiece:{prefix}.model")


def learn_for_hugging_face(files: list[str], of_bytes: bool):
    """Learns a byte-level vocabulary, of bytes alone or of as many pieces."""
    import tokenizers

    learnt = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.pre_tokenizer = byte_level
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 if of_bytes else PIECES,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    learnt.train(files, trainer)
    return learnt


def main() -> None:
    """Reads the arguments, races, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", dest="pattern", default="python")
    parser.add_argument("--tokenizer", choices=("bytes", "pieces"), default="bytes")
    parser.add_argument("--sequence_length", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    job = parser.parse_args()
    job.files = input_pipeline.open_source(f"text:{job.pattern}").files("train")
    names = job.contenders.split(",")
    with tempfile.TemporaryDirectory() as folder:
        of_bytes = job.tokenizer == "bytes"
        made = text.open_tokenizer("bytes") if of_bytes else None
        tokenizer = made or learn_pieces(job.files, folder)
    if "hugging_face" in names:
        job.learnt = learn_for_hugging_face(job.files, of_bytes)
    found = alternate(lambda name: measure(name, job, tokenizer), names, job.rounds)
    speeds = {name: [*zip(*some, strict=True)] for name, some in found.items()}
    print(
        f"{'million tokens/s':16}{'epoch 1':>9}{'later':>9}{'ours/epoch 1':>14}", end=""
    )
    print(f"{'ours/later':>12}")
    for name in names:
        medians = [statistics.median(some) / 1e6 for some in speeds[name]]
        ratios = [*map(ratio, speeds[names[0]], speeds[name])]
        print(
            f"{name:16}{medians[0]:9.2f}{medians[1]:9.2f}{ratios[0]:14.2f}"
            f"{ratios[1]:12.2f}"
        )


if __name__ == "__main__":
    main()
