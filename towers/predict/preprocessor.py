"""Makes what a model takes of what files have, in TensorFlow's graph or eagerly."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from towers import input_pipeline
from towers.input_pipeline import text
from towers.input_pipeline.images.decode import ALL_TRICKS, decode_window
from towers.input_pipeline.sources.tables import categories
from towers.train.outputs.preprocessing import OWN, Preprocessing


class Preprocessor:
    """Prepares a batch as training did in evaluation.

    Args:
        known: What the run has written of its preprocessing.
        tokenizer: Of a model of texts.
        own: `preprocess` of the user's file, if there is one: of (x, y, training).
    """

    def __init__(
        self,
        known: Preprocessing,
        tokenizer: text.Tokenizer | None = None,
        own: Callable[[Any, Any, bool], Any] | None = None,
    ):
        self._known, self._tokenizer, self._own = known, tokenizer, own
        with tf.init_scope():
            self._ids = categories.finders(known.vocabularies)

    def __call__(self, raw: Any) -> Any:
        """Makes what the model takes.

        Args:
            raw: A tensor, or a dict of them by the names of columns or inputs. Strings
                are encoded pictures, or texts.

        Raises:
            ValueError: `preprocess` of the user's file fails.
        """
        known, x = self._known, raw
        if isinstance(raw, Mapping) and known.input != OWN:
            x = self._columns(raw)
        elif known.input == "row":
            x = self._rows(raw)
        elif known.input == "tokens":
            x = text.pad_ids(self._tokenizer.encode(raw), *known.shape)
        elif known.input == "image" and raw.dtype == tf.string:
            x = self._pictures(raw)
        if self._own is not None:
            x = self._by_own(x)
        images = known.input == "image" and x.dtype == tf.uint8
        return input_pipeline.normalize(x) if images else x

    def picture(self, encoded: tf.Tensor) -> tf.Tensor:
        """Decodes a file of a picture, as in evaluation; uint8 pixels [H, W, C]."""
        recipe = self._known.evaluation_recipe
        window = recipe.window and (lambda shape: recipe.window(shape, None))
        tricks = ALL_TRICKS
        if self._known.same_size and window is None:
            tricks = dataclasses.replace(ALL_TRICKS, fast_dct=False)
        shape = self._known.shape
        return decode_window(
            encoded, window, shape, antialias=recipe.antialias, tricks=tricks
        )

    def _pictures(self, encoded):
        return tf.map_fn(
            tf.autograph.experimental.do_not_convert(self.picture),
            encoded,
            fn_output_signature=tf.TensorSpec(self._known.shape, tf.uint8),
        )

    def _rows(self, numbers):
        known, numbers = self._known, tf.cast(numbers, tf.float64)
        if numbers.shape.rank != 2 or numbers.shape[1] != known.shape[0]:
            raise ValueError(
                f"Received numbers {list(numbers.shape)}; expected rows "
                f"[B, {known.shape[0]}] of {', '.join(known.features or ())}."
            )
        scaling = known.scaling
        return tf.cast(numbers, tf.float32) if scaling is None else scaling(numbers)

    def _columns(self, columns):
        """Of numbers [B], texts [B] of categories, and ids [B], by their names."""
        known = self._known
        numbers = [tf.cast(columns[name], tf.float64) for name in known.features or ()]
        rows = self._rows(tf.stack(numbers, axis=1)) if numbers else None
        if known.input == "row":
            return rows
        ids = {
            name: self._ids[name](columns[name])
            if known.is_text(name)
            else tf.cast(columns[name], tf.int64)
            for name in known.tables
        }
        return categories.examples(rows, ids)

    def _by_own(self, x):
        try:
            x, _ = self._own(x, None, False)
        except Exception as error:
            raise ValueError(
                f"preprocess of {self._known.model!r} raised "
                f"{type(error).__name__} ({' '.join(str(error).split())}) when called "
                "with y=None; expected x and y in return, so let it leave y "
                "as it is if y is None."
            ) from error
        return x
