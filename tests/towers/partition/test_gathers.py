"""Gathers of sharded parameters: when they begin, what they share, what they copy."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.layers import parameters, sharded
from towers.partition.partitioned import Partitioned, judge
from towers.plan import Plan

DEVICES = "/device:CPU:0", "/device:CPU:1", "/device:CPU:2"
ROWS, WIDTH = 6, 5


def _weights(count, shape=(WIDTH, WIDTH)):
    random = np.random.default_rng(0)
    weights = [
        keras.Variable(random.normal(size=shape).astype("float32"), name=f"w{i}")
        for i in range(count)
    ]
    parameters.cut(weights, DEVICES, None)
    return weights


def _partitioned(function, weights):
    def traced(batch):
        with sharded.standing_in(weights):
            return function(*batch)

    handles = sharded.stand_ins(weights)
    spec = (tf.TensorSpec([None, WIDTH], tf.float32),)
    return Partitioned(judge(traced, spec, stand_ins=handles))


def _computed(partitioned, x):
    plan = Plan.of(DEVICES, [1] * 3, DEVICES[0])
    local = [(part,) for part in tf.split(x, 3)]
    call = tf.function(lambda: partitioned(plan, local, ROWS), autograph=False)
    return call()


def _chain(weights, x):
    for weight in weights:
        x = tf.tanh(x @ weight)
    return x


def _x():
    return tf.constant(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), tf.float32)


def _reads(partitioned):
    """Returns what reads shards, by the operation that each gather is for."""
    (phase, *_), *_ = partitioned.phases
    nodes = [n for n in phase.part.graph.node if n.op == "ReadVariableOp"]
    found = {}
    for node in nodes:
        _, taker, *_ = node.name.split("/")
        waits = [name[1:] for name in node.input if name.startswith("^")]
        found.setdefault(taker, set()).update(waits)
    return found


def test_a_gather_waits_for_the_one_before_the_last():
    weights = _weights(4)
    partitioned = _partitioned(functools.partial(_chain, weights), weights)
    names = ["matmul", "matmul_1", "matmul_2", "matmul_3"]
    waits = {
        name.lower(): {w.lower() for w in s} for name, s in _reads(partitioned).items()
    }
    assert waits == dict(
        zip(names, [set(), set(), {"matmul"}, {"matmul_1"}], strict=True)
    )
    expected = _chain([tf.constant(w.numpy()) for w in weights], _x())
    np.testing.assert_allclose(_computed(partitioned, _x()), expected, atol=1e-6)


def test_uses_that_follow_share_a_gather():
    weights = _weights(2)
    first, second = weights

    def function(x):
        return x @ first @ second @ first @ second

    partitioned = _partitioned(function, weights)
    assert len(_reads(partitioned)) == 2
    values = [tf.constant(w.numpy()) for w in weights]
    expected = _x() @ values[0] @ values[1] @ values[0] @ values[1]
    np.testing.assert_allclose(_computed(partitioned, _x()), expected, rtol=1e-5)


def test_an_operation_may_take_more_than_travel_at_once():
    weights = _weights(4)

    def function(x):
        return x @ tf.add_n([tf.convert_to_tensor(w) for w in weights])

    partitioned = _partitioned(function, weights)
    expected = _x() @ sum(w.numpy() for w in weights)
    np.testing.assert_allclose(_computed(partitioned, _x()), expected, atol=1e-5)


def test_an_operation_may_take_a_parameter_again_after_others():
    weights = _weights(3)

    def function(x):
        values = [tf.convert_to_tensor(w) for w in weights]
        return x @ tf.concat([*values, values[0]], 1)

    partitioned = _partitioned(function, weights)
    values = [w.numpy() for w in weights]
    expected = _x() @ np.concatenate([*values, values[0]], 1)
    np.testing.assert_allclose(_computed(partitioned, _x()), expected, atol=1e-5)


CHAINS = {
    "transposed": lambda w: tf.transpose(w),
    "cast": lambda w: tf.cast(tf.cast(w, tf.float64), tf.float32),
    "reshaped": lambda w: tf.reshape(tf.reshape(w, [-1]), [WIDTH, WIDTH]),
    "squeezed": lambda w: tf.squeeze(tf.expand_dims(w, 0), 0),
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_changes_the_layout_is_made_again(name):
    weights = _weights(1)

    def function(x):
        return x @ CHAINS[name](tf.convert_to_tensor(weights[0]))

    partitioned = _partitioned(function, weights)
    (phase, *_), *_ = partitioned.phases
    # No phase at home makes it, and sends it.
    assert phase.place.on_towers
    expected = _x() @ CHAINS[name](tf.constant(weights[0].numpy()))
    np.testing.assert_allclose(_computed(partitioned, _x()), expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (2,), (1, 4), (3, 2, 2), (7,), (2, 3)])
def test_parameters_of_any_shape(shape):
    weights = _weights(1, shape)
    value = weights[0].numpy()
    count = min(3, shape[0] if len(shape) == 2 else value.size)
    assert len(sharded.of(weights[0]).shards) == count

    def function(x):
        return tf.reduce_sum(x, axis=1) * tf.reduce_sum(weights[0] * weights[0])

    expected = tf.reduce_sum(_x(), axis=1) * (value**2).sum()
    computed = _computed(_partitioned(function, weights), _x())
    np.testing.assert_allclose(computed, expected, rtol=1e-5)


def test_a_returned_parameter_is_whole():
    weights = _weights(1)

    def function(x):
        return x @ weights[0], tf.convert_to_tensor(weights[0])

    _, whole = _computed(_partitioned(function, weights), _x())
    np.testing.assert_array_equal(whole, weights[0].numpy())


def test_a_function_that_assigns_a_parameter_is_refused():
    weights = _weights(1)

    def function(x):
        weights[0].assign(weights[0] * 0.5)
        return x @ weights[0]

    handles = sharded.stand_ins(weights)

    def traced(batch):
        with sharded.standing_in(weights):
            return function(*batch)

    spec = (tf.TensorSpec([None, WIDTH], tf.float32),)
    verdict = judge(traced, spec, stand_ins=handles)
    assert verdict.placement.assigned == parameters.of(weights)
    assert "changes a variable that is in parts" in verdict.refused
