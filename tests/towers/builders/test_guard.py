"""What the guard takes for finite: each number is looked at, not their sum alone."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import executed
from tests.valued import valued
from towers import multi_gpu_model
from towers.builders.guard import Guard, StoppedStep, sums_are_finite
from towers.collectives import reduce
from towers.numerics.errors import NotFiniteStep

pytestmark = pytest.mark.quick_one_in(2)

TOWERS = "/device:CPU:1", "/device:CPU:2"


def _small(values):
    return tf.split(values, 24)


def _sparse(values):
    return [tf.IndexedSlices(values[:, None], tf.range(384)), None]


def _whole(values):
    return [values]


def _both(values):
    return [*_sparse(values), values]


def _before(guard, loss, towers, packs):
    """Guards an update with what towers have computed."""
    packed = []
    if packs:
        device = TOWERS[0]
        ends = [device, device]
        (_, sums), sent = reduce.all_reduce(towers, TOWERS, ends, "device")
        packed.append(sent)
    else:
        sums = reduce.sum_gradients(towers)
    return guard.before(tuple, loss, [sums], None, packed)


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("packs", [False, True], ids=["", "packed"])
@pytest.mark.parametrize(
    ("dtype", "large", "gradients"),
    [
        ("float32", 1e36, _small),
        ("float16", 3e4, _small),
        ("bfloat16", 1e36, _sparse),
        ("float32", 1e36, _both),
        ("float64", 1e306, _whole),
    ],
)
def test_only_numbers_that_are_not_finite_stop_a_step(dtype, large, gradients, packs):
    """Finite ones may add up to infinity, or to what is not a number."""
    guard, applied = Guard(), tf.Variable(0)

    @tf.function
    def step(values, loss):
        towers = [gradients(values), gradients(tf.zeros_like(values))]
        with _before(guard, loss, towers, packs):
            applied.assign_add(1)

    large = tf.constant(large, dtype)
    values = tf.fill([384], large)
    step(values, large)
    assert int(applied) == 1 and guard._stopped is None
    for wrong in (np.inf, -np.inf, np.nan):
        bad = tf.cast(wrong, dtype)
        one_bad = tf.tensor_scatter_nd_update(values, [[7]], [bad])
        for arguments in [(one_bad, large), (values, bad)]:
            with pytest.raises(StoppedStep), guard.raises():
                step(*arguments)
    assert int(applied) == 1


@pytest.mark.parametrize("packs", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_sum_over_towers_that_overflows_stops_a_step(dtype, packs):
    guard, applied = Guard(), tf.Variable(0)

    @tf.function
    def step(values):
        with _before(guard, tf.ones([]), [[values], [values]], packs):
            applied.assign_add(1)

    step(tf.fill([9], tf.as_dtype(dtype).max * 0.4))
    with pytest.raises(tf.errors.OutOfRangeError):
        step(tf.fill([9], tf.as_dtype(dtype).max * 0.6))
    assert int(applied) == 1


@pytest.mark.parametrize(
    ("dtype", "large"),
    [("float16", 1e3), ("bfloat16", 1e15), ("float32", 1e15), ("float64", 1e150)],
)
def test_ordinary_numbers_need_no_closer_look(dtype, large):
    small, large = tf.constant([0.1, -1], dtype), tf.constant([large, 0], dtype)
    assert sums_are_finite([small, large])
    for wrong in (np.inf, -np.inf, np.nan):
        assert not sums_are_finite([small, tf.constant([wrong, 0], dtype)])


@pytest.mark.slow
@pytest.mark.parametrize("builder", ["parameter_server", "replicated"])
def test_where_gradients_travel_packed_towers_look(builder):
    """Each reads its buffer once; what is beside it are scalars."""
    layers = [keras.layers.Dense(4, name=f"dense_{i}") for i in range(3)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    parallel = multi_gpu_model(
        model, TOWERS, **valued(builder, packed=True), check_numerics=True
    )
    parallel.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    fit = functools.partial(parallel.fit, x, x, batch_size=4, verbose=0, shuffle=False)
    nodes = executed.run(fit, "check_numerics")
    ours = {
        device: [node for node in each if "check_numerics/" in node.name]
        for device, each in nodes.items()
    }
    # What follows a branch is not computed, as long as it is not taken.
    looked = [device for device in TOWERS for n in ours[device] if n.op == "L2Loss"]
    assert looked == [*TOWERS]
    assert not [
        n for each in ours.values() for n in each if n.op in ("Sum", "ConcatV2")
    ]
    # Nor is it sent: what a branch takes is dead then.
    sent = [
        each
        for each in executed.transfers(nodes)
        if "check_numerics/" in each[3] and "check_numerics/cond/else/" not in each[3]
    ]
    assert sent
    assert all(dtype == tf.bool or "L2Loss" in name for *_, dtype, name in sent), sent

    weights = model.get_weights()
    x[-1, 2] = np.nan
    with pytest.raises(NotFiniteStep) as caught:
        parallel.fit(x[4:], x[4:], batch_size=4, verbose=0)
    assert caught.value.origin.tower == 1
    np.testing.assert_equal(model.get_weights(), weights)


def test_a_loss_scale_skips_only_what_overflows():
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=2.0
    )
    guard = Guard()
    for large in (1e36, np.inf):
        gradient = tf.fill([384], tf.constant(large, tf.float32))
        with guard.before(tuple, tf.ones([]), [[gradient]], optimizer):
            pass
    assert guard._stopped is None and guard._skipped == (1, 1)
