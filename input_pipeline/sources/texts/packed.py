"""``text:GLOB``: documents in rows of tokens, for language models."""

import functools
import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

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
        self.bytes_per_token: Mapping[str, float] = {}

    def prepare(self) -> None:
        """Tokenises the documents; does nothing the second time.

        Raises:
            ValueError: a file cannot be read or is no text, or there is too little.
        """
        if self._tokens is not None:
            return
        path = self._cache_dir and os.path.join(self._cache_dir, self._cache_name())
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
        (length,) = self.image_shape
        if isinstance(self._tokens.ids, np.memmap):
            (rows,) = in_python.call(self._rows, [records], [tf.int32])
            rows = tf.ensure_shape(rows, [None, length + 1])
        else:
            places = self._places(records, tf.where)[:, None]
            columns = tf.range(length + 1, dtype=tf.int64)
            rows = tf.gather(self._in_memory, places + columns)
        return tf.cast(rows[:, :-1], tf.int32), tf.cast(rows[:, 1:], tf.int64)

    def _places(self, records: Any, where: Any) -> Any:
        """Where rows begin: those held out, behind all tokens for training."""
        (length,) = self.image_shape
        first = self.splits.get("train", 0)
        held_out = self._tokens.count.get("train", 0) + (records - first) * length
        return where(records < first, records * length, held_out)

    def _rows(self, records: np.ndarray) -> list[np.ndarray]:
        windows = np.lib.stride_tricks.sliding_window_view(
            self._tokens.ids, self.image_shape[0] + 1
        )
        return [windows[self._places(records, np.where)].astype(np.int32)]

    @functools.cached_property
    def _in_memory(self) -> tf.Tensor:
        # Outside the graph that is being traced: a constant in it may not exceed
        # 2 GiB. On the CPU: that is where tf.data runs.
        with tf.init_scope(), tf.device("/CPU:0"):
            return tf.constant(self._tokens.ids)

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
