"""Even shares of a global batch, as integers and as tensors.

Knows how a batch is cut and put together again. Which device gets which share is
`tower.py`'s business, what a share weighs in the loss the builders'.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def even_shares(total: int, towers: int) -> list[int]:
    """Cuts `total` examples into `towers` shares that differ by at most one.

    The first shares are the larger ones, so a batch smaller than the number of
    towers leaves the last towers idle instead of overloading one.

    >>> even_shares(11, 4)
    [3, 3, 3, 2]
    >>> even_shares(2, 4)
    [1, 1, 0, 0]

    Args:
        total: Number of examples, 0 or more.
        towers: Number of towers, 1 or more.

    Returns:
        One size for each tower; they sum to `total`.

    Raises:
        ValueError: If `total` is negative or `towers` is below 1.
    """
    if total < 0 or towers < 1:
        raise ValueError(
            f"Received total={total} and towers={towers}; expected at least 0 examples "
            "and at least 1 tower."
        )
    return [end - start for start, end in share_bounds(total, towers)]


def share_bounds(total: tf.Tensor | int, towers: int) -> list[tuple[Any, Any]]:
    """Computes where each tower's share starts and ends; see `even_shares`.

    Args:
        total: Number of examples: an int, or a scalar integer tensor.
        towers: Number of towers.

    Returns:
        One pair (start, end) for each tower, of the type of `total`.
    """
    each, left = total // towers, total % towers
    smaller = min if isinstance(total, int) else tf.minimum
    edges = [k * each + smaller(k, left) for k in range(towers + 1)]
    return list(itertools.pairwise(edges))


def batch_size(batch: Any) -> int | tf.Tensor:
    """Returns the number of examples in a batch.

    Args:
        batch: A nest of tensors whose first dimensions are the examples; `None`
            entries are passed over.

    Returns:
        An int where the shape is known, a scalar int32 tensor where it is not.

    Raises:
        ValueError: If the batch holds no tensor.
    """
    tensors = [t for t in tf.nest.flatten(batch) if t is not None]
    if not tensors:
        raise ValueError(
            "Received a batch without any tensor; expected inputs with one row an "
            "example."
        )
    first = tensors[0]
    size = first.shape[0]
    if size is not None:
        return int(size)
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    return tf.shape(first)[0]


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


def join(shares: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Puts the towers' outputs together again, in the order of the examples.

    Args:
        shares: One nest of tensors for each tower, each with one row an example. An
            idle tower's tensors are empty, of any shape.
        sizes: Number of rows of each share: ints or scalar tensors.

    Returns:
        One nest, with the rows of all shares.
    """

    def rows(*parts):
        if parts[0] is None or len(parts) == 1:
            return parts[0]
        if not isinstance(parts[0], tf.Tensor):
            concat = (
                tf.sparse.concat
                if isinstance(parts[0], tf.SparseTensor)
                else lambda axis, parts: tf.concat(parts, axis)
            )
            return concat(0, list(parts))
        if None in parts[0].shape[1:]:
            # An idle tower cannot know the other dimensions of what it did not
            # compute, and concat insists on them.
            inner = tf.shape(parts[0])[1:]
            parts = [
                tf.reshape(part, tf.concat([[size], inner], axis=0))
                for part, size in zip(parts, sizes, strict=True)
            ]
        return tf.concat(parts, axis=0)

    return tf.nest.map_structure(rows, *shares)


def share_spec(batch: Any, rows: int | None) -> Any:
    """Describes one share of a batch, for tracing.

    Args:
        batch: A nest of tensors with one row an example; `None` and scalars stay.
        rows: Number of rows of every share, `None` where shares differ.

    Returns:
        The same nest of `tf.TypeSpec`s.
    """

    def spec(tensor):
        if tensor is None:
            return None
        if _is_scalar(tensor):
            return tf.TensorSpec([], tensor.dtype)
        if isinstance(tensor, tf.Tensor):
            return tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype)
        if isinstance(tensor, tf.SparseTensor):
            return tf.SparseTensorSpec([rows, *tensor.shape[1:]], tensor.dtype)
        return tf.RaggedTensorSpec(
            [rows, *tensor.shape[1:]],
            tensor.dtype,
            tensor.ragged_rank,
            tensor.row_splits.dtype,
        )

    return tf.nest.map_structure(spec, batch)


def fractions(batch: Any, towers: int) -> list[tf.Tensor]:
    """Returns the part of a batch that each tower's share is.

    Args:
        batch: A nest of tensors with one row an example.
        towers: Number of towers.

    Returns:
        One float32 scalar for each tower; they sum to 1, or to 0 if there is no row.
    """
    size = batch_size(batch)
    return [
        tf.math.divide_no_nan(
            tf.cast(end - start, tf.float32), tf.cast(size, tf.float32)
        )
        for start, end in share_bounds(size, towers)
    ]
