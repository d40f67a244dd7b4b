"""Tokenizers of Hugging Face, by the package `tokenizers`; ids are the file's.

Id 0 is padding: if a vocabulary has another piece there, its ids are shifted by 1.
"""

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from towers.program.extras import install_command
from towers.program.python_calls import until_exit

try:
    import tokenizers
except ImportError as error:
    raise ValueError(
        f"tokenizers cannot be imported ({error}), which hf:FILE needs: "
        + install_command("tokenizers")
    ) from error

from towers.input_pipeline.text.tokenizer import Tokenizer

# Names of padding and of ends that published tokenizers give; the first one counts.
_PADDING = "<pad>", "[PAD]", "<|pad|>"
_ENDS = "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]"


class HuggingFaceTokenizer(Tokenizer):
    """What a `tokenizer.json` describes: byte pairs, unigrams, WordPiece and others.

    It encodes without the special tokens that the file adds around a text: where a
    document ends is for the data set to say. `tokenizers` works on several threads, and
    returns the ids in the order of the texts.

    Args:
        content: the content of the file.
        name: the spec that opens it.

    Raises:
        ValueError: it is no such file.
    """

    in_graph = False

    def __init__(self, content: bytes, name: str):
        self.name = name
        self._content = content
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        # The package raises no narrower class.
        except Exception as error:
            raise ValueError(
                f"the tokenizer {name!r} cannot be read ({error}): expected a "
                "tokenizer.json of Hugging Face"
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(
                f"the vocabulary of the tokenizer {name!r} is empty: expected a "
                "trained tokenizer"
            )
        self._shift = int(self._tokenizer.id_to_token(0) not in _PADDING)
        # Ids may have gaps.
        self._count = max(vocabulary.values()) + 1
        self.size = self._count + self._shift
        ends = [vocabulary[end] for end in _ENDS if end in vocabulary]
        if ends:
            self.end = ends[0] + self._shift
        else:
            self.end, self.size = self.size, self.size + 1

    def encode(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Encodes texts, in Python; see ``Tokenizer.encode``."""
        ids, lengths = tf.numpy_function(
            until_exit(self._encode), [texts], (tf.int32, tf.int64), stateful=False
        )
        ids.set_shape([None])
        lengths.set_shape([None])
        return tf.RaggedTensor.from_row_lengths(ids, lengths, validate=False)

    def _encode(self, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of all texts, and how many each text has."""
        encoded = self._tokenizer.encode_batch_fast(
            [text.decode("utf-8", "replace") for text in texts],
            add_special_tokens=False,
        )
        rows = [np.array(one.ids, np.int32) + self._shift for one in encoded]
        ids = np.concatenate([np.empty([0], np.int32), *rows])
        return ids, np.array([len(row) for row in rows], np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes the ids of one text; see ``Tokenizer.decode``."""
        own_ids = np.asarray(ids, np.int64).ravel()
        own_ids = own_ids[(own_ids != 0) & (own_ids != self.end)] - self._shift
        own_ids = own_ids[own_ids < self._count].tolist()
        return self._tokenizer.decode(own_ids, skip_special_tokens=False)

    def file(self) -> tuple[str, bytes]:
        """Returns the description; see ``Tokenizer.file``."""
        # A folder's tokenizer.json is ours.
        return "hugging_face.json", self._content
