"""Draws pictures with words on them, as TensorBoard has no captions."""

import math
import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

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
