"""The product of inputs and a matrix of which only some blocks are there."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from towers.models.block_sparse.layout import Layout, Reads, checked_mask


def block_sparse_matmul(x: Any, blocks: Any, layout: Any) -> tf.Tensor:
    """Multiplies by a matrix of which only some blocks are there.

    The inputs of a few output blocks at a time are gathered and multiplied by a batched
    product of TensorFlow. Only the blocks are multiplied and get gradients. OpenAI's
    block-sparse kernels (Gray, Radford and Kingma 2017) compute the same.

    Args:
        x: Numbers [..., inputs].
        blocks: Numbers [blocks, inputs of a block, outputs of a block]: by output, and
            those of one output by input, as `np.argwhere(layout.T)` lists them.
        layout: 0 or 1 [input blocks, output blocks]: which blocks are there. Also a
            `Layout`, which is faster to call again outside of a `tf.function`.

    Returns:
        Numbers [..., outputs].

    Raises:
        ValueError: The shapes do not fit.
    """
    x, blocks = tf.convert_to_tensor(x), tf.convert_to_tensor(blocks)
    if not isinstance(layout, Layout):
        layout = Layout(checked_mask(layout), tuple(blocks.shape[1:]))
    expected = (layout.num_blocks, *layout.block_shape)
    if blocks.shape.rank != 3 or tuple(blocks.shape) != expected:
        raise ValueError(
            f"Received blocks of shape {tuple(blocks.shape)}; expected {expected} for "
            f"a layout that has {layout.num_blocks} blocks."
        )
    if x.shape.rank is None or x.shape.rank < 1 or x.shape[-1] != layout.shape[0]:
        raise ValueError(
            f"Received x of shape {tuple(x.shape)}; expected {layout.shape[0]} as the "
            f"last axis, for {layout.mask.shape[0]} input blocks of "
            f"{layout.block_shape[0]}."
        )
    y = multiply(slabs_of(x, layout), blocks, layout, layout.reads)
    return rows_of(y, x, layout.shape[1])


def slabs_of(x: tf.Tensor, layout: Layout) -> tf.Tensor:
    """Makes blocks of features [input blocks, inputs of a block, examples].

    Each is one piece of memory.

    Args:
        x: Numbers [..., inputs]. Inputs that only the layout has are zero.
        layout: Which blocks the matrix has.
    """
    shape = layout.mask.shape[0], layout.block_shape[0]
    return _slabs(tf.reshape(x, (-1, x.shape[-1])), shape)


def rows_of(slabs: tf.Tensor, x: tf.Tensor, outputs: int) -> tf.Tensor:
    """Makes the first outputs [..., outputs] of blocks of features.

    Args:
        slabs: [output blocks, outputs of a block, examples].
        x: What the inputs were made of.
        outputs: How many.
    """
    return tf.reshape(_rows(slabs, outputs), [*_leading(x), outputs])


def _slabs(rows, shape):
    """Blocks of features, [*shape, examples], of rows [examples, features]."""

    @tf.custom_gradient
    def made(rows):
        features = tf.transpose(rows)
        missing = shape[0] * shape[1] - rows.shape[1]
        if missing:
            features = tf.pad(features, ((0, missing), (0, 0)))
        return tf.reshape(features, (*shape, -1)), lambda g: _rows(g, rows.shape[1])

    return made(rows)


def _rows(slabs, number):
    """Rows [examples, number] of the first features of blocks."""

    @tf.custom_gradient
    def made(slabs):
        shape = slabs.shape[:2]
        features = tf.reshape(slabs, (shape[0] * shape[1], -1))[:number]
        return tf.transpose(features), lambda g: _slabs(g, shape)

    return made(slabs)


def _leading(x):
    """The sizes of all axes but the last."""
    known, sizes = x.shape[:-1].as_list(), tf.shape(x)
    if known.count(None) == 1:
        known[known.index(None)] = -1
        return known
    return [sizes[i] if size is None else size for i, size in enumerate(known)]


def multiply(
    slabs: tf.Tensor, blocks: tf.Tensor, layout: Layout, reads: Reads
) -> tf.Tensor:
    """Multiplies blocks of features.

    Args:
        slabs: [input blocks, inputs of a block, examples].
        blocks: [blocks, inputs of a block, outputs of a block].
        layout: Which blocks are there.
        reads: What is read.

    Returns:
        [output blocks, outputs of a block, examples].
    """
    return bilinear(
        lambda slabs, blocks: _forward(slabs, blocks, layout, reads),
        lambda upstream, slabs, blocks: _backward(
            upstream, slabs, blocks, layout, reads
        ),
    )(slabs, blocks)


def bilinear(
    product: Callable[..., tf.Tensor],
    gradients: Callable[..., tuple[tf.Tensor, tf.Tensor]],
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns a function of two tensors that has derivatives of any order.

    Args:
        product: Takes both, and is linear in each.
        gradients: Takes the gradient of what it returns, and both; returns theirs.
    """

    # The gradients are linear in all three: theirs are made of the same two functions.
    @tf.custom_gradient
    def forward(a, b):
        return product(a, b), lambda upstream: backward(upstream, a, b)

    @tf.custom_gradient
    def backward(upstream, a, b):
        def gradient(of_a, of_b):
            of_upstream = forward(of_a, b) + forward(a, of_b)
            return of_upstream, *backward(upstream, of_a, of_b)

        return gradients(upstream, a, b), gradient

    return forward


def _forward(slabs, blocks, layout, reads):
    """Multiplies with each output block's blocks, one below the other."""
    into, out = layout.block_shape
    slabs = _with_zeros(slabs, layout.by_output)
    returned = []
    for group, (read, own) in zip(layout.by_output, reads.forward, strict=True):
        rows, width = group.slots.shape
        gathered = _gathered(slabs, read, after=returned[-1:])
        gathered = tf.reshape(gathered, (rows, width * into, -1))
        kernel = tf.reshape(taken(blocks, own), (rows, width * into, out))
        returned.append(tf.matmul(kernel, gathered, transpose_a=True))
    return _in_order(returned, layout.by_output)


def _backward(upstream, slabs, blocks, layout, reads):
    """Returns the gradients of slabs and blocks; what both read is gathered once."""
    into, out = layout.block_shape
    lines = tf.reshape(blocks, (-1, out))
    upstream = _with_zeros(upstream, layout.by_input)
    of_slabs, of_lines = [], []
    for group, (read, own) in zip(layout.by_input, reads.backward, strict=True):
        rows, width = group.slots.shape
        gathered = _gathered(upstream, read, after=of_lines[-1:])
        gathered = tf.reshape(gathered, (rows, width * out, -1))
        # Each input of the block with its weights to all outputs, one beside the other.
        kernel = tf.reshape(taken(lines, own), (rows, into, width * out))
        of_slabs.append(tf.matmul(kernel, gathered))
        products = tf.matmul(taken(slabs, group.rows), gathered, transpose_b=True)
        of_lines.append(tf.reshape(products, (-1, out)))
    of_blocks = taken(tf.concat(of_lines, 0), reads.gradient)
    return _in_order(of_slabs, layout.by_input), of_blocks


def _with_zeros(slabs, groups):
    """Adds a block of zeros, if a group reads any."""
    if all((group.slots >= 0).all() for group in groups):
        return slabs
    return tf.pad(slabs, ((0, 1), (0, 0), (0, 0)))


def _gathered(slabs, read, after):
    """Gathers what a group reads, when the product of the group before is done.

    So the memory of one group is enough, and the cache holds what it reads.
    """
    with tf.control_dependencies(after):
        return taken(slabs, read)


def taken(values: tf.Tensor, indices: Any, axis: int = 0) -> tf.Tensor:
    """Gathers along an axis; nothing is copied if that changes nothing.

    Args:
        values: Numbers, of which one axis at most is not known.
        indices: An array, or a tensor.
        axis: The axis.
    """
    if isinstance(indices, np.ndarray):
        flat = indices.reshape(-1)
        if values.shape[axis] == flat.size and (flat == np.arange(flat.size)).all():
            sizes = [-1 if size is None else size for size in values.shape]
            return tf.reshape(
                values, (*sizes[:axis], *indices.shape, *sizes[axis + 1 :])
            )
    return tf.gather(values, indices, axis=axis)


def _in_order(returned, groups):
    """Puts what groups returned into the order of rows."""
    rows = np.concatenate([group.rows for group in groups])
    return taken(tf.concat(returned, 0), np.argsort(rows))
