"""Reads files for a model, batch by batch, in order; and says which are bad."""

import csv
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.files.record import fault_of
from towers.input_pipeline.sources.folder import pictures
from towers.predict.trained import Trained

_PARQUET = (".parquet", ".pq")


class Batch(NamedTuple):
    """Some examples.

    Attributes:
        names: For each, what tells it from the others, by column.
        x: What the model takes.
    """

    names: list[dict[str, Any]]
    x: tf.Tensor


def batches(
    trained: Trained, files: Sequence[str], size: int, say_bad: Callable[[str], None]
) -> Iterator[Batch]:
    """Reads files, and yields them by the batch.

    Args:
        trained: Whose input they are.
        files: Pictures or folders of these, tables, or texts.
        size: Examples in a batch.
        say_bad: Is called with a sentence for each example that is left out.

    Raises:
        ValueError: A file is not of the kind that the model takes.
    """
    kind, task = trained.preprocessing.input, trained.preprocessing.task
    if task == "language_model":
        raise ValueError(
            "This run's model tells the next token, not something about a text; "
            "expected towers generate, which writes text."
        )
    if kind == "image":
        return _pictures(trained, _all_pictures(files), size, say_bad)
    if kind == "row":
        return _tables(trained, files, size, say_bad)
    if kind == "tokens":
        return _texts(trained, files, size, say_bad)
    raise ValueError(
        f"This run's examples are {kind}, which no file has; expected pictures, rows "
        "of numbers or texts, so load the model by towers.load_model."
    )


def _all_pictures(files):
    found = []
    for file in files:
        if os.path.isdir(file):
            inside = [
                os.path.join(folder, name)
                for folder, _, names in sorted(os.walk(file))
                for name in sorted(names)
                if name.lower().endswith(pictures.SUFFIXES)
            ]
            if not inside:
                raise ValueError(f"The folder {file} has no picture; name another.")
            found += inside
        else:
            found.append(file)
    return found


def _pictures(trained, files, size, say_bad):
    def load(number):
        encoded = tf.io.read_file(tf.gather(paths, number))
        return number, trained.preprocessing.picture(encoded)

    paths = tf.constant(files)
    # What cannot be decoded is missing among the numbers.
    good = tf.data.Dataset.range(len(files)).map(load, tf.data.AUTOTUNE)
    good = good.ignore_errors(log_warning=False).batch(size)
    seen = -1
    for numbers, x in good.prefetch(tf.data.AUTOTUNE):
        numbers = numbers.numpy()
        last = int(numbers[-1])
        for number in sorted({*range(seen + 1, last)} - {*numbers}):
            say_bad(_fault(files[number], trained))
        seen = last
        yield Batch([{"file": files[number]} for number in numbers], x)
    for number in range(seen + 1, len(files)):
        say_bad(_fault(files[number], trained))


def _fault(file, trained):
    try:
        trained.preprocessing.picture(tf.io.read_file(file))
    except (tf.errors.OpError, ValueError) as error:
        return f"{file}: {fault_of(error)}."
    return f"{file}: it could not be read, and now it can; run again."


def _tables(trained, files, size, say_bad):
    features = trained.preprocessing.features

    def rows():
        for file in files:
            read = _parquet if file.lower().endswith(_PARQUET) else _csv
            for number, row in enumerate(read(file, features), 1):
                try:
                    yield {"file": file, "row": number}, [*map(_number, features, row)]
                except ValueError as error:
                    say_bad(f"{file}: row {number}: {error}.")

    for some in _batched(rows(), size):
        names, numbers = zip(*some, strict=True)
        yield Batch([*names], trained.prepare(np.array(numbers, np.float32)))


def _number(name, value):
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"column {name!r} is {value!r}, expected a number")
    return number


def _csv(file, features):
    try:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines)
            places = _places(file, next(reader, []), features)
            for row in filter(None, reader):
                yield [row[i] if i < len(row) else None for i in places]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is no text in UTF-8; expected a CSV or a Parquet file."
        ) from error


def _parquet(file, features):
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.ParquetFile(file)
        _places(file, table.schema_arrow.names, features)
        for batch in table.iter_batches(columns=[*features]):
            columns = (batch.column(name).to_pylist() for name in features)
            yield from zip(*columns, strict=True)
    except ArrowException as error:
        raise ValueError(f"{file} cannot be read: {error}; correct it.") from error


def _places(file, header, features):
    missing = [name for name in features if name not in header]
    if missing:
        raise ValueError(
            f"{file} has no column {', '.join(map(repr, missing))}, which the model "
            f"was trained on; its columns are {', '.join(map(repr, header))}."
        )
    return [header.index(name) for name in features]


def _texts(trained, files, size, say_bad):
    def texts():
        for file in files:
            is_table = file.lower().endswith((".csv", *_PARQUET))
            word = "row" if is_table else "line"
            found = _column(trained, file) if is_table else _lines(file)
            for number, text in found:
                if isinstance(text, str | bytes):
                    yield {"file": file, "row": number}, text
                else:
                    say_bad(f"{file}: {word} {number}: it has no text.")

    for some in _batched(texts(), size):
        names, strings = zip(*some, strict=True)
        yield Batch([*names], trained.prepare(np.array(strings, object)))


def _lines(file):
    with open(file, encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if text := line.strip():
                    yield number, text
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is no text in UTF-8; convert it.") from error


def _column(trained, file):
    features = trained.preprocessing.features
    read = _parquet if file.lower().endswith(_PARQUET) else _csv
    for number, (text,) in enumerate(read(file, features), 1):
        yield number, text


def _batched(items, size):
    items = iter(items)
    while some := [*itertools.islice(items, size)]:
        yield some
