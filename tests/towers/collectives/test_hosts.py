"""What hosts send one another, as far as one process can tell."""

import numpy as np
import pytest
import tensorflow as tf

from towers.cluster import server
from towers.cluster.heartbeat import HostFailedError
from towers.collectives import hosts
from towers.keras_adapter import runtime
from towers.model import arguments
from towers.plan import Plan

TYPES = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "uint8",
    "int32",
    "uint32",
    "int64",
]


class _Alone(hosts.Cluster):
    """A host of which nobody else has anything: what it sums is what it has."""

    def __init__(self, count=3, index=1):
        super().__init__([f"host {k}" for k in range(count)], index, timeout_s=1.0)
        self.sums = []

    def _sum_one(self, buffer, purpose):
        self.sums.append((purpose, buffer.dtype.name, buffer.shape))
        return tf.identity(buffer)

    def tell_all(self, value):
        return [value] * self.count


def _values(dtype):
    numbers = np.array([[0, 1, 2], [3, 100, 250]])
    return tf.cast(tf.constant(numbers), dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_sum_keeps_type_and_value(dtype):
    value = _values(dtype)
    (found,) = _Alone().sum([value], "test")
    assert found.dtype == value.dtype and found.shape == value.shape
    np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize("least", [-(2**63), -1, 2**40 + 3])
def test_integers_are_added_as_integers(least):
    (found,) = _Alone().sum([tf.constant(least, tf.int64)], "test")
    assert int(found) == least


def test_one_buffer_for_all_but_float64():
    alone = _Alone()
    nest = {"loss": tf.ones([]), "state": [tf.ones([2], tf.int64), None]}
    nest |= {"wide": tf.ones([3], tf.float64)}
    found = alone.sum(nest, "step")
    assert [(dtype, *shape) for _, dtype, shape in alone.sums] == [
        ("float64", 3),
        ("float32", 9),
    ]
    tf.nest.assert_same_structure(found, nest)


def test_buckets_begin_with_the_last_gradients(monkeypatch):
    monkeypatch.setattr(hosts, "_BUCKET_BYTES", 40)
    alone = _Alone()
    alone.sum([tf.ones([10]), tf.ones([4]), tf.ones([3]), tf.ones([3])], "step")
    assert [shape[0] for _, _, shape in alone.sums] == [10, 10]
    assert len({purpose for purpose, *_ in alone.sums}) == 2


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("dtype", [*TYPES, "bool"])
def test_rows_are_placed(dtype, known):
    value, alone = _values(dtype), _Alone()
    start, total = (20, 33) if known else (tf.constant(20), tf.constant(33))
    found = alone.gather(value, start, total, "rows")
    assert found.shape == (33, 3) and found.dtype == value.dtype
    np.testing.assert_array_equal(found[20:22], value)
    assert not np.any(found[:20]) and not np.any(found[22:])


@pytest.mark.parametrize(
    "rows", [tf.constant(["text"]), tf.ragged.constant([[1], [2, 3]])]
)
def test_what_cannot_be_sent_is_refused(rows):
    with pytest.raises(ValueError, match=r"outputs of type .* on 3 hosts; expected"):
        _Alone().gather(rows, 0, 3, "outputs")


def test_asynchronous_is_for_one_host():
    arguments.check_hosts(1, "asynchronous")
    arguments.check_hosts(2, "replicated")
    with pytest.raises(ValueError, match="'asynchronous' on 2 hosts"):
        arguments.check_hosts(2, "asynchronous")


def test_sizes_that_are_not_known_are_few():
    rounded = {int(hosts._rounded_up(tf.constant(n))) for n in range(1, 4096)}
    assert len(rounded) < 90
    for n in (1, 15, 16, 17, 1000, 4095):
        assert n <= int(hosts._rounded_up(tf.constant(n))) <= n + n // 8 + 1


def test_minus_zero_and_nan_are_broadcast_to_the_bit():
    value = tf.constant([-0.0, np.nan, np.inf, 1e-45])
    (found,) = _Alone(index=0).first([value], "variables")
    assert found.numpy().tobytes() == value.numpy().tobytes()
    # Others have what the first sends: here, nobody does.
    (found,) = _Alone(index=1).first([value], "variables")
    assert not found.numpy().tobytes().strip(b"\0")


def test_rows_of_slices_are_joined():
    slices = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([5, 0]), tf.constant([9, 2])
    )
    (found,) = _Alone().sum([slices], "step")
    np.testing.assert_array_equal(found.values, slices.values)
    np.testing.assert_array_equal(found.indices, slices.indices)


def test_a_key_belongs_to_a_purpose_a_type_and_a_size():
    known, found = hosts._key("gradients float32", 70), tf.constant(70, tf.int64)
    assert known == int(hosts._key("gradients float32", found)) < 2**31
    others = {hosts._key("gradients float32", n) for n in range(1000)}
    assert len(others) == 1000
    assert known != hosts._key("state float32", 70)


def test_a_plan_numbers_the_towers_of_all_hosts():
    plan = Plan.of(["/device:CPU:0", "/device:CPU:1"], (1, 2), "", hosts=_Alone())
    assert [tower.index for tower in plan.towers] == [2, 3]
    assert plan.count == 6 and plan.split_ratios == (1, 2) * 3
    assert plan.sizes(18) == [2, 4]
    assert plan.bounds(18) == [(6, 8), (8, 12)]
    assert [float(f) for f in plan.fractions([2, 4], 18)] == pytest.approx(
        [1 / 9, 2 / 9]
    )
    # Of a small batch, the first towers of all get the rows.
    assert plan.sizes(1) == [0, 0]


def test_a_host_that_waits_hears_of_a_failure(monkeypatch):
    """Otherwise it would wait for what a host that has ended was to write."""

    def nothing(key, timeout_s):
        raise tf.errors.DeadlineExceededError(None, None, f"no {key}")

    def failed(wait):
        raise HostFailedError("host 0 has ended")

    monkeypatch.setattr(runtime, "read_key", nothing)
    with pytest.raises(tf.errors.DeadlineExceededError):
        hosts.Cluster(["a", "b"], 1, timeout_s=0.0).broadcast(None)
    monkeypatch.setattr(server, "check", failed)
    with pytest.raises(HostFailedError):
        hosts.Cluster(["a", "b"], 1, timeout_s=600.0).broadcast(None)
