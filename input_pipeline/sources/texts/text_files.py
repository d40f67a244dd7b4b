"""``text:GLOB``: documents in rows of tokens, for language models."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.files import in_python
from towers.input_pipeline.sources.files.record import Record
from towers.input_pipeline.sources.texts.rows import RaggedSource, bad_record
from towers.input_pipeline.sources.texts.tokenised import TokenisedSource
from towers.input_pipeline.sources.texts.tokens import Tokens


def open_text(pattern: str, packing: bool = True, **options: Any) -> TokenisedSource:
    """Opens files of text.

    Args:
        pattern: see ``TokenisedSource``.
        packing: whether rows go on with the next document; else each has one document.
        **options: see ``TokenisedSource``.
    """
    kind = TextSource if packing else DocumentSource
    return kind(pattern, **options)


class TextSource(TokenisedSource):
    """Files of text, packed into rows of tokens without padding.

    Documents are joined, each followed by an end, and cut into rows: a row's tokens are
    int32 [T], and its targets the tokens that follow each, int64 [T]. So each token but
    the first of a split is learnt once in an epoch; tokens after the last row are not.
    See ``TokenisedSource`` for the arguments.
    """

    _in_memory: Sequence[tf.Tensor] | None = None

    @property
    def in_graph(self) -> bool:
        """False if Python reads tokens from disk; see ``Source.in_graph``."""
        return not self._cache_dir

    def _take(self, tokens: Tokens) -> dict[str, int]:
        (length,) = self.image_shape
        splits = {split: (n - 1) // length for split, n in tokens.count.items()}
        if self.in_graph and min(splits.values()) > 0:
            self._keep_in_memory(tokens, splits)
        return splits

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns rows of tokens, and the following tokens; see ``Source.parse``."""
        if self._in_memory is None:
            (rows,) = in_python.call(self._read, [records], [tf.int32])
            rows = tf.ensure_shape(rows, [None, self.image_shape[0] + 1])
            return rows[:, :-1], tf.cast(rows[:, 1:], tf.int64)
        rows, following = (tf.gather(kept, records) for kept in self._in_memory)
        targets = tf.concat([rows[:, 1:], following[:, None]], 1)
        return tf.cast(rows, tf.int32), tf.cast(targets, tf.int64)

    def _keep_in_memory(self, tokens: Tokens, splits: Mapping[str, int]) -> None:
        """Keeps all rows, and the token after each, as tensors: whole rows are copied.

        They are made outside the graph that is being traced: a constant in a graph is
        limited to 2 GiB. On the CPU, where tf.data runs.
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
        positions = np.where(records < first, records * length, held_out)
        rows = np.lib.stride_tricks.sliding_window_view(self._tokens.ids, length + 1)
        return [rows[positions].astype(np.int32)]

    def files(self, split: str) -> list[str]:
        """Returns the paths of one split's files; see ``Source.files``."""
        return self._documents.files[split]

    def is_whole(self, path: str) -> bool:
        """Tells whether a file is not left out; see ``Source.is_whole``."""
        return path not in self._tokens.bad

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """Yields the rows that begin in a file; or its fault, in place of rows."""
        if path in self._tokens.bad:
            yield Record(path, "", -1, fault=self._tokens.bad[path], count=0)
            return
        (length,) = self.image_shape
        for part_of, rows in self.splits.items():
            begins = self._tokens.begins[part_of]
            if split not in (None, part_of) or path not in begins:
                continue
            order = [*begins.values(), self._tokens.count[part_of]]
            place = order.index(begins[path])
            first, end = (-(-n // length) for n in order[place : place + 2])
            offset = 0 if part_of == "train" else self.splits.get("train", 0)
            for row in range(first, min(end, rows)):
                number = tf.constant(offset + row, tf.int64)
                yield Record(path, f"row {row - first + 1}", offset + row, number)


class DocumentSource(TokenisedSource, RaggedSource):
    """Files of text, each a document in a row of its own, padded with 0.

    A row's tokens are int32 [T], and its targets the tokens that follow each, int64
    [T]; the last one is the document's end. A longer document takes several rows. All
    are kept in memory. See ``TokenisedSource`` for the arguments.
    """

    def _take(self, tokens: Tokens) -> dict[str, int]:
        (length,) = self.image_shape
        splits, begins, lengths, places, before = {}, [], [], [], 0
        for split, count in tokens.count.items():
            rows = len(lengths)
            ends = [*tokens.begins[split].values(), count]
            for path, first, end in zip(
                tokens.begins[split], ends, ends[1:], strict=False
            ):
                # Behind the last token, none follows.
                for number, begin in enumerate(range(first, end - 1, length), 1):
                    begins.append(before + begin)
                    lengths.append(min(length, end - 1 - begin))
                    places.append((path, f"row {number}"))
            splits[split], before = len(lengths) - rows, before + count
        self._files = self._documents.files
        self._faults = [bad_record(path, "", why) for path, why in tokens.bad.items()]
        ids = np.asarray(tokens.ids)
        self._keep(ids, lengths, np.zeros([0]), places, begins)
        return splits

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See ``Source.parse``."""
        x, is_token, places = self._tokens_of(records)
        following = tf.gather(self._tensors[0], tf.where(is_token, places + 1, 0))
        return x, tf.where(is_token, tf.cast(following, tf.int64), 0)
