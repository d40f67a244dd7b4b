"""``text:GLOB``: documents in rows of tokens, for language models."""

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.base import IndexedSource, size_and_time
from towers.input_pipeline.sources.files import in_python
from towers.input_pipeline.sources.files.record import Record
from towers.input_pipeline.sources.targets import Target
from towers.input_pipeline.sources.texts import documents
from towers.input_pipeline.sources.texts.rows import check_length
from towers.input_pipeline.sources.texts.tokens import Tokens, tokenise
from towers.input_pipeline.text import Tokenizer, open_tokenizer
from towers.program import words


class TextSource(IndexedSource):
    """Files of text, packed into rows of tokens without padding.

    Each file is a document. Documents are joined, each with an end behind it, and cut
    into rows: a row's tokens are int32 [T], and its targets the tokens that follow
    each, int64 [T]. So each token but the first of a split is learnt once in an epoch;
    what is left behind the last row is not. Text is tokenised once, by ``prepare``.

    Args:
        pattern: glob of files, or a folder, for all files in it; ``python`` for the
            sources of Python's standard library.
        tokenizer: a spec of ``open_tokenizer``, or a tokenizer.
        sequence_length: T. None: 128.
        eval_fraction: to hold out, unless files are held out by their names, as those
            of ``FileSource``: of many files, some; of few files, the end of each. None:
            a tenth.
        cache_dir: folder for a file of the tokens, which later runs use as well; None
            keeps them in memory.
        skip_bad: whether to leave out files that cannot be read, or are no text.

    Attributes:
        bytes_per_token: how many bytes of text a token stands for, by split.

    Raises:
        ValueError: there is no file or tokenizer, or a number is too small.
    """

    encoded = False
    image_fields = ("text",)

    def __init__(
        self,
        pattern: str,
        *,
        tokenizer: str | Tokenizer = "bytes",
        sequence_length: int | None = None,
        eval_fraction: float | None = None,
        cache_dir: str | os.PathLike | None = None,
        skip_bad: bool = False,
    ):
        length = check_length(sequence_length)
        if isinstance(tokenizer, str):
            tokenizer = open_tokenizer(tokenizer)
        self.name = f"text:{pattern}"
        self.tokenizer, self.image_shape = tokenizer, (length,)
        self._take_target(Target("tokens", tokenizer.size))
        self.splits = {}
        self._documents = documents.find(pattern, eval_fraction)
        self.notes = self._documents.notes
        self.reads = (tokenizer.fingerprint, length, self._documents.fraction)
        self._cache_dir = cache_dir and os.path.expanduser(cache_dir)
        self._skip_bad = skip_bad
        # On the disk, Python reads.
        self.in_graph = not self._cache_dir
        self._tokens: Tokens | None = None
        self._in_memory: list[tf.Tensor] | None = None
        self.bytes_per_token: Mapping[str, float] = {}

    def prepare(self) -> None:
        """Tokenises the documents; does nothing the second time.

        Raises:
            ValueError: a file cannot be read or is no text, or there is too little.
        """
        if self._tokens is not None:
            return
        path = None
        if self._cache_dir:
            path = os.path.join(self._cache_dir, self._cache_name())
        tokens = tokenise(self._documents, self.tokenizer, self._skip_bad, path)
        (length,) = self.image_shape
        splits = {split: (n - 1) // length for split, n in tokens.count.items()}
        for split, rows in splits.items():
            if rows < 1:
                raise ValueError(
                    f"{self.name} has {words.count(tokens.count[split], 'token')} in "
                    f"its split {split}: expected more than a row, so give more text, "
                    f"or a smaller --sequence_length than {length}"
                )
        self.splits, self._tokens = splits, tokens
        if path is None:
            self._keep_in_memory()
        self.bytes_per_token = {s: tokens.size[s] / n for s, n in tokens.count.items()}
        count = words.count(sum(tokens.count.values()), "token")
        where = f"kept in {self._cache_dir}" if path else "kept in memory"
        self.note = f"{count}, {where}"
        if tokens.empty:
            empty = words.count(len(tokens.empty), "file")
            note = f"{empty} left out as empty, such as {tokens.empty[0]}."
            self.notes = (*self.notes, note)

    def _cache_name(self) -> str:
        """Changes with the tokens, whatever the length of rows."""
        files = [
            (split, [(path, *size_and_time(path)) for path in paths])
            for split, paths in self._documents.files.items()
        ]
        fraction = self._documents.fraction
        facts = (files, fraction, self.tokenizer.fingerprint, self._skip_bad)
        return f"tokens_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See ``Source.parse``."""
        if self._in_memory is None:
            (rows,) = in_python.call(self._read, [records], [tf.int32])
            rows = tf.ensure_shape(rows, [None, self.image_shape[0] + 1])
            return rows[:, :-1], tf.cast(rows[:, 1:], tf.int64)
        rows, following = (tf.gather(kept, records) for kept in self._in_memory)
        targets = tf.concat([rows[:, 1:], following[:, None]], 1)
        return tf.cast(rows, tf.int32), tf.cast(targets, tf.int64)

    def _keep_in_memory(self) -> None:
        """Has all rows, and the token behind each, as tensors: whole rows are copied.

        They are made outside the graph that is being traced: a constant in it may not
        exceed 2 GiB. On the CPU: that is where tf.data runs.
        """
        (length,) = self.image_shape
        rows, following, begin = [], [], 0
        for split, count in self.splits.items():
            ids = self._tokens.ids[begin : begin + count * length + 1]
            rows.append(ids[:-1].reshape(count, length))
            following.append(ids[length::length])
            begin += self._tokens.count[split]
        with tf.init_scope(), tf.device("/CPU:0"):
            self._in_memory = [tf.concat(kept, 0) for kept in (rows, following)]
        self._tokens = dataclasses.replace(self._tokens, ids=self._tokens.ids[:0])

    def _read(self, records: np.ndarray) -> list[np.ndarray]:
        (length,) = self.image_shape
        first = self.splits.get("train", 0)
        held_out = self._tokens.count.get("train", 0) + (records - first) * length
        places = np.where(records < first, records * length, held_out)
        rows = np.lib.stride_tricks.sliding_window_view(self._tokens.ids, length + 1)
        return [rows[places].astype(np.int32)]

    def files(self, split: str) -> list[str]:
        """See ``Source.files``."""
        return self._documents.files[split]

    def is_whole(self, path: str) -> bool:
        """See ``Source.is_whole``: False for a file that is left out."""
        return path not in self._tokens.bad

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """The rows that begin in a file; or its fault, which stands for no row."""
        if path in self._tokens.bad:
            yield Record(path, "", -1, fault=self._tokens.bad[path], count=0)
            return
        (length,) = self.image_shape
        for each, rows in self.splits.items():
            begins = self._tokens.begins[each]
            if split not in (None, each) or path not in begins:
                continue
            order = [*begins.values(), self._tokens.count[each]]
            place = order.index(begins[path])
            first, end = (-(-n // length) for n in order[place : place + 2])
            offset = 0 if each == "train" else self.splits.get("train", 0)
            for row in range(first, min(end, rows)):
                number = tf.constant(offset + row, tf.int64)
                yield Record(path, f"row {row - first + 1}", offset + row, number)
