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
TYPES = [
    *("float16", "bfloat16", "float32", "float64"),
    *("uint8", "int16", "int32", "uint32", "int64"),
]


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


def values(dtype):
    return tf.cast(tf.constant([[0, 1, 2], [3, 100, 120]]), dtype)


def check_sum_of_each_type(world, folder):
    for dtype in TYPES:
        value = values(dtype)
        (total,) = world.all_reduce([value], f"sum of {dtype}")
        assert total.dtype == value.dtype and total.shape == value.shape
        expected = tf.cast(world.count * tf.cast(value, tf.int64), dtype)
        np.testing.assert_array_equal(total, expected)


def check_sum_of_complex_numbers(world, folder):
    for dtype in (tf.complex64, tf.complex128):
        value = tf.constant([[1 + 2j], [3.5 - 1j]], dtype)
        (total,) = world.all_reduce([value], "complex numbers")
        assert total.dtype == dtype
        np.testing.assert_array_equal(total, world.count * value)


def check_sum_of_large_integers(world, folder):
    for value in (-(2**61), -1, 2**40 + 3):
        (total,) = world.all_reduce([tf.constant(value, tf.int64)], "integers")
        expected = (world.count * value + 2**63) % 2**64 - 2**63
        assert int(total) == expected


def check_sum_of_large_and_small(world, folder):
    tensors = [
        tf.range(size, dtype=tf.float32)[:, tf.newaxis] for size in (3, LARGE, 0, 5)
    ]
    totals = world.all_reduce(tensors, "large and small")
    for total, tensor in zip(totals, tensors, strict=True):
        np.testing.assert_array_equal(total, world.count * tensor)


def check_same_bits(world, folder):
    rng = np.random.default_rng(world.index)
    own = rng.normal(size=LARGE).astype("float32")
    (total,) = world.all_reduce([tf.constant(own)], "bits")
    for other in world.exchange(total.numpy().tobytes().hex()):
        assert bytes.fromhex(other) == total.numpy().tobytes()


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


def check_a_function_that_one_host_traces_again(world, folder):
    """Asked what they do, hosts differ in nothing."""

    def add(x):
        return world.all_reduce([x], "traced")

    for _ in range(1 + (world.index == 1)):
        tf.function(add, autograph=False).get_concrete_function(tf.ones([3]))
    told = world.exchange([*getattr(world.communicator, "collectives", ())])
    assert told == told[:1] * world.count


def check_order_in_a_loop(world, folder):
    def step(i, x):
        sums = world.all_reduce([x], "one"), world.all_reduce([x + 1], "another")
        return i + 1, tf.add_n([total for (total,) in sums])

    @tf.function(autograph=False)
    def function(x):
        return tf.while_loop(lambda i, _: i < 3, step, [0, x])[1]

    expected = 1.0
    for _ in range(3):
        expected = world.count * (2 * expected + 1)
    assert float(function(tf.ones([]))) == expected


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
    mine["empty"] = mine["rows"][:, :0]
    found = world.all_gather(mine, total, "rows")
    assert found["empty"].shape == (total, 0)
    np.testing.assert_array_equal(found["rows"], np.concatenate(every))
    assert int(found["scalar"]) == 3


def check_gather_of_each_type(world, folder):
    """Hosts have different numbers of rows, or none."""
    for dtype in (*TYPES, "bool"):
        value = values(dtype)
        want = np.concatenate([value[:k].numpy() for k in range(world.count)])
        total = len(want)

        def gather(value=value, total=total, dtype=dtype):
            return world.all_gather(value[: world.index], total, f"rows of {dtype}")

        for function in (gather, tf.function(gather, autograph=False)):
            whole = function()
            assert whole.shape == want.shape and whole.dtype == value.dtype
            np.testing.assert_array_equal(whole, want)


def check_gather_of_unknown_rows(world, folder):
    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def gather(rows):
        return world.all_gather(rows, None, "unknown rows")

    # Two of them are of as many numbers.
    for rows, width in ((1, 2), (4, 3), (6, 2)):
        own = tf.fill([rows * world.index, width], float(world.index))
        want = [[k] * width for k in range(world.count) for _ in range(k * rows)]
        np.testing.assert_array_equal(gather(own), np.reshape(want, [-1, width]))


def check_gather_of_a_host_without_rows(world, folder):
    """It does not know how long the rows of others are."""
    own = tf.ones([0, 0, 2]) if world.index else tf.ones([2, 5, 2])

    @tf.function(input_signature=[tf.TensorSpec([None, None, 2])])
    def gather(rows):
        return world.all_gather(rows, None, "rows of the first host")

    np.testing.assert_array_equal(gather(own), np.ones([2, 5, 2]))


def check_parts_of_several_types(world, folder):
    """A host has tensors of several types, large and small; others have none."""
    shapes = [[(2, 3), (LARGE,), (3,)], [], [(1,), (0, 2), ()]]
    types = [tf.float32, tf.float64, tf.bfloat16]

    def parts(rank):
        return [
            [
                tf.fill(shape, tf.cast(8 * k + i + rank, dtype))
                for i, (shape, dtype) in enumerate(zip(of_host, types, strict=False))
            ]
            for k, of_host in enumerate((shapes * world.count)[: world.count])
        ]

    first = parts(0)
    sums = world.reduce_scatter(parts(world.index), "several types")
    ranks = sum(range(world.count))
    for total, part in zip(sums, first[world.index], strict=True):
        assert total.dtype == part.dtype and total.shape == part.shape
        expected = world.count * tf.cast(part, tf.float64) + ranks
        expected = tf.cast(expected, part.dtype).numpy()
        np.testing.assert_array_equal(total.numpy(), expected)
    like = [[tf.TensorSpec(t.shape, t.dtype) for t in of_host] for of_host in first]
    gathered = world.gather_parts(first[world.index], like, "several types")
    for of_host, expected in zip(gathered, first, strict=True):
        for value, part in zip(of_host, expected, strict=True):
            assert value.dtype == part.dtype and value.shape == part.shape
            np.testing.assert_array_equal(value.numpy(), part.numpy())


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
    shapes = [None, 2], [None], None

    @tf.function(input_signature=[*map(tf.TensorSpec, shapes)])
    def first(*tensors):
        return world.broadcast([tf.constant(world.index), *tensors], "test")

    k = world.index
    full = tf.fill([1 + k, 2], 1.0 + k)
    index, full, empty, of_any_rank = first(full, tf.ones([k]), full)
    np.testing.assert_array_equal(full, [[1, 1]])
    np.testing.assert_array_equal(of_any_rank, [[1, 1]])
    assert (index.numpy(), empty.shape) == (0, (0,))


def check_all_to_all(world, folder):
    k, every = world.index, range(world.count)

    def of_pair(source, to):
        """What a host sends another, of which some is empty."""
        numbers = np.arange(to, dtype=np.int64) + source
        return numbers, np.full([2 * source, 2, 3], 10.0 * source + to, np.float32)

    def exchanged(parts):
        return world.all_to_all(parts, "test")

    def in_graph(*arguments):
        received = function(*arguments)
        for numbers, rows in function.get_concrete_function().structured_outputs:
            assert numbers.shape.as_list() == [None]
            assert rows.shape.as_list() == [None, 2, 3]
        return received

    sent = [[*map(tf.constant, of_pair(k, to))] for to in every]
    expected = [of_pair(source, k) for source in every]
    specs = [[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 2, 3])]]
    function = tf.function(exchanged, [specs * world.count], autograph=False)
    results = [exchanged(sent), in_graph(sent), in_graph(sent)]
    for received in results:
        for tensors, arrays in zip(received, expected, strict=True):
            for tensor, array in zip(tensors, arrays, strict=True):
                assert tensor.dtype == array.dtype
                np.testing.assert_array_equal(tensor, array)


def check_values(world, folder):
    told = world.exchange({"rank": world.index, "none": None})
    assert told == [{"rank": i, "none": None} for i in range(world.count)]
    assert world.broadcast_value([world.index, "first"]) == [0, "first"]


FILES = {"empty": b"", "odd": b"abc", "large": bytes(range(256)) * 5000}


def check_files(world, folder):
    own = os.path.join(folder, "0", "sent")
    if world.index == 0:
        os.makedirs(own)
        for name, content in FILES.items():
            with open(os.path.join(own, name), "wb") as file:
                file.write(content)
    to = os.path.join(folder, str(world.index))
    found = world.send_files(own if world.index == 0 else None, to)
    assert found == os.path.join(to, "sent")
    assert {*os.listdir(found)} == FILES.keys()
    for name, content in FILES.items():
        with open(os.path.join(found, name), "rb") as file:
            assert file.read() == content
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
