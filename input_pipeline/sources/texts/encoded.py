"""Texts with a target each, in rows of tokens of their own."""

import concurrent.futures
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.texts.rows import RaggedSource
from towers.input_pipeline.sources.texts.tokens import ahead, at_once, type_of_ids
from towers.machine import limits
from towers.program import words
from towers.program.progress import Progress


class Example(NamedTuple):
    """A text.

    Attributes:
        path: of its file.
        place: where it is there, a phrase; empty where the file is the text.
        text: what it says.
        labels: what is beside it.
    """

    path: str
    place: str
    text: bytes
    labels: Sequence[str]


class EncodedSource(RaggedSource):
    """Texts, cut off or padded with 0 at their end, and a target for each.

    All are kept in memory. A subclass knows examples and targets, and calls `_encode`.
    """

    def _encode(self, examples: Sequence[Example], targets: np.ndarray) -> None:
        """Tokenises and keeps all examples, those for training first."""
        (length,), dtype = self.image_shape, type_of_ids(self.tokenizer)

        def encode(group):
            with tf.device("/CPU:0"):
                found = self.tokenizer.encode(
                    tf.constant([each.text for each in group])
                )
                cut = found[:, :length]
                return (
                    cut.values.numpy().astype(dtype),
                    cut.row_lengths().numpy(),
                    (found.row_lengths().numpy() > length),
                )

        ids, lengths, too_long = [np.empty([0], dtype)], [], 0
        with (
            concurrent.futures.ThreadPoolExecutor(limits.cpu_count()) as pool,
            Progress(f"Tokenising {self.name}", len(examples), "texts") as shown,
        ):
            for _, (some, counts, is_long) in ahead(pool, encode, at_once(examples)):
                ids.append(some)
                lengths += counts.tolist()
                shown.add(len(counts))
                too_long += int(is_long.sum())
        if too_long:
            count = words.count(too_long, "text")
            self._note(
                f"{count} of {len(examples):,} are cut off after {length} tokens; "
                "--sequence_length (in Python, sequence_length) changes this."
            )
        places = [(each.path, each.place) for each in examples]
        if self.target.kind == "class":
            targets = targets.astype(np.int64)
        self._keep(np.concatenate(ids), lengths, targets, places)

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See ``Source.parse``."""
        x, _, _ = self._tokens_of(records)
        return x, tf.gather(self._tensors[-1], records)
