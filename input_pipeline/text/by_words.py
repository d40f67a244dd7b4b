"""Encodes each different word of a batch of texts once, where that changes nothing.

Texts repeat their words: of Python's own sources, one in five differs from those before
it in the same megabyte. SentencePiece's byte pairs are merged in the order of the
vocabulary, and no piece reaches beyond a word, so a word gives the same pieces wherever
it stands. Unigrams are left alone: of two ways that cost the same, SentencePiece takes
one by how the costs of all the text before were rounded.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf
from google.protobuf import empty_pb2, unknown_fields

Encode = Callable[[tf.Tensor], tf.RaggedTensor]

# In sentencepiece_model.proto: ModelProto.trainer_spec, TrainerSpec.model_type, BPE.
_TRAINER, _TYPE, _BYTE_PAIRS = 2, 3, 2
_BEGIN = "▁".encode()
_SPACES = " ", "\t", "\n", "\v", "\f", "\r"


def by_words(encode: Encode, model: bytes, pieces: Sequence[bytes]) -> Encode | None:
    """Makes of a function that encodes texts one that encodes each word once.

    Args:
        encode: of strings [B], ids [B, None].
        model: of SentencePiece, the content of its file.
        pieces: of that model, by their ids.

    Returns:
        A function that returns the same; None where there is none.
    """
    if _type(model) != _BYTE_PAIRS or _BEGIN not in pieces:
        return None
    if any(_BEGIN in piece[1:] or piece.split() != [piece] for piece in pieces):
        return None
    found = _spaces(encode)
    if found is None:
        return None
    dropped, between = found

    def encode_words(texts):
        if dropped:
            texts = tf.strings.regex_replace(texts, f"[{dropped}]", "")
        words = tf.strings.split(texts, between)
        different, places = tf.unique(words.values)
        ids = tf.gather(encode(different), places)
        splits = tf.gather(ids.row_splits, words.row_splits)
        return tf.RaggedTensor.from_row_splits(ids.values, splits, validate=False)

    return encode_words


def _type(model):
    return _field(_field(model, _TRAINER, b""), _TYPE, None)


def _field(message, number, default):
    """What the last field of this number has, in the format of protocol buffers."""
    fields = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))
    found = [field.data for field in fields if field.field_number == number]
    return found[-1] if found else default


def _spaces(encode):
    """Finds out what white space is to a model.

    Returns:
        Characters that it takes for nothing, and what is between words, as for
        `tf.strings.split`; None if spaces themselves are kept.
    """
    texts = ["a", "b", "ab", " a", "a ", "a  b", *(f"a{space}b" for space in _SPACES)]
    with tf.init_scope(), tf.device("/CPU:0"):
        one, other, joined, *spaced = encode(tf.constant(texts)).to_list()
    divided = one + other
    if spaced[:4] != [one, one, divided, divided]:
        return None
    found = [*zip(_SPACES, spaced[3:], strict=True)]
    dropped = "".join(space for space, ids in found if ids == joined)
    all_divide = all(ids in (divided, joined) for _, ids in found)
    return dropped, (None if all_divide else " ")
