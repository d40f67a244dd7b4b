"""Shows a model's examples and mistakes in TensorBoard."""

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.monitoring.tensorboard import drawing
from towers.program import progress

# Of more examples than that, the first ones: it takes as long as their evaluation.
_MOST_EXAMPLES = 10_000
# Of more classes than that, nobody reads a table.
_MOST_CLASSES = 20
# A picture of all pairs of classes grows with the square of their number: of more
# classes than that, it has those that are most confused, and the others as one.
_MOST_DRAWN, _MOST_CONFUSED = 100, 30
_OTHERS = "all others"
_LOOKING = "Looking for mistakes"
# To draw what devices do takes milliseconds.
_TIMELINE_S = 30.0


class Classes:
    """The names of classes; their numbers where they have none."""

    def __init__(self, names: Sequence[str] | None = None):
        self._names = names

    def __getitem__(self, label: Any) -> str:
        return self._names[int(label)] if self._names else str(int(label))

    def drawn(self, label: Any) -> str:
        """The name as it is drawn: the number, if the font lacks a letter."""
        return drawing.plain(self[label]) or str(int(label))


class Timeline:
    """Draws what devices have done lately, beside the steps of training."""

    def __init__(
        self,
        rows: Callable[[], Mapping[str, np.ndarray]] | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Initializes it.

        Args:
            rows: Returns what to draw, [N] from 0 to 1 by name; nothing if unknown.
            clock: Returns seconds.
        """
        self._rows, self._clock = rows, clock
        self._drawn_s = float("-inf")

    def write_if_due(self) -> None:
        """Writes a picture, with the tag `utilization`, unless one is recent."""
        if self._clock() - self._drawn_s >= _TIMELINE_S:
            self.write()

    def write(self) -> None:
        """Writes a picture."""
        rows = self._rows() if self._rows is not None else {}
        if rows:
            self._drawn_s = self._clock()
            caption = "each column is a sample, the latest on the right, up to 100%"
            _write_image("utilization", drawing.areas(rows, caption))


def write_examples(batches: Iterable, classes: Classes, most: int = 9) -> None:
    """Writes the first examples, each with its class.

    Tags are `input` (one picture of all) and `input_labels` (the same classes as text).
    Batches are pairs of (uint8 images [B, H, W, C], labels [B]).
    """
    images, labels = next(iter(batches))
    drawn = [classes.drawn(label) for label in labels[:most]]
    _write_image("input", drawing.sheet(images[:most].numpy(), drawn))
    # A tag is of one kind only, so not the picture's own.
    _write_list("input_labels", [classes[label] for label in labels[:most]])


def write_mistakes(
    model: keras.Model, batches: Iterable, classes: Classes, most: int = 16
) -> None:
    """Writes what a model takes for what, all together and some of it as pictures.

    Tags are `confusion` (a picture; of many classes, of the most confused),
    `confusion_counts` (a table, if there are few classes), `misclassified` (one picture
    of some) and `misclassified_as`.

    Args:
        model: The model; it returns a value for each class.
        batches: As for `write_examples`, or of rows of numbers or dicts of columns,
            which are no pictures. The first is the largest.
        classes: The names of the classes.
        most: How many examples to show.
    """
    pictures, captions, lines, confusions = [], [], [], Confusions()
    predicted = _predicted(model.predict_on_batch, batches)
    for images, labels, outputs in progress.over(predicted, _LOOKING, None, "batches"):
        guesses = np.argmax(outputs, axis=-1)
        confusions.add(labels, guesses, outputs.shape[-1])
        for i in np.flatnonzero(guesses != labels)[: most - len(lines)]:
            if isinstance(images, tf.Tensor):  # columns are none
                pictures.append(images[i])
            lines.append(f"{classes[labels[i]]}, taken for {classes[guesses[i]]}")
            names = (classes.drawn(each) for each in (labels[i], guesses[i]))
            captions.append("\ntaken for ".join(names))
        if confusions.examples >= _MOST_EXAMPLES:
            break
    if lines:
        if pictures and len(pictures[0].shape) == 3:
            _write_image("misclassified", drawing.sheet(np.stack(pictures), captions))
        _write_list("misclassified_as", lines)
    drawn = confusions.drawn()
    counts = confusions.among(drawn)
    names = [*map(classes.drawn, drawn), *[_OTHERS] * (len(counts) > len(drawn))]
    note = ""
    if len(drawn) < confusions.classes:
        note = f", the {len(drawn)} most confused of {confusions.classes:,}"
    _write_image("confusion", drawing.confusion(counts, names, note))
    if confusions.classes <= _MOST_CLASSES:
        tf.summary.text("confusion_counts", table(counts, classes))


class Confusions:
    """How many examples of a class were taken for another, of the pairs that occur.

    Attributes:
        classes: How many classes there are.
        examples: How many examples were counted.
    """

    def __init__(self):
        self.classes = self.examples = 0
        self._counts = collections.Counter()

    def add(self, labels: np.ndarray, guesses: np.ndarray, classes: int) -> None:
        """Counts examples.

        Args:
            labels: Their classes, [B].
            guesses: What they were taken for, [B].
            classes: How many classes there are.
        """
        self.classes, self.examples = classes, self.examples + len(labels)
        self._counts.update(zip(labels.tolist(), guesses.tolist(), strict=True))

    def drawn(self) -> list[int]:
        """Returns the classes to draw, sorted: all, or of many the most confused."""
        if self.classes <= _MOST_DRAWN:
            return [*range(self.classes)]
        confused = collections.Counter(dict.fromkeys(range(_MOST_CONFUSED), 0))
        for pair, count in self._counts.items():
            if pair[0] != pair[1]:
                confused.update(dict.fromkeys(pair, count))
        return sorted(label for label, _ in confused.most_common(_MOST_CONFUSED))

    def among(self, drawn: Sequence[int]) -> np.ndarray:
        """Returns a confusion matrix of some classes.

        Args:
            drawn: The classes.

        Returns:
            Counts [N, N], in that order; a row and a column more for all others, if
            there are some.
        """
        place = {label: k for k, label in enumerate(drawn)}
        others = len(drawn)
        counts = np.zeros([others + (others < self.classes)] * 2, int)
        for (label, guess), count in self._counts.items():
            counts[place.get(label, others), place.get(guess, others)] += count
        return counts


def table(counts: np.ndarray, classes: Classes) -> str:
    """Returns a confusion matrix as a table in Markdown: a row for each true class."""
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
    predict: Callable[[Any], np.ndarray], batches: Iterable
) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """Yields images, labels and outputs of each batch."""
    size = None

    def filled(values):
        missing = [[0, size - len(values)], *[[0, 0]] * (values.ndim - 1)]
        return tf.pad(values, missing)

    for images, labels in batches:
        size = size or len(labels)
        # A short batch is filled up: another size would be traced anew.
        outputs = predict(tf.nest.map_structure(filled, images))
        yield images, labels.numpy(), outputs[: len(labels)]


def _write_image(tag, image):
    tf.summary.image(tag, image[np.newaxis])


def _write_list(tag, lines):
    numbered = [f"{number}. {line}" for number, line in enumerate(lines, start=1)]
    tf.summary.text(tag, "\n".join(numbered))
