"""What each of several hosts gets of the batches that they train on together."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.variants import slow
from towers.input_pipeline import ArraySource, open_source
from towers.input_pipeline.pipeline import Pipeline
from towers.input_pipeline.pipeline.rows import Rows
from towers.plan import Share


def shares(ratios, layout):
    """What hosts with so many towers compute."""
    ends = np.cumsum(layout)
    return [
        Share(ratios, int(end - count), int(end))
        for end, count in zip(ends, layout, strict=True)
    ]


def batches(pipeline):
    return [tf.nest.map_structure(np.asarray, each) for each in pipeline.dataset()]


def check(pipeline, ratios, layout):
    """Puts together what hosts get; it has to be what one host has."""
    whole = batches(pipeline)
    hosts = [
        batches(dataclasses.replace(pipeline, share=share))
        for share in shares(ratios, layout)
    ]
    assert {len(each) for each in hosts} == {len(whole)}
    marks = []
    for expected, *parts in zip(whole, *hosts, strict=True):
        said = [part[0] for part in parts]
        assert {int(each.total) for each in said} == {len(expected[1])}
        assert len({int(each.mark) for each in said}) == 1
        marks.append(int(said[0].mark))
        firsts = [int(each.first) for each in said]
        assert firsts == [0, *np.cumsum([len(part[1]) for part in parts])[:-1]]
        found = [
            (said_of.x, *others)
            for said_of, (_, *others) in zip(said, parts, strict=True)
        ]
        joined = tf.nest.map_structure(lambda *each: np.concatenate(each), *found)
        tf.nest.map_structure(np.testing.assert_array_equal, joined, expected)
    assert len(set(marks)) == len(marks)
    return hosts


def test_the_order_of_a_batch_is_part_of_its_mark():
    ways = [(1, 2, 3, 4), (2, 1, 3, 4), (4, 3, 2, 1), (1, 2, 3, 5), (2, 3, 4, 1)]
    (share, _) = shares((1, 1), (1, 1))
    of_records, of_whole = set(), set()
    for numbers in ways:
        numbers = tf.constant(numbers, tf.int64)
        rows = Rows(share, 4)
        _, _, beside = rows(numbers, numbers)
        of_records.add(int(beside[0, 2]))
        said, *_ = rows.of_whole(numbers, tf.zeros([4]))
        of_whole.add(int(said.mark))
    assert len(of_records) == len(of_whole) == len(ways)


@pytest.fixture(scope="module")
def photos(tmp_path_factory, encode, example, write_tfrecord):
    """23 PNGs in two files; image i is filled with i, and its label is i."""
    folder = tmp_path_factory.mktemp("photos")
    for shard, size in enumerate((12, 11)):
        records = [
            example(
                image__encoded=encode(np.full([6, 5, 3], i, np.uint8)),
                image__class__label=i,
            )
            for i in range(12 * shard, 12 * shard + size)
        ]
        write_tfrecord(folder / f"train-{shard}", records)
    return open_source(f"tfrecord:{folder}/*")


@pytest.fixture(scope="module")
def arrays():
    x = np.broadcast_to(
        np.arange(23, dtype=np.uint8)[:, None, None, None], [23, 8, 8, 1]
    )
    return ArraySource(x, np.arange(23))


@pytest.fixture
def source(request):
    return request.getfixturevalue(request.param)


OPTIONS = {"image_shape": (6, 6, 3), "recipe": "cifar", "seed": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "size", "ratios", "layout"),
    [
        # The last batch has 3 rows, and the last host none of them.
        ("photos", 5, (1, 1, 1, 1), (3, 1)),
        # Of 3 rows, the second host has one, of 4 none.
        ("arrays", 4, (1, 1, 5, 5, 5), (1, 1, 3)),
        ("photos", 4, (1, 1, 5, 5, 5), (1, 1, 3)),
        ("photos", 5, (2, 3, 3), (1, 1, 1)),
        ("arrays", 5, (2, 3, 3), (1, 1, 1)),
    ],
    indirect=["source"],
)
def test_hosts_have_the_rows_of_one(source, size, ratios, layout):
    pipeline = Pipeline(source, "train", batch_size=size, **OPTIONS)
    check(pipeline, ratios, layout)


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 10])
def test_epochs_without_a_gap(arrays, start):
    pipeline = Pipeline(
        arrays, "train", batch_size=5, repeat=True, start_record=start, seed=1
    )
    whole = [y for _, y in pipeline.dataset().take(8).as_numpy_iterator()]
    parts = []
    for share in shares((1, 1, 1), (2, 1)):
        mine = dataclasses.replace(pipeline, share=share).dataset().take(8)
        parts.append([y for _, y in mine.as_numpy_iterator()])
    for expected, *found in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize("grouped", [slow(False), True])
def test_rows_of_tokens(tmp_path, grouped):
    rows = [f"{'x' * (7 * k % 50 + 1)},{k % 2}\n" for k in range(43)]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(rows))
    source = open_source(
        f"csv:{tmp_path}/a.csv", text_column="text", sequence_length=40, eval_fraction=0
    )
    pipeline = Pipeline(source, "train", batch_size=4, group_by_length=grouped, seed=1)
    check(pipeline, (1, 1, 1, 1), (3, 1))


@pytest.mark.slow
def test_the_first_batches_only(arrays):
    pipeline = Pipeline(arrays, "train", batch_size=5, most_batches=2, seed=1)
    assert len(pipeline.dataset()) == 2
    first, _ = check(pipeline, (1, 1), (1, 1))
    assert len(first) == 2


@pytest.mark.slow
def test_each_host_decodes_its_own_rows(photos, monkeypatch):
    decoded = []

    class Counted(type(photos)):
        def load(self, image):
            tf.py_function(lambda: decoded.append(1), [], [])
            return super().load(image)

    counted = object.__new__(Counted)
    counted.__dict__.update(photos.__dict__)
    ratios = (1, 1, 1, 1)
    counts = []
    for share in shares(ratios, (2, 2)):
        decoded.clear()
        batches(Pipeline(counted, "train", batch_size=4, share=share, **OPTIONS))
        counts.append(len(decoded))
    # Five batches of 4, and one of 3.
    assert counts == [12, 11]
