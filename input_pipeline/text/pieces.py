"""Tokenizers with trained vocabularies, by tensorflow-text; ids are the file's.

Id 0 is padding: if a vocabulary has another piece there, its ids are shifted by 1.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from towers.program.extras import install_command

try:
    import tensorflow_text as tf_text
except ImportError as error:
    raise ValueError(
        f"tensorflow-text cannot be imported ({error}), which these tokenizers need: "
        + install_command("text")
    ) from error

from towers.input_pipeline.text.by_words import by_words
from towers.input_pipeline.text.tokenizer import Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, of unigrams or of byte pairs.

    Args:
        model: the content of the file.
        name: the spec that opens it.

    Raises:
        ValueError: it is no such model.
    """

    def __init__(self, model: bytes, name: str):
        self.name = name
        self._model = model
        with tf.init_scope(), tf.device("/CPU:0"):
            try:
                self._pieces = tf_text.SentencepieceTokenizer(model)
                count = int(self._pieces.vocab_size())
                pieces = self._pieces.id_to_string(tf.range(count)).numpy().tolist()
            except tf.errors.OpError as error:
                raise ValueError(
                    f"the vocabulary of the tokenizer {name!r} cannot be read: "
                    "expected the .model file that SentencePiece has written"
                ) from error
        tokenize = self._pieces.tokenize
        self._tokenize = by_words(tokenize, model, pieces) or tokenize
        self._shift = int(pieces[0] != b"<pad>")
        self._count = count
        self.size = count + self._shift
        if b"</s>" in pieces:
            self.end = pieces.index(b"</s>") + self._shift
        else:
            self.end, self.size = self.size, self.size + 1

    def encode(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Encodes texts; see ``Tokenizer.encode``."""
        return self._tokenize(texts) + self._shift

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes the ids of one text; see ``Tokenizer.decode``."""
        own_ids = np.asarray(ids, np.int32).ravel()
        own_ids = own_ids[(own_ids != 0) & (own_ids != self.end)] - self._shift
        own_ids = own_ids[own_ids < self._count]
        with tf.device("/CPU:0"):
            text = self._pieces.detokenize(tf.constant(own_ids, tf.int32)).numpy()
        return text.decode("utf-8", "replace")

    def file(self) -> tuple[str, bytes]:
        """Returns the model's file; see ``Tokenizer.file``."""
        return "tokenizer.model", self._model


class WordPieceTokenizer(Tokenizer):
    """The WordPiece of BERT: words are separated, and then cut into pieces.

    If no piece has a capital letter, text becomes lower case, without accents.

    Args:
        vocabulary: the pieces, by their ids. Those within words begin with ``##``.
        name: the spec that opens it.

    Raises:
        ValueError: the piece for unknown words is missing.
    """

    def __init__(self, vocabulary: Sequence[str], name: str):
        if "[UNK]" not in vocabulary:
            raise ValueError(
                f"the vocabulary of the tokenizer {name!r} has no [UNK]: expected a "
                "piece in each line, and [UNK] for all that cannot be written in pieces"
            )
        self.name = name
        self._vocabulary = [*vocabulary]
        self._shift = int(vocabulary[0] != "[PAD]")
        words = [piece for piece in vocabulary if piece[:1] != "["]
        self.lower_case = all(piece == piece.lower() for piece in words)
        self.size = len(vocabulary) + self._shift
        if "[SEP]" in vocabulary:
            self.end = vocabulary.index("[SEP]") + self._shift
        else:
            self.end, self.size = self.size, self.size + 1
        with tf.init_scope(), tf.device("/CPU:0"):
            self._pieces = tf_text.FastBertTokenizer(
                self._vocabulary,
                token_out_type=tf.int32,
                lower_case_nfd_strip_accents=self.lower_case,
            )

    def encode(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Encodes texts; see ``Tokenizer.encode``."""
        return self._pieces.tokenize(texts) + self._shift

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids, with a space between all words and signs; see ``Tokenizer``."""
        own_ids = np.asarray(ids).ravel()
        own_ids = [int(n) - self._shift for n in own_ids if n not in (0, self.end)]
        pieces = [self._vocabulary[n] for n in own_ids if n < len(self._vocabulary)]
        return " ".join(pieces).replace(" ##", "")

    def file(self) -> tuple[str, bytes]:
        """Returns the file of pieces; see ``Tokenizer.file``."""
        content = "".join(f"{piece}\n" for piece in self._vocabulary).encode()
        return "tokenizer.txt", content
