"""Forms of a block-sparse product and of its gradients in TensorFlow, each for itself.

They are for given patterns of single blocks. Each form has `forward` of x and blocks,
`inputs` of the upstream gradient and blocks, and `blocks` of x and the upstream
gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from towers.models.block_sparse.layout import Group, Layout

from . import case as cases
from .contenders import PRODUCTS
from .keras_layers import check_csr, csr, csr_matmul, peak, start, wait
from .worker import Job

__all__ = ["build", "notes", "peak", "start", "wait"]


def notes(job: Job) -> list[str]:
    """Says what forms cannot do."""
    del job
    return [
        "csr: TensorFlow has no product of two dense matrices at some places only, "
        "except by gathering numbers of the whole batch for each of them."
    ]


def build(name: str, case: cases.Case, job: Job) -> cases.Built:
    """Builds a form of a product."""
    name, _, product = name.partition(":")
    if name == "csr":
        check_csr(job)
    form = _FORMS[name](case, job.dtype)
    step = tf.function(
        getattr(form, product), jit_compile=name == "xla" or job.jit_compile or None
    )
    given = {"x": case.x, "upstream": case.upstream}
    given["blocks"] = form.parameters()
    reads = {
        "forward": ("x", "blocks"),
        "inputs": ("upstream", "blocks"),
        "blocks": ("x", "upstream"),
    }
    arguments = [tf.cast(given[each], job.dtype) for each in reads[product]]
    call = functools.partial(step, *arguments)

    def results():
        found = tf.cast(call(), tf.float32).numpy()
        if product == "blocks":
            found = form.matrix_of(found)
        mask = form.mask
        y, of_x, (of_kernel,) = cases.right(
            case, [cases.Factor(case.kernel * mask, mask)]
        )
        expected = {"forward": y, "inputs": of_x, "blocks": of_kernel}
        return [(PRODUCTS[product], found, expected[product])]

    size = given["blocks"].size
    return cases.Built(call, results, size, 4 * size, 8 * size)


class _Form:
    """What most forms share: their parameters are the blocks."""

    def __init__(self, case, dtype):
        del dtype
        self.case, self.mask = case, case.full_mask
        self.layout = Layout(case.mask, (case.block_size, case.block_size))
        self.matrix_of = case.matrix_of

    def parameters(self):
        return self.case.blocks

    def cut(self, rows):
        """Cuts [examples, features] into [blocks, features of a block, examples]."""
        return tf.reshape(
            tf.transpose(rows), (-1, self.case.block_size, self.case.batch)
        )

    def joined(self, slabs):
        """The reverse of `cut`."""
        return tf.transpose(tf.reshape(slabs, (-1, self.case.batch)))


class _Dense(_Form):
    """All blocks: the yardstick."""

    def __init__(self, case, dtype):
        super().__init__(case, dtype)
        self.mask = np.ones_like(self.mask)
        self.matrix_of = np.asarray

    def parameters(self):
        return self.case.kernel

    def forward(self, x, kernel):
        return tf.matmul(x, kernel)

    def inputs(self, upstream, kernel):
        return tf.matmul(upstream, kernel, transpose_b=True)

    def blocks(self, x, upstream):
        return tf.matmul(x, upstream, transpose_a=True)


class _Masked(_Dense):
    """A dense product with zeros."""

    def __init__(self, case, dtype):
        super().__init__(case, dtype)
        self.mask = case.full_mask
        self.zeros_and_ones = tf.cast(self.mask, dtype)

    def forward(self, x, kernel):
        return super().forward(x, self._masked(kernel))

    def inputs(self, upstream, kernel):
        return super().inputs(upstream, self._masked(kernel))

    def blocks(self, x, upstream):
        return self._masked(super().blocks(x, upstream))

    def _masked(self, kernel):
        return kernel * self.zeros_and_ones


class _Gathered(_Form):
    """Gathers what a group of rows reads, and multiplies it as a batch: ours."""

    def forward(self, x, blocks):
        into, out = self.layout.block_shape

        def product(gathered, group, own):
            kernel = tf.reshape(tf.gather(blocks, own), (len(group.rows), -1, out))
            return self.times(gathered, kernel, transpose=False)

        groups, reads = self.layout.by_output, self.layout.reads.forward
        returned = self._by_group(self.cut(x), into, groups, reads, product)
        return self.joined(_in_order(returned, groups))

    def inputs(self, upstream, blocks):
        into, out = self.layout.block_shape
        lines = tf.reshape(blocks, (-1, out))

        def product(gathered, group, own):
            kernel = tf.reshape(tf.gather(lines, own), (len(group.rows), into, -1))
            return self.times(gathered, kernel, transpose=True)

        groups, reads = self.layout.by_input, self.layout.reads.backward
        returned = self._by_group(self.cut(upstream), out, groups, reads, product)
        return self.joined(_in_order(returned, groups))

    def blocks(self, x, upstream):
        out = self.layout.block_shape[1]
        slabs = self.cut(x)

        def product(gathered, group, own):
            del own
            products = self.outer(tf.gather(slabs, group.rows), gathered)
            return tf.reshape(products, (-1, out))

        groups, reads = self.layout.by_input, self.layout.reads.backward
        returned = self._by_group(self.cut(upstream), out, groups, reads, product)
        return tf.gather(tf.concat(returned, 0), self.layout.reads.gradient)

    def _by_group(self, slabs, size, groups, reads, product):
        if any((group.slots < 0).any() for group in groups):
            slabs = tf.pad(slabs, ((0, 1), (0, 0), (0, 0)))
        returned = []
        for group, (read, own) in zip(groups, reads, strict=True):
            # So the memory of one group is enough.
            with tf.control_dependencies(returned[-1:]):
                gathered = tf.gather(slabs, read)
            width = size * group.slots.shape[1]
            returned.append(product(self.beside(gathered, width), group, own))
        return returned

    def beside(self, gathered, width):
        """What a row reads, as one matrix."""
        return tf.reshape(gathered, (-1, width, self.case.batch))

    def times(self, gathered, kernel, transpose):
        """Multiplies [rows, width, examples] by the kernels of rows."""
        return tf.matmul(kernel, gathered, transpose_a=not transpose)

    def outer(self, own, gathered):
        """Sums over examples the products of own and gathered features."""
        return tf.matmul(own, gathered, transpose_b=True)


class _BatchMajor(_Gathered):
    """The same with features side by side: [blocks, examples, features of a block]."""

    def cut(self, rows):
        size = self.case.block_size
        return tf.transpose(tf.reshape(rows, (self.case.batch, -1, size)), (1, 0, 2))

    def joined(self, slabs):
        return tf.reshape(tf.transpose(slabs, (1, 0, 2)), (self.case.batch, -1))

    def beside(self, gathered, width):
        gathered = tf.transpose(gathered, (0, 2, 1, 3))
        return tf.reshape(gathered, (-1, self.case.batch, width))

    def times(self, gathered, kernel, transpose):
        return tf.matmul(gathered, kernel, transpose_b=transpose)

    def outer(self, own, gathered):
        return tf.matmul(own, gathered, transpose_a=True)


class _Unlimited(_Gathered):
    """The same in one group: all is gathered at once."""

    def __init__(self, case, dtype):
        super().__init__(case, dtype)
        self.layout = _OneGroup(self.layout.mask, self.layout.block_shape)


class _OneGroup(Layout):
    by_output = functools.cached_property(lambda self: (_group(self.mask.sum(0)),))
    by_input = functools.cached_property(lambda self: (_group(self.mask.sum(1)),))


def _group(counts):
    slots = (np.cumsum(counts) - counts)[:, None] + np.arange(counts.max())
    there = np.arange(counts.max()) < counts[:, None]
    return Group(np.arange(len(counts)), np.where(there, slots, -1))


def _in_order(returned, groups):
    rows = np.concatenate([group.rows for group in groups])
    return tf.gather(tf.concat(returned, 0), np.argsort(rows))


class _PerBlock(_Form):
    """One small product for each block; those of a row are summed."""

    def forward(self, x, blocks):
        read = tf.gather(self.cut(x), self.layout.inputs)
        products = tf.matmul(blocks, read, transpose_a=True)
        return self._summed(products, self.layout.outputs, self.layout.mask.shape[1])

    def inputs(self, upstream, blocks):
        read = tf.gather(self.cut(upstream), self.layout.outputs)
        products = tf.matmul(blocks, read)
        return self._summed(products, self.layout.inputs, self.layout.mask.shape[0])

    def blocks(self, x, upstream):
        x = tf.gather(self.cut(x), self.layout.inputs)
        upstream = tf.gather(self.cut(upstream), self.layout.outputs)
        return tf.matmul(x, upstream, transpose_b=True)

    def _summed(self, products, rows, number):
        return self.joined(tf.math.unsorted_segment_sum(products, rows, number))


class _Csr(_Form):
    """TensorFlow's product with single numbers."""

    def __init__(self, case, dtype):
        super().__init__(case, dtype)
        self.places = tf.constant(np.argwhere(self.mask.T))

    def parameters(self):
        return self.case.kernel.T[self.mask.T]

    def forward(self, x, numbers):
        return tf.transpose(csr_matmul(self._matrix(numbers), x))

    def inputs(self, upstream, numbers):
        return tf.transpose(csr_matmul(self._matrix(numbers), upstream, transpose=True))

    def _matrix(self, numbers):
        return csr(self.places, numbers, self.mask.T.shape)


_FORMS: dict[str, Callable[[cases.Case, str], Any]] = {
    "dense": _Dense,
    "gathered": _Gathered,
    "per_block": _PerBlock,
    "masked": _Masked,
    "csr": _Csr,
    "batch_major": _BatchMajor,
    "xla": _Gathered,
    "unlimited": _Unlimited,
}
