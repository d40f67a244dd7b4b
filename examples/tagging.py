"""Tagging: is a character of Python code part of a name, a number, a text, ...?

    towers train --model=examples/tagging.py --task=tagging

There is a tag for each character. Lines are padded to one length, and weights of 0 tell
the loss and the metrics which characters are padding.
"""

import io
import json
import keyword
import pathlib
import tokenize

import keras
import numpy as np

LENGTH = 80
TAGS = ("space", "keyword", "name", "number", "operator", "text", "comment")
_KINDS = {
    tokenize.NAME: "name",
    tokenize.NUMBER: "number",
    tokenize.OP: "operator",
    tokenize.STRING: "text",
    tokenize.COMMENT: "comment",
}


def build(input_shape, num_outputs):
    """Looks at the characters around each one; a value for each tag and character."""
    return keras.Sequential(
        [
            keras.Input(input_shape, dtype="int32"),
            keras.layers.Embedding(128, 16),
            keras.layers.Conv1D(64, 9, padding="same", activation="relu"),
            keras.layers.Conv1D(64, 9, padding="same", activation="relu"),
            keras.layers.Dense(num_outputs),
        ]
    )


def _tags(code):
    """Lines of a file, and the tags of their characters."""
    lines = code.splitlines()
    tags = [[0] * len(line) for line in lines]
    for kind, text, (row, first), (last_row, last), _ in tokenize.generate_tokens(
        io.StringIO(code).readline
    ):
        name = "keyword" if keyword.iskeyword(text) else _KINDS.get(kind)
        if name is not None and row == last_row:
            tags[row - 1][first:last] = [TAGS.index(name)] * (last - first)
    return zip(lines, tags, strict=True)


def _data():
    folder = pathlib.Path(json.__file__).parent
    pairs = [
        (line[:LENGTH], tags[:LENGTH])
        for path in sorted(folder.glob("*.py"))
        for line, tags in _tags(path.read_text())
        if line.strip() and line.isascii()
    ]
    x, y = np.zeros([2, len(pairs), LENGTH], "int32")
    weights = np.zeros([len(pairs), LENGTH], "float32")
    for row, (line, tags) in enumerate(pairs):
        x[row, : len(line)] = [ord(character) for character in line]
        y[row, : len(line)] = tags
        weights[row, : len(line)] = 1
    return x, y, weights


def train_data():
    """All lines but every tenth."""
    return tuple(np.delete(each, np.s_[::10], axis=0) for each in _data())


def eval_data():
    """Every tenth line."""
    return tuple(each[::10] for each in _data())
