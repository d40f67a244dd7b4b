"""Products with block-sparse matrices: against a plain dense, masked product."""

import numpy as np
import pytest
import tensorflow as tf

from towers.models.block_sparse import block_sparse_matmul
from towers.models.block_sparse.layout import Layout, Reads
from towers.models.block_sparse.product import multiply, rows_of, slabs_of

pytestmark = pytest.mark.quick_one_in(3)


def _irregular(rows=7, columns=5):
    """From no block to all of them, and one row that has none."""
    mask = np.random.default_rng(3).random((rows, columns))
    mask = mask < np.linspace(0, 1, columns)
    mask[1] = False
    return mask


def _uneven():
    """Both directions have several groups with filling."""
    random = np.random.default_rng(4)
    return random.random((48, 40)) < random.uniform(0.02, 0.5, 40) ** 2


MASKS = {
    "one block": np.ones((1, 1)),
    "one of several": np.eye(3, 4) * [[0], [1], [0]],
    "full": np.ones((3, 2)),
    "diagonal": np.eye(4),
    "one row": np.array([[1, 0, 1]]),
    "one column": np.array([[0], [1], [1]]),
    "irregular": _irregular(),
    "irregular, transposed": _irregular().T,
    "uneven": _uneven(),
}
BLOCKS = (8, 8), (16, 16), (32, 32), (64, 64), (8, 24), (5, 3), (1, 1), (16, 1)
# How near the numbers are to those of float64, relative to the norm of each array.
LIMITS = {"float32": 1e-6, "float64": 1e-12, "bfloat16": 1e-2}


def _layout(name, block=(4, 3)):
    return Layout(np.asarray(MASKS[name], bool), block)


def _numbers(*shape, seed=0, dtype="float32"):
    return tf.cast(np.random.default_rng(seed).normal(size=shape), dtype)


def _operands(layout, leading=(6,), dtype="float32"):
    """Inputs, blocks and what the gradients of outputs are."""
    x = _numbers(*leading, layout.shape[0], dtype=dtype)
    blocks = _numbers(layout.num_blocks, *layout.block_shape, seed=1, dtype=dtype)
    return x, blocks, _numbers(*leading, layout.shape[1], seed=2, dtype=dtype)


def _matrix(blocks, layout, inputs=None):
    """The dense matrix, block by block in the documented order."""
    (into, out), mask = layout.block_shape, layout.mask
    matrix = np.zeros(layout.shape)
    places = [(i, o) for o, i in np.argwhere(mask.T)]
    for k, (block, (i, o)) in enumerate(zip(blocks, places, strict=True)):
        i = i if inputs is None else inputs[k]
        matrix[i * into :, o * out :][:into, :out] = block
    return matrix


def _cut(matrix, layout, inputs=None):
    """The blocks of a dense matrix."""
    (into, out), places = layout.block_shape, np.argwhere(layout.mask.T)
    inputs = places[:, 1] if inputs is None else inputs
    return np.stack(
        [
            matrix[i * into :, o * out :][:into, :out]
            for i, o in zip(inputs, places[:, 0], strict=True)
        ]
    )


def _results(product, x, matrix, upstream):
    """The product and its gradients."""
    with tf.GradientTape() as tape:
        tape.watch([x, matrix])
        y = product(x, matrix)
        loss = tf.reduce_sum(y * upstream)
    return [y, *tape.gradient(loss, [x, matrix])]


def _exact(x, blocks, upstream, layout, inputs=None):
    """The product and its gradients in numpy's float64."""
    x, blocks, upstream = (tf.cast(e, "float64").numpy() for e in (x, blocks, upstream))
    matrix = _matrix(blocks, layout, inputs)
    of_matrix = np.tensordot(x, upstream, ([*range(x.ndim - 1)],) * 2)
    return [x @ matrix, upstream @ matrix.T, _cut(of_matrix, layout, inputs)]


def _assert_near(found, expected, limit):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        apart = np.linalg.norm(tf.cast(mine, "float64") - theirs)
        assert apart <= limit * np.linalg.norm(theirs)


def test_masks_are_what_they_should_be():
    for groups in _layout("uneven").by_output, _layout("uneven").by_input:
        assert len(groups) > 2
        assert sum((group.slots < 0).any() for group in groups) > 1
    for name in "irregular", "irregular, transposed", "uneven":
        assert not all(MASKS[name].any(axis).all() for axis in (0, 1))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_equals_a_dense_product(name, block):
    if name == "uneven" and max(block) > 24:
        block = block[0] // 2, block[1] // 2
    layout = _layout(name, block)
    operands = _operands(layout)
    found = _results(lambda *a: block_sparse_matmul(*a, layout), *operands)
    _assert_near(found, _exact(*operands, layout), LIMITS["float32"])


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", ("full", "irregular", "uneven"))
def test_types(name, dtype):
    layout = _layout(name, (8, 16))
    operands = _operands(layout, dtype=dtype)
    found = _results(lambda *a: block_sparse_matmul(*a, layout), *operands)
    assert {each.dtype for each in found} == {tf.as_dtype(dtype)}
    _assert_near(found, _exact(*operands, layout), LIMITS[dtype])


@pytest.mark.parametrize(
    "leading", ((), (1,), (6,), (2, 3), (2, 1, 3), (0,), (2, 0)), ids=str
)
def test_axes_of_examples(leading):
    layout = _layout("irregular")
    operands = _operands(layout, leading)
    found = _results(lambda *a: block_sparse_matmul(*a, layout), *operands)
    _assert_near(found, _exact(*operands, layout), LIMITS["float32"])


def test_a_mask_and_arrays():
    """The layout, inputs and blocks may all be plain arrays or lists."""
    layout = _layout("irregular")
    x, blocks, _ = (each.numpy() for each in _operands(layout))
    expected = x @ _matrix(blocks, layout)
    for mask in layout.mask, layout.mask.astype(int).tolist(), layout.mask * 1.0:
        found = block_sparse_matmul(x, blocks, mask)
        _assert_near([found], [expected], LIMITS["float32"])


# In graphs


def _specs(layout, leading):
    """Inputs, blocks and what the gradients of outputs are."""
    blocks = layout.num_blocks, *layout.block_shape
    shapes = (*leading, layout.shape[0]), blocks, (*leading, layout.shape[1])
    return [*map(tf.TensorSpec, shapes)]


@pytest.mark.quick_one_in(15)
@pytest.mark.parametrize("xla", (False, True), ids=("", "xla"))
@pytest.mark.parametrize("leading", ((None,), (None, 3), (2, None), (None, None)))
@pytest.mark.parametrize("name", ("full", "uneven"))
def test_functions_of_unknown_sizes(name, leading, xla):
    layout = _layout(name)

    @tf.function(input_signature=_specs(layout, leading), jit_compile=xla)
    def function(*operands):
        results = _results(lambda *a: block_sparse_matmul(*a, layout), *operands)
        assert results[0].shape.as_list() == [*leading, layout.shape[1]]
        return results

    for size in (5,) if xla else (5, 2):
        sizes = [size if each is None else each for each in leading]
        operands = _operands(layout, sizes)
        expected = _exact(*operands, layout)
        _assert_near(function(*operands), expected, LIMITS["float32"])


@pytest.mark.parametrize("xla", (False, True), ids=("", "xla"))
def test_functions_of_known_sizes(xla):
    layout = _layout("uneven", (8, 8))
    operands = _operands(layout)
    function = tf.function(
        lambda *a: _results(lambda *b: block_sparse_matmul(*b, layout), *a),
        jit_compile=xla,
    )
    expected = _exact(*operands, layout)
    _assert_near(function(*operands), expected, LIMITS["float32"])


# Derivatives of derivatives


def _second(product, mask, x, matrix):
    """The gradients of the squares of gradients."""
    with tf.GradientTape() as outer:
        outer.watch([x, matrix])
        with tf.GradientTape() as inner:
            inner.watch([x, matrix])
            loss = tf.reduce_sum(product(x, matrix) ** 3)
        of_x, of_matrix = inner.gradient(loss, [x, matrix])
        penalty = tf.reduce_sum(of_x**2) + tf.reduce_sum((mask * of_matrix) ** 2)
    return outer.gradient(penalty, [x, matrix])


@pytest.mark.quick_one_in(12)
@pytest.mark.parametrize("mode", ("eager", "function", "xla"))
@pytest.mark.parametrize("name", ("one block", "full", "irregular", "uneven"))
def test_second_derivatives(name, mode):
    layout = _layout(name)
    x, blocks, _ = _operands(layout, (2, 2), "float64")
    # Of the dense matrix, only gradients where there are blocks count.
    mask = _matrix(np.ones(blocks.shape), layout)
    of_x, of_matrix = _second(
        lambda x, matrix: tf.tensordot(x, matrix, 1),
        *(mask, x, tf.constant(_matrix(blocks.numpy(), layout))),
    )
    expected = [of_x, _cut(of_matrix.numpy(), layout)]

    def second(x, blocks):
        return _second(lambda *a: block_sparse_matmul(*a, layout), 1.0, x, blocks)

    if mode != "eager":
        second = tf.function(second, jit_compile=mode == "xla")
    _assert_near(second(x, blocks), expected, LIMITS["float64"])


def test_third_derivatives():
    layout = _layout("irregular")
    x, blocks, _ = _operands(layout, dtype="float64")
    matrix = tf.constant(_matrix(blocks.numpy(), layout))
    ours, theirs = (
        _third(*pair)
        for pair in (
            (lambda x: block_sparse_matmul(x, blocks, layout), x),
            (lambda x: x @ matrix, x),
        )
    )
    _assert_near([ours], [theirs], LIMITS["float64"])


def _third(function, x):
    with tf.GradientTape() as one:
        one.watch(x)
        with tf.GradientTape() as two:
            two.watch(x)
            with tf.GradientTape() as three:
                three.watch(x)
                loss = tf.reduce_sum(function(x) ** 4)
            squares = tf.reduce_sum(three.gradient(loss, x) ** 2)
        squares = tf.reduce_sum(two.gradient(squares, x) ** 2)
    return one.gradient(squares, x)


# Places that are tensors


def _moved(layout):
    """Other input blocks: pairs exchange theirs, unless that makes two alike."""
    inputs, outputs = layout.inputs.copy(), layout.outputs
    places = {*zip(inputs, outputs, strict=True)}
    for a, b in np.random.default_rng(1).integers(layout.num_blocks, size=(500, 2)):
        new = (inputs[b], outputs[a]), (inputs[a], outputs[b])
        if not places & {*new}:
            places -= {(inputs[a], outputs[a]), (inputs[b], outputs[b])}
            places |= {*new}
            inputs[[a, b]] = inputs[[b, a]]
    return inputs


def _with_places(x, blocks, layout, inputs):
    y = multiply(slabs_of(x, layout), blocks, layout, Reads.of(layout, inputs))
    return rows_of(y, x, layout.shape[1])


@pytest.mark.quick_one_in(18)
@pytest.mark.parametrize("mode", ("eager", "function", "xla"))
@pytest.mark.parametrize("moved", (False, True), ids=("", "moved"))
@pytest.mark.parametrize("name", ("one block", "irregular", "uneven"))
def test_places_that_are_tensors(name, moved, mode):
    layout = _layout(name)
    inputs = _moved(layout) if moved else layout.inputs
    operands = _operands(layout)
    assert (inputs != layout.inputs).any() == (moved and name != "one block")

    def function(inputs, *operands):
        return _results(lambda *a: _with_places(*a, layout, inputs), *operands)

    if mode != "eager":
        function = tf.function(function, jit_compile=mode == "xla")
    found = function(tf.constant(inputs, tf.int32), *operands)
    _assert_near(found, _exact(*operands, layout, inputs), LIMITS["float32"])


@pytest.mark.parametrize("name", MASKS)
def test_reads_of_tensors_are_those_of_arrays(name):
    layout = _layout(name)
    inputs = _moved(layout)
    arrays, tensors = (Reads.of(layout, each) for each in (inputs, tf.constant(inputs)))
    for mine, theirs in (
        *zip(arrays.forward, tensors.forward, strict=True),
        *zip(arrays.backward, tensors.backward, strict=True),
        ([arrays.gradient], [tensors.gradient]),
    ):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


# Only blocks are computed


def _traced(layout, batch):
    """The operations of a product and its gradients."""

    @tf.function(input_signature=_specs(layout, (batch,)))
    def function(*operands):
        return _results(lambda *a: block_sparse_matmul(*a, layout), *operands)

    operations = function.get_concrete_function().graph.get_operations()
    assert not {op.type for op in operations if "Call" in op.type}
    return operations


def _sizes(tensors):
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    assert None not in sizes
    return sizes


def _sparse(rows, columns, seed=0):
    """A mask of which 90% are zero."""
    return np.random.default_rng(seed).random((rows, columns)) < 0.1


@pytest.mark.parametrize("rows, columns", ((32, 32), (24, 48), (48, 24)))
def test_nothing_is_as_large_as_the_dense_matrix(rows, columns):
    layout = Layout(_sparse(rows, columns), (16, 16))
    operations = _traced(layout, 4)
    largest = max(_sizes(output for op in operations for output in op.outputs))
    assert largest < np.prod(layout.shape) / 6


@pytest.mark.parametrize("rows, columns", ((32, 32), (24, 48), (48, 24)))
def test_only_blocks_are_multiplied(rows, columns):
    layout, batch = Layout(_sparse(rows, columns), (8, 8)), 16
    multiplied = 0
    for op in _traced(layout, batch):
        if "MatMul" in op.type:
            shared = op.inputs[0].shape[-2 if op.get_attr("adj_x") else -1]
            multiplied += op.outputs[0].shape.num_elements() * shared
    # The product, and a gradient of each operand.
    least = 3 * layout.size * batch
    # An eighth of a group may be filling; what has no block is multiplied by zeros.
    alone = (~layout.mask.any(0)).sum() + 2 * (~layout.mask.any(1)).sum()
    assert least <= multiplied <= 8 / 7 * least + alone * 8 * 8 * batch


@pytest.mark.parametrize("mask", ("sparse", "dense", "full row"))
def test_little_is_gathered_at_once(mask):
    masks = {"sparse": _sparse(40, 40), "dense": ~_sparse(40, 40)}
    masks["full row"] = masks["sparse"] | (np.arange(40) == 7)[:, None]
    layout, batch = Layout(masks[mask], (8, 8)), 5
    operations = _traced(layout, batch)
    features = [
        op
        for op in operations
        if op.type == "GatherV2" and op.outputs[0].shape.as_list()[2:] == [8, batch]
    ]
    assert len(features) > 1
    # Inputs and outputs are of one size.
    limit = 4 * layout.shape[0] * batch
    assert max(_sizes(op.outputs[0] for op in features)) <= limit
    # They are not all gathered at first: each waits for the product before. (It is the
    # constant of indices that waits.)
    waiting = [op for op in features if op.inputs[1].op.control_inputs]
    assert len(waiting) == len(features) - 2


# Layouts


@pytest.mark.parametrize("name", MASKS)
def test_dense_and_blocks_of_are_inverse(name):
    layout = _layout(name)
    _, blocks, _ = _operands(layout)
    matrix = layout.dense(blocks)
    np.testing.assert_array_equal(matrix, _matrix(blocks.numpy(), layout))
    np.testing.assert_array_equal(layout.blocks_of(matrix), blocks)
    # What is in no block is lost.
    other = _numbers(*layout.shape)
    np.testing.assert_array_equal(layout.blocks_of(other), _cut(other.numpy(), layout))
    kept = np.kron(layout.mask, np.ones(layout.block_shape)) * other
    np.testing.assert_array_equal(layout.dense(layout.blocks_of(other)), kept)


@pytest.mark.parametrize("name", MASKS)
def test_sizes(name):
    layout = _layout(name)
    number = int(MASKS[name].sum())
    assert (layout.num_blocks, layout.size) == (number, 12 * number)
    assert layout.shape == (4 * len(layout.mask), 3 * len(layout.mask[0]))


@pytest.mark.parametrize("name", MASKS)
def test_groups_have_each_row_once(name):
    """And each block once, with few more for filling."""
    layout = _layout(name)
    for groups, counts in (
        (layout.by_output, layout.mask.sum(0)),
        (layout.by_input, layout.mask.sum(1)),
    ):
        rows = np.concatenate([group.rows for group in groups])
        np.testing.assert_array_equal(np.sort(rows), np.arange(len(counts)))
        slots = np.concatenate([group.slots.ravel() for group in groups])
        there = np.sort(slots[slots >= 0])
        np.testing.assert_array_equal(there, np.arange(layout.num_blocks))
        for group in groups:
            np.testing.assert_array_equal((group.slots >= 0).sum(1), counts[group.rows])
            filled = (group.slots < 0).mean()
            assert filled <= 1 / 8 or counts[group.rows].max() == 0


# Errors


@pytest.mark.parametrize(
    "x, blocks, mask, message",
    [
        (
            (2, 8),
            (2, 4, 3),
            np.eye(3),
            r"shape \(2, 4, 3\); expected \(3, 4, 3\) for a",
        ),
        ((2, 8), (2, 4), np.eye(2), r"blocks of shape \(2, 4\); expected"),
        ((2, 8), (4, 2, 2, 3), np.eye(4), r"blocks of shape \(4, 2, 2, 3\); expected"),
        (
            *((2, 9), (2, 4, 3), np.eye(2)),
            r"x of shape \(2, 9\); expected 8 as the last axis, for 2 input blocks of",
        ),
        ((), (2, 4, 3), np.eye(2), r"x of shape \(\); expected 8 as the last axis"),
        *(
            ((2, 8), (2, 4, 3), mask, rf"layout of shape {shape}.*expected a matrix")
            for mask, shape in (
                (np.zeros((2, 2)), r"\(2, 2\)"),
                (np.diag([1, 2]), r"\(2, 2\) with 1 values other than 0 and 1"),
                (np.ones(2), r"\(2,\)"),
                (np.ones((1, 2, 2)), r"\(1, 2, 2\)"),
                ([], r"\(0,\)"),
            )
        ),
    ],
)
def test_errors(x, blocks, mask, message):
    with pytest.raises(ValueError, match=message):
        block_sparse_matmul(tf.zeros(x), tf.zeros(blocks), mask)


def test_an_error_in_a_function():
    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def function(x):
        return block_sparse_matmul(x, tf.zeros((2, 4, 3)), np.eye(2))

    message = r"shape \(None, None\); expected 8 as the last axis"
    with pytest.raises(ValueError, match=message):
        function(tf.zeros((2, 8)))


def test_a_layout_of_other_blocks():
    message = r"blocks of shape \(2, 4, 3\); expected \(2, 3, 4\)"
    with pytest.raises(ValueError, match=message):
        layout = Layout(np.eye(2, dtype=bool), (3, 4))
        block_sparse_matmul(tf.zeros((2, 6)), tf.zeros((2, 4, 3)), layout)
