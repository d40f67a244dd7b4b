"""Which blocks of a matrix are there, and the order in which products read them."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

# A group reads at most this many times the values that it is multiplied from: what is
# gathered stays in the cache, and never is a multiple of the activations.
_READ_AT_ONCE = 4
# Rows of a group that have fewer blocks than others are filled with zeros, up to this
# part of the group.
_FILLED = 1 / 8


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows of blocks that one batched product computes: `rows` of `width` blocks each.

    Attributes:
        rows: Their numbers, int [rows].
        slots: The rank of each of their blocks among all blocks sorted by row, int
            [rows, width]; -1 where a row has fewer.
    """

    rows: np.ndarray
    slots: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Which blocks of a matrix [inputs, outputs] are there.

    The blocks are numbered by output, and those of one output by input:
    `np.argwhere(mask.T)` lists them.

    Attributes:
        mask: Bool [input blocks, output blocks].
        block_shape: Inputs and outputs of a block.
    """

    mask: np.ndarray
    block_shape: tuple[int, int]

    @property
    def num_blocks(self) -> int:
        """The number of blocks that are there."""
        return int(self.mask.sum())

    @property
    def size(self) -> int:
        """The numbers in all blocks."""
        return self.num_blocks * self.block_shape[0] * self.block_shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs of the matrix."""
        return tuple(
            n * size for n, size in zip(self.mask.shape, self.block_shape, strict=True)
        )

    @functools.cached_property
    def inputs(self) -> np.ndarray:
        """The input block of each block, int [blocks]."""
        return np.argwhere(self.mask.T)[:, 1]

    @functools.cached_property
    def outputs(self) -> np.ndarray:
        """The output block of each block, int [blocks], ascending."""
        return np.argwhere(self.mask.T)[:, 0]

    @functools.cached_property
    def by_output(self) -> tuple[Group, ...]:
        """The groups of output blocks, for products with inputs."""
        return tuple(_groups(self.mask.sum(0), self.mask.shape[0]))

    @functools.cached_property
    def by_input(self) -> tuple[Group, ...]:
        """The groups of input blocks, for products with the transposed matrix."""
        return tuple(_groups(self.mask.sum(1), self.mask.shape[1]))

    @functools.cached_property
    def reads(self) -> "Reads":
        """What products read, for the places that `mask` tells."""
        return Reads.of(self, self.inputs)

    def dense(self, blocks: Any, inputs: Any = None) -> tf.Tensor:
        """Returns the matrix [..., inputs, outputs], with zeros for other blocks.

        Args:
            blocks: Numbers [blocks, ..., *block_shape].
            inputs: The input block of each block, if not those of `mask`: int [blocks].
        """
        blocks, (rows, columns) = tf.convert_to_tensor(blocks), self.mask.shape
        others, places = blocks.shape[1:-2], self._places(inputs)
        grid = tf.scatter_nd(
            places[:, None], blocks, (rows * columns, *blocks.shape[1:])
        )
        grid = tf.reshape(grid, (rows, columns, *blocks.shape[1:]))
        n = len(others)
        grid = tf.transpose(grid, (*range(2, n + 2), 0, n + 2, 1, n + 3))
        return tf.reshape(grid, (*others, *self.shape))

    def blocks_of(self, matrix: Any) -> tf.Tensor:
        """Returns the blocks of a matrix.

        Args:
            matrix: Numbers [..., inputs, outputs]. It is filled with zeros to a whole
                number of blocks.

        Returns:
            Numbers [blocks, ..., *block_shape].
        """
        matrix = _filled(matrix, self.shape)
        (rows, columns), (into, out) = self.mask.shape, self.block_shape
        others = matrix.shape[:-2]
        n = len(others)
        grid = tf.reshape(matrix, (*others, rows, into, columns, out))
        grid = tf.transpose(grid, (n, n + 2, *range(n), n + 1, n + 3))
        grid = tf.reshape(grid, (-1, *others, into, out))
        return tf.gather(grid, self._places())

    def _places(self, inputs=None):
        """Where each block is among all that there could be, int [blocks]."""
        inputs = self.inputs if inputs is None else inputs
        return inputs * self.mask.shape[1] + self.outputs


@dataclasses.dataclass(frozen=True)
class Reads:
    """The indices of what products read: arrays, or tensors if places can change.

    Attributes:
        forward: For each group by output: the input blocks [rows, width] that it reads
            (the number of input blocks where it reads zeros), and the blocks.
        backward: For each group by input: the output blocks [rows, width] it reads,
            and lines [rows, inputs of a block, width]: the first line of block k is
            k * inputs of a block.
        gradient: Where each line of each block is in what the groups by input return,
            int [blocks, inputs of a block].
    """

    forward: list[tuple[Any, Any]]
    backward: list[tuple[Any, Any]]
    gradient: Any

    @classmethod
    def of(cls, layout: Layout, inputs: Any) -> "Reads":
        """Tells what is read if block k reads from input block `inputs[k]`.

        Args:
            layout: How many blocks each input and output has.
            inputs: Int [blocks], an array or a tensor; each number as often as in
                `layout.inputs`.
        """
        order, ranks = by_input(inputs)
        into = layout.block_shape[0]
        forward, backward = [], []
        for group in layout.by_output:
            blocks = np.maximum(group.slots, 0)
            read = _where(group.slots, take(inputs, blocks), layout.mask.shape[0])
            forward.append((read, blocks))
        for group in layout.by_input:
            blocks = take(order, np.maximum(group.slots, 0))
            read = take(layout.outputs, blocks)
            read = _where(group.slots, read, layout.mask.shape[1])
            backward.append((read, blocks[:, None] * into + np.arange(into)[:, None]))
        begins, strides = _returned(layout)
        rows = take(begins, ranks)[:, None] + take(strides, ranks)[:, None] * np.arange(
            into
        )
        return cls(forward, backward, rows)


def checked_mask(mask: Any) -> np.ndarray:
    """Returns a bool matrix of 0 and 1.

    Raises:
        ValueError: It is no such matrix, or has no block.
    """
    array = np.asarray(mask)
    known = np.isin(array, (0, 1))
    if array.ndim != 2 or not known.all() or not array.any():
        raise ValueError(
            f"Received a layout of shape {array.shape} with {known.size - known.sum()} "
            f"values other than 0 and 1, and {(known & (array == 1)).sum()} of 1; "
            "expected a matrix [input blocks, output blocks] of 0 and 1, with a 1 at "
            "least."
        )
    return array.astype(bool)


def by_input(inputs: Any) -> tuple[Any, Any]:
    """Sorts blocks by the inputs that they read: an array, or a tensor.

    Returns:
        The blocks in that order, and where each block is in it.
    """
    if isinstance(inputs, np.ndarray):
        order = np.argsort(inputs, kind="stable")
        return order, np.argsort(order)
    order = tf.argsort(inputs, stable=True)
    return order, tf.argsort(order)


def take(values: Any, indices: Any) -> Any:
    """Takes values by indices: an array if both are, else a tensor."""
    known = isinstance(values, np.ndarray) and isinstance(indices, np.ndarray)
    return values[indices] if known else tf.gather(values, indices)


def sums_of_blocks(
    matrix: Any, blocks: tuple[int, int], block_shape: tuple[int, int]
) -> tf.Tensor:
    """Returns the sum of each block of a matrix [..., inputs, outputs].

    Args:
        matrix: The matrix. It is filled with zeros to a whole number of blocks, and
            added up over axes before the last two.
        blocks: Number of input blocks and of output blocks.
        block_shape: Inputs and outputs of a block.

    Returns:
        Numbers [input blocks, output blocks].
    """
    (rows, columns), (into, out) = blocks, block_shape
    matrix = _filled(matrix, (rows * into, columns * out))
    grid = tf.reshape(matrix, (-1, rows, into, columns, out))
    return tf.reduce_sum(grid, (0, 2, 4))


def _filled(matrix, shape):
    """A matrix with zeros below and beside it; axes before the last two stay."""
    matrix = tf.convert_to_tensor(matrix)
    more = [(0, n - size) for n, size in zip(shape, matrix.shape[-2:], strict=True)]
    return tf.pad(matrix, [(0, 0)] * (matrix.shape.rank - 2) + more)


def _where(slots, read, zeros):
    """What is read, and zeros where there is no block."""
    if (slots >= 0).all():
        return read
    return (np if isinstance(read, np.ndarray) else tf).where(slots >= 0, read, zeros)


def _groups(counts: np.ndarray, sources: int) -> Iterator[Group]:
    """Groups rows that have about as many blocks.

    Args:
        counts: Blocks of each row.
        sources: Number of blocks that they are read from.
    """
    begins = np.cumsum(counts) - counts
    rows = np.argsort(-counts, kind="stable")
    while rows.size:
        # What has no block reads zeros once.
        width = max(1, counts[rows[0]])
        most = max(1, _READ_AT_ONCE * sources // width)
        # As many in each group, rather than few in the last.
        most = -(-len(rows) // -(-len(rows) // most))
        filled = np.cumsum(width - counts[rows[:most]])
        size = np.arange(1, len(filled) + 1)
        # As many as fit; `filled` never decreases as a part of the group.
        number = max(1, int((filled <= _FILLED * width * size).sum()))
        chosen, rows = np.sort(rows[:number]), rows[number:]
        slots = begins[chosen, None] + np.arange(width)
        there = np.arange(width) < counts[chosen, None]
        yield Group(chosen, np.where(there, slots, -1))


def _returned(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Where groups by input return the first line of a block, and the next ones."""
    begins = np.zeros(layout.num_blocks, np.int64)
    strides = np.zeros(layout.num_blocks, np.int64)
    offset, into = 0, layout.block_shape[0]
    for group in layout.by_input:
        rows, width = group.slots.shape
        at = offset + np.arange(rows)[:, None] * into * width + np.arange(width)
        there = group.slots >= 0
        begins[group.slots[there]] = at[there]
        strides[group.slots[there]] = width
        offset += rows * into * width
    return begins, strides
