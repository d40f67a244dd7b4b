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


def test_the_creation_of_a_variable_is_no_graph_of_ours():
    """TensorFlow reports the first ones of each kind, whatever test that is in."""
    name = "made_and_read"

    def make_and_read():
        # Nobody else makes such a one there.
        with tf.device("CPU:3"):
            variable = tf.Variable([[[[1.0]]]], dtype=tf.float64, name=name)
        return tf.function(lambda: variable + 1, autograph=False)()

    nodes = executed.run(make_and_read, name)
    assert "VarHandleOp" not in {node.op for each in nodes.values() for node in each}
