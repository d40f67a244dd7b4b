"""Sentences to tag: lines of text, or the words of CoNLL files."""

import os
from collections.abc import Iterator, Sequence

from towers.input_pipeline.sources.texts import conll
from towers.predict.trained import Trained

_SUFFIXES = (".conll", ".conllu")


def read(trained: Trained, file: str) -> Iterator[tuple[int, str, str]]:
    """Reads the sentences of a file.

    A sentence of more words than the model takes comes in several parts, as in
    training.

    Args:
        trained: A model that tags words.
        file: Text, where each line is a sentence; or in the form of CoNLL: its name
            says so, or each line of the first sentence ends with a tag.

    Returns:
        For each the number of its line, its words with spaces between, and why it
        cannot be read, or "".

    Raises:
        UnicodeDecodeError: The file is not UTF-8.
    """
    found = _of_conll(trained, file) if _is_conll(trained, file) else _lines(file)
    (most,) = trained.preprocessing.shape
    for number, words, fault in found:
        if fault:
            yield number, "", fault
        for first in range(0, len(words), most):
            yield number, " ".join(words[first : first + most]), ""


def _is_conll(trained, file):
    if os.path.splitext(file)[1].lower() in _SUFFIXES:
        return True
    tags = {*(trained.classes or ())}
    ends = []
    for _, words, _ in _lines(file):
        # The first sentence ends where a line is empty.
        if not words and ends:
            break
        ends += [len(words) > 1 and words[-1] in tags] if words else []
    return bool(ends) and all(ends)


def _of_conll(trained, file):
    (column,) = trained.preprocessing.features or ("",)
    asked = int(column) if column.isdecimal() else None
    for number, words, fault in conll.words_of(file, asked):
        # Space would divide a word.
        yield number, ["_".join(word.split()) for word in words], fault


def _lines(file) -> Iterator[tuple[int, Sequence[str], str]]:
    with open(file, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            yield number, line.split(), ""
