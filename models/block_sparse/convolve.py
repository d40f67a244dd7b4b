"""The product of a convolution's kernel of which only some blocks are there.

Pictures are [batch, height, width, channels], and blocks
[blocks, height, width, channels, filters].
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from towers.models.block_sparse import product
from towers.models.block_sparse.layout import Layout, by_input, take


@dataclasses.dataclass(frozen=True)
class Window:
    """How a kernel goes over pictures, as of `keras.layers.Conv2D`.

    Attributes:
        size: Height and width of the kernel.
        strides: Of rows and columns.
        padding: "valid" or "same".
        dilation_rate: Of rows and columns. Strides are 1 if it is more.
    """

    size: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: str = "valid"
    dilation_rate: tuple[int, int] = (1, 1)

    def output_sizes(self, sizes: Iterable[int | None]) -> list[int | None]:
        """Returns height and width of what it makes of pictures, if they are known."""
        found = []
        for axis, size in enumerate(sizes):
            if size is not None:
                if self.padding == "valid":
                    size -= (self.size[axis] - 1) * self.dilation_rate[axis]
                size = -(-size // self.strides[axis])
            found.append(size)
        return found


def convolve(
    x: tf.Tensor, blocks: tf.Tensor, layout: Layout, inputs: Any, window: Window
) -> tf.Tensor:
    """Convolves pictures, with one convolution of TensorFlow for each output block.

    A product of slabs, as that of BlockSparseDense, would copy each pixel once for each
    place of the kernel, and take several times as long.

    Args:
        x: Pictures with all channels of the layout.
        blocks: The kernel's.
        layout: Which of them are there.
        inputs: Int [blocks]: the block of channels that each reads; an array, or a
            tensor.
        window: How the kernel goes over pictures.

    Returns:
        Pictures with all filters of the layout.
    """
    if max(window.dilation_rate) > 1:
        return _dilated(x, blocks, layout, inputs, window)
    options = {"strides": (1, *window.strides, 1), "padding": window.padding.upper()}
    settings = {"layout": layout, "inputs": inputs, "options": options}
    return product.bilinear(
        functools.partial(_forward, **settings),
        functools.partial(_backward, **settings),
    )(x, blocks)


def _dilated(x, blocks, layout, inputs, window):
    """Convolves each d-th row and column of pictures by itself.

    `tf.nn.convolution` does so, too: without oneDNN, dilated convolutions have no
    gradients on CPUs. But it puts such parts of pictures before the examples; here they
    are behind, so that towers see that examples do not meet.
    """
    pads, grid, sizes = [], [], []
    known, unknown = x.shape[1:3], tf.unstack(tf.shape(x))[1:3]
    for axis, rate in enumerate(window.dilation_rate):
        size = unknown[axis] if known[axis] is None else known[axis]
        lost = (window.size[axis] - 1) * rate
        before = lost // 2 if window.padding == "same" else 0
        after = lost - before if window.padding == "same" else 0
        size += before + after
        sizes.append(size - lost)
        pads.append((before, after + -size % rate))
        grid += [(size + -size % rate) // rate, rate]
    x = tf.pad(x, ((0, 0), *pads, (0, 0)))
    rows, down, columns, right = grid
    x = tf.reshape(x, (-1, *grid, x.shape[-1]))
    x = tf.transpose(x, (0, 2, 4, 1, 3, 5))
    x = tf.reshape(x, (-1, rows, columns, x.shape[-1]))
    x = convolve(x, blocks, layout, inputs, Window(window.size))
    rows, columns = rows - window.size[0] + 1, columns - window.size[1] + 1
    x = tf.reshape(x, (-1, down, right, rows, columns, x.shape[-1]))
    x = tf.transpose(x, (0, 3, 1, 4, 2, 5))
    x = tf.reshape(x, (-1, rows * down, columns * right, x.shape[-1]))
    return x[:, : sizes[0], : sizes[1]]


def _forward(x, blocks, layout, inputs, options):
    """Makes one convolution for each output block."""
    read = _reader(x, layout.mask.shape[0])
    returned = {}
    for number, own in _slices(layout.mask.sum(0)):
        kernel = tf.transpose(blocks[own], (1, 2, 0, 3, 4))
        kernel = tf.reshape(kernel, (*kernel.shape[:2], -1, kernel.shape[-1]))
        with _after(returned):
            source = read(inputs[own])
        returned[number] = tf.raw_ops.Conv2D(input=source, filter=kernel, **options)
    return _joined(returned, layout.mask.shape[1])


def _backward(upstream, x, blocks, layout, inputs, options):
    """Returns the gradients of pictures and blocks: two for each input block.

    They read the same channels of `upstream`.
    """
    read = _reader(upstream, layout.mask.shape[1])
    sources = tf.split(x, layout.mask.shape[0], -1)
    # Sorted by input, as the loop goes through them.
    order, ranks = by_input(inputs)
    of_sources, of_blocks = {}, []
    for number, own in _slices(layout.mask.sum(1)):
        kernel = tf.transpose(tf.gather(blocks, order[own]), (1, 2, 3, 0, 4))
        split = kernel.shape
        kernel = tf.reshape(kernel, (*split[:3], -1))
        with _after(of_sources):
            gradient = read(take(layout.outputs, order[own]))
        of_sources[number] = tf.raw_ops.Conv2DBackpropInput(
            input_sizes=tf.shape(sources[number]),
            filter=kernel,
            out_backprop=gradient,
            **options,
        )
        of_kernel = tf.raw_ops.Conv2DBackpropFilter(
            input=sources[number],
            filter_sizes=kernel.shape,
            out_backprop=gradient,
            **options,
        )
        of_blocks.append(tf.transpose(tf.reshape(of_kernel, split), (3, 0, 1, 2, 4)))
    of_x = _joined(of_sources, layout.mask.shape[0])
    return of_x, tf.gather(tf.concat(of_blocks, 0), ranks)


def _slices(counts: np.ndarray) -> Iterator[tuple[int, slice]]:
    """The number of each block that has others, and where they are in their list."""
    for number, (begin, end) in enumerate(itertools.pairwise((0, *np.cumsum(counts)))):
        if begin < end:
            yield number, slice(begin, end)


def _reader(x: tf.Tensor, number: int) -> Callable[[Any], tf.Tensor]:
    """Returns a function that reads blocks of channels, one beside the other.

    Args:
        x: Pictures.
        number: How many blocks they have.
    """
    parts = tf.split(x, number, -1)

    def read(blocks):
        # This is faster than to gather, if the numbers are known.
        if isinstance(blocks, np.ndarray):
            return tf.concat([parts[block] for block in blocks], -1)
        size, shape = parts[0].shape[-1], tf.shape(x)[:-1]
        grid = tf.reshape(x, tf.concat([shape, (number, size)], 0))
        taken = tf.gather(grid, blocks, axis=-2)
        return tf.reshape(taken, tf.concat([shape, (blocks.shape[0] * size,)], 0))

    return read


def _after(returned):
    """Lets what a convolution reads be copied when the one before is done.

    So the memory of one such copy is enough, and it is still in the cache.
    """
    return tf.control_dependencies([*returned.values()][-1:])


def _joined(returned: dict[int, tf.Tensor], number: int) -> tf.Tensor:
    """Puts blocks of channels beside each other; those that are missing are zero."""
    zeros = tf.zeros_like(next(iter(returned.values())))
    return tf.concat([returned.get(block, zeros) for block in range(number)], -1)
