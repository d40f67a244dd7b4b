"""Names of data sets, and the arguments of each kind; needs no TensorFlow."""

import difflib
import glob
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

from towers.input_pipeline.choices import ARRAY_KINDS, FILE_KINDS

FORMS = {
    "digits": "digits",
    "tfds": "tfds:NAME",
    "tfrecord": "tfrecord:GLOB",
    "array_record": "array_record:GLOB",
    "parquet": "parquet:GLOB",
    "csv": "csv:GLOB",
    "npz": "npz:FILE",
    "npy": "npy:X.npy,Y.npy",
    "folder": "folder:DIR",
    "text": "text:GLOB",
    "conll": "conll:GLOB",
    "synthetic": "synthetic:HxWxC:CLASSES[:COUNT]",
    "zipf": "zipf:NUMBERS:TABLESxROWS[:COUNT]",
}

# The sources of Python's standard library.
PYTHON = "text:python"

# The files of folder:, as messages call them.
PICTURES = "JPEG, PNG, GIF, BMP or WebP"

TEXTS = ".txt"

# The arguments of some kinds of data sets.
_OF_TFDS = ("data_dir", "train_split", "eval_split", "shard", "read_config")
_OF_EXAMPLES = ("image_column", "label_column", "num_classes", "skip_bad", "findings")
_OF_TABLES = (
    "label_column",
    "feature_columns",
    "missing",
    "findings",
    "text_column",
    "tokenizer",
    "sequence_length",
    "target",
    "num_classes",
    "class_names",
    "vocabularies",
    "column_kinds",
    "eval_fraction",
    "skip_bad",
    "local_store",
)
_OF_ARRAYS = ("target", "num_classes", "class_names", "eval_fraction", "missing")
_TAKES = {
    "digits": _OF_TFDS,
    "tfds": (
        *(*_OF_TFDS, "target", "num_classes", "label_column"),
        *("feature_columns", "vocabularies"),
    ),
    "tfrecord": (*_OF_EXAMPLES, "local_store"),
    "array_record": _OF_EXAMPLES,
    "parquet": ("image_column", *_OF_TABLES),
    "csv": _OF_TABLES,
    "npz": _OF_ARRAYS,
    "npy": _OF_ARRAYS,
    "folder": (
        "target",
        "num_classes",
        "class_names",
        "tokenizer",
        "sequence_length",
        "eval_fraction",
        "skip_bad",
        "local_store",
        "findings",
    ),
    "text": (
        "tokenizer",
        "sequence_length",
        "packing",
        "eval_fraction",
        "cache_dir",
        "skip_bad",
    ),
    "conll": (
        "text_column",
        "label_column",
        "tokenizer",
        "sequence_length",
        "class_names",
        "eval_fraction",
        "skip_bad",
    ),
    "synthetic": ("seed",),
    "zipf": ("seed",),
}


# The kinds with named columns.
_TABLES = ("parquet", "csv")


class SourceOptions(TypedDict, total=False):
    """Arguments of ``open_source`` that only some kinds of data sets take.

    Attributes:
        image_column: column of ``parquet:`` with the encoded image, by default
            ``image``; field of tf.Examples, by default ``image/encoded``.
        label_column: field of the label in tf.Examples, by default
            ``image/class/label``; column of ``parquet:`` and ``csv:``, by default
            ``label``, ``class`` or ``target``, else the last one; several columns, with
            commas between or as a sequence, are several numbers or labels. Of
            ``tfds:``, the feature to predict of a set of columns. Of ``conll:``, the
            number of the tags' column, from 1; by default the last one, and the fourth
            of CoNLL-U.
        text_column: column of ``parquet:`` and ``csv:`` with text to learn from, in
            place of numbers. Of ``conll:``, the number of the words' column, from 1; by
            default the first one, and the second of CoNLL-U.
        target: the kind of target, a ``Target.kind``, if the data allow several:
            "class", "numbers" or "labels" for ``parquet:`` and ``csv:``, these or
            "mask" for ``npz:`` and ``npy:``, "class" or "mask" for ``folder:``, and
            these or "numbers" for ``tfds:``. None: the obvious one.
        feature_columns: columns of ``parquet:`` and ``csv:``, or features of a set of
            columns of ``tfds:``, to learn from: numbers, and text as categories. None:
            all except the label.
        missing: the replacement of missing numbers in ``parquet:`` and ``csv:``: the
            "mean" or "median" of the column; "fail" makes the row a bad record. None:
            the mean.
        findings: file, without its suffix, for the findings of a pass over all data,
            which later runs use: over rows of ``parquet:`` and ``csv:`` that do not fit
            in memory, and over labels of ``tfrecord:`` and ``array_record:`` and masks
            of ``folder:`` whose classes are counted. None: each run reads all.
        num_classes: number of classes, if labels are read from files. None: every label
            is read to find the largest.
        class_names: names of the classes 0, 1, ... if the labels of ``parquet:`` and
            ``csv:`` are names. None: all labels are read, and the names are sorted. For
            ``folder:`` with masks, by the numbers in these; None: see classes.txt.
        vocabularies: texts of the columns of categories of ``parquet:``, ``csv:`` and
            ``tfds:``, by their names; the first one has id 1. None: those of the
            training data, sorted.
        column_kinds: the contents of columns of ``parquet:`` and ``csv:``, by their
            names: "number", "date", "truth" or "text", as in the training data. None:
            the types of the files, or of their first rows.
        eval_fraction: fraction of the records of ``parquet:``, ``csv:`` and ``folder:``
            to hold out, unless a file or folder is held out by its name. None: a tenth.
        tokenizer: the tokenizer of text: a ``Tokenizer``, or ``bytes``,
            ``sentencepiece:FILE``, ``wordpiece:FILE`` or ``words:FILE``. None: bytes.
            ``conll:`` takes only the last, by default made from its training data.
        sequence_length: tokens in a row of text. None: 128.
        packing: whether rows of ``text:`` go on with the next document, without
            padding; else each has one document, or a part of it. None: True.
        cache_dir: folder for a file of the tokens of ``text:``, which later runs use as
            well. None: they are kept in memory.
        train_split: split of ``digits`` and ``tfds:`` to train on; see ``TFDSSource``.
        eval_split: split of ``digits`` and ``tfds:`` to evaluate on.
        shard: (index, count): the part of ``digits`` or ``tfds:`` to read.
        read_config: TFDS's configuration of reading, for ``digits`` or ``tfds:``.
        local_store: a ``LocalStore``, through which ``tfrecord:``, ``folder:``,
            ``csv:`` and ``parquet:`` read far files. Not for text.
    """

    image_column: str | None
    label_column: str | Sequence[str] | None
    text_column: str | None
    target: str | None
    feature_columns: Sequence[str] | None
    missing: str | None
    findings: str | None
    num_classes: int | None
    class_names: Sequence[str] | None
    eval_fraction: float | None
    tokenizer: Any
    sequence_length: int | None
    packing: bool | None
    vocabularies: Mapping[str, Sequence[str]] | None
    column_kinds: Mapping[str, str] | None
    cache_dir: str | None
    train_split: str | None
    eval_split: str | None
    shard: tuple[int, int] | None
    read_config: Any
    local_store: Any


def takes(spec: str, name: str) -> bool:
    """Tells whether an argument of ``open_source`` applies to a data set.

    Args:
        spec: the spec of the data set.
        name: the name of the argument, one that not all data sets take.

    Returns:
        Whether it does; True for an unknown data set, which another check reports.
    """
    return name in _TAKES.get(spec.partition(":")[0], (name,))


def kinds_with(name: str) -> str:
    """Lists the kinds of data sets to which an argument of ``open_source`` applies."""
    kinds = [kind for kind in FORMS if takes(kind, name)]
    return ", ".join(kind if kind == "digits" else f"{kind}:" for kind in kinds)


def check_text(spec: str, given: Collection[str]) -> None:
    """Checks that options of text apply: to a table, only with its column.

    Args:
        spec: the spec of the data set.
        given: the names of the given arguments.

    Raises:
        ValueError: one does not apply.
    """
    if spec.partition(":")[0] not in _TABLES:
        return
    of_text = [name for name in ("tokenizer", "sequence_length") if name in given]
    others = ("feature_columns", "image_column", "missing")
    others = [name for name in others if name in given]
    if "text_column" in given and others:
        raise ValueError(
            f"received text_column and {others[0]} for {spec!r}: expected one of them, "
            "as a model learns from text or from the other"
        )
    if "text_column" in given and "local_store" in given:
        raise ValueError(
            f"received local_store for {spec!r} with text_column, whose texts are read "
            "once: expected one of them, so leave out --local_store (in Python, "
            "local_store)"
        )
    if of_text and "text_column" not in given:
        raise ValueError(
            f"received {of_text[0]} for {spec!r} without text_column: expected the "
            "name of the column that has the text, so give --text_column (in Python, "
            "text_column)"
        )


def check(spec: str) -> None:
    """Checks the form of a data set's name, and that local files exist.

    Raises:
        ValueError: there is no such kind of data set, or no such file or folder.
    """
    kind, _, rest = spec.partition(":")
    # All but "digits" need something after the colon.
    if kind not in FORMS or bool(rest) == (kind == "digits"):
        raise ValueError(
            f"unknown data set {spec!r}: {_hint(spec)}expected one of "
            f"{', '.join(FORMS.values())}"
        )
    if kind == "synthetic":
        read_synthetic(rest)
    if kind == "zipf":
        read_zipf(rest)
    if kind not in FILE_KINDS or "://" in rest or spec == PYTHON:
        return
    if kind in ARRAY_KINDS:
        check_arrays(kind, rest)
        return
    path = os.path.expanduser(rest)
    if kind == "folder":
        if not os.path.isdir(path):
            raise no_folder(rest)
    # TensorFlow and Python interpret brackets and backslashes in different ways.
    elif (
        not os.path.exists(path)
        and not re.search(r"[\[\]\\]", path)
        and not _matches(path)
    ):
        raise no_files(kind, rest)


def check_arrays(kind: str, rest: str) -> None:
    """Checks the files of ``npz:`` or ``npy:``.

    Raises:
        ValueError: there are too few or too many files, or a file does not exist.
    """
    paths = rest.split(",") if kind == "npy" else [rest]
    if kind == "npy" and len(paths) not in (2, 4):
        raise ValueError(
            f"'npy:{rest}' names {len(paths)} files: expected npy:X.npy,Y.npy, or "
            "npy:X.npy,Y.npy,X_TEST.npy,Y_TEST.npy"
        )
    for path in paths:
        if not os.path.isfile(os.path.expanduser(path)):
            raise ValueError(
                f"there is no file {path!r}: expected one, so check the path"
            )


def _matches(pattern: str) -> bool:
    matches = glob.iglob(pattern, recursive=True, include_hidden=True)
    return any(itertools.islice(matches, 1))


def _hint(spec: str) -> str:
    """Suggests a known spec for an unknown one: a form, or a name with a kind."""
    if os.path.isdir(os.path.expanduser(spec)):
        return f"did you mean folder:{spec}? "
    near = difflib.get_close_matches(spec.partition(":")[0], FORMS, n=1)
    if near:
        return f"did you mean {FORMS[near[0]]}? "
    # TFDS reports unknown names itself, once it is imported.
    return f"did you mean tfds:{spec}? " if re.fullmatch(r"[a-z]\w*", spec) else ""


def no_files(kind: str, pattern: str) -> ValueError:
    """Makes an error for a pattern without files."""
    return ValueError(
        f"no file matches {pattern!r}: expected files, such as "
        f"'{kind}:/data/train-*'; check the path, and quote the pattern"
    )


def no_folder(path: str) -> ValueError:
    """Makes an error for a missing folder of pictures or texts."""
    return ValueError(
        f"{path!r} is not a folder: expected one that holds a folder of {PICTURES} "
        f"files, or of {TEXTS} files, for each class"
    )


def read_synthetic(rest: str) -> list[int | None]:
    """Parses a spec after ``synthetic:``.

    Returns:
        Height, width, channels and classes; the number of images, None if not given.

    Raises:
        ValueError: it is not HxWxC:CLASSES or HxWxC:CLASSES:COUNT of positive numbers.
    """
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+):(\d+)(?::(\d+))?", rest)
    numbers = [digits and int(digits) for digits in match.groups()] if match else [0]
    if 0 in numbers:
        raise ValueError(
            f"'synthetic:{rest}' cannot be read: expected synthetic:HxWxC:CLASSES or "
            "synthetic:HxWxC:CLASSES:COUNT with positive numbers, such as "
            "synthetic:32x32x3:10:1024"
        )
    return numbers


def read_zipf(rest: str) -> list[int | None]:
    """Parses a spec after ``zipf:``.

    Returns:
        Numbers, tables and ids of a table; the number of examples, None if not given.

    Raises:
        ValueError: it is not NUMBERS:TABLESxROWS or NUMBERS:TABLESxROWS:COUNT.
    """
    match = re.fullmatch(r"(\d+):(\d+)x(\d+)(?::(\d+))?", rest)
    numbers = [digits and int(digits) for digits in match.groups()] if match else [0, 0]
    if 0 in numbers[1:]:
        raise ValueError(
            f"'zipf:{rest}' cannot be read: expected zipf:NUMBERS:TABLESxROWS or "
            "zipf:NUMBERS:TABLESxROWS:COUNT with positive numbers, such as "
            "zipf:13:8x1000:65536"
        )
    return numbers
