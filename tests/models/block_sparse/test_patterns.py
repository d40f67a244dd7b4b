"""Patterns of blocks: as many as asked for, where their definitions say."""

import hashlib
import re
import warnings

import numpy as np
import pytest

from towers.models.block_sparse.layout import checked_mask
from towers.models.block_sparse.patterns import layouts, names

SIZES = (
    *((256, 256, 16), (512, 128, 32), (128, 512, 32), (96, 96, 8), (256, 384, 64)),
    *((250, 250, 16), (70, 64, 8), (64, 70, 8), (150, 128, 32), (128, 150, 32)),
    *((1000, 300, 16), (7, 5, 1), (8, 8, 8), (3, 200, 8), (200, 3, 8), (1, 1, 32)),
    *((64, 64, 5), (2, 2, 1), (16, 16, 8), (24, 40, 8)),
)
SPARSITIES = 0, 0.1, 0.25, 0.5, 0.6, 0.75, 0.8, 0.9, 0.95, 0.99
RANDOM = "random", "erdos_renyi", "barabasi_albert"
OF_BLOCKS = "local_strided", *RANDOM


def _mask(pattern, rows, columns, sparsity, seed=0):
    """A mask of blocks that are single numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (layout,) = layouts(pattern, rows, columns, 1, sparsity, seed)
    assert layout.shape == (rows, columns)
    # Blocks that are larger count as many.
    return np.kron(layout.mask, np.ones(layout.block_shape)).astype(bool)


def _asked(pattern, inputs, outputs, size, sparsity):
    """The layouts, and what was said of them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = layouts(pattern, inputs, outputs, size, sparsity)
    return made, [str(each.message) for each in caught]


def _has_monarch(inputs, outputs, size):
    middle = min(inputs, outputs)
    return middle % size == 0 and middle // size > 1


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("pattern", names())
def test_the_share_is_near_or_told(pattern, sparsity):
    for inputs, outputs, size in SIZES:
        if pattern == "monarch" and not _has_monarch(inputs, outputs, size):
            continue
        made, said = _asked(pattern, inputs, outputs, size, sparsity)
        numbers = sum(each.mask.sum() * np.prod(each.block_shape) for each in made)
        rows, columns = -(-inputs // size) * size, -(-outputs // size) * size
        found = 1 - numbers / rows / columns
        if abs(found - sparsity) <= 0.05:
            assert not said
            continue
        (message,) = said
        # No rounding of 0.
        assert (
            f"{pattern!r} has a sparsity of {found:.2f} at {inputs} inputs" in message
        )
        assert (
            f"{outputs} outputs with block_size={size}, instead of {sparsity};"
            in message
        )


@pytest.mark.parametrize("pattern", names())
def test_layouts_cover_the_matrix(pattern):
    for inputs, outputs, size in SIZES:
        if pattern == "monarch" and not _has_monarch(inputs, outputs, size):
            continue
        made, _ = _asked(pattern, inputs, outputs, size, 0.75)
        assert len(made) == (2 if pattern == "monarch" else 1)
        assert made[0].shape[0] >= inputs and made[-1].shape[1] >= outputs
        for each in made:
            assert each.mask.dtype == bool and each.mask.any()
            assert not any(side % size for side in each.block_shape)
        if pattern in OF_BLOCKS:
            shape = -(-inputs // size), -(-outputs // size)
            assert made[0].mask.shape == shape
            assert made[0].block_shape == (size, size)


@pytest.mark.parametrize("pattern", names())
def test_nothing_is_said_of_what_can_be(pattern):
    """At sizes and sparsities that all of them have."""
    for sparsity in 0.5, 0.75:
        _, said = _asked(pattern, 512, 512, 16, sparsity)
        assert not said


# Each pattern


@pytest.mark.parametrize("groups", (1, 2, 3, 4, 8))
def test_block_diagonal(groups):
    mask = _mask("block_diagonal", 24, 48, 1 - 1 / groups)
    expected = np.zeros((24, 48), bool)
    for group in range(groups):
        rows, columns = 24 // groups, 48 // groups
        expected[group * rows :, group * columns :][:rows, :columns] = True
    np.testing.assert_array_equal(mask, expected)


def test_block_diagonal_of_equal_groups_has_large_blocks():
    (layout,) = layouts("block_diagonal", 512, 256, 32, 0.75)
    assert layout.mask.tolist() == np.eye(4).tolist()
    assert layout.block_shape == (128, 64)


@pytest.mark.parametrize("rows, columns", ((7, 7), (7, 11), (11, 7), (5, 23)))
def test_block_diagonal_of_uneven_groups(rows, columns):
    """Each row and column is in one group, and groups are as large but for one."""
    mask = _mask("block_diagonal", rows, columns, 0.67)
    kinds, counts = np.unique(mask, axis=0, return_counts=True)
    assert len(kinds) == 3
    assert (kinds.sum(0) == 1).all()
    for sizes in counts, kinds.sum(1):
        assert np.ptp(sizes) <= 1


def test_butterfly_by_hand():
    """Of 8 blocks, those meet whose numbers differ in the first or second bit."""
    (layout,) = layouts("butterfly", 8 * 16, 8 * 16, 16, 1 - 3 / 8)
    expected = [
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 0],
        [1, 0, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 0, 1],
        [0, 0, 0, 0, 1, 0, 1, 1],
        [0, 0, 0, 0, 0, 1, 1, 1],
    ]
    assert layout.mask.astype(int).tolist() == expected


@pytest.mark.parametrize("bits", (1, 2, 3, 4, 5, 6))
def test_butterfly(bits):
    """Pixelated Butterfly: i and j meet if they are equal or differ by a power of 2.

    (In one bit, that is, of the first ones.)
    """
    density = (1 + bits) / 64
    (layout,) = layouts("butterfly", 64, 64, 1, 1 - density)
    # The same share can be had with more bits, and larger blocks.
    groups = len(layout.mask)
    used = round(groups * density) - 1
    assert used >= bits
    powers = {2**bit for bit in range(used)}
    expected = [
        [i == j or i ^ j in powers for j in range(groups)] for i in range(groups)
    ]
    assert layout.mask.tolist() == expected
    assert layout.block_shape == (64 // groups,) * 2


def test_butterfly_of_a_rectangle():
    (layout,) = layouts("butterfly", 128, 512, 16, 0.5)
    assert layout.mask.shape == (8, 8) and layout.block_shape == (16, 64)
    assert (layout.mask.sum(0) == 4).all()
    (uneven,) = layouts("butterfly", 9 * 16, 32 * 16, 16, 0.5)
    assert uneven.mask.shape == (9, 32)
    # Groups of one or two rows, and of four columns.
    assert {*uneven.mask.sum(1)} == {16} and {*uneven.mask.sum(0)} <= {4, 5}


def test_local_strided_by_hand():
    mask = _mask("local_strided", 10, 10, 0.6)
    rows, columns = np.indices((10, 10))
    apart = np.abs(rows - columns)
    np.testing.assert_array_equal(mask, (apart <= 0) | (apart % 3 == 0))


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("side", (8, 16, 33, 64))
def test_local_strided(side, sparsity):
    """Blocks are there by how far they are from the diagonal: near, or each s-th."""
    mask = _mask("local_strided", side, side, sparsity)
    np.testing.assert_array_equal(mask, mask.T)
    for apart in range(side):
        assert len({*np.diagonal(mask, apart)}) == 1
    there = mask[0]
    numbers = np.arange(side)
    assert any(
        (there == ((numbers <= near) | (numbers % stride == 0))).all()
        for near in range(side)
        for stride in range(1, side + 1)
    )


@pytest.mark.parametrize("rows, columns", ((10, 40), (13, 40)))
def test_local_strided_of_a_rectangle(rows, columns):
    mask = _mask("local_strided", rows, columns, 0.75)
    assert mask[np.arange(columns) * rows // columns, np.arange(columns)].all()
    np.testing.assert_array_equal(_mask("local_strided", columns, rows, 0.75), mask.T)


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("rows, columns", ((16, 16), (7, 30), (30, 7), (1, 9), (64, 3)))
def test_random_is_even(rows, columns, sparsity):
    mask = _mask("random", rows, columns, sparsity)
    assert mask.sum() == max(1, round((1 - sparsity) * rows * columns))
    assert np.ptp(mask.sum(0)) <= 1 and np.ptp(mask.sum(1)) <= 1


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("rows, columns", ((16, 16), (7, 30), (30, 7), (1, 9), (1, 1)))
def test_erdos_renyi(rows, columns, sparsity):
    mask = _mask("erdos_renyi", rows, columns, sparsity)
    assert mask.sum() == max(1, round((1 - sparsity) * rows * columns))


@pytest.mark.parametrize("pattern", ("random", "erdos_renyi"))
def test_each_block_is_as_likely(pattern):
    masks = np.stack([_mask(pattern, 6, 8, 0.75, seed) for seed in range(600)])
    # Those of a column, for "random".
    expected = masks.mean((0, 1)) if pattern == "random" else masks.mean()
    # Five standard deviations.
    apart = np.abs(masks.mean(0) - expected)
    assert apart.max() < 5 * (0.25 * 0.75 / len(masks)) ** 0.5


@pytest.mark.parametrize("sparsity", (0.5, 0.75, 0.9, 0.95))
@pytest.mark.parametrize("side", (16, 64, 150))
def test_barabasi_albert(side, sparsity):
    mask = _mask("barabasi_albert", side, side, sparsity)
    np.testing.assert_array_equal(mask, mask.T)
    assert mask.diagonal().all()
    # Each node joins as many; the first ones, which are as many, join none.
    degrees = mask.sum(0) - 1
    (joined,) = (
        number
        for number in range(1, side // 2 + 1)
        if degrees.sum() == 2 * number * (side - number)
    )
    assert (degrees >= joined).sum() >= side - joined
    assert degrees.min() >= 1


@pytest.mark.parametrize("seed", range(4))
def test_barabasi_albert_has_hubs(seed):
    degrees = _mask("barabasi_albert", 128, 128, 0.95, seed).sum(0)
    assert degrees.max() > 5 * np.median(degrees)
    even = _mask("erdos_renyi", 128, 128, 0.95, seed).sum(0)
    assert degrees.max() > 1.5 * even.max()
    # Hubs are anywhere.
    hubs = {_mask("barabasi_albert", 128, 128, 0.95, s).sum(0).argmax() for s in (1, 2)}
    assert len(hubs) == 2


@pytest.mark.parametrize("rows, columns", ((40, 64), (64, 40)))
def test_barabasi_albert_of_a_rectangle(rows, columns):
    """It is cut out of the square one."""
    square = _mask("barabasi_albert", 64, 64, 0.8)
    mask = _mask("barabasi_albert", rows, columns, 0.8)
    np.testing.assert_array_equal(mask, square[:rows, :columns])


@pytest.mark.parametrize("pattern", names())
@pytest.mark.parametrize("rows, columns", ((32, 32), (32, 64), (64, 32)))
def test_every_row_and_column_has_a_block(rows, columns, pattern):
    if pattern in ("monarch", "erdos_renyi", "barabasi_albert"):
        pytest.skip("two matrices, or blocks at random")
    mask = _mask(pattern, rows, columns, 0.75)
    assert mask.any(0).all() and mask.any(1).all()


@pytest.mark.parametrize("inputs, outputs", ((64, 64), (64, 128), (256, 64)))
def test_monarch_is_two_block_diagonal_matrices(inputs, outputs):
    """Their product is in test_dense.py."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = layouts("monarch", inputs, outputs, 8, 0.5)
    assert first.shape == (inputs, min(inputs, outputs))
    assert second.shape == (min(inputs, outputs), outputs)
    for each in first, second:
        np.testing.assert_array_equal(each.mask, np.eye(len(each.mask)))
    assert len(first.mask) == len(second.mask)


# Seeds. Saved models hold a seed, not a mask: masks must stay.

PINNED = {
    ("random", 0): "939619bae4909650",
    ("random", 1): "fee7466a366387db",
    ("erdos_renyi", 0): "2136c8030e4c3eba",
    ("erdos_renyi", 1): "f1b5daf8352a63d2",
    ("barabasi_albert", 0): "7c5f4b53ec868759",
    ("barabasi_albert", 1): "fa5c8936f59d6a78",
}


@pytest.mark.parametrize("pattern, seed", PINNED)
def test_masks_of_a_seed_never_change(pattern, seed):
    digest = hashlib.sha256()
    for rows, columns, sparsity in (32, 32, 0.75), (24, 50, 0.9), (50, 24, 0.5):
        digest.update(np.packbits(_mask(pattern, rows, columns, sparsity, seed)))
    assert digest.hexdigest()[:16] == PINNED[pattern, seed]


@pytest.mark.parametrize("pattern", names())
def test_seeds(pattern):
    def masks(seed):
        return [each.mask for each in layouts(pattern, 256, 256, 8, 0.75, seed)]

    same = [np.array_equal(*pair) for pair in zip(masks(3), masks(3), strict=True)]
    other = [np.array_equal(*pair) for pair in zip(masks(3), masks(4), strict=True)]
    assert all(same)
    # Seeds tell which bits a butterfly has, too.
    assert all(other) == (pattern not in (*RANDOM, "butterfly"))


def test_the_program_s_random_numbers_are_left_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].tolist()
    for pattern in RANDOM:
        layouts(pattern, 64, 64, 4, 0.75)
    assert np.random.get_state()[1].tolist() == before


# Given matrices


def test_a_given_matrix():
    mask = [[1, 0, 0], [0, 0, 1]]
    made, said = _asked(mask, 30, 40, 16, 2 / 3)
    assert not said
    assert made[0].mask.astype(int).tolist() == mask
    assert made[0].block_shape == (16, 16)
    # It has its own sparsity.
    assert not _asked(mask, 30, 40, 16, 0)[1]


@pytest.mark.parametrize("kind", (bool, "int8", "float32"))
def test_types_of_a_given_matrix(kind):
    mask = checked_mask(np.eye(3).astype(kind))
    assert mask.dtype == bool and (mask == np.eye(3)).all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"pattern": "other"}, "pattern='other'; expected one of block_diagonal, butt"),
        (
            {"pattern": np.eye(3)},
            "shape (3, 3); expected (4, 5), the blocks of 16 in 60",
        ),
        (
            {"pattern": np.zeros((4, 5))},
            "0 values other than 0 and 1, and 0 of 1; expected a matrix",
        ),
        (
            {"pattern": np.eye(4, 5) * 3},
            "4 values other than 0 and 1, and 0 of 1; expected a matrix",
        ),
        (
            {"pattern": [1, 0]},
            "shape (2,) with 0 values other than 0 and 1, and 1 of 1",
        ),
        ({"block_size": 0}, "block_size=0; expected a whole number of at least 1"),
        ({"block_size": 8.0}, "block_size=8.0; expected a whole number of at least 1"),
        ({"sparsity": 1}, "sparsity=1; expected at least 0 and less than 1, such as"),
        ({"sparsity": -0.1}, "sparsity=-0.1; expected at least 0 and less than 1"),
        ({"sparsity": float("nan")}, "sparsity=nan; expected at least 0"),
        (
            {"pattern": "monarch"},
            "pattern='monarch' for 60 inputs and 80 outputs with block_size=16; "
            "expected the smaller number to be at least twice the block size",
        ),
        ({"pattern": "monarch", "inputs": 16}, "for 16 inputs and 80 outputs"),
    ],
)
def test_errors(arguments, message):
    arguments = {"pattern": "random", "block_size": 16, "sparsity": 0.5, **arguments}
    with pytest.raises(ValueError, match=re.escape(message)):
        layouts(**{"inputs": 60, "outputs": 80, **arguments})


@pytest.mark.parametrize("sparsity", [0.5, 0.75, 0.9])
def test_butterflies_of_several_seeds_mix_all_features(sparsity):
    reach = None
    for seed in range(8):
        (layout,) = layouts("butterfly", 4096, 4096, 32, sparsity, seed)
        step = layout.mask.astype(int)
        reach = step if reach is None else np.minimum(reach @ step, 1)
    assert reach.all()
