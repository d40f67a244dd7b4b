import numpy as np
import pytest
import tensorflow as tf

from towers.collectives import batch


@pytest.mark.parametrize(
    ("total", "shares", "sizes"),
    [
        (11, (1, 1, 1, 1), [3, 3, 3, 2]),
        (2, (1, 1, 1, 1), [1, 1, 0, 0]),
        # Keras's old get_slice gave 0, 0, 0, 3.
        (3, (1, 1, 1, 1), [1, 1, 1, 0]),
        (8, (1, 1, 1, 1), [2, 2, 2, 2]),
        (0, (1, 1), [0, 0]),
        (7, (1,), [7]),
        (64, (2, 3, 3), [16, 24, 24]),
        (65, (2, 3, 3), [17, 24, 24]),
        (5, (1, 1, 10), [1, 0, 4]),
        (1, (1, 10), [1, 0]),
    ],
)
def test_cut(total, shares, sizes):
    assert batch.cut(total, shares) == sizes


@pytest.mark.parametrize(("total", "shares"), [(-1, (1, 1)), (3, ()), (3, (1, 0))])
def test_cut_refuses(total, shares):
    with pytest.raises(ValueError, match=f"total={total} and split_ratios="):
        batch.cut(total, shares)


@pytest.mark.parametrize("shares", [(1, 1, 1, 1), (2, 3, 3, 1)])
@pytest.mark.parametrize("total", range(12))
def test_bounds_of_tensors_equal_those_of_integers(total, shares):
    of_int = batch.split_bounds(total, shares)
    of_tensor = batch.split_bounds(tf.constant(total), shares)
    assert of_int == [(int(a), int(b)) for a, b in of_tensor]
    assert [end - start for start, end in of_int] == batch.cut(total, shares)
    assert total == 0 or of_int[0] != (0, 0)


def _nest():
    return {
        "dense": tf.reshape(tf.range(15), [5, 3]),
        "ragged": tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]]),
        "sparse": tf.sparse.from_dense([[0, 1], [2, 0], [0, 0], [3, 4], [0, 5]]),
        "none": None,
    }


@pytest.mark.parametrize("compiled", [False, True])
def test_shares_join_to_the_batch(compiled):
    def cut_and_join(whole):
        bounds = batch.split_bounds(batch.batch_size(whole), (1, 1, 1))
        shares = [batch.take(whole, start, end) for start, end in bounds]
        return batch.join(shares, [end - start for start, end in bounds])

    if compiled:
        cut_and_join = tf.function(cut_and_join, autograph=False)
    whole = _nest()
    joined = cut_and_join(whole)
    assert joined["none"] is None
    np.testing.assert_array_equal(joined["dense"], whole["dense"])
    assert joined["ragged"].to_list() == whole["ragged"].to_list()
    np.testing.assert_array_equal(
        tf.sparse.to_dense(joined["sparse"]), tf.sparse.to_dense(whole["sparse"])
    )


def test_take_gives_the_rows():
    part = batch.take(_nest(), 1, 4)
    np.testing.assert_array_equal(part["dense"], [[3, 4, 5], [6, 7, 8], [9, 10, 11]])
    assert part["ragged"].to_list() == [[2, 3], [], [4, 5, 6]]
    np.testing.assert_array_equal(
        tf.sparse.to_dense(part["sparse"]), [[2, 0], [0, 0], [3, 4]]
    )


def test_join_with_an_idle_tower_whose_inner_size_is_unknown():
    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def join(rows):
        idle = tf.zeros([0, 0])
        idle.set_shape([None, None])
        return batch.join([rows, idle], [tf.shape(rows)[0], 0])

    assert join(tf.ones([2, 3])).shape == [2, 3]


def test_batch_size_of_nothing():
    with pytest.raises(ValueError, match="without any tensor"):
        batch.batch_size((None, None))


def test_fractions_sum_to_one():
    fractions = batch.fractions(batch.cut(11, (1, 1, 1, 1)))
    np.testing.assert_allclose(fractions, np.array([3, 3, 3, 2]) / 11, rtol=1e-6)
