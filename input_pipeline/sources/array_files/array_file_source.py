"""``npz:FILE`` and ``npy:X,Y``: arrays that stay in their files."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from towers.input_pipeline.choices import IGNORED
from towers.input_pipeline.sources import label_notes
from towers.input_pipeline.sources.array_files import numpy_files, roles
from towers.input_pipeline.sources.array_files.examples import Examples, sentences
from towers.input_pipeline.sources.arrays import target_of
from towers.input_pipeline.sources.base import IndexedSource, size_and_time
from towers.input_pipeline.sources.files import splits
from towers.input_pipeline.sources.tables.labels import Labels
from towers.input_pipeline.sources.tables.moments import Moments
from towers.input_pipeline.sources.targets import LARGEST, Target, TargetKind
from towers.program.progress import Progress
from towers.program.python_calls import until_exit

# Numbers, or pixels of masks, to check at once.
_AT_ONCE = 2**23


class ArrayFileSource(IndexedSource):
    """Arrays of examples and labels in files of NumPy's.

    Uncompressed arrays stay on disk; batches are read from there.

    Args:
        kind: "npz" or "npy".
        paths: the path of the file; or the paths of two or four files, with commas
            between.
        target: kind of the labels: "class", "numbers", "labels" or "mask". None:
            inferred from their type, shape and values.
        num_classes: number of classes. None: the largest label plus one.
        class_names: one name for each class, number or label.
        eval_fraction: fraction of the examples to hold out, if there are no others to
            evaluate on; None for a tenth.
        missing: the replacement of a missing number (NaN) in a row of numbers; see
            ``TableSource``.

    Raises:
        ValueError: the files or arrays are not as expected.
    """

    encoded = False
    in_graph = False

    def __init__(
        self,
        kind: str,
        paths: str,
        *,
        target: TargetKind | None = None,
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        eval_fraction: float | None = None,
        missing: str = "mean",
    ):
        self.name = f"{kind}:{paths}"
        load = numpy_files.load if kind == "npz" else roles.named_by_files
        arrays, notes = load(paths)
        pairs, more = roles.pairs(paths, arrays)
        self.notes = [*notes, *more]
        self._examples = [Examples(pair.x_name, pair.x) for pair in pairs.values()]
        self.notes += sentences(self._examples)
        shapes = [examples.shape for examples in self._examples]
        if len({*shapes}) > 1:
            raise ValueError(
                f"{paths} has examples {shapes[0]} to train on, and {shapes[1]} to "
                "evaluate on: expected one shape"
            )
        self.image_shape = shapes[0]
        y_name = next(iter(pairs.values())).y_name
        self._ends = np.cumsum([len(examples) for examples in self._examples])
        self._set_labels(
            y_name,
            [pair.y for pair in pairs.values()],
            target,
            num_classes,
            class_names,
        )
        sizes = {split: len(pair.x) for split, pair in pairs.items()}
        self._hold_out(sizes, eval_fraction)
        if self.target.kind != "mask":
            train = self.splits.get("train", 0)
            y = self._labels if self._rows is None else self._labels[self._rows]
            labels_of = {"train": y[:train], "test": y[train:]}
            self.notes += label_notes.notes(self.target, labels_of)
        if self.input_kind == "row":
            self.image_fields = tuple(map(str, range(self.image_shape[0])))
            self._measure(missing)
        files = paths.split(",") if kind == "npy" else [paths]
        self.reads = tuple(
            (path, *size_and_time(os.path.expanduser(path))) for path in files
        )
        self.reads += (self._fraction, missing)

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads examples and labels from their files; see ``Source.parse``."""
        x_type, y_type = self._examples[0].dtype, self._labels_type
        x, y = tf.numpy_function(until_exit(self._read), [records], [x_type, y_type])
        x = tf.ensure_shape(x, [None, *self.image_shape])
        return x, tf.ensure_shape(y, [None, *self._label_shape])

    def medians(self) -> Sequence[float]:
        """Returns medians of columns; all training rows are in memory meanwhile."""
        rows = np.concatenate([*self._in_parts("train")])
        return np.nanmedian(rows, axis=0).tolist()

    def _read(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = records if self._rows is None else self._rows[records]
        y = np.asarray(self._labels[rows]).astype(self._labels_type, copy=False)
        if len(self._examples) == 1:
            return self._examples[0].read(rows), y
        x = np.empty([len(rows), *self.image_shape], self._examples[0].dtype)
        of_test = rows >= self._ends[0]
        x[~of_test] = self._examples[0].read(rows[~of_test])
        x[of_test] = self._examples[1].read(rows[of_test] - self._ends[0])
        return x, y

    def _hold_out(self, sizes: dict[str, int], fraction: float | None) -> None:
        """Sets the splits, and the rows of their examples if these are drawn."""
        self.splits, self._rows, self._fraction = sizes, None, 0
        if [*sizes] != ["train"]:
            if fraction:
                raise ValueError(
                    f"eval_fraction is {fraction}, but {self.name} has examples to "
                    "evaluate on: leave it out"
                )
            return
        fraction, count = splits.check_fraction(fraction), sizes["train"]
        held_out = splits.count_held_out(0, count, fraction)
        if not held_out:
            return
        chosen = splits.is_held_out(np.arange(count), fraction)
        self._rows = np.concatenate([np.flatnonzero(~chosen), np.flatnonzero(chosen)])
        self.splits, self._fraction = (
            {"train": count - held_out, "test": held_out},
            fraction,
        )
        self.notes.append(splits.note(fraction, "examples", held_out))

    def _set_labels(
        self,
        name: str,
        parts: list[np.ndarray],
        asked: TargetKind | None,
        num_classes: int | None,
        class_names: Sequence[str] | None,
    ) -> None:
        """Infers the kind of the labels, and stores them."""
        forms = {(part.shape[1:], part.dtype.kind in "iub") for part in parts}
        if len(forms) > 1:
            raise self._unexpected(name, parts[-1])
        # Masks may be larger than the memory.
        y = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if y.dtype.kind not in "biufUS" or y.ndim > 4:
            raise self._unexpected(name, y)
        if y.ndim == 4 and y.shape[3] == 1:
            y = y[..., 0]
        if y.ndim == 3:
            self._set_masks(name, y, asked, num_classes, class_names)
            return
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.ndim == 2 and asked in (None, "class") and _is_one_hot(y):
            self.notes.append(
                f"{name} {[*y.shape]} has a single 1 in each row, and so "
                f"{y.shape[1]} classes."
            )
            num_classes = y.shape[1] if class_names is None else num_classes
            y = y.argmax(axis=1)
        if y.ndim == 1:
            self._set_column(name, y, asked, num_classes, class_names)
            return
        if y.dtype.kind not in "biuf" or y.ndim != 2 or asked == "class":
            raise self._unexpected(name, y)
        y = y.astype(np.float64)
        kind = asked or ("labels" if np.isin(y, (0, 1)).all() else "numbers")
        target = target_of(kind, y, num_classes, class_names)
        what = "several labels, each 0 or 1" if kind == "labels" else "numbers"
        self.notes.append(f"{name} {[*y.shape]} has {what}.")
        self._keep(target, y.astype(np.float32))

    def _set_column(self, name, y, asked, num_classes, class_names):
        """Takes labels [N] as those of a table."""
        if y.dtype.kind in "US":
            texts = y if y.dtype.kind == "U" else np.char.decode(y, "utf-8")
            column, kind = pa.array(texts, pa.string()).dictionary_encode(), pa.string()
        else:
            column = np.asarray(y, np.float64)
            kind = pa.float64() if y.dtype.kind == "f" else pa.int64()
        labels = Labels(self.name, [name], {name: kind})
        labels.add([column], [])
        labels.decide(asked, class_names, num_classes, True)
        if len(bad := labels.bad()[0]):
            fault = labels.fault(0, int(bad[0]))
            raise ValueError(f"{self.name}: {name}[{bad[0]}]: {fault}; correct it")
        self.notes += labels.notes
        targets, _ = labels.targets([column])
        self._keep(labels.target, targets)

    def _set_masks(self, name, y, asked, num_classes, class_names):
        """Takes labels [N, H, W], which stay in the file."""
        of_pixels = len(self.image_shape) == 3 and y.shape[1:] == self.image_shape[:2]
        if y.dtype.kind not in "biu" or asked not in (None, "mask") or not of_pixels:
            raise self._unexpected(name, y)
        largest = -1
        step = max(_AT_ONCE // y[:1].size, 1)
        with Progress("Reading masks", len(y), "masks") as progress:
            for first in range(0, len(y), step):
                some = np.asarray(y[first : first + step])
                if some.min() < 0 or some.max() > IGNORED:
                    raise ValueError(
                        f"{name} goes from {some.min()} to {some.max()}: expected "
                        f"classes from 0 to 254, and {IGNORED} for pixels to ignore"
                    )
                largest = max(largest, *np.unique(some[some != IGNORED]).tolist(), -1)
                progress.add(len(some))
        size = num_classes or len(class_names or ()) or largest + 1
        if largest >= size:
            raise ValueError(
                f"{name} goes up to {largest}: expected at most {size - 1}, so give "
                "other names or another number of classes"
            )
        names = None if class_names is None else tuple(class_names)
        self._keep(Target("mask", size, names), y, np.uint8)

    def _keep(self, target, y, dtype=None):
        self._take_target(target)
        self._labels, self._label_shape = y, y.shape[1:]
        if dtype is None:
            self._labels = y.astype(target.dtype)
        self._labels_type = np.dtype(dtype or target.dtype)

    def _unexpected(self, name, y):
        return ValueError(
            f"{name} of {self.name} is {y.dtype} {[*y.shape]}: expected labels, "
            "integers or texts [N] of classes, a single 1 in rows [N, K], numbers [N] "
            "or [N, K], or masks [N, H, W] of integers as large as pictures; else "
            "choose another --task (in Python, target)"
        )

    def _in_parts(self, split: str) -> Iterator[np.ndarray]:
        """Yields rows of a split's examples, some at a time, in the file's order."""
        first = 0 if split == "train" else self.splits.get("train", 0)
        end, step = first + self.splits[split], max(_AT_ONCE // self.image_shape[0], 1)
        for begin in range(first, end, step):
            rows, _ = self._read(np.arange(begin, min(begin + step, end)))
            yield rows

    def _measure(self, missing: str) -> None:
        """Measures and checks the columns of rows of numbers."""
        self.moments, self.missing = Moments.of_nothing(self.image_shape[0]), missing
        with Progress("Measuring columns", sum(self.splits.values())) as progress:
            for split in self.splits:
                for rows in self._in_parts(split):
                    bad = np.abs(rows) > LARGEST
                    if bad.any():
                        raise self._bad(rows, bad, f" of at most {LARGEST:.2g}")
                    if missing == "fail" and np.isnan(rows).any():
                        raise self._bad(rows, np.isnan(rows), ", or --missing=mean")
                    if split == "train" or len(self.splits) == 1:
                        self.moments.add(rows)
                    progress.add(len(rows))
        counts = zip(self.image_fields, self.moments.missing, strict=True)
        self.missing_columns = tuple(name for name, count in counts if count)

    def _bad(self, rows: np.ndarray, bad: np.ndarray, more: str) -> ValueError:
        value, column = rows[bad][0], int(np.flatnonzero(bad.any(axis=0))[0])
        return ValueError(
            f"{self.name} has {bad.any(axis=1).sum():,} rows or more with {value:g}, "
            f"such as in the column {column}: expected numbers{more}"
        )


def _is_one_hot(y: np.ndarray) -> bool:
    """Tells whether each row has a single 1, and 0 elsewhere."""
    if y.dtype.kind not in "biuf" or not len(y):
        return False
    ones = y == 1
    return bool(((y == 0) | ones).all() and (ones.sum(axis=1) == 1).all())


def open_npz(paths: str, **options: Any) -> ArrayFileSource:
    """Opens ``npz:FILE``; see ``ArrayFileSource``."""
    return ArrayFileSource("npz", paths, **options)


def open_npy(paths: str, **options: Any) -> ArrayFileSource:
    """Opens ``npy:X,Y``; see ``ArrayFileSource``."""
    return ArrayFileSource("npy", paths, **options)
