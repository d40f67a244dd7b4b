"""Files of records, which their names sort into splits."""

import abc
import collections
import contextlib
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.local_store.store import LocalStore
from towers.input_pipeline.sources.base import Source, StreamSource
from towers.input_pipeline.sources.files import splits
from towers.input_pipeline.sources.files.record import FAULTS, FILE, BadRecordError
from towers.input_pipeline.sources.files.splits import HELD_OUT, held_out
from towers.input_pipeline.specs import no_files
from towers.program import words

_CYCLE_LENGTH = 16
_BLOCK_LENGTH = 16
_SAMPLE = 64
_MOST_TRIES = 100
# TFDS, the converter, Spark and Dask write these beside records.
_BESIDE = re.compile(
    r"(dataset_info|features|bad_records)\.json|_(SUCCESS|metadata|common_metadata)"
)


class FileSource(Source):
    """Files that are sorted into splits by their names.

    A file whose name, below the part of the glob that has no wildcard, holds one of
    the words validation, valid, val or test is held out; all others are for training.
    Where there is no such file, a fraction of the records may be.

    Args:
        pattern: glob of the files, or a folder, for all files in it.
        num_classes: None reads all labels and takes the largest plus one.
        skip_bad: whether to look beyond bad records for what must be known.
        eval_fraction: of the records to hold out, if no file is; None for a tenth.
        local_store: where to keep what is read of files that lie far away, if anywhere.

    Attributes:
        kind: what stands before the colon of a spec.

    Raises:
        ValueError: no file, or a fraction although files are held out.
    """

    kind: str
    labels_need_checking = True

    def __init__(
        self,
        pattern: str,
        num_classes: int | None = None,
        skip_bad: bool = False,
        eval_fraction: float | None = None,
        local_store: LocalStore | None = None,
    ):
        if num_classes is not None and num_classes < 1:
            raise ValueError(f"num_classes is {num_classes}, expected at least 1")
        self.name = f"{self.kind}:{pattern}"
        self._files, self.notes = group_by_split(self.kind, pattern)
        self.splits = dict.fromkeys(self._files)
        self._skip_bad = skip_bad
        self._fraction = splits.check_fraction(eval_fraction)
        if "test" in self._files or "train" not in self._files:
            if eval_fraction:
                raise splits.held_out_by_name(eval_fraction, self.name, self._files)
            self._fraction = 0
        self._stored = None
        if local_store is not None:
            self._store(local_store)
        # Until all labels are read, any is allowed.
        self.num_classes = num_classes or math.inf

    def _store(self, local_store: LocalStore) -> None:
        """Reads all files through a store from now on."""
        self._stored = local_store.open(self.name, self._all_files())
        self.in_graph = False
        self._note(self._stored.note)

    def files(self, split: str) -> list[str]:
        """Paths of one split's files, sorted; two splits may have parts of the same."""
        return self._files["train" if self._fraction else split]

    def _all_files(self) -> list[str]:
        return [path for paths in self._files.values() for path in paths]

    def _first_number(self, path: str) -> int:
        """Number of a file's first record."""
        return self._file_places[path] * FILE

    @functools.cached_property
    def _file_places(self) -> dict[str, int]:
        """The place of each file among those of its split."""
        return {
            path: place
            for paths in self._files.values()
            for place, path in enumerate(paths)
        }

    def _has(self, split: str | None, number: Any) -> Any:
        """Tells whether a record of a split's files is part of the split."""
        if split is None or not self._fraction:
            return True
        return splits.is_held_out(number, self._fraction) == (split == "test")

    def _good_of_split(self, numbers: np.ndarray, split: str) -> np.ndarray:
        """Returns those numbers of its files' records that a split has and uses."""
        has = np.broadcast_to(self._has(split, numbers), numbers.shape)
        return self._without_bad(numbers[has], split)

    def _hold_out(self) -> None:
        """Has a split of what is held out of the files, and says so.

        To be called when everything else is known.
        """
        if not self._fraction:
            return
        count = self.splits["test"]
        if not count:
            self._fraction = 0
            self.splits.pop("test", None)
            return
        self._note(splits.note(self._fraction, "rows", count))

    def _check_first(self, check: Callable[[str, Any], None]) -> None:
        """Looks at the first record, or at the first good one.

        Args:
            check: takes a record's place and the raw record; raises ``ValueError``.
        """
        reason = ValueError(f"{self.name} holds no record: expected at least one")
        records = itertools.chain.from_iterable(map(self.walk, self._all_files()))
        for tries, record in enumerate(records):
            try:
                if record.fault:
                    raise BadRecordError(str(record))
                check(record.where, record.raw)
            except ValueError as error:
                reason = reason if tries else error
                if not self._skip_bad or tries == _MOST_TRIES:
                    break
            else:
                records = itertools.chain([record], records)
                self._note(*self._notes_of_pictures(records))
                return
        raise reason

    def _set_sizes(self, split: str, sizes: Sequence[int]) -> None:
        """Takes over how many records the files of a split have."""
        self.splits[split] = sum(sizes)
        if self._fraction:
            held_out = sum(
                splits.count_held_out(file * FILE, size, self._fraction)
                for file, size in enumerate(sizes)
            )
            self.splits = {"train": sum(sizes) - held_out, "test": held_out}


class StreamFiles(FileSource, StreamSource):
    """Files that are read from front to back."""

    def records(
        self, split: str, shuffle_seed: tf.Tensor | None = None
    ) -> tf.data.Dataset:
        """See ``StreamSource.records``."""
        return self._interleaved(split, self._reader(split), shuffle_seed)

    def _interleaved(
        self, split: str, read: Callable, shuffle_seed: tf.Tensor | None
    ) -> tf.data.Dataset:
        """Reads several files at once, by a function of a file."""
        paths = self.files(split)
        # Not by `enumerate`, which counts anew in each worker of a service.
        files = tf.data.Dataset.from_tensor_slices((np.arange(len(paths)), paths))
        files = shuffle_all(files, len(paths), shuffle_seed)

        # In the same order as `_in_turns` has it.
        return files.interleave(
            read,
            cycle_length=min(len(paths), _CYCLE_LENGTH),
            # Changing files for each record costs more than reading a small one.
            block_length=_BLOCK_LENGTH,
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    def _in_turns(self, files: Sequence[np.ndarray]) -> np.ndarray:
        """Joins arrays, one of each file, in the order of `_interleaved`."""
        counts, cycle = [*map(len, files)], min(len(files), _CYCLE_LENGTH)
        turns = interleaved(counts, cycle, _BLOCK_LENGTH)
        return np.concatenate([files[file][begin:end] for file, begin, end in turns])

    @abc.abstractmethod
    def _reader(self, split: str) -> Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]:
        """Makes numbers and raw records of a file's place in a split and its path."""

    def record_bytes(self, split: str) -> float:
        """See ``StreamSource.record_bytes``."""
        with tf.init_scope():  # the pipeline asks while its graph is built
            # Of all files, around what cannot be read; a bad record is not for this to
            # say. A file that is not there is an error each time.
            first, lengths = iter(self.records(split)), []
            for _ in range(_SAMPLE):
                with contextlib.suppress(StopIteration, *FAULTS):
                    lengths.append(len(next(first)[1].numpy()))
        return sum(lengths) / max(len(lengths), 1)


def interleaved(
    counts: Sequence[int], cycle_length: int, block_length: int
) -> Iterator[tuple[int, int, int]]:
    """Yields the order of ``tf.data.Dataset.interleave``, without reading anything.

    Args:
        counts: how many records each file has.
        cycle_length: files that are open at the same time.
        block_length: records that are read of a file before the next one has its turn.

    Yields:
        The place of a file, and the bounds of its records that are read in one turn.
    """
    left, waiting = [*counts], collections.deque(range(len(counts)))
    open_files: list[int | None] = [None] * cycle_length
    while waiting or any(file is not None for file in open_files):
        for turn in range(cycle_length):
            if open_files[turn] is None and waiting:
                open_files[turn] = waiting.popleft()
            file = open_files[turn]
            if file is None:
                continue
            begin, count = counts[file] - left[file], min(left[file], block_length)
            yield file, begin, begin + count
            left[file] -= count
            # A file that ends with a whole block is only found to have ended, and
            # another one opened, in its next turns.
            if count < block_length:
                open_files[turn] = None


def numbered(file: tf.Tensor, records: tf.data.Dataset) -> tf.data.Dataset:
    """Numbers and records of a split's file, of which its place there is given."""
    numbers = tf.data.Dataset.range(file * FILE, (file + 1) * FILE)
    return tf.data.Dataset.zip((numbers, records))


def shuffle_all(
    dataset: tf.data.Dataset, size: int, seed: int | tf.Tensor | None
) -> tf.data.Dataset:
    """Shuffles a dataset of small items as a whole; leaves it alone without a seed."""
    if seed is None:
        return dataset
    return dataset.shuffle(max(size, 1), seed=seed, reshuffle_each_iteration=False)


def group_by_split(
    kind: str, pattern: str
) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Sorts the files of a glob, or a folder, into "train" and "test".

    A path that exists is taken as it is, whatever signs are in its name.

    Returns:
        The paths of each split, and a note if files were left out.

    Raises:
        ValueError: there is no file, or all are left out.
    """
    pattern = os.path.expanduser(pattern)
    if tf.io.gfile.isdir(pattern):
        fixed = pattern
        names = [name.rstrip("/") for name in tf.io.gfile.listdir(pattern)]
        paths = [os.path.join(pattern, name) for name in names]
    elif tf.io.gfile.exists(pattern):
        fixed, paths = os.path.dirname(pattern), [pattern]
    else:
        fixed, paths = os.path.dirname(re.split(r"[*?\[]", pattern)[0]), _glob(pattern)

    def relative(path):
        return os.path.relpath(path, fixed or ".")

    # A pattern such as `_part*`, `_runs*/*.csv` or `*.json` asks for what is left out.
    asked = "" if fixed == pattern else relative(pattern)
    reasons = [reason for reason in (_is_hidden, _is_json) if not reason(asked)]
    paths = {path for path in paths if not tf.io.gfile.isdir(path)}
    left_out = {
        path for path in paths if any(reason(relative(path)) for reason in reasons)
    }
    notes = _left_out([path for path in left_out if _may_be_data(relative(path))])
    paths = sorted(paths - left_out)
    if not paths:
        raise ValueError(notes[0]) if notes else no_files(kind, pattern)
    groups: dict[str, list[str]] = {}
    for path in paths:
        words_of_path = re.split(r"[^a-z]+", relative(path).lower())
        # The last word is the closest to the file's own name.
        known = [word for word in words_of_path if word in ("train", *HELD_OUT)]
        groups.setdefault((known or ["train"])[-1], []).append(path)
    test = held_out(groups)
    splits_of = {"train": groups.get("train"), "test": groups.get(test)}
    return {split: paths for split, paths in splits_of.items() if paths}, notes


def _is_hidden(path: str) -> bool:
    """Tells whether the name of a file, or of a folder above it, begins with . or _."""
    return any(name.startswith((".", "_")) for name in path.split(os.sep))


def _is_json(path: str) -> bool:
    return path.endswith(".json")


def _may_be_data(path: str) -> bool:
    """Tells whether a user may miss a file that is left out."""
    *_, name = names = path.split(os.sep)
    return not _BESIDE.fullmatch(name) and not any(part[0] == "." for part in names)


def _left_out(paths: Sequence[str]) -> tuple[str, ...]:
    """Says how many files are left out."""
    if not paths:
        return ()
    return (
        f"{words.count(len(paths), 'file')} left out, such as {min(paths)}: names that "
        "begin with _ or end with .json are read if a path or a pattern names them, "
        "such as _* or *.json.",
    )


def _glob(pattern: str) -> set[str]:
    """The paths of a glob on any file system; ``**`` is any depth of folders."""
    head, deep, tail = pattern.partition("**/")
    if not deep:
        return set(tf.io.gfile.glob(pattern))
    return {
        path
        for root in _glob(head.rstrip("/")) or {head or "."}
        for folder, _, _ in tf.io.gfile.walk(root)
        for path in _glob(os.path.join(folder, tail))
    }
