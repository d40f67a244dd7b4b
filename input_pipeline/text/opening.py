"""Opens tokenizers: by a spec, or from the folder of a run."""

import os
import posixpath

import tensorflow as tf

from towers.input_pipeline import json_file, tokenizer_specs
from towers.input_pipeline.text.hub import HubTokenizer
from towers.input_pipeline.text.tokenizer import (
    FILE,
    ByteTokenizer,
    Tokenizer,
    WordTokenizer,
)
from towers.program import object_store, small_file, words


def open_tokenizer(spec: str | Tokenizer) -> Tokenizer:
    """Opens the tokenizer that a spec names.

    Args:
        spec: ``bytes``, ``sentencepiece:FILE``, ``wordpiece:FILE``, ``words:FILE`` or
            ``hf:FILE``; a tokenizer is returned as it is.

    Raises:
        ValueError: there is no such tokenizer, file or package.
    """
    if isinstance(spec, Tokenizer):
        return spec
    kind, path = tokenizer_specs.check(spec)
    if kind == "bytes":
        return ByteTokenizer()
    path = os.path.expanduser(path)
    object_store.prepare(path)
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            content = file.read()
    except tf.errors.OpError as error:
        raise ValueError(
            f"the vocabulary of the tokenizer {spec!r} cannot be read: "
            f"{words.error_line(error)}"
        ) from error
    if kind == "words":
        return WordTokenizer(_lines(spec, content), spec)
    if kind == "hf":
        # Imports tokenizers.
        from towers.input_pipeline.text import hugging_face

        return hugging_face.HuggingFaceTokenizer(content, spec)
    # Imports tensorflow-text.
    from towers.input_pipeline.text import pieces

    if kind == "wordpiece":
        return pieces.WordPieceTokenizer(_lines(spec, content), spec)
    return pieces.SentencePieceTokenizer(content, spec)


def load(folder: str) -> Tokenizer:
    """Reads the tokenizer that ``save`` has written into a folder.

    Raises:
        ValueError: there is none.
    """
    path = posixpath.join(folder, FILE)
    try:
        saved = json_file.read(path, dict)
        kind, name = str(saved["tokenizer"]), str(saved["file"])
        # A folder from somebody else must not make us read files elsewhere.
        if name and not small_file.is_name(name):
            raise ValueError(f"it names {name!r}, which is no file beside it")
    except (tf.errors.OpError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): expected the tokenizer that a run has "
            "saved"
        ) from error
    path = posixpath.join(folder, name)
    if kind == HubTokenizer.name:
        return HubTokenizer.from_file(path)
    return open_tokenizer(f"{kind}:{path}" if name else kind)


def _lines(spec: str, content: bytes) -> list[str]:
    """Returns the words of a vocabulary file, one in each line."""
    try:
        lines = content.decode("utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the vocabulary of the tokenizer {spec!r} is not UTF-8: expected a word "
            "in each line"
        ) from error
    return [line.removesuffix("\r") for line in lines]
