import itertools

import numpy as np
import pytest
import tensorflow as tf

from towers import plan
from towers.collectives import reduce
from towers.collectives.world import Alone


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


def test_rows_by_indices_of_two_types_are_added():
    # A model may look up rows of one table by int32 and by int64 ids.
    narrow, wide = _rows([[1.0]], [2]), _rows([[4.0]], [2])
    narrow = tf.IndexedSlices(
        narrow.values, tf.cast(narrow.indices, tf.int32), narrow.dense_shape
    )
    total = reduce.add([narrow, wide])
    assert total.indices.dtype == tf.int64
    np.testing.assert_array_equal(tf.convert_to_tensor(total), [[0], [0], [5], [0]])


# All-reduce.

ALGORITHMS = ["cpu", "device", "ring", "nccl"]
CPUS = [f"/device:CPU:{k}" for k in range(4)]


def _parts(towers, shapes, dtype="float32", seed=0):
    """K x N gradients, each on its device: integers, which add up exactly."""
    random = np.random.default_rng(seed)
    parts = []
    for device in CPUS[:towers]:
        with tf.device(device):
            drawn = [random.integers(-8, 9, shape) for shape in shapes]
            parts.append([tf.constant(d.astype("float32"), dtype) for d in drawn])
    return parts


def _sums(parts):
    return [np.sum([g.numpy() for g in each], axis=0) for each in zip(*parts)]  # noqa: B905


def _assert_on(sums, device, expected):
    assert len(sums) == len(expected)
    for ours, theirs in zip(sums, expected, strict=True):
        assert ours.device.endswith(device)
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize("towers", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "shapes",
    [[(12,)], [(7,), (2, 2)], [(1,)], [()], [(3,), (), (0, 2), (2, 1, 2)], [(0, 2)]],
    ids=str,
)
def test_every_device_gets_the_sums(algorithm, towers, shapes):
    parts, devices = _parts(towers, shapes), CPUS[:towers]
    reduced, _ = reduce.all_reduce(parts, devices, devices, algorithm)
    assert len(reduced) == towers
    for device, sums in zip(devices, reduced, strict=True):
        _assert_on(sums, device, _sums(parts))
        assert [tuple(s.shape) for s in sums] == shapes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_devices_get_the_same_bits(algorithm):
    random = np.random.default_rng(0)
    devices = CPUS[:3]
    # Numbers whose sum depends on the order.
    parts = [
        [tf.constant(random.normal(size=1001) * 10.0**k, tf.float32)] for k in range(3)
    ]
    reduced, _ = reduce.all_reduce(parts, devices, devices, algorithm)
    for (sums,) in reduced[1:]:
        assert sums.numpy().tobytes() == reduced[0][0].numpy().tobytes()
    exact = np.sum([part[0].numpy().astype("float64") for part in parts], axis=0)
    np.testing.assert_allclose(reduced[0][0], exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_numbers_of_64_bits_are_added_in_64(algorithm):
    parts, devices = [[tf.constant([1.0 + 2.0**-40], tf.float64)]] * 2, CPUS[:2]
    for (sums,) in reduce.all_reduce(parts, devices, devices, algorithm)[0]:
        np.testing.assert_array_equal(sums, [2.0 + 2.0**-39])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce_adds_16_bits_in_32(algorithm, dtype):
    # In 16 bits, adding 1 to it changes nothing; adding 1 four times in 32 bits does.
    large = {"float16": 2048.0, "bfloat16": 512.0}[dtype]
    devices = CPUS[:4]
    ones = [large, 1.0, 1.0, 2.0]
    parts = [[tf.constant([value] * 5, dtype)] for value in ones]
    assert float(tf.constant(large, dtype) + tf.constant(1.0, dtype)) == large
    for (sums,) in reduce.all_reduce(parts, devices, devices, algorithm)[0]:
        assert sums.dtype == dtype
        np.testing.assert_array_equal(tf.cast(sums, tf.float32), [large + 4.0] * 5)


def _rows(values, indices, rows=4):
    values = tf.constant(values)
    shape = tf.constant([rows, *values.shape[1:]], tf.int64)
    return tf.IndexedSlices(values, tf.constant(indices, tf.int64), shape)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dense_sparse_and_missing_together(algorithm):
    devices = CPUS[:2]
    parts = [
        [tf.constant([1.0, 2.0, 3.0]), _rows([[1.0], [2.0]], [0, 3]), None],
        [tf.constant([10.0, 20.0, 30.0]), _rows([[4.0]], [3]), None],
    ]
    # One tower may have what the other has not, or has otherwise.
    parts[0] += [None, tf.constant([[1.0], [1.0], [1.0], [1.0]]), tf.constant([[5]])]
    parts[1] += [tf.constant([7.0]), _rows([[2.0]], [1]), tf.constant([[6]])]
    for device, sums in zip(
        devices, reduce.all_reduce(parts, devices, devices, algorithm)[0], strict=True
    ):
        dense, sparse, missing, once, mixed, integers = sums
        np.testing.assert_array_equal(dense, [11.0, 22.0, 33.0])
        assert isinstance(sparse, tf.IndexedSlices)
        assert sparse.values.device.endswith(device)
        np.testing.assert_array_equal(
            tf.convert_to_tensor(sparse), [[1.0], [0.0], [0.0], [6.0]]
        )
        assert missing is None
        np.testing.assert_array_equal(once, [7.0])
        assert once.device.endswith(device)
        np.testing.assert_array_equal(mixed, [[1.0], [3.0], [1.0], [1.0]])
        np.testing.assert_array_equal(integers, [[11]])
        assert integers.dtype == tf.int32


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("sources", [1, 2])
def test_idle_towers_send_nothing_and_get_the_sums(algorithm, sources):
    parts = _parts(sources, [(5,), (2, 2)])
    parts[0].append(_rows([[1.0]], [2]))
    for part in parts[1:]:
        part.append(_rows([[2.0]], [0]))
    reduced, _ = reduce.all_reduce(parts, CPUS[:sources], CPUS, algorithm)
    assert len(reduced) == 4
    table = _sums([[tf.convert_to_tensor(part[-1])] for part in parts])
    for device, sums in zip(CPUS, reduced, strict=True):
        _assert_on(sums[:-1], device, _sums([part[:-1] for part in parts]))
        assert isinstance(sums[-1], tf.IndexedSlices)
        np.testing.assert_array_equal(tf.convert_to_tensor(sums[-1]), table[0])


@pytest.mark.parametrize(
    ("home", "connects", "fits", "algorithm"),
    [
        ("/device:GPU:0", False, [True], "device"),
        ("/device:CPU:0", False, [False], "cpu"),
        ("/device:GPU:0", True, [True, True], "nccl"),
        ("/device:GPU:0", True, [True, False], "device"),
        ("/device:CPU:0", True, [False, True], "cpu"),
    ],
)
def test_hosts_choose_one_algorithm(home, connects, fits, algorithm, monkeypatch):
    """All hosts need the same graph; `fits` has whether NCCL fits each of them."""

    class Hosts(Alone):
        connects_devices = connects

        def exchange(self, value):
            return [value, *fits[1:]]

    monkeypatch.setattr(plan, "nccl_fits", lambda towers: fits[0])
    of_hosts = plan.Plan.of([home], [1], home, hosts=Hosts(), ratios_of_hosts=[[1]])
    assert of_hosts.algorithm_for("auto") == algorithm
    assert of_hosts.algorithm_for("ring") == "ring"


@pytest.mark.parametrize("gradients", [[], [None, None]])
def test_nothing_to_reduce(gradients):
    reduced, _ = reduce.all_reduce([gradients] * 2, CPUS[:2], CPUS[:2], "ring")
    assert reduced == [gradients] * 2


@pytest.mark.parametrize("towers", [1, 2, 3])
def test_packed_sums_are_those_of_the_parts(towers):
    parts = _parts(towers, [(5,), (2, 2), ()])
    ends = CPUS[2], CPUS[3]
    (_, sums), _ = reduce.all_reduce(parts, CPUS[:towers], ends, "device")
    _assert_on(sums, CPUS[3], _sums(parts))


@pytest.mark.parametrize("towers", [2, 3])
def test_large_sums_are_made_chunk_by_chunk(towers, monkeypatch):
    """So that the device has room for a few pieces of others' parts, not for all."""
    monkeypatch.setattr(reduce, "_CHUNK_BYTES", 128)
    parts = _parts(towers, [(100,), (3, 5), ()])

    @tf.function(autograph=False)
    def sums():
        ends = CPUS[3], CPUS[3]
        return reduce.all_reduce(parts, CPUS[:towers], ends, "device")[0][1]

    for total, expected in zip(sums(), _sums(parts), strict=True):
        np.testing.assert_array_equal(total, expected)
    operations = sums.get_concrete_function().graph.get_operations()
    added = [op for op in operations if op.type == "AddN"]
    # 100 and 15 numbers, padded to 112 and 16, and 1 to 16: 144 in chunks of 32.
    assert len(added) == 5
    for early, late in itertools.pairwise(added[::2]):
        waits = {op for piece in late.inputs for op in piece.op.control_inputs}
        assert waits == {early}
