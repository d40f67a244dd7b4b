"""``text:GLOB`` without packing: documents in rows of their own, padded."""

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.texts.rows import RaggedSource, bad_record
from towers.input_pipeline.sources.texts.tokenised import TokenisedSource
from towers.input_pipeline.sources.texts.tokens import Tokens


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
