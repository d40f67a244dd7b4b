"""What all contenders compute, and what is right."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

# Relative to the largest number expected.
_TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3, "tf32": 4e-3}

Compared = tuple[str, np.ndarray, np.ndarray]


class WrongResult(Exception):
    """Says in a line what a contender has computed wrong."""


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A product, and its two gradients.

    Attributes:
        sparsity: The share of the matrix that is asked to be zero.
        inputs: Inputs of the matrix.
        outputs: Its outputs.
        batch: Examples.
        block_size: Rows and columns of a block.
        mask: Which blocks are there, for those that are given a pattern, bool [input
            blocks, output blocks].
    """

    sparsity: float
    inputs: int
    outputs: int
    batch: int
    block_size: int
    mask: np.ndarray

    @property
    def x(self) -> np.ndarray:
        """Float32 [batch, inputs]."""
        return _drawn(self.batch, self.inputs, 1)

    @property
    def upstream(self) -> np.ndarray:
        """The gradient of the outputs, float32 [batch, outputs]."""
        return _drawn(self.batch, self.outputs, 2)

    @property
    def kernel(self) -> np.ndarray:
        """A dense matrix, float32 [inputs, outputs]."""
        return _drawn(self.inputs, self.outputs, 3) / self.inputs**0.5

    @functools.cached_property
    def places(self) -> np.ndarray:
        """The output and input block of each block, by output, int [blocks, 2]."""
        return np.argwhere(self.mask.T)

    @property
    def blocks(self) -> np.ndarray:
        """The blocks of `kernel` by output [blocks, inputs, outputs of a block]."""
        return self.blocks_of(self.kernel)

    @property
    def full_mask(self) -> np.ndarray:
        """Which numbers of the matrix are there, bool [inputs, outputs]."""
        size = self.block_size
        return self.mask.repeat(size, 0).repeat(size, 1)

    def blocks_of(self, matrix: np.ndarray) -> np.ndarray:
        """Returns the blocks of a matrix [inputs, outputs], as in `blocks`."""
        rows, columns, size = *self.mask.shape, self.block_size
        grid = matrix.reshape(rows, size, columns, size).transpose(2, 0, 1, 3)
        return np.ascontiguousarray(grid[*self.places.T])

    def matrix_of(self, blocks: np.ndarray) -> np.ndarray:
        """Returns the matrix [inputs, outputs] that has these blocks."""
        rows, columns, size = *self.mask.shape, self.block_size
        grid = np.zeros((columns, rows, size, size), blocks.dtype)
        grid[*self.places.T] = blocks
        return grid.transpose(1, 2, 0, 3).reshape(self.inputs, self.outputs)

    def compared(self, y: Any, of_x: Any, of_kernel: Any) -> list[Compared]:
        """Lists what a contender has computed of `kernel`, masked; see `compared`."""
        mask = self.full_mask
        return compared(self, [Factor(self.kernel * mask, mask)], y, of_x, [of_kernel])


@dataclasses.dataclass(frozen=True)
class Factor:
    """A matrix; inputs are multiplied by one or more of them in turn.

    Attributes:
        kernel: [inputs, outputs], masked.
        mask: Which numbers are there.
        order: Which feature of the product each output is, if they are permuted.
    """

    kernel: np.ndarray
    mask: np.ndarray
    order: np.ndarray | None = None


def right(
    case: Case, factors: Sequence[Factor]
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Returns the output, and the gradients of the input and of each matrix."""
    reads = [case.x.astype(float)]
    for each in factors:
        product = reads[-1] @ each.kernel
        reads.append(product if each.order is None else product[:, each.order])
    y, upstream, of_kernels = reads.pop(), case.upstream.astype(float), []
    for each in factors[::-1]:
        if each.order is not None:
            upstream = upstream[:, np.argsort(each.order)]
        of_kernels.append(reads.pop().T @ upstream * each.mask)
        upstream = upstream @ each.kernel.T
    return y, upstream, of_kernels[::-1]


def compared(
    case: Case, factors: Sequence[Factor], y: Any, of_x: Any, of_kernels: Sequence[Any]
) -> list[Compared]:
    """Lists what was computed, by name, and what the dense masked matrices make."""
    right_y, right_of_x, right_of_kernels = right(case, factors)
    return [
        ("output", y, right_y),
        ("gradient of the input", of_x, right_of_x),
        *(
            ("gradient of the blocks", *both)
            for both in zip(of_kernels, right_of_kernels, strict=True)
        ),
    ]


def check(found: Iterable[Compared], precision: str) -> None:
    """Checks what `compared` lists.

    Args:
        found: Names, what was computed, and what is right.
        precision: "float32", "bfloat16", "float16" or "tf32".

    Raises:
        WrongResult: They differ.
    """
    for what, computed, expected in found:
        apart = np.abs(computed - expected).max() / np.abs(expected).max()
        # As it is for NaN.
        if not apart <= _TOLERANCES[precision]:
            raise WrongResult(
                f"Received a wrong {what}: it differs by {apart:.1e} of the largest "
                f"number; expected at most {_TOLERANCES[precision]:.0e}, as in the "
                "dense masked product. Do not trust its times."
            )


def small(block_size: int) -> Case:
    """Returns a case to check contenders: uneven rows, one of them without blocks."""
    mask = np.random.RandomState(0).random_sample((12, 8)) < 0.5
    mask[3] = mask[:, 5] = False
    return Case(0.6, 12 * block_size, 8 * block_size, 16, block_size, mask)


@dataclasses.dataclass(frozen=True)
class Built:
    """A contender that is ready to compute a case.

    Attributes:
        call: Computes the outputs and gradients, and returns them.
        results: Lists what `compared` does, computed anew.
        size: How many parameters there are.
        parameter_bytes: Of them.
        slot_bytes: Of Adam's slots.
    """

    call: Callable[[], Any]
    results: Callable[[], Iterable[Compared]]
    size: int
    parameter_bytes: int
    slot_bytes: int


@functools.lru_cache(maxsize=8)
def _drawn(rows, columns, seed):
    return np.random.RandomState(seed).standard_normal((rows, columns)).astype("f")
