import numpy as np
import pytest
import tensorflow as tf

from towers import batch


@pytest.mark.parametrize(
    ("total", "towers", "shares"),
    [
        (11, 4, [3, 3, 3, 2]),
        (2, 4, [1, 1, 0, 0]),
        # Keras's old get_slice gave 0, 0, 0, 3.
        (3, 4, [1, 1, 1, 0]),
        (8, 4, [2, 2, 2, 2]),
        (0, 2, [0, 0]),
        (7, 1, [7]),
    ],
)
def test_even_shares(total, towers, shares):
    assert batch.even_shares(total, towers) == shares


@pytest.mark.parametrize(("total", "towers"), [(-1, 2), (3, 0)])
def test_even_shares_refuses(total, towers):
    with pytest.raises(ValueError, match=f"total={total} and towers={towers}"):
        batch.even_shares(total, towers)


@pytest.mark.parametrize("total", range(12))
def test_bounds_of_tensors_equal_those_of_integers(total):
    of_int = batch.share_bounds(total, 4)
    of_tensor = batch.share_bounds(tf.constant(total), 4)
    assert of_int == [(int(a), int(b)) for a, b in of_tensor]
    assert [end - start for start, end in of_int] == batch.even_shares(total, 4)


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
        bounds = batch.share_bounds(batch.batch_size(whole), 3)
        shares = [batch.take(whole, start, end) for start, end in bounds]
        return batch.join(shares, [end - start for start, end in bounds])

    if compiled:
        cut_and_join = tf.function(cut_and_join)
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
    fractions = batch.fractions(tf.zeros([11, 2]), 4)
    np.testing.assert_allclose(fractions, np.array([3, 3, 3, 2]) / 11, rtol=1e-6)
