"""Values that are linear in sums over rows are put together of towers' parts."""

import numpy as np
import pytest
import tensorflow as tf

from towers.analysis import linear
from towers.analysis.dependence import Reader
from towers.analysis.layer_calls import recorded_layers

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def doubled(x, old):
    return x + x


def summed(x, old):
    return x - old


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(("following", "count"), [(doubled, 10), (summed, 1100)])
def test_the_work_grows_with_the_operations(following, count):
    """Nodes that share an input are read once, and a long sum needs no deep stack."""

    @tf.function(autograph=False)
    def part(rows, old, fraction):
        graph = tf.compat.v1.get_default_graph()
        with recorded_layers() as calls:
            reader = Reader(rows, calls)
            value = 0.5 * old + tf.reduce_sum(rows, axis=0)
            for _ in range(count):
                value = following(value, old)
            terms = linear.weights(reader, value)
            before = len(graph.get_operations())
            value = linear.weighted(value, terms, fraction)
        added.append(len(graph.get_operations()) - before)
        return value

    added, old = [], np.full(3, 0.25, np.float32)
    spec = tf.TensorSpec([None, 3])
    part = part.get_concrete_function(spec, tf.TensorSpec([3]), tf.TensorSpec([]))
    assert added[0] < 4 * count
    parts = [
        part(tf.constant(rows), tf.constant(old), tf.constant(len(rows) / 4))
        for rows in (ROWS[:1], ROWS[1:])
    ]
    expected = 0.5 * old + ROWS.sum(axis=0)
    for _ in range(count):
        expected = following(expected, old)
    np.testing.assert_allclose(sum(parts), expected, rtol=1e-4)
