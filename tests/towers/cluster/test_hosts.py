"""Connected hosts, as far as no engine is needed; see `worlds.py` for engines."""

import types

import pytest
import tensorflow as tf

from towers.cluster import hosts
from towers.collectives import packing
from towers.layers.pipeline import ONE_STAGE, Pipeline
from towers.plan import Plan


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

    _sums = _gather_equal = _swap = None


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


@pytest.mark.parametrize(
    "rows", [tf.constant(["text"]), tf.ragged.constant([[1], [2, 3]])]
)
def test_what_cannot_be_sent_is_refused(rows):
    with pytest.raises(ValueError, match=r"outputs of type .* on 3 hosts; expected"):
        _Counting().all_gather(rows, 3, "outputs")


def test_a_sum_of_unknown_size_is_refused():
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def add(rows):
        return _Counting().all_reduce([rows], "losses")

    with pytest.raises(ValueError, match=r"a sum of shape \(None, 3\) on 3 hosts; ex"):
        add(tf.ones([2, 3]))


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
