"""Shows a model's examples and mistakes in TensorBoard."""

import collections
import math
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw, ImageFont

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
# All lengths are in pixels.
_FONT = 13
_LINE = _FONT + 4
_GAP = 6
# Smaller pictures are magnified to about this.
_PICTURE = 96
# A confusion matrix without its words. Of more classes, only some are named.
_MATRIX = 480
_MOST_NAMED = 25
# The longest name of a class that is written in full.
_NAME = 120
_INK, _SOFT, _PAPER = (40, 44, 52), (208, 208, 208), (255, 255, 255)
_FILL = (33, 113, 181)
# Of a row that is drawn over time.
_ROW, _COLUMN = 60, 6


class Classes:
    """The names of classes; their numbers where they have none."""

    def __init__(self, names: Sequence[str] | None = None):
        self._names = names

    def __getitem__(self, label: Any) -> str:
        return self._names[int(label)] if self._names else str(int(label))

    def drawn(self, label: Any) -> str:
        """The name as it is drawn: the number, if the font lacks a letter."""
        return plain(self[label]) or str(int(label))


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
            _write_image("utilization", areas(rows, caption))


def write_examples(batches: Iterable, classes: Classes, most: int = 9) -> None:
    """Writes the first examples, each with its class.

    Tags are `input` (one picture of all) and `input_labels` (the same classes as text).
    Batches are pairs of (uint8 images [B, H, W, C], labels [B]).
    """
    images, labels = next(iter(batches))
    drawn = [classes.drawn(label) for label in labels[:most]]
    _write_image("input", sheet(images[:most].numpy(), drawn))
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
            _write_image("misclassified", sheet(np.stack(pictures), captions))
        _write_list("misclassified_as", lines)
    drawn = confusions.drawn()
    counts = confusions.among(drawn)
    names = [*map(classes.drawn, drawn), *[_OTHERS] * (len(counts) > len(drawn))]
    note = ""
    if len(drawn) < confusions.classes:
        note = f", the {len(drawn)} most confused of {confusions.classes:,}"
    _write_image("confusion", confusion(counts, names, note))
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


# Draws pictures with words on them, as TensorBoard has no captions.


def sheet(images: np.ndarray, captions: Sequence[str]) -> np.ndarray:
    """Puts pictures side by side, each above its caption.

    Args:
        images: uint8 [N, H, W, C], of 1, 3 or 4 channels.
        captions: What stands below each, in one or more lines, of ASCII.

    Returns:
        A picture, uint8 [H, W, 3].
    """
    tiles = [_rgb(image) for image in images]
    scale = max(1, math.ceil(_PICTURE / max(tiles[0].size)))
    width, height = (scale * side for side in tiles[0].size)
    lines = [caption.split("\n") for caption in captions]
    # A caption may be wider than its picture, within reason.
    widest = math.ceil(max(_length(line) for each in lines for line in each))
    cell = max(width, min(widest, _NAME)) + _GAP
    row = height + _LINE * max(map(len, lines)) + _GAP
    columns = math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    paper = Image.new("RGB", (columns * cell + _GAP, rows * row + _GAP), _PAPER)
    pen = ImageDraw.Draw(paper)
    for place, (tile, each) in enumerate(zip(tiles, lines, strict=True)):
        x, y = place % columns * cell + _GAP, place // columns * row + _GAP
        # Pixels stay squares.
        paper.paste(tile.resize((width, height), Image.Resampling.NEAREST), (x, y))
        for number, line in enumerate(each):
            text = _short(line, cell - _GAP)
            pen.text((x, y + height + number * _LINE), text, _INK, _font())
    return np.asarray(paper)


def areas(rows: Mapping[str, np.ndarray], caption: str) -> np.ndarray:
    """Draws rows of numbers below one another, each as an area over time.

    Args:
        rows: Numbers from 0 to 1 by name, [N] each; NaN where there is none.
        caption: What stands below.

    Returns:
        A picture, uint8 [H, W, 3].
    """
    left = math.ceil(max(map(_length, rows))) + 2 * _GAP
    count = max(map(len, rows.values()))
    width = max(left + count * _COLUMN, math.ceil(_length(caption))) + 2 * _GAP
    height = len(rows) * (_ROW + _GAP) + _GAP + _LINE
    paper = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(paper)
    for place, (name, values) in enumerate(rows.items()):
        top = _GAP + place * (_ROW + _GAP)
        bottom, right = top + _ROW - 1, left + count * _COLUMN - 1
        pen.text((_GAP, (top + bottom) / 2), name, _INK, _font(), anchor="lm")
        pen.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline=_SOFT)
        for k, value in enumerate(values):
            if full := round(_ROW * float(np.nan_to_num(value))):
                x = left + k * _COLUMN
                box = (x, bottom + 1 - full, x + _COLUMN - 1, bottom)
                pen.rectangle(box, _FILL)
    pen.text((_GAP, height - _GAP), caption, _INK, _font(), anchor="ld")
    return np.asarray(paper)


def confusion(counts: np.ndarray, names: Sequence[str], note: str = "") -> np.ndarray:
    """Draws a confusion matrix: the darker, the more of a row's examples.

    Args:
        counts: How many of the class of a row were taken for that of a column, [N, N].
        names: Of the classes, [N], of ASCII.
        note: What to write behind "predicted class".

    Returns:
        A picture, uint8 [H, W, 3]: blue where the two agree, else red; white for none.
        The classes stand at the rows and below the columns, if need be every few.
    """
    cells = matrix(counts)
    side, cell = len(cells), len(cells) // len(counts)
    every = math.ceil(len(names) / _MOST_NAMED)
    named = {k: _short(names[k], _NAME) for k in range(0, len(names), every)}
    widest = math.ceil(max(map(_length, named.values())))
    turned = widest > every * cell
    left = _LINE + _GAP + widest + _GAP
    below = (widest if turned else _LINE) + _GAP + _LINE
    paper = Image.new("RGB", (left + side + _GAP, _GAP + side + _GAP + below), _PAPER)
    paper.paste(Image.fromarray(cells), (left, _GAP))
    pen = ImageDraw.Draw(paper)
    for k, name in named.items():
        middle = k * cell + cell // 2
        pen.text((left - _GAP, _GAP + middle), name, _INK, _font(), anchor="rm")
        under = (left + middle, _GAP + side + _GAP)
        if turned:
            _upright(paper, name, under, "top")
        else:
            pen.text(under, name, _INK, _font(), anchor="ma")
    if cell >= _length(f"{counts.max():,}") + 4:
        for (i, j), count in np.ndenumerate(counts):
            if count:
                at = left + j * cell + cell // 2, _GAP + i * cell + cell // 2
                dark = cells[i * cell + cell // 4, j * cell + cell // 4].mean() < 128
                ink = _PAPER if dark else _INK
                pen.text(at, f"{count:,}", ink, _font(), anchor="mm")
    bottom = (left + side // 2, paper.height)
    pen.text(bottom, f"predicted class{note}", _INK, _font(), anchor="md")
    _upright(paper, "true class", (_LINE // 2, _GAP + side // 2), "middle")
    return np.asarray(paper)


def matrix(counts: np.ndarray) -> np.ndarray:
    """Draws the cells of a confusion matrix alone; see `confusion`."""
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    right = np.eye(len(counts), dtype=bool)[..., np.newaxis]
    full = np.where(right, [8, 48, 107], [165, 15, 21])
    # The root, so that few mistakes show, too.
    depth = np.sqrt(share)[..., np.newaxis]
    colors = np.rint(255 + (full - 255) * depth).astype(np.uint8)
    cell = max(1, _MATRIX // len(counts))
    picture = colors.repeat(cell, axis=0).repeat(cell, axis=1)
    if cell >= 8:
        picture[::cell] = picture[:, ::cell] = _SOFT  # lines between the cells
        picture[-1] = picture[:, -1] = _SOFT
    return picture


def plain(name: str) -> str | None:
    """Writes a name in ASCII, which is what the font has.

    Returns:
        The name, without accents; `None` if that leaves something out.
    """
    letters = unicodedata.normalize("NFKD", name)
    letters = "".join(each for each in letters if not unicodedata.combining(each))
    return letters if letters.isascii() and letters.isprintable() else None


def _upright(paper, text, at, anchor):
    """Writes from the bottom to the top, around or below a point."""
    tile = Image.new("RGB", (math.ceil(_length(text)) + 1, _LINE), _PAPER)
    ImageDraw.Draw(tile).text((0, _LINE // 2), text, _INK, _font(), anchor="lm")
    tile = tile.rotate(90, expand=True)
    x, y = at
    y -= tile.height // 2 if anchor == "middle" else 0
    paper.paste(tile, (x - tile.width // 2, y))


def _rgb(image):
    image = np.asarray(image)
    if image.shape[-1] == 1:
        image = image[..., 0]
    return Image.fromarray(image).convert("RGB")


def _short(text, width):
    """Ends a text that is too long with dots."""
    if _length(text) <= width:
        return text
    text = text[:width]  # a letter has a pixel at least
    while text and _length(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"


def _length(text):
    return _font().getlength(text)


def _font():
    return ImageFont.load_default(_FONT)
