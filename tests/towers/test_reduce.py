import numpy as np
import tensorflow as tf

from towers import reduce
from towers.dependence import Dependence


def test_gradients_are_added_in_order():
    towers = [[tf.fill([2], 1.0 + k), tf.fill([3, 1], 10.0 * k)] for k in range(3)]
    first, second = reduce.sum_gradients(towers)
    np.testing.assert_array_equal(first, [6.0, 6.0])
    np.testing.assert_array_equal(second, [[30.0], [30.0], [30.0]])


def test_missing_gradients_stay_missing():
    assert reduce.sum_gradients([[None], [None]]) == [None]


def test_sparse_gradients_stay_sparse():
    def rows(values, indices):
        return tf.IndexedSlices(
            tf.constant(values), tf.constant(indices), tf.constant([4, 1])
        )

    (total,) = reduce.sum_gradients(
        [[rows([[1.0], [2.0]], [0, 3])], [rows([[4.0]], [3])]]
    )
    assert isinstance(total, tf.IndexedSlices)
    np.testing.assert_array_equal(
        tf.convert_to_tensor(total), [[1.0], [0.0], [0.0], [6.0]]
    )


def test_16_bits_are_added_in_32():
    towers = [[tf.constant([value], tf.float16)] for value in (2048.0, 1.0, 1.0)]
    (total,) = reduce.sum_gradients(towers)
    assert total.dtype == tf.float16
    # In 16 bits, 2048 + 1 is 2048.
    np.testing.assert_array_equal(total, [2050.0])


def test_states_follow_their_rules():
    fractions = [tf.constant(0.75), tf.constant(0.25)]
    seed = tf.constant([5, 1], tf.int64)
    combined = reduce.combine_states(
        [
            [tf.constant([0.0, 4.0]), None, seed, tf.constant(3.0)],
            [tf.constant([8.0, 0.0]), None, seed + 99, tf.constant(4.0)],
        ],
        fractions,
        [Dependence.MEAN, None, Dependence.NONE, Dependence.SUM],
    )
    np.testing.assert_array_equal(combined[0], [2.0, 3.0])
    assert combined[1] is None
    np.testing.assert_array_equal(combined[2], [5, 1])
    assert float(combined[3]) == 7
