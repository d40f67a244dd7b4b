"""Makes the data that pages speak of."""

import csv
import os
import pathlib

import numpy as np
from PIL import Image

ROOT = pathlib.Path(__file__).parents[2]
# Of the checkout: pages name files of them.
LINKS = ("examples", "scripts", "tests", "Makefile", "setup.py", "pyproject.toml")
PICTURES = 12
ROWS = 60

_MODEL = '''"""The model of the pages."""

import keras


def build(input_shape, num_classes):
    return keras.Sequential(
        [
            keras.Input(input_shape),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(num_classes),
        ]
    )
'''
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "All happy families are alike; each unhappy family is unhappy in its own way.",
    "It was a bright cold day in April, and the clocks were striking thirteen.",
)


def make(folder: pathlib.Path) -> None:
    """Fills a folder with made-up data, and with links to files of the checkout.

    There are my_pictures/{cat,dog,owl}/*.jpg, new/*.jpg, flowers.csv, flowers.parquet,
    new_flowers.csv, houses.csv, book.txt, books/*.txt, reviews.csv and my_model.py.
    `.venv/bin/activate` is empty: the commands of Towers are found without it.
    """
    rng = np.random.default_rng(0)
    for name in LINKS:
        (folder / name).symlink_to(ROOT / name)
    for number, name in enumerate(("cat", "dog", "owl")):
        for count in range(PICTURES):
            _picture(folder / f"my_pictures/{name}/{count:02}.jpg", rng, number)
    for count in range(3):
        _picture(folder / f"new/{count + 1}.jpg", rng, count)
    flowers = _flowers(rng)
    _table(folder / "flowers.csv", flowers)
    _parquet(folder / "flowers.parquet", flowers)
    _table(folder / "new_flowers.csv", [row[:-1] for row in flowers[:6]])
    _table(folder / "houses.csv", _houses(rng))
    _table(folder / "reviews.csv", _reviews())
    book = "\n".join(_SENTENCES * 40) + "\n"
    for name in ("book.txt", "books/one.txt", "books/two.txt"):
        _text(folder / name, book)
    _text(folder / "my_model.py", _MODEL)
    _text(folder / ".venv/bin/activate", "")


def _picture(path, rng, channel):
    pixels = rng.integers(0, 80, size=(48, 64, 3))
    pixels[..., channel] += 120
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype("uint8")).save(path)


def _flowers(rng):
    columns = "sepal_length", "sepal_width", "petal_length", "petal_width", "species"
    species = "setosa", "versicolor", "virginica"
    rows = [
        (*(round(n, 1) for n in rng.normal([5 + k, 3, 1 + 2 * k, k], 0.2)), name)
        for _ in range(ROWS // 3)
        for k, name in enumerate(species)
    ]
    return [columns, *rows]


def _houses(rng):
    rows = []
    for _ in range(ROWS):
        rooms, area, age = rng.integers(1, 8), rng.integers(30, 200), rng.integers(80)
        price = 2000 * area + 9000 * rooms - 500 * age
        rows.append((rooms, area, age, price, price // 300))
    return [("rooms", "area", "age", "price", "rent"), *rows]


def _reviews():
    good = [(f"{sentence} I liked it.", "good") for sentence in _SENTENCES]
    bad = [(f"{sentence} I was bored.", "bad") for sentence in _SENTENCES]
    return [("review", "label"), *(good + bad) * (ROWS // 6)]


def _table(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def _parquet(path, rows):
    import pyarrow
    from pyarrow import parquet

    columns, *values = rows
    table = dict(zip(columns, map(list, zip(*values, strict=True)), strict=True))
    parquet.write_table(pyarrow.table(table), os.fspath(path))


def _text(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
