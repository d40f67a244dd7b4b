"""Keeps documents as one sequence of token ids, in memory or in a file."""

import collections
import concurrent.futures
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil
import tensorflow as tf

from towers.input_pipeline import checked_files
from towers.input_pipeline.sources.files.record import BadRecordError
from towers.input_pipeline.sources.texts.documents import Documents, chunks
from towers.input_pipeline.text import Tokenizer
from towers.machine import limits
from towers.program import words
from towers.program.progress import EARLY_S, Progress

_CHUNK = 2**15
_AT_ONCE = 2**20
_THREADS = limits.cpu_count()
# The endings of a file of tokens, and of its description.
_ENDS = (".ids", ".json")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The documents of all splits, one after the other, each with its end.

    Attributes:
        ids: [N] of both splits, those for training first.
        count: number of tokens of each split.
        size: number of bytes of text of each split.
        begins: the beginning of each file in its split, by split and path.
        bad: why a file was left out, by path.
        empty: the paths of files without text.
    """

    ids: np.ndarray
    count: Mapping[str, int]
    size: Mapping[str, int]
    begins: Mapping[str, Mapping[str, int]]
    bad: Mapping[str, str]
    empty: Sequence[str]


def tokenise(
    documents: Documents, tokenizer: Tokenizer, skip_bad: bool, path: str | None
) -> Tokens:
    """Tokenises documents, or takes the tokens that an earlier run left in a file.

    Args:
        documents: the documents.
        tokenizer: the tokenizer.
        skip_bad: whether to leave out bad files.
        path: the path of the file, whose name changes with all that changes the tokens;
            None keeps them in memory.

    Raises:
        BadRecordError: a file cannot be read, or is no text.
        ValueError: they do not fit into memory, or the file cannot be written.
    """
    dtype = type_of_ids(tokenizer)
    if path is None:
        _check_memory(documents, tokenizer, np.dtype(dtype).itemsize)
        parts: list[np.ndarray] = []
        description = _Reader(documents, tokenizer, skip_bad, dtype).read(parts.append)
        return Tokens(np.concatenate([np.empty([0], dtype), *parts]), **description)
    if not checked_files.are_good(path, _ENDS):
        _write(path, _Reader(documents, tokenizer, skip_bad, dtype))
    with open(f"{path}.json") as file:
        description = json.load(file)
    # An empty file cannot be mapped.
    empty = not sum(description["count"].values())
    ids = np.empty([0], dtype) if empty else np.memmap(f"{path}.ids", dtype, "r")
    return Tokens(ids, **description)


def _check_memory(documents: Documents, tokenizer: Tokenizer, itemsize: int) -> None:
    """Checks that the ids of bytes, or of a fourth of pieces, fit into memory."""
    size = _size(documents)
    needed = size * itemsize // (4 if tokenizer.needs_utf8 else 1)
    free = psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"the tokens of {words.count(len(_paths(documents)), 'file')} take "
            f"{words.size(needed)}, and {words.size(free)} of memory are free: give a "
            "folder for them, by --cache=disk:FOLDER (in Python, cache_dir)"
        )


def _size(documents: Documents) -> int:
    """Returns the bytes of all files, of which each split may have a part."""
    paths = filter(tf.io.gfile.exists, _paths(documents))
    return sum(tf.io.gfile.stat(path).length for path in paths)


def _paths(documents: Documents) -> set[str]:
    return {path for some in documents.files.values() for path in some}


def _write(path: str, reader: "_Reader") -> None:
    folder = os.path.dirname(path)
    try:
        with checked_files.written(path, _ENDS) as new:
            with open(f"{new}.ids", "wb") as file:
                description = reader.read(lambda ids: ids.tofile(file))
            with open(f"{new}.json", "w") as file:
                json.dump(description, file)
    except OSError as error:
        raise ValueError(
            f"the tokens cannot be written into {folder} ({error.strerror}): expected "
            "another --cache=disk:FOLDER (in Python, cache_dir)"
        ) from error


class _Reader:
    """Reads and tokenises documents, and notes facts about them."""

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        skip_bad: bool,
        dtype: type[np.integer],
    ):
        self._documents, self._tokenizer = documents, tokenizer
        self._skip_bad, self._dtype = skip_bad, dtype
        self._bad: dict[str, str] = {}
        self._empty: set[str] = set()

    def read(self, take: Callable[[np.ndarray], Any]) -> dict[str, Any]:
        """Calls `take` with arrays of ids, in order.

        Returns:
            The other fields of `Tokens`.
        """
        count, size, begins = {}, {}, {}
        total = _size(self._documents)
        with (
            concurrent.futures.ThreadPoolExecutor(_THREADS) as pool,
            Progress("Tokenising texts", total, "bytes", EARLY_S) as shown,
        ):
            for split, paths in self._documents.files.items():
                count[split], size[split], begins[split] = 0, 0, {}
                pieces = (
                    piece for path in paths for piece in self._pieces(path, split)
                )
                groups = at_once(pieces)
                for pieces, (ids, lengths) in ahead(pool, self._encode, groups):
                    for piece, length in zip(pieces, lengths, strict=True):
                        begins[split].setdefault(piece.path, count[split])
                        count[split] += int(length)
                        size[split] += len(piece.text)
                    take(ids)
                    shown.add(sum(len(piece.text) for piece in pieces))
        bad, empty = self._bad, sorted(self._empty)
        return dict(count=count, size=size, begins=begins, bad=bad, empty=empty)

    def _pieces(self, path: str, split: str) -> Iterator["_Piece"]:
        needs_utf8 = self._tokenizer.needs_utf8
        try:
            text = self._documents.read(path, split)
            if fault := fault_of_text(self._tokenizer, text):
                raise BadRecordError(f"{path}: {fault}")
        except BadRecordError as error:
            if not self._skip_bad:
                raise
            self._bad[path] = str(error).removeprefix(f"{path}: ")
            return
        if not text:
            self._empty.add(path)
        *most, last = [*chunks(text, _CHUNK, needs_utf8)] or [None]
        yield from (_Piece(path, text, False) for text in most)
        if last is not None:
            yield _Piece(path, last, True)

    def _encode(self, pieces: Sequence["_Piece"]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of pieces, and the number of ids of each."""
        is_last = np.array([piece.is_last for piece in pieces])
        with tf.device("/CPU:0"):
            encoded = self._tokenizer.encode(
                tf.constant([piece.text for piece in pieces])
            )
            ends = encoded.row_splits.numpy()[1:]
            ids = encoded.values.numpy().astype(self._dtype)
        ids = np.insert(ids, ends[is_last], self._tokenizer.end)
        return ids, np.diff(ends, prepend=0) + is_last


class _Piece(NamedTuple):
    """A piece of a document; the last one includes its end."""

    path: str
    text: bytes
    is_last: bool


def fault_of_text(tokenizer: Tokenizer, text: bytes) -> str:
    """Describes why a text cannot be learnt from, in a phrase; empty if it can."""
    fault = tokenizer.fault(text)
    return f"{fault}; --tokenizer=bytes reads any" if fault else ""


def type_of_ids(tokenizer: Tokenizer) -> type[np.integer]:
    """Returns the smallest type that holds the ids."""
    return np.uint16 if tokenizer.size <= 2**16 else np.int32


def at_once(pieces: Iterable[Any]) -> Iterator[list[Any]]:
    """Groups items with a `text`, to encode some bytes at once."""
    group, size = [], 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= _AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def ahead(
    pool: concurrent.futures.Executor, function: Callable, items: Iterable
) -> Iterator[tuple[Any, Any]]:
    """Yields items with the results of a function, in order.

    Args:
        pool: the executor that calls the function.
        function: is called with an item.
        items: are taken as they are needed; a few are in progress.
    """
    under_way: collections.deque = collections.deque()
    for item in items:
        under_way.append((item, pool.submit(function, item)))
        if len(under_way) > 2 * _THREADS:
            done, future = under_way.popleft()
            yield done, future.result()
    for item, future in under_way:
        yield item, future.result()
