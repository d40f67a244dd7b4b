"""``text:GLOB``: documents in rows of tokens, for language models."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.files import in_python
from towers.input_pipeline.sources.files.record import Record
from towers.input_pipeline.sources.texts.tokenised import TokenisedSource
from towers.input_pipeline.sources.texts.tokens import Tokens
from towers.input_pipeline.sources.texts.whole import DocumentSource


def open_text(pattern: str, packing: bool = True, **options: Any) -> TokenisedSource:
    """Opens files of text.

    Args:
        pattern: see ``TokenisedSource``.
        packing: whether rows go on with the next document; else each has one.
        **options: see ``TokenisedSource``.
    """
    kind = TextSource if packing else DocumentSource
    return kind(pattern, **options)


class TextSource(TokenisedSource):
    """Files of text, packed into rows of tokens without padding.

    Documents are joined, each with an end behind it, and cut into rows: a row's tokens
    are int32 [T], and its targets the tokens that follow each, int64 [T]. So each token
    but the first of a split is learnt once in an epoch; what is left behind the last
    row is not. See ``TokenisedSource`` for the arguments.
    """

    _in_memory: Sequence[tf.Tensor] | None = None

    @property
    def in_graph(self) -> bool:
        """See ``Source.in_graph``: on the disk, Python reads."""
        return not self._cache_dir

    def _take(self, tokens: Tokens) -> dict[str, int]:
        (length,) = self.image_shape
        splits = {split: (n - 1) // length for split, n in tokens.count.items()}
        if self.in_graph and min(splits.values()) > 0:
            self._keep_in_memory(tokens, splits)
        return splits

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See ``Source.parse``."""
        if self._in_memory is None:
            (rows,) = in_python.call(self._read, [records], [tf.int32])
            rows = tf.ensure_shape(rows, [None, self.image_shape[0] + 1])
            return rows[:, :-1], tf.cast(rows[:, 1:], tf.int64)
        rows, following = (tf.gather(kept, records) for kept in self._in_memory)
        targets = tf.concat([rows[:, 1:], following[:, None]], 1)
        return tf.cast(rows, tf.int32), tf.cast(targets, tf.int64)

    def _keep_in_memory(self, tokens: Tokens, splits: Mapping[str, int]) -> None:
        """Has all rows, and the token behind each, as tensors: whole rows are copied.

        They are made outside the graph that is being traced: a constant in it may not
        exceed 2 GiB. On the CPU: that is where tf.data runs.
        """
        (length,) = self.image_shape
        rows, following, begin = [], [], 0
        for split, count in splits.items():
            ids = tokens.ids[begin : begin + count * length + 1]
            rows.append(ids[:-1].reshape(count, length))
            following.append(ids[length::length])
            begin += tokens.count[split]
        with tf.init_scope(), tf.device("/CPU:0"):
            self._in_memory = [tf.concat(kept, 0) for kept in (rows, following)]

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
