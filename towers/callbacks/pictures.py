"""Shows a model's examples and mistakes in TensorBoard."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Of more examples than that, the first ones: it takes as long as their evaluation.
_MOST_EXAMPLES = 10_000
# Of more classes than that, nobody reads a table.
_MOST_CLASSES = 20
_SIDE = 480  # pixels


class Classes:
    """The names of classes; their numbers where they have none."""

    def __init__(self, names: Sequence[str] | None = None):
        self._names = names

    def __getitem__(self, label: Any) -> str:
        return self._names[int(label)] if self._names else str(int(label))


def write_examples(batches: Iterable, classes: Classes, most: int = 9) -> None:
    """Writes the first examples, as `input`, and what they are, as `input_labels`.

    Args:
        batches: Pairs of (uint8 images [B, H, W, C], labels [B]).
        classes: The names of the classes.
        most: How many to write.
    """
    images, labels = next(iter(batches))
    _write_images("input", images[:most])
    # A tag is of one kind only, so not the pictures' own.
    _write_list("input_labels", [classes[label] for label in labels[:most]])


def write_mistakes(
    model: keras.Model, batches: Iterable, classes: Classes, most: int = 16
) -> None:
    """Writes what a model takes for what, all together and some of it as pictures.

    Tags are `confusion` (a picture, see `draw`), `confusion_counts` (the same in
    numbers, if there are few classes), `misclassified` and `misclassified_as`.

    Args:
        model: The model; it returns a value for each class.
        batches: As for `write_examples`, or of rows of numbers, which are no pictures.
            The first is the largest.
        classes: The names of the classes.
        most: How many examples to show.
    """
    pictures, lines, counts = [], [], None
    for images, labels, outputs in _predicted(model.predict_on_batch, batches):
        guesses = np.argmax(outputs, axis=-1)
        if counts is None:
            counts = np.zeros([outputs.shape[-1]] * 2, int)
        np.add.at(counts, (labels, guesses), 1)
        for i in np.flatnonzero(guesses != labels)[: most - len(lines)]:
            pictures.append(images[i])
            lines.append(f"{classes[labels[i]]}, taken for {classes[guesses[i]]}")
        if counts.sum() >= _MOST_EXAMPLES:
            break
    if lines:
        if len(pictures[0].shape) == 3:
            _write_images("misclassified", tf.stack(pictures))
        _write_list("misclassified_as", lines)
    _write_images("confusion", draw(counts)[np.newaxis])
    if len(counts) <= _MOST_CLASSES:
        tf.summary.text("confusion_counts", table(counts, classes))


def draw(counts: np.ndarray) -> np.ndarray:
    """Draws a confusion matrix: the darker, the more of a row's examples.

    Args:
        counts: How many of the class of a row were taken for that of a column, [N, N].

    Returns:
        A picture, uint8 [H, W, 3]: blue where the two agree, else red; white for none.
    """
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    right = np.eye(len(counts), dtype=bool)[..., np.newaxis]
    full = np.where(right, [8, 48, 107], [165, 15, 21])
    # The root, so that few mistakes show, too.
    depth = np.sqrt(share)[..., np.newaxis]
    colors = np.rint(255 + (full - 255) * depth).astype(np.uint8)
    cell = max(1, _SIDE // len(counts))
    picture = colors.repeat(cell, axis=0).repeat(cell, axis=1)
    if cell >= 8:
        picture[::cell] = picture[:, ::cell] = 208  # lines between the cells
    return picture


def table(counts: np.ndarray, classes: Classes) -> str:
    """Returns a confusion matrix as a table in Markdown; see `draw`."""
    names = [classes[label].replace("|", "\\|") for label in range(len(counts))]
    rows = [
        ["is \\ taken for", *names],
        ["---", *["---:"] * len(names)],
        *(
            [f"**{name}**", *(str(count) if count else "" for count in row)]
            for name, row in zip(names, counts, strict=True)
        ),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _predicted(
    predict: Callable[[tf.Tensor], np.ndarray], batches: Iterable
) -> Iterator[tuple[tf.Tensor, np.ndarray, np.ndarray]]:
    """Yields images, labels and outputs of each batch."""
    size = None
    for images, labels in batches:
        size = size or len(images)
        # A short batch is filled up: another size would be traced anew.
        missing = [[0, size - len(images)], *[[0, 0]] * (images.ndim - 1)]
        yield images, labels.numpy(), predict(tf.pad(images, missing))[: len(images)]


def _write_images(tag, images):
    tf.summary.image(tag, images, max_outputs=len(images))


def _write_list(tag, lines):
    numbered = [f"{number}. {line}" for number, line in enumerate(lines, start=1)]
    tf.summary.text(tag, "\n".join(numbered))
