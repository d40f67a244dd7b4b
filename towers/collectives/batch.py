"""Cuts a global batch into local batches, given as integers or tensors, and joins them.

Builders decide which device gets which local batch, and its weight in the loss.

Each host knows the number of rows of the global batch, and which rows are its own,
whether it reads all rows or only some (`HostPart`). So sizes, fractions and the end of
the data need no communication.
"""

import collections
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.program import words

# The type of the fraction of a global batch that a tower has: the most precise one.
FRACTION = tf.float64


class HostPart(NamedTuple):
    """The inputs of a host that reads only some rows of a global batch.

    It takes the place of x. Targets and weights beside it have the same rows.

    Attributes:
        x: The inputs, a nest of tensors.
        first: Index of the first row in the global batch: an int32 scalar.
        total: Number of rows of the global batch: an int32 scalar.
        mark: Identifies the global batch: a number from 0 to 65520.
    """

    x: Any
    first: tf.Tensor
    total: tf.Tensor
    mark: tf.Tensor


def part_of(batch: Any) -> HostPart | None:
    """Returns the inputs of a batch of which this host reads only some rows.

    Returns `None` if the host reads the whole batch. `batch` is x, (x, y) or
    (x, y, weights).
    """
    x = batch
    if isinstance(batch, tuple | list) and batch and not isinstance(batch, HostPart):
        x = batch[0]
    return x if isinstance(x, HostPart) else None


def rows_given(batch: Any) -> Any:
    """Returns the rows that this host reads, with x in place of any `HostPart`."""
    part = part_of(batch)
    if part is None:
        return batch
    return part.x if part is batch else type(batch)((part.x, *batch[1:]))


def cut(total: int, split_ratios: Sequence[int]) -> list[int]:
    """Cuts `total` examples into one number for each tower.

    The remainder goes to the first towers, one example each. With even ratios, sizes
    differ by at most one, and a batch smaller than the number of towers leaves the last
    towers idle instead of overloading one; the first tower is idle in an empty batch
    only.

    >>> cut(11, (1, 1, 1, 1))
    [3, 3, 3, 2]
    >>> cut(2, (1, 1, 1, 1))
    [1, 1, 0, 0]
    >>> cut(64, (2, 3, 3))
    [16, 24, 24]

    Args:
        total: Number of examples, 0 or more.
        split_ratios: Share of each tower, relative to the others: positive integers.

    Returns:
        One size for each tower; they sum to `total`.

    Raises:
        ValueError: If `total` is negative, or a ratio is not positive.
    """
    if total < 0 or not split_ratios or min(split_ratios) < 1:
        raise ValueError(
            f"Received total={total} and split_ratios={tuple(split_ratios)}; expected "
            "at least 0 examples, and a positive ratio for each tower."
        )
    return [end - start for start, end in split_bounds(total, split_ratios)]


def split_bounds(
    total: tf.Tensor | int, split_ratios: Sequence[int]
) -> list[tuple[Any, Any]]:
    """Computes the start and end of each tower's local batch; see `cut`.

    Returns one pair (start, end) for each tower, of the type of `total`: ints, or
    scalar integer tensors.
    """
    ratio_sum = sum(split_ratios)
    if isinstance(total, int):
        sizes = [total * ratio // ratio_sum for ratio in (0, *split_ratios)]
        left = total - sum(sizes)
        starts = itertools.accumulate(sizes)
        edges = [edge + min(k, left) for k, edge in enumerate(starts)]
    else:
        # Vectorized over the towers, as each operation takes time to trace.
        sizes = total * tf.constant((0, *split_ratios), total.dtype) // ratio_sum
        more = tf.constant([*range(len(split_ratios) + 1)], total.dtype)
        left = total - tf.reduce_sum(sizes)
        edges = tf.unstack(tf.cumsum(sizes) + tf.minimum(more, left))
    return list(itertools.pairwise(edges))


def batch_size(batch: Any) -> int | tf.Tensor:
    """Returns the number of examples in a global batch, also if a host reads only some.

    Args:
        batch: A nest of tensors whose first dimensions are the examples; `None`
            entries and scalars are ignored.

    Returns:
        An int where the shape is known, a scalar int32 tensor where it is not.

    Raises:
        ValueError: If the batch holds no tensor with rows.
    """
    if (part := part_of(batch)) is not None:
        total = tf.get_static_value(part.total)
        return part.total if total is None else int(total)
    entries = [t for t in tf.nest.flatten(batch) if t is not None]
    tensors = [t for t in entries if not _is_scalar(t)]
    if not tensors:
        described = "with scalars only" if entries else "without any tensor"
        raise ValueError(
            f"Received a batch {described}; expected inputs with one row an example."
        )
    first = tensors[0]
    size = first.shape[0]
    if size is not None:
        return int(size)
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    # On the device of the tensor: elsewhere it would be copied to read its shape.
    with tf.compat.v1.get_default_graph().colocate_with(first):
        return tf.shape(first)[0]


def as_tensor(value: Any) -> Any:
    """Converts a NumPy array or number to a tensor; returns other values unchanged."""
    is_numpy = isinstance(value, np.ndarray | np.generic)
    return tf.convert_to_tensor(value) if is_numpy else value


_PARTS = "x", "y", "sample_weight"
_AS_MANY = (
    "expected inputs, targets and weights with as many rows, one for each example, as "
    "each tower gets a part of the rows; if an input has no row for each example, "
    "such as a matrix of all nodes, make it a variable of the model "
    "(`self.add_weight(trainable=False)`), or repeat it for each example."
)


def check_rows(batch: Any) -> None:
    """Checks that all tensors of a batch have the same number of rows.

    The graph checks numbers that are not known when it is built.

    Args:
        batch: A nest of tensors with one row an example, or of their `tf.TypeSpec`s;
            `None` entries and scalars are ignored.

    Raises:
        ValueError: If the numbers differ; `tf.errors.InvalidArgumentError` from the
            graph.
    """
    parts = _named(rows_given(batch))
    tensors = {name: t for name, t in parts if t is not None and not _is_scalar(t)}
    # A spec is checked if its number of rows is known.
    sizes = {
        name: batch_size(t)
        for name, t in tensors.items()
        if not isinstance(t, tf.TypeSpec) or t.shape[0] is not None
    }
    known = {name: size for name, size in sizes.items() if isinstance(size, int)}
    examples = collections.Counter(known.values()).most_common(1)
    for name, size in known.items():
        if size != examples[0][0]:
            raise ValueError(
                f"Received a batch of "
                f"{words.count(examples[0][0], 'example')} in which {name} has "
                f"{words.count(size, 'row')}; {_AS_MANY}"
            )
    first, *others = sizes.items() or [(None, None)]
    for name, size in others:
        if not (isinstance(first[1], int) and isinstance(size, int)):
            message = f"Received {name} and {first[0]} with different numbers of rows; "
            tf.debugging.assert_equal(size, first[1], message + _AS_MANY)


def _named(batch):
    """Yields the tensors of a batch, with the names that a user knows."""
    parts = keras.tree.flatten_with_path(batch)
    # (x, y, sample_weight); a list is x.
    apart = isinstance(batch, tuple) and len(batch) <= len(_PARTS)
    for path, tensor in parts:
        name, path = (_PARTS[path[0]], path[1:]) if apart and path else ("x", path)
        yield name + "".join(f"[{key!r}]" for key in path), tensor


def take(batch: Any, start: Any, end: Any) -> Any:
    """Returns rows `start` to `end` of every tensor in a batch.

    Args:
        batch: A nest of dense, ragged or sparse tensors with one row an example;
            `None` entries and scalars stay.
        start: First row: an int or a scalar tensor.
        end: The row after the last.

    Returns:
        The same nest with `end - start` rows.
    """

    def rows(tensor):
        if tensor is None or _is_scalar(tensor):
            return tensor
        if isinstance(tensor, tf.SparseTensor):
            shape = tensor.dense_shape
            first = tf.cast(start, tf.int64)
            count = tf.cast(end, tf.int64) - first
            return tf.sparse.slice(
                tensor,
                tf.concat([[first], tf.zeros_like(shape[1:])], axis=0),
                tf.concat([[count], shape[1:]], axis=0),
            )
        part = tensor[start:end]
        if isinstance(start, int) and isinstance(end, int):
            return part
        if isinstance(part, tf.Tensor):
            part.set_shape([None, *tensor.shape[1:]])
        return part

    return tf.nest.map_structure(rows, batch)


def _is_scalar(tensor):
    return tf.TensorShape(tensor.shape).rank == 0


def join(local_batches: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Joins the towers' outputs, in the order of the examples.

    Args:
        local_batches: One nest of tensors for each tower, each with one row an example.
            An idle tower's tensors are empty, of any shape. `None` and scalars stay.
        sizes: Number of rows of each local batch: ints or scalar tensors.

    Returns:
        One nest, with the rows of all local batches.
    """

    def rows(*parts):
        if parts[0] is None or len(parts) == 1 or _is_scalar(parts[0]):
            return parts[0]
        if not isinstance(parts[0], tf.Tensor):
            concat = (
                tf.sparse.concat
                if isinstance(parts[0], tf.SparseTensor)
                else lambda axis, parts: tf.concat(parts, axis)
            )
            return concat(0, list(parts))
        if any(None in part.shape[1:] for part in parts):
            # `concat` needs the other dimensions of all parts, which an idle tower
            # does not know.
            inner = tf.shape(parts[0])[1:]
            parts = [
                tf.reshape(part, tf.concat([[size], inner], axis=0))
                for part, size in zip(parts, sizes, strict=True)
            ]
        return tf.concat(parts, axis=0)

    return tf.nest.map_structure(rows, *local_batches)


def specs(nest: Any) -> Any:
    """Converts a nest of tensors or arrays to `tf.TypeSpec`s; specs and `None` stay."""

    def spec(value):
        known = value is None or isinstance(value, tf.TypeSpec)
        return value if known else tf.type_spec_from_value(value)

    return tf.nest.map_structure(spec, nest)


def local_spec(batch: Any, rows: int | None) -> Any:
    """Returns the specs of a local batch, for tracing.

    Args:
        batch: A nest of tensors with one row an example, or of their `tf.TypeSpec`s;
            `None` and scalars stay.
        rows: Number of rows, `None` if local batches differ.

    Returns:
        The same nest of `tf.TypeSpec`s.
    """

    def spec(tensor):
        if tensor is None:
            return None
        if _is_scalar(tensor):
            return tf.TensorSpec([], tensor.dtype)
        if isinstance(tensor, tf.Tensor | tf.TensorSpec):
            return tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype)
        if isinstance(tensor, tf.SparseTensor | tf.SparseTensorSpec):
            return tf.SparseTensorSpec([rows, *tensor.shape[1:]], tensor.dtype)
        ragged = tensor
        if isinstance(tensor, tf.RaggedTensor):
            ragged = tf.type_spec_from_value(tensor)
        return tf.RaggedTensorSpec(
            [rows, *ragged.shape[1:]],
            ragged.dtype,
            ragged.ragged_rank,
            ragged.row_splits_dtype,
        )

    return tf.nest.map_structure(spec, rows_given(batch))


def fractions(
    sizes: Sequence[int | tf.Tensor], total: int | tf.Tensor | None = None
) -> list[tf.Tensor]:
    """Returns the fraction of the global batch that each local batch has.

    Args:
        sizes: The numbers of examples of the towers.
        total: Number of examples of the global batch; the sum of `sizes` by default.

    Returns:
        One scalar of type `FRACTION` for each tower; the fractions of all towers sum to
        1, or to 0 if there is no row.
    """
    rows = tf.cast(tf.stack(sizes), FRACTION)
    total = tf.reduce_sum(rows) if total is None else tf.cast(total, FRACTION)
    return tf.unstack(tf.math.divide_no_nan(rows, total))


def nothing_like(tensor: tf.Tensor, none: tf.Tensor) -> tf.Tensor:
    """Returns zeros like a tensor, without rows where their number is not known.

    Args:
        tensor: The tensor to be replaced.
        none: A scalar that is 0 when computed. With a constant, shape inference would
            conclude that there are never any rows.
    """
    if tensor.dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=none, element_dtype=tf.float32
        )
    shape = [None] if tensor.shape.rank is None else tensor.shape
    sizes = [none if size is None else size for size in shape]
    text = tensor.dtype == tf.string
    value = tf.constant("") if text else tf.cast(none, tensor.dtype)
    return tf.fill(tf.stack(sizes) if sizes else [], value)
