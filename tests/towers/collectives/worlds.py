"""The contract of `World`: what each method returns, on any number of hosts.

    python -m tests.towers.collectives.worlds RANK ADDRESSES TOWERS FOLDER
    mpirun -n 2 python -m tests.towers.collectives.worlds mpi FOLDER

Checks it on one of several hosts, each a process. What host `k` has is made of `k`, so
each host knows what all of them have.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from towers.cluster import process_group
from towers.collectives.joined_hosts import this_host
from towers.collectives.world import World
from towers.hosts import group
from towers.hosts.group import Membership

# Large enough to be added where it lies.
LARGE = 2**14 + 3


def rows_of(k):
    """The rows of a host: each has one more than the one before."""
    return np.full([k + 1, 2], float(k), np.float32)


def check_attributes(world, folder):
    names = [name for name in vars(World) if not name.startswith("_")]
    assert all(hasattr(world, name) for name in [*names, *World.__annotations__])
    assert len(world.names) == world.count
    assert 0 <= world.index < world.count
    assert world.overlaps(2**40) == (world.count > 1)
    assert not world.overlaps(1)


def check_sum(world, folder):
    k, every = world.index, range(world.count)
    nest = {
        "dense": [tf.fill([LARGE], k + 1.0), tf.fill([2, 3], float(k)), None],
        "whole": tf.constant(2**40 + k, tf.int64),
        "slices": tf.IndexedSlices(rows_of(k), tf.range(k + 1), tf.constant([9, 2])),
    }
    found = world.all_reduce(nest, "test")
    large, small, nothing = found["dense"]
    np.testing.assert_array_equal(large, np.full(LARGE, sum(i + 1 for i in every)))
    np.testing.assert_array_equal(small, np.full([2, 3], sum(every)))
    assert nothing is None
    assert int(found["whole"]) == sum(2**40 + i for i in every)
    np.testing.assert_array_equal(
        found["slices"].values, np.concatenate([*map(rows_of, every)])
    )
    np.testing.assert_array_equal(
        found["slices"].indices, [row for i in every for row in range(i + 1)]
    )


def check_rounded_sum(world, folder):
    third, exact = tf.fill([LARGE], 1 / 3), tf.fill([LARGE], 1 / 3)
    # Sums of small buffers, or of none, are not rounded.
    rounded, kept = world.compressing("bf16").all_reduce(
        [third, exact], "test", [third]
    )
    np.testing.assert_allclose(rounded, np.full(LARGE, world.count / 3), rtol=2**-7)
    np.testing.assert_allclose(kept, np.full(LARGE, world.count / 3), rtol=1e-6)


def check_order(world, folder):
    @tf.function(autograph=False)
    def function(x):
        (first,), (second,) = (
            world.all_reduce([x], "one"),
            world.all_reduce([x + 1], "another"),
        )
        return first + second

    for _ in range(3):
        assert float(function(tf.constant(2.0))) == 5 * world.count


def check_reduce_scatter(world, folder):
    k, every = world.index, range(world.count)
    parts = [
        [tf.fill([i + 1], float(i + k)), tf.fill([LARGE], float(k))] for i in every
    ]
    small, large = world.reduce_scatter(parts, "test")
    np.testing.assert_array_equal(small, np.full(k + 1, sum(k + i for i in every)))
    np.testing.assert_array_equal(large, np.full(LARGE, sum(every)))


def check_gather(world, folder):
    every = [*map(rows_of, range(world.count))]
    total = sum(map(len, every))
    mine = {"rows": tf.constant(rows_of(world.index)), "scalar": tf.constant(3)}
    found = world.all_gather(mine, total, "rows")
    np.testing.assert_array_equal(found["rows"], np.concatenate(every))
    assert int(found["scalar"]) == 3


def check_gather_parts(world, folder):
    def of(i):
        return [tf.fill([i + 1, 2], float(i)), tf.fill([LARGE], tf.cast(i, tf.float64))]

    every = [of(i) for i in range(world.count)]
    like = [[tf.TensorSpec(each.shape, each.dtype) for each in of_i] for of_i in every]
    found = world.gather_parts(of(world.index), like, "test")
    for parts, wanted in zip(found, every, strict=True):
        for part, want in zip(parts, wanted, strict=True):
            assert part.dtype == want.dtype
            np.testing.assert_array_equal(part, want)


def check_stack(world, folder):
    found = world.stack(tf.constant([world.index, 7]), "test")
    np.testing.assert_array_equal(found, [[i, 7] for i in range(world.count)])


def check_broadcast(world, folder):
    value = np.array([-0.0, np.nan, np.inf, 1e-45], np.float32)
    mine = value if world.index == 0 else np.ones_like(value)
    found, empty = world.broadcast([tf.constant(mine), tf.ones([0, 2])], "test")
    assert found.numpy().tobytes() == value.tobytes()
    assert empty.shape == (0, 2)


def check_broadcast_of_other_sizes(world, folder):
    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None])])
    def first(*tensors):
        return world.broadcast([tf.constant(world.index), *tensors], "test")

    k = world.index
    index, full, empty = first(tf.fill([1 + k, 2], 1.0 + k), tf.ones([k]))
    np.testing.assert_array_equal(full, [[1, 1]])
    assert (index.numpy(), empty.shape) == (0, (0,))


def check_all_to_all(world, folder):
    k, every = world.index, range(world.count)

    def function(numbers):
        sent = [[np.full(i + k, i, np.int64), numbers[:i]] for i in every]
        received = world.all_to_all(sent, "test")
        sizes = [[len(sent_by[0]), len(sent_by[1])] for sent_by in received]
        return [np.array(sizes), np.concatenate([one for one, _ in received])]

    types = [tf.int64, tf.int64]
    sizes, received = world.meet(function, [tf.range(5.0)], types)
    np.testing.assert_array_equal(sizes, [[k + i, k] for i in every])
    np.testing.assert_array_equal(received, [k] * sum(k + i for i in every))


def check_values(world, folder):
    told = world.exchange({"rank": world.index, "none": None})
    assert told == [{"rank": i, "none": None} for i in range(world.count)]
    assert world.broadcast_value([world.index, "first"]) == [0, "first"]


def check_files(world, folder):
    own = os.path.join(folder, "0", "sent")
    if world.index == 0:
        os.makedirs(own)
        for name, content in ("empty", ""), ("text", "abc" * 1000):
            with open(os.path.join(own, name), "w") as file:
                file.write(content)
    to = os.path.join(folder, str(world.index))
    found = world.send_files(own if world.index == 0 else None, to)
    assert found == os.path.join(to, "sent")
    assert sorted(os.listdir(found)) == ["empty", "text"]
    with open(os.path.join(found, "text")) as file:
        assert file.read() == "abc" * 1000
    assert world.send_files(None, to) is None


CHECKS = [value for name, value in [*globals().items()] if name.startswith("check_")]


def main(rank, addresses, towers, folder):
    """Checks this host's `World`."""
    addresses = tuple(addresses.split(","))
    names = tuple(f"host {k}" for k in range(len(addresses)))
    process_group.join(Membership(int(rank), addresses, names))
    assert this_host().count == len(addresses)
    check_all(folder)


def check_all(folder):
    """Checks the `World` that this process has joined."""
    for check in CHECKS:
        check(this_host(), folder)


if __name__ == "__main__":
    if sys.argv[1] == "mpi":
        assert group.join_as_started("auto").count > 1
        check_all(sys.argv[2])
    else:
        main(*sys.argv[1:])
