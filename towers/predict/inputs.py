"""Reads files for a model, batch by batch, in order; and says which are bad."""

import collections
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.array_files import numpy_files
from towers.input_pipeline.sources.files.record import fault_of
from towers.input_pipeline.sources.folder import pictures
from towers.input_pipeline.specs import TEXTS
from towers.predict import arrays, sentences, tables
from towers.predict.trained import Trained
from towers.program.voice import say
from towers.train.outputs.preprocessing import OWN


class Batch(NamedTuple):
    """Some examples.

    Attributes:
        names: For each, what tells it from the others, by column.
        x: What the model takes.
    """

    names: list[dict[str, Any]]
    x: Any


def batches(
    trained: Trained,
    files: Sequence[str],
    size: int,
    say_bad: Callable[[str], None],
    kept: Sequence[str] = (),
) -> Iterator[Batch]:
    """Reads files, and yields them by the batch.

    Args:
        trained: Whose input they are.
        files: Pictures or folders of these, tables, texts, or arrays.
        size: Examples in a batch.
        say_bad: Is called with a sentence for each example that is left out.
        kept: Columns of tables, which `Batch.names` are to have, too.

    Raises:
        ValueError: A file is not of the kind that the model takes.
    """
    kind, task = trained.preprocessing.input, trained.preprocessing.task
    if task == "language_model":
        raise ValueError(
            "Received a run with --task=language_model, which predicts nothing about "
            "a text; expected another task, so use towers generate, which continues it."
        )
    of_tables = kind in ("row", "columns") or (
        kind == "tokens"
        and trained.preprocessing.features
        and all(file.lower().endswith(tables.SUFFIXES) for file in files)
    )
    if kept and not of_tables:
        raise ValueError(
            f"Received --keep_columns={','.join(kept)}; expected CSV or Parquet files "
            "to copy columns of, so leave it out."
        )
    of_arrays = [file.lower().endswith(numpy_files.SUFFIXES) for file in files]
    if kind in ("image", "row") and all(of_arrays):
        return _examples(trained, files, size)
    if kind == "image":
        return _pictures(trained, inside(files), size, say_bad)
    if kind == "tokens" and not trained.preprocessing.features:
        return _whole_texts(trained, inside(files, texts=True), size, say_bad)
    for folder in filter(os.path.isdir, files):
        raise ValueError(
            f"Received the folder {folder}; expected files, so name those in it."
        )
    if kind == "tokens":
        return _texts(trained, files, size, say_bad, kept)
    if kind == OWN:
        return _arrays(trained, files, size)
    return _tables(trained, files, size, say_bad, kept)


def inside(files: Sequence[str], texts: bool = False) -> list[str]:
    """Files, and in the place of folders what training would read of them.

    A line says how many files of the folders are left out.

    Args:
        files: Paths of files and folders.
        texts: Whether texts are looked for; else pictures.

    Raises:
        ValueError: A folder has none.
    """
    found, chosen = [], pictures.Sorted(texts)
    for file in files:
        some = chosen.walk(file) if os.path.isdir(file) else [file]
        if not some:
            what = f"{TEXTS} file" if texts else "picture"
            raise ValueError(f"The folder {file} has no {what}; name another.")
        found += some
    for note in chosen.notes():
        say(note)
    return found


def _pictures(trained, files, size, say_bad):
    @tf.autograph.experimental.do_not_convert
    def load(number):
        encoded = tf.io.read_file(tf.gather(paths, number))
        return number, trained.preprocessor.picture(encoded)

    for note in pictures.notes_of_content(files):
        say(note)
    # Names may be in no encoding.
    paths = tf.constant([*map(os.fsencode, files)])
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
        names = [{"file": files[number]} for number in numbers]
        yield Batch(names, trained.preprocessor(x))
    for number in range(seen + 1, len(files)):
        say_bad(_fault(files[number], trained))


def _fault(file, trained):
    try:
        trained.preprocessor.picture(tf.io.read_file(os.fsencode(file)))
    except (tf.errors.OpError, ValueError) as error:
        return f"{file}: {fault_of(error).rstrip('.')}."
    return f"{file}: it could not be read, and now it can; run again."


def _tables(trained, files, size, say_bad, kept):
    known = trained.preprocessing
    unseen = collections.Counter()
    for file in files:
        for rows in _whole(file, tables.blocks(known, file, kept)):
            for number, fault in rows.faults.items():
                say_bad(f"{file}: row {number}: {fault}.")
            unseen.update(rows.unseen)
            for first in range(0, len(rows.numbers), size):
                some = slice(first, first + size)
                columns = {name: each[some] for name, each in rows.columns.items()}
                names = [
                    {"file": file, "row": int(number)} for number in rows.numbers[some]
                ]
                for name, cells in rows.kept.items():
                    for row, cell in zip(names, cells[some], strict=True):
                        row[name] = cell
                yield Batch(names, trained.prepare(columns))
    if others := [f"{count:,} in {name!r}" for name, count in unseen.items() if count]:
        say(f"Texts that training has not seen are all one: {', '.join(others)}.")


def _arrays(trained, files, size):
    for file in files:
        found = arrays.checked(
            trained.preprocessing, arrays.load(trained.preprocessing, file)
        )
        for first in range(0, len(tf.nest.flatten(found)[0]), size):
            some = tf.nest.map_structure(lambda x, k=first: x[k : k + size], found)
            rows = range(first + 1, first + 1 + len(tf.nest.flatten(some)[0]))
            names = [{"file": file, "row": number} for number in rows]
            yield Batch(names, trained.preprocessor(some))


def _examples(trained, files, size):
    """Of arrays of pictures or rows of numbers."""
    for file in files:
        found = arrays.examples(trained.preprocessing, file)
        for first in range(0, len(found), size):
            rows = range(first, min(first + size, len(found)))
            names = [{"file": file, "row": row + 1} for row in rows]
            yield Batch(names, trained.prepare(found.read(np.array(rows))))


def _whole_texts(trained, files, size, say_bad):
    """Of a run on a folder of texts: each file is a text."""

    def texts():
        for file in files:
            try:
                with open(file, "rb") as content:
                    text = content.read()
            except OSError as error:
                text, fault = b"", f"cannot be read: {error.strerror}"
            else:
                fault = trained.tokenizer.fault(text)
            if fault:
                say_bad(f"{file}: {fault}.")
            else:
                yield {"file": file}, text

    for some in _batched(texts(), size):
        names, strings = zip(*some, strict=True)
        yield Batch([*names], trained.prepare(np.array(strings, object)))


def _texts(trained, files, size, say_bad, kept):
    def texts():
        for file in files:
            is_table = file.lower().endswith(tables.SUFFIXES)
            word = "row" if is_table else "line"
            read = _column(trained, file, kept) if is_table else _lines(trained, file)
            for number, text, fault, copied in _whole(file, read):
                fault = fault or _fault_of_text(trained.tokenizer, text)
                if fault:
                    say_bad(f"{file}: {word} {number}: {fault}.")
                else:
                    yield {"file": file, "row": number, **copied}, text

    for some in _batched(texts(), size):
        names, strings = zip(*some, strict=True)
        yield Batch([*names], trained.prepare(np.array(strings, object)))


def _fault_of_text(tokenizer, text):
    return tokenizer.fault(text) if isinstance(text, bytes) else ""


def _lines(trained, file):
    try:
        if trained.preprocessing.task == "tagging":
            for number, words, fault in sentences.read(trained, file):
                yield number, words, fault, {}
            return
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if text := line.strip():
                    yield number, text, "", {}
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8; convert it.") from error


def _column(trained, file, kept):
    rows = tables.texts(trained.preprocessing, file, kept)
    for number, (text, fault, copied) in enumerate(rows, 1):
        yield number, text, fault, dict(zip(kept, copied, strict=True))


def _whole(file, found):
    """Yields what is read of a file, and says if it cannot be read to its end."""
    try:
        yield from found
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read: {error.strerror}; correct it."
        ) from error


def _batched(items, size):
    items = iter(items)
    while some := [*itertools.islice(items, size)]:
        yield some
