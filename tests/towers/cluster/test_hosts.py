"""What hosts send one another; they are threads here."""

import types

import numpy as np
import pytest
import tensorflow as tf

from tests.towers.cluster.in_threads import communicators, on_each
from towers.cluster import hosts
from towers.collectives import packing
from towers.layers.pipeline import ONE_STAGE, Pipeline
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


def _together(function, count=2):
    """Calls a function with the place of each of several hosts."""
    names = [f"host {k}" for k in range(count)]
    with communicators(count) as every:
        places = [hosts.Cluster(names, k, comm) for k, comm in enumerate(every)]
        found = on_each(places, lambda _, place: function(place))
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


class _Counting(hosts.Cluster):
    """A host of which nobody else has anything: what it sums is what it has."""

    def __init__(self):
        super().__init__(["host 0", "host 1", "host 2"], 1, communicator=None)
        self.sums = []

    def _sum_bucket(self, tensors, purpose, wire):
        name = tensors[0].dtype.name
        name = name if wire is None else f"{name} as {wire}"
        self.sums.append((purpose, name, sum(each.shape[0] for each in tensors)))
        return [*map(tf.identity, tensors)]

    def exchange(self, value):
        return [value] * self.count


def _values(dtype):
    numbers = np.array([[0, 1, 2], [3, 100, 120]])
    return tf.cast(tf.constant(numbers), dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_sum_keeps_type_and_value(dtype):
    value = _values(dtype)
    for (found,) in _together(lambda place: place.all_reduce([value], "test")):
        assert found.dtype == value.dtype and found.shape == value.shape
        np.testing.assert_array_equal(found, value + value)


def test_large_and_small_tensors_are_added_together():
    sizes = [3, hosts.LARGE + 1, 0, 5, hosts.LARGE]
    values = [tf.range(size, dtype=tf.float32)[:, tf.newaxis] for size in sizes]
    for found in _together(lambda place: place.all_reduce(values, "test")):
        for total, value in zip(found, values, strict=True):
            np.testing.assert_array_equal(total, 2 * value)


def test_parts_are_added_and_gathered():
    """Hosts have tensors of several types, large and small, and one has none."""
    shapes = [[(2, 3), (hosts.LARGE + 1,), (3,)], [], [(1,), (0, 2), ()]]
    types = [tf.float32, tf.float64, tf.bfloat16]

    def parts(rank):
        return [
            [
                tf.fill(shape, tf.cast(8 * k + i + rank, dtype))
                for i, (shape, dtype) in enumerate(zip(of_host, types, strict=False))
            ]
            for k, of_host in enumerate(shapes)
        ]

    like = [[tf.TensorSpec(t.shape, t.dtype) for t in each] for each in parts(0)]

    def both(place):
        sums = place.reduce_scatter(parts(place.index), "test")
        own = parts(0)[place.index]
        return sums, place.gather_parts(own, like, "test")

    for rank, (sums, gathered) in enumerate(_together(both, 3)):
        for total, first in zip(sums, parts(0)[rank], strict=True):
            assert total.dtype == first.dtype and total.shape == first.shape
            expected = 3 * first + tf.cast(3, first.dtype)
            np.testing.assert_array_equal(total.numpy(), expected.numpy())
        for found, expected in zip(gathered, parts(0), strict=True):
            for value, part in zip(found, expected, strict=True):
                assert value.dtype == part.dtype and value.shape == part.shape
                np.testing.assert_array_equal(value.numpy(), part.numpy())


@pytest.mark.parametrize("least", [-(2**62), -1, 2**40 + 3])
def test_integers_are_added_as_integers(least):
    value = tf.constant(least, tf.int64)
    for (found,) in _together(lambda place: place.all_reduce([value], "test")):
        assert int(found) == 2 * least


def test_one_buffer_for_each_type():
    alone = _Counting()
    nest = {"loss": tf.ones([]), "state": [tf.ones([2], tf.int32), None]}
    nest |= {"wide": tf.ones([3], tf.float64), "half": tf.ones([4], tf.float16)}
    found = alone.all_reduce(nest, "step")
    assert sorted(each[1:] for each in alone.sums) == [
        ("float32", 5),
        ("float64", 3),
        ("int64", 2),
    ]
    tf.nest.assert_same_structure(found, nest)


def test_gradients_alone_are_compressed():
    alone = _Counting().compressing("bf16")
    gradients = [tf.ones([5]), tf.ones([6], tf.float16)]
    alone.all_reduce([tf.ones([]), gradients, tf.ones([2])], "step", gradients)
    assert sorted(each[1:] for each in alone.sums) == [
        ("float32", 3),
        ("float32 as bfloat16", 11),
    ]


def test_buckets_begin_with_the_last_gradients(monkeypatch):
    monkeypatch.setattr(packing, "BUCKET_BYTES", 40)
    alone = _Counting()
    alone.all_reduce([tf.ones([10]), tf.ones([4]), tf.ones([3]), tf.ones([3])], "step")
    assert [size for _, _, size in alone.sums] == [10, 10]
    assert len({purpose for purpose, *_ in alone.sums}) == 2


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", [*TYPES, "bool"])
def test_rows_are_gathered(dtype, graph):
    """Of hosts that have different numbers of them, or none."""
    value = _values(dtype)
    # In a graph each blocks a thread of TensorFlow's, of which there are few.
    count, total = (2, 1) if graph else (3, 3)

    def gather(place):
        def function():
            return place.all_gather(value[: place.index], total, "rows")

        return (tf.function(function, autograph=False) if graph else function)()

    for found in _together(gather, count):
        assert found.shape == (total, 3) and found.dtype == value.dtype
        want = tf.concat([value[:k] for k in range(count)], 0)
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    "rows", [tf.constant(["text"]), tf.ragged.constant([[1], [2, 3]])]
)
def test_what_cannot_be_sent_is_refused(rows):
    with pytest.raises(ValueError, match=r"outputs of type .* on 3 hosts; expected"):
        _Counting().all_gather(rows, 3, "outputs")


def test_minus_zero_and_nan_are_broadcast_to_the_bit():
    value = np.array([-0.0, np.nan, np.inf, 1e-45], np.float32)

    def first(place):
        mine = [value if place.index == 0 else np.ones_like(value), np.ones([0, 2])]
        return place.broadcast([*map(tf.constant, mine)], "variables")

    for found, empty in _together(first):
        assert found.numpy().tobytes() == value.tobytes() and empty.shape == (0, 2)


def test_rows_of_slices_are_joined():
    def add(place):
        k = place.index
        slices = tf.IndexedSlices(
            tf.fill([k + 1, 2], float(k)), tf.range(k + 1), tf.constant([9, 2])
        )
        return place.all_reduce([slices, tf.ones([])], "step")

    for slices, one in _together(add):
        np.testing.assert_array_equal(slices.values, [[0, 0], [1, 1], [1, 1]])
        np.testing.assert_array_equal(slices.indices, [0, 0, 1])
        assert int(one) == 2


def test_sums_in_a_graph_run_in_their_order():
    """Nothing but the order tells the second from the first."""

    def add(place):
        def step(i, x):
            sums = place.all_reduce([x], "one"), place.all_reduce([x + 1], "another")
            return i + 1, tf.add_n([each for (each,) in sums])

        @tf.function(autograph=False)
        def function(x):
            return tf.while_loop(lambda i, _: i < 3, step, [0, x])[1]

        return [float(function(tf.ones([]))) for _ in range(5)]

    assert _together(add) == [[4 * (4 * (4 + 2) + 2) + 2.0] * 5] * 2


def test_what_each_tells():
    told = _together(lambda place: place.exchange({"rank": place.index}), count=3)
    assert told == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3
    assert _together(lambda place: place.broadcast_value(place.index)) == [0, 0]


def test_files_are_sent(tmp_path):
    folder = tmp_path / "0" / "checkpoint"
    folder.mkdir(parents=True)
    content = {"empty": b"", "odd": b"abc", "large": bytes(range(256)) * 5000}
    for name, data in content.items():
        (folder / name).write_bytes(data)

    def send(place):
        own = str(folder) if place.index == 0 else None
        return place.send_files(own, str(tmp_path / str(place.index)))

    for k, found in enumerate(_together(send, count=3)):
        assert found == str(tmp_path / str(k) / "checkpoint")
        files = (tmp_path / str(k) / "checkpoint").iterdir()
        assert {each.name: each.read_bytes() for each in files} == content
    assert _together(lambda place: place.send_files(None, "")) == [None, None]


@pytest.mark.parametrize(
    "told",
    [
        ["ckpt-1-0", {"../outside": 3}],
        ["ckpt-1-0", {"/tmp/outside": 3}],
        ["ckpt-1-0", {"in/side": 3}],
        ["ckpt-1-0", {"..": 3}],
        ["ckpt-1-0", {"": 3}],
        ["ckpt-1-0", {"a\0b": 3}],
        ["../ckpt-1-0", {"file": 3}],
        ["/tmp/ckpt-1-0", {"file": 3}],
        [None, {"file": 3}],
        ["ckpt-1-0", {"file": -1}],
        ["ckpt-1-0", {"file": "3"}],
        ["ckpt-1-0", ["file"]],
        ["ckpt-1-0"],
        3,
    ],
)
def test_files_stay_in_the_folder_that_they_are_sent_to(tmp_path, told):
    place = types.SimpleNamespace(index=1, broadcast_value=lambda value: told)
    with pytest.raises(ValueError, match="The first host sends"):
        hosts.Cluster.send_files(place, None, str(tmp_path / "received"))
    assert not [*tmp_path.iterdir()]


def test_a_plan_numbers_the_towers_of_all_hosts():
    plan = Plan.of(["/device:CPU:0", "/device:CPU:1"], (1, 2), "", hosts=_Counting())
    assert [tower.index for tower in plan.towers] == [2, 3]
    assert plan.count == 6 and plan.split_ratios == (1, 2) * 3
    assert plan.sizes(18) == [2, 4]
    assert plan.bounds(18) == [(6, 8), (8, 12)]
    assert [float(f) for f in plan.fractions([2, 4], 18)] == pytest.approx(
        [1 / 9, 2 / 9]
    )
    # Of a small batch, the first towers of all get the rows.
    assert plan.sizes(1) == [0, 0]


@pytest.mark.parametrize(
    ("others", "pipeline", "expected"),
    [
        ([1], ONE_STAGE, [0]),
        ([1, 1], ONE_STAGE, [0, 1]),
        ([1, 1, 1], ONE_STAGE, [0, 1]),
        ([1], Pipeline(1, 2), [0]),
        ([1], Pipeline(2, 2), [0, 1]),
    ],
    ids=["fewer", "as many", "two of three", "micro-batches", "stages"],
)
def test_hosts_divide_whole_tables_over_as_many_devices(others, pipeline, expected):
    names = iter(f"/device:CPU:{k}" for k in range(4))
    devices = [[next(names) for _ in range(pipeline.stages)] for _ in range(2)]
    plan = Plan.of(
        devices,
        (1, 1),
        devices[0],
        hosts=_Counting(),
        pipeline=pipeline,
        ratios_of_hosts=[others, (1, 1)],
    )
    assert plan.table_devices == tuple(f"/device:CPU:{k}" for k in expected)
