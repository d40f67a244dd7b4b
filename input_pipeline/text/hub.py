"""Tokenizers of keras-hub's presets; ids are the preset's."""

import io
import json
import os
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.input_pipeline.text.tokenizer import Tokenizer
from towers.program import words
from towers.program.extras import import_extra

# In the file of a tokenizer, beside its vocabulary: what keras-hub makes it of.
_CONFIG = "config.json"


class HubTokenizer(Tokenizer):
    """A tokenizer of keras-hub, for language models.

    Id 0 may be a token, as in GPT-2: rows of packed text have no padding.

    Args:
        tokenizer: a `keras_hub.tokenizers.Tokenizer`.
    """

    name = "hub"

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.size = tokenizer.vocabulary_size()
        self.end = tokenizer.end_token_id
        self.has_padding = 0 in tokenizer.special_token_ids

    @classmethod
    def from_file(cls, path: str) -> "HubTokenizer":
        """Reads what `file` has returned.

        Raises:
            ValueError: keras-hub is not installed, or the file is not as expected.
        """
        import_extra("keras_hub", "hub")  # registers its classes
        with tf.io.gfile.GFile(path, "rb") as file:
            content = file.read()
        try:
            return cls(_read(content))
        except Exception as error:  # of whatever class, as the file may hold anything
            raise ValueError(
                f"the tokenizer {path!r} cannot be read ({words.error_line(error)}): "
                "expected the file that a run has saved, so copy it again"
            ) from error

    def encode(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Encodes texts; see ``Tokenizer.encode``. In a graph, by tensorflow-text."""
        ids = self._tokenizer(texts)
        if isinstance(ids, tf.RaggedTensor):
            return tf.cast(ids, tf.int32)
        values = np.concatenate([np.asarray(row, np.int32) for row in ids])
        return tf.RaggedTensor.from_row_lengths(values, [*map(len, ids)])

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes the ids of one text; see ``Tokenizer.decode``."""
        least = int(self.has_padding)
        own_ids = [int(n) for n in ids if n != self.end and n >= least]
        return self._tokenizer.detokenize(own_ids)

    def file(self) -> tuple[str, bytes]:
        """Returns an archive of its vocabulary; see ``Tokenizer.file``."""
        content = io.BytesIO()
        with tempfile.TemporaryDirectory() as folder:
            self._tokenizer.save_assets(folder)
            config = keras.saving.serialize_keras_object(self._tokenizer)
            Path(folder, _CONFIG).write_text(json.dumps(config), "utf-8")
            with zipfile.ZipFile(content, "w") as archive:
                for name in sorted(os.listdir(folder)):
                    # Of a fixed date: the same tokenizer gives the same bytes.
                    entry = zipfile.ZipInfo(name)
                    archive.writestr(entry, Path(folder, name).read_bytes())
        return "tokenizer.zip", content.getvalue()


def _read(content):
    """Makes a tokenizer of keras-hub of what `HubTokenizer.file` has written."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            archive.extractall(folder)
        config = json.loads(Path(folder, _CONFIG).read_text("utf-8"))
        tokenizer = keras.saving.deserialize_keras_object(config)
        tokenizer.load_assets(folder)
    return tokenizer
