"""The interface of tokenizers; bytes, and words.

pieces.py and hugging_face.py have trained vocabularies.
"""

import abc
import collections
import hashlib
import posixpath
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from towers.program import whole_file

# The file that names a folder's tokenizer.
FILE = "tokenizer.json"


class Tokenizer(abc.ABC):
    """Turns texts into ids, and ids into text.

    Id 0 is padding, unless `has_padding` is false. ``decode`` leaves padding and the
    ends of documents out.

    Attributes:
        name: the spec that opens it, such as ``bytes`` or ``sentencepiece:FILE``.
        size: ids are in [0, size).
        end: id of the end of a document.
        needs_utf8: whether it reads only valid text.
        has_padding: whether no text has the id 0.
        in_graph: whether TensorFlow's operations encode, which a SavedModel can hold.
    """

    name: str
    size: int
    end: int
    needs_utf8: bool = True
    has_padding: bool = True
    in_graph: bool = True

    @abc.abstractmethod
    def encode(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Turns texts into ids, also within ``Dataset.map``.

        Args:
            texts: strings [B], in UTF-8.

        Returns:
            int32 [B, None], without padding and without an end.
        """

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Turns the ids of one text into the text."""

    def fault(self, text: bytes) -> str:
        """Describes why a text cannot be read, in a phrase; empty if it can."""
        try:
            if self.needs_utf8:
                text.decode("utf-8")
        except UnicodeDecodeError as error:
            return f"is not UTF-8 at byte {error.start}, expected text"
        return ""

    def file(self) -> tuple[str, bytes] | None:
        """Returns name and content of the tokenizer's file, if there is one."""
        return None

    @property
    def fingerprint(self) -> str:
        """Returns a digest that changes with the ids."""
        _, content = self.file() or ("", b"")
        kind = self.name.partition(":")[0]
        return hashlib.sha256(kind.encode() + b"\0" + content).hexdigest()[:16]

    def save(self, folder: str) -> None:
        """Writes the tokenizer into a folder, for ``load``; a few small files."""
        kind, name = self.name.partition(":")[0], ""
        tf.io.gfile.makedirs(folder)
        if (file := self.file()) is not None:
            name, content = file
            with whole_file.opened(posixpath.join(folder, name), "wb") as out:
                out.write(content)
        content = {"tokenizer": kind, "file": name}
        whole_file.write_json(posixpath.join(folder, FILE), content)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, which need no vocabulary: byte b is b + 1, and the end is 257."""

    name = "bytes"
    size = 258
    end = 257
    needs_utf8 = False

    def encode(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Encodes bytes as ids; see ``Tokenizer.encode``."""
        # All at once: splitting them takes far longer.
        joined = tf.io.decode_raw(tf.strings.reduce_join(texts), tf.uint8)
        return tf.RaggedTensor.from_row_lengths(
            tf.cast(joined, tf.int32) + 1, tf.strings.length(texts), validate=False
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids; bytes that are not UTF-8 become U+FFFD; see ``Tokenizer``."""
        content = bytes(number - 1 for number in _numbers(ids) if 0 < number < self.end)
        return content.decode("utf-8", "replace")


class WordTokenizer(Tokenizer):
    """Words between white space; all unknown words have one id.

    Id 1 is any other word, id 2 the end of a document; `words` follow.

    Args:
        words: the different words, by their ids.
        name: the spec that opens it.

    Raises:
        ValueError: two words are the same.
    """

    def __init__(self, words: Sequence[str], name: str = "words:tokenizer.txt"):
        self.name = name
        self.words = [*words]
        self._ids = {word: number for number, word in enumerate(self.words, 3)}
        if len(self._ids) < len(self.words):
            twice = collections.Counter(self.words).most_common(1)[0][0]
            raise ValueError(
                f"the vocabulary of {name!r} has the word {twice!r} twice: expected "
                "different words"
            )
        self.size = len(self.words) + 3
        self.end = 2
        # Plain operations: a lookup table would not travel to the workers of a tf.data
        # service.
        with tf.init_scope(), tf.device("/CPU:0"):
            hashes = _hashes(tf.constant(self.words, tf.string)).numpy()
        self._order = np.argsort(hashes, kind="stable").astype(np.int32)
        self._hashes = hashes[self._order]

    @classmethod
    def of(cls, words: Iterable[str], least: int = 1) -> "WordTokenizer":
        """Makes a tokenizer of words seen `least` times, the most frequent first."""
        counts = collections.Counter(words)
        known = [word for word, count in counts.items() if count >= least]
        return cls(sorted(known, key=lambda word: (-counts[word], word)))

    def look_up(self, words: Iterable[str]) -> list[int]:
        """Returns the ids of words, in Python."""
        return [self._ids.get(word, 1) for word in words]

    def encode(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Encodes words; see ``Tokenizer.encode``."""
        return tf.ragged.map_flat_values(self._find, tf.strings.split(texts))

    def _find(self, words: tf.Tensor) -> tf.Tensor:
        if not self.words:
            return tf.ones_like(words, tf.int32)
        index = tf.searchsorted(tf.constant(self._hashes), _hashes(words))
        index = tf.minimum(index, len(self.words) - 1)
        number = tf.gather(tf.constant(self._order), index)
        known = tf.equal(tf.gather(tf.constant(self.words), number), words)
        return tf.where(known, number + 3, 1)

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids, unknown words as ``<unk>``; see ``Tokenizer.decode``."""
        known = dict(enumerate(self.words, 3))
        return " ".join(
            known.get(number, "<unk>")
            for number in _numbers(ids)
            if number not in (0, 2)
        )

    def file(self) -> tuple[str, bytes]:
        """Returns the file of words; see ``Tokenizer.file``."""
        return "tokenizer.txt", "".join(f"{word}\n" for word in self.words).encode()


def _numbers(ids: Iterable[int]) -> list[int]:
    return [int(number) for number in np.asarray(ids).ravel()]


def _hashes(words: tf.Tensor) -> tf.Tensor:
    return tf.strings.to_hash_bucket_fast(words, 2**63 - 1)
