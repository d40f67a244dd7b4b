"""Patterns by name: which blocks of a matrix are there, for a share of zeros asked for.

docs/scale/block_sparse.md tells which pattern is for what.
"""

import numbers
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from towers.models.block_sparse.layout import Layout, checked_mask

# Sparsity that is farther from what was asked for is told.
NEAR = 0.05
# Groups are made equal if the matrix does not grow by more than this factor.
_MOST_FILLED = 1.1
# Rows and columns of blocks, the share of blocks that are to be there, random numbers.
_Maker = Callable[[int, int, float, np.random.RandomState], np.ndarray]


def layouts(
    pattern: Any,
    inputs: int,
    outputs: int,
    block_size: int,
    sparsity: float,
    seed: int = 0,
) -> tuple[Layout, ...]:
    """Makes the layout of a matrix [inputs, outputs], or of two to multiply in turn.

    Args:
        pattern: One of `names()`, or 0 and 1 [input blocks, output blocks].
        inputs: Inputs of the matrix.
        outputs: Its outputs.
        block_size: Rows and columns of a block. Those of "block_diagonal", "butterfly"
            and "monarch" are as large as the sparsity lets them be, in multiples of it.
        sparsity: The share of the matrix that is zero; what is nearest to it is taken.
            A matrix of 0 and 1 has its own.
        seed: Of random patterns; and which bits a butterfly has, if not all.

    Returns:
        One layout; for "monarch" two. A matrix that has no whole number of blocks is
        padded to one.

    Raises:
        ValueError: The pattern or a number is none of these.
    """
    check(block_size, sparsity, seed)
    shape = _ceil(inputs, block_size), _ceil(outputs, block_size)
    if pattern is None or (np.ndim(pattern) == 0 and not isinstance(pattern, str)):
        raise _no_pattern(pattern)
    if not isinstance(pattern, str):
        mask = checked_mask(pattern)
        if mask.shape != shape:
            raise ValueError(
                f"Received a pattern of shape {mask.shape}; expected {shape}, the "
                f"blocks of {block_size} in {inputs} inputs and {outputs} outputs."
            )
        return (Layout(mask, (block_size, block_size)),)
    if pattern in _OF_GROUPS:
        made = _OF_GROUPS[pattern](inputs, outputs, block_size, 1 - sparsity, seed)
    elif pattern in _OF_BLOCKS:
        random = np.random.RandomState(seed)
        mask = _OF_BLOCKS[pattern](*shape, 1 - sparsity, random)
        made = (Layout(mask, (block_size, block_size)),)
    else:
        raise _no_pattern(pattern)
    found = 1 - sum(layout.size for layout in made) / np.prod(shape) / block_size**2
    if abs(found - sparsity) > NEAR:
        warnings.warn(
            f"The pattern {pattern!r} has a sparsity of {found:.2f} at {inputs} inputs "
            f"and {outputs} outputs with block_size={block_size}, instead of "
            f"{sparsity}; smaller blocks may come nearer.",
            stacklevel=2,
        )
    return made


def _no_pattern(pattern):
    return ValueError(
        f"Received pattern={pattern!r}; expected one of {', '.join(names())}, or a "
        "matrix [input blocks, output blocks] of 0 and 1."
    )


def names() -> tuple[str, ...]:
    """Returns every pattern's name."""
    return (*_OF_GROUPS, *_OF_BLOCKS)


def check(block_size: Any, sparsity: Any, seed: Any) -> None:
    """Checks numbers.

    Raises:
        ValueError: One of them is not what it has to be.
    """
    check_whole("block_size", block_size, 1, "32")
    check_whole("seed", seed, 0, "1")
    number = isinstance(sparsity, numbers.Real) and not isinstance(sparsity, bool)
    if not number or not 0 <= sparsity < 1:
        raise ValueError(
            f"Received sparsity={sparsity!r}; expected at least 0 and less than 1, "
            "such as 0.75 for a quarter of the blocks."
        )


def check_whole(name: str, value: Any, least: int, example: str) -> None:
    """Checks that an argument is a whole number.

    Raises:
        ValueError: It is none, or too small.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < least:
        raise ValueError(
            f"Received {name}={value!r}; expected a whole number of at least {least}, "
            f"such as {example}."
        )


# Patterns of groups of blocks. Where groups can be equal, each is one large block.


def _block_diagonal(inputs, outputs, block_size, density, seed):
    """Groups of inputs, each for a group of outputs."""
    del seed

    def badness(groups):
        # Equal groups are faster, and worth a hundredth.
        apart = abs(1 / groups - density)
        equal = _equal_groups((groups, groups), inputs, outputs, block_size)
        return round(apart, 2), equal is None, apart

    most = min(_ceil(inputs, block_size), _ceil(outputs, block_size))
    groups = min(range(1, most + 1), key=badness)
    return (_grouped(np.eye(groups, dtype=bool), inputs, outputs, block_size),)


def _butterfly(inputs, outputs, block_size, density, seed):
    """A flat block butterfly (Pixelated Butterfly, Dao et al. 2022).

    Group i of n = 2**m meets group i and those whose number differs in one bit. If the
    density does not let it be any of the m bits, it is one of some that follow each
    other; the seed tells the first, so that layers with different seeds mix all groups.
    Where several choices are as near to the density, that with the most bits is taken,
    and with it the smallest groups.
    """
    side = min(_ceil(inputs, block_size), _ceil(outputs, block_size))
    choices = [
        (1 << m, bits)
        for m in range(side.bit_length())
        for bits in range(min(1, m), m + 1)
    ]
    groups, bits = min(
        choices, key=lambda c: (round(abs((1 + c[1]) / c[0] - density), 9), -c[1])
    )
    number = np.arange(groups)
    mask = np.eye(groups, dtype=bool)
    for bit in range(seed, seed + bits):
        mask[number, number ^ (1 << bit % (groups.bit_length() - 1))] = True
    return (_grouped(mask, inputs, outputs, block_size),)


def _monarch(inputs, outputs, block_size, density, seed):
    """Two block-diagonal matrices; in between, groups deal out what they return.

    (Monarch, Dao et al. 2022: https://arxiv.org/abs/2204.00595.)
    """
    del seed
    middle = min(inputs, outputs)
    # The features in between are all there, and no more.
    groups = [n for n in range(2, middle + 1) if middle % (n * block_size) == 0]
    if not groups:
        raise ValueError(
            f"Received pattern='monarch' for {inputs} inputs and {outputs} outputs "
            f"with block_size={block_size}; expected the smaller number to be at least "
            "twice the block size, and a multiple of it."
        )
    nearest = min(
        groups,
        key=lambda n: abs(middle * (inputs + outputs) / n / inputs / outputs - density),
    )
    mask = np.eye(nearest, dtype=bool)
    return (
        _grouped(mask, inputs, middle, block_size),
        _grouped(mask, middle, outputs, block_size),
    )


def _grouped(mask: np.ndarray, inputs: int, outputs: int, unit: int) -> Layout:
    """Makes a layout of which groups meet."""
    sizes = _equal_groups(mask.shape, inputs, outputs, unit)
    if sizes is not None:
        return Layout(mask, sizes)
    into, out = (
        np.arange(blocks) * groups // blocks
        for blocks, groups in zip(
            (_ceil(inputs, unit), _ceil(outputs, unit)), mask.shape, strict=True
        )
    )
    return Layout(mask[np.ix_(into, out)], (unit, unit))


def _equal_groups(groups, inputs, outputs, unit) -> tuple[int, int] | None:
    """Inputs and outputs of equal groups; None if filling them up would add much."""
    sizes = tuple(
        _ceil(_ceil(features, unit), number) * unit
        for features, number in zip((inputs, outputs), groups, strict=True)
    )
    size = sizes[0] * groups[0] * sizes[1] * groups[1]
    return sizes if size <= _MOST_FILLED * inputs * outputs else None


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


# Patterns of single blocks.


def _local_strided(rows, columns, density, random):
    """Blocks near the diagonal, and each s-th one (Sparse Transformers, Child 2019).

    About half of the blocks are near the diagonal.
    """
    del random
    place = np.arange(rows)[:, None] * columns // rows
    apart = np.abs(place - np.arange(columns))
    if columns > rows:
        place = np.arange(columns) * rows // columns
        apart = np.abs(np.arange(rows)[:, None] - place)
    side = min(rows, columns)
    half = max(1, round(density * side / 2))
    near = apart <= (half - 1) / 2

    def with_stride(stride):
        return near | (apart % stride == 0)

    strides = range(1, side + 1)
    nearest = min(strides, key=lambda s: abs(with_stride(s).mean() - density))
    return with_stride(nearest)


def _random(rows, columns, density, random):
    """Random blocks, about as many in each row as in each column.

    Each column takes those rows that have the fewest so far.
    """
    mask = np.zeros((rows, columns), bool)
    total = max(1, round(density * rows * columns))
    counts = np.arange(1, columns + 1) * total // columns
    counts = np.diff(counts, prepend=0)
    for column in random.permutation(columns):
        taken = np.lexsort((random.random_sample(rows), mask.sum(1)))
        mask[taken[: counts[column]], column] = True
    return mask


def _erdos_renyi(rows, columns, density, random):
    """Any blocks, each as likely as any other."""
    mask = np.zeros(rows * columns, bool)
    total = max(1, round(density * mask.size))
    mask[random.permutation(mask.size)[:total]] = True
    return mask.reshape(rows, columns)


def _barabasi_albert(rows, columns, density, random):
    """A graph whose nodes join those that many others have joined; and the diagonal.

    So a few inputs and outputs meet most others. (Barabasi and Albert 1999; for weights
    in Gray, Radford and Kingma 2017.)
    """
    nodes = max(rows, columns)

    def share(joined):
        return (2 * joined * (nodes - joined) + nodes) / nodes**2

    # Beyond half of the nodes there is no more to join.
    choices = range(1, max(2, nodes // 2 + 1))
    joined = min(choices, key=lambda m: abs(share(m) - density))
    mask = np.eye(nodes, dtype=bool)
    ends = list(range(joined))
    for node in range(joined, nodes):
        # A node is as often in the list as it has neighbours.
        found = set()
        while len(found) < joined:
            found.add(ends[random.randint(len(ends))])
        for other in found:
            mask[node, other] = mask[other, node] = True
        # In an order that no version of Python changes: saved models need the same.
        ends += [*sorted(found), *[node] * joined]
    order = random.permutation(nodes)
    return mask[np.ix_(order, order)][:rows, :columns]


_OF_GROUPS = {
    "block_diagonal": _block_diagonal,
    "butterfly": _butterfly,
    "monarch": _monarch,
}
_OF_BLOCKS: dict[str, _Maker] = {
    "local_strided": _local_strided,
    "random": _random,
    "erdos_renyi": _erdos_renyi,
    "barabasi_albert": _barabasi_albert,
}
