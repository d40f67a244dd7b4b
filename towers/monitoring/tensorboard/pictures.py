"""Shows a model's examples and mistakes in TensorBoard."""

import collections
import dataclasses
import math
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw, ImageFont

from towers.program import progress

MOST_EXAMPLES = 10_000
"""Mistakes are sought in no more examples: it takes as long as their evaluation."""
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
# Larger pictures are shrunk to this: files of many photographs would be tens of MB.
_LARGEST = 256
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
        name = self._names[int(label)] if self._names else str(int(label))
        # A folder may have any bytes as its name.
        return name.encode("utf-8", "replace").decode()

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


@dataclasses.dataclass(frozen=True)
class Mistake:
    """An example that a model takes for another class.

    Attributes:
        label: Its class.
        guess: The class that the model takes it for.
        margin: By how much the output of the guess exceeds that of the class.
        image: The example [H, W, C], if it is a picture.
    """

    label: int
    guess: int
    margin: float
    image: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Mistakes:
    """The mistakes of a model: counts of all, and the worst ones.

    Attributes:
        confusions: How many examples of each class were taken for each class.
        worst: Some mistakes, those of the largest margin first.
    """

    confusions: "Confusions"
    worst: Sequence[Mistake]


def find_mistakes(
    predict: Callable[[Any], np.ndarray], batches: Iterable, most: int = 16
) -> Mistakes:
    """Finds the mistakes of a model, in the first examples if there are many.

    Examples whose label is no class of the outputs are left out.

    Args:
        predict: Returns a value for each class, of a batch of inputs.
        batches: As for `write_examples`, or of rows of numbers or dicts of columns,
            which are no pictures. The first is the largest.
        most: How many mistakes to keep.
    """
    confusions, worst = Confusions(), []
    predicted = _predicted(predict, batches)
    for images, labels, outputs in progress.over(predicted, _LOOKING, None, "batches"):
        # Labels that name no class, such as -1, mark examples to leave out.
        kept = np.flatnonzero((labels >= 0) & (labels < outputs.shape[-1]))
        labels, outputs, rows = labels[kept], outputs[kept], np.arange(len(kept))
        guesses = np.argmax(outputs, axis=-1)
        confusions.add(labels, guesses, outputs.shape[-1])
        margins = outputs[rows, guesses] - outputs[rows, labels]
        wrong = np.flatnonzero(guesses != labels)
        # The sort is stable: of equal margins, the first examples.
        for i in wrong[np.argsort(-margins[wrong], kind="stable")][:most]:
            image = images[kept[i]].numpy() if _are_pictures(images) else None
            worst.append(
                Mistake(int(labels[i]), int(guesses[i]), float(margins[i]), image)
            )
        worst = sorted(worst, key=lambda mistake: -mistake.margin)[:most]
        if confusions.examples >= MOST_EXAMPLES:
            break
    return Mistakes(confusions, worst)


def _are_pictures(inputs):
    return isinstance(inputs, tf.Tensor) and len(inputs.shape) == 4


def write_mistakes(mistakes: Mistakes, classes: Classes) -> None:
    """Writes the confusion matrix and misclassified images to TensorBoard.

    Tags are `confusion` (a picture; of many classes, of the most confused),
    `confusion_counts` (a table, if there are few classes), `misclassified` (one picture
    of the worst mistakes) and `misclassified_as`.

    Args:
        mistakes: The mistakes.
        classes: The names of the classes.
    """
    images = _misclassified(mistakes, classes)
    if images is not None:
        _write_image("misclassified", images)
    if mistakes.worst:
        lines = [
            f"{classes[mistake.label]}, taken for {classes[mistake.guess]}"
            for mistake in mistakes.worst
        ]
        _write_list("misclassified_as", lines)
    _write_image("confusion", _confused(mistakes.confusions, classes))
    if mistakes.confusions.classes <= _MOST_CLASSES:
        counts = mistakes.confusions.among(range(mistakes.confusions.classes))
        tf.summary.text("confusion_counts", table(counts, classes))


def draw_mistakes(mistakes: Mistakes, classes: Classes) -> np.ndarray:
    """Draws the confusion matrix, and misclassified images below it.

    Args:
        mistakes: The mistakes.
        classes: The names of the classes.

    Returns:
        A picture, uint8 [H, W, 3].
    """
    parts = [_confused(mistakes.confusions, classes), _misclassified(mistakes, classes)]
    papers = [Image.fromarray(part) for part in parts if part is not None]
    size = max(part.width for part in papers), sum(part.height for part in papers)
    paper, top = Image.new("RGB", size, _PAPER), 0
    for part in papers:
        paper.paste(part, (0, top))
        top += part.height
    return np.asarray(paper)


def _misclassified(mistakes, classes):
    """Draws the worst mistakes; `None` if there are none, or they are no pictures."""
    shown = [mistake for mistake in mistakes.worst if mistake.image is not None]
    if not shown:
        return None
    captions = [
        f"{classes.drawn(mistake.label)}\ntaken for {classes.drawn(mistake.guess)}"
        for mistake in shown
    ]
    return sheet(np.stack([mistake.image for mistake in shown]), captions)


def _confused(confusions, classes):
    """Draws the confusion matrix; of many classes, of those most confused."""
    drawn = confusions.drawn()
    counts = confusions.among(drawn)
    names = [*map(classes.drawn, drawn), *[_OTHERS] * (len(counts) > len(drawn))]
    note = ""
    if len(drawn) < confusions.classes:
        note = f", the {len(drawn)} most confused of {confusions.classes:,}"
    return confusion(counts, names, note)


class Confusions:
    """How many examples of a class were taken for another, of the pairs that occur.

    Attributes:
        classes: How many classes there are.
        examples: How many examples were counted.
        mistakes: How many of these were taken for another class.
    """

    def __init__(self):
        self.classes = self.examples = self.mistakes = 0
        self._counts = collections.Counter()

    def add(self, labels: np.ndarray, guesses: np.ndarray, classes: int) -> None:
        """Counts examples.

        Args:
            labels: Their classes, [B].
            guesses: What they were taken for, [B].
            classes: How many classes there are.
        """
        self.classes, self.examples = classes, self.examples + len(labels)
        self.mistakes += int((guesses != labels).sum())
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
        ["true \\ predicted", *names],
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
        images: uint8 [N, H, W, C]; of more than 4 channels, the first 3 are drawn. Both
            sides are shrunk if one has more than 256 pixels.
        captions: What stands below each, in one or more lines, of ASCII.

    Returns:
        A picture, uint8 [H, W, 3].
    """
    tiles = [_rgb(image) for image in images]
    for tile in tiles:
        tile.thumbnail((_LARGEST, _LARGEST))  # leaves smaller ones as they are
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
    channels = image.shape[-1]
    if channels not in (1, 3, 4):
        # Other channels are not of light; three of them show where something is.
        image = image[..., : 3 if channels > 3 else 1]
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
