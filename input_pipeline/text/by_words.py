"""Encodes each different word of a batch of texts once, where results are equal.

Texts repeat their words: in Python's own sources, one in five differs from those before
it in the same megabyte. SentencePiece's byte pairs are merged in the order of the
vocabulary, and no piece reaches beyond a word, so a word gives the same pieces
everywhere. Unigrams are left alone: of two equal costs, SentencePiece chooses by the
rounding of the costs of all the text before.
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
    """Makes a function that encodes each word once, from one that encodes texts.

    Args:
        encode: encodes strings [B] to ids [B, None].
        model: the content of SentencePiece's file.
        pieces: the pieces of that model, by their ids.

    Returns:
        A function with the same results; None if there is none.
    """
    if _type(model) != _BYTE_PAIRS or _BEGIN not in pieces:
        return None
    if any(_BEGIN in piece[1:] or piece.split() != [piece] for piece in pieces):
        return None
    spaces = _spaces(encode)
    if spaces is None:
        return None
    dropped, between = spaces

    def encode_words(texts):
        if dropped:
            texts = tf.strings.regex_replace(texts, f"[{dropped}]", "")
        words = tf.strings.split(texts, between)
        different, indices = tf.unique(words.values)
        ids = tf.gather(encode(different), indices)
        splits = tf.gather(ids.row_splits, words.row_splits)
        return tf.RaggedTensor.from_row_splits(ids.values, splits, validate=False)

    return encode_words


def _type(model):
    return _field(_field(model, _TRAINER, b""), _TYPE, None)


def _field(message, number, default):
    """Returns the last field of a number, in the format of protocol buffers."""
    fields = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))
    values = [field.data for field in fields if field.field_number == number]
    return values[-1] if values else default


def _spaces(encode):
    """Finds out how a model treats white space.

    Returns:
        Characters that it drops, and the separator of words, as for `tf.strings.split`;
        None if spaces themselves are kept.
    """
    texts = ["a", "b", "ab", " a", "a ", "a  b", *(f"a{space}b" for space in _SPACES)]
    with tf.init_scope(), tf.device("/CPU:0"):
        one, other, joined, *spaced = encode(tf.constant(texts)).to_list()
    divided = one + other
    if spaced[:4] != [one, one, divided, divided]:
        return None
    ids_by_space = [*zip(_SPACES, spaced[3:], strict=True)]
    dropped = "".join(space for space, ids in ids_by_space if ids == joined)
    all_divide = all(ids in (divided, joined) for _, ids in ids_by_space)
    return dropped, (None if all_divide else " ")
