"""What tests are told that TensorFlow executed."""

import tensorflow as tf

from tests import executed


def _partition(exchanged):
    graph = tf.compat.v1.GraphDef()
    for op, tensor in exchanged:
        graph.node.add(op=op).attr["tensor_name"].s = tensor
    return graph


def test_graphs_that_are_reported_as_one_are_told_apart():
    """TensorFlow reports what two threads start at once as one graph."""
    first = [_partition([("_Send", b"a")]), _partition([("_Recv", b"a")])]
    second = [_partition([("_Send", b"b"), ("_Recv", b"c")]), _partition([])]
    third = _partition([("_Send", b"c"), ("_Recv", b"b")])
    groups = executed._connected([first[0], *second, first[1], third])
    assert [len(group) for group in groups] == [1, 2, 2]
    assert first in groups
