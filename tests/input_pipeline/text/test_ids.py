import numpy as np
import pytest
import tensorflow as tf

from tests.variants import slow
from towers.input_pipeline import text

TEXTS = ["", "a", "Straße", "日本語", "😀😀", "a\0b\0", "é" * 40, "\0", "line\nline"]


def _byte_ids(string, length):
    ids = [byte + 1 for byte in string.encode()][:length]
    return ids + [0] * (length - len(ids))


def _padded(ids, length):
    return [*ids, *[0] * length][:length]


@pytest.mark.parametrize("length", [1, 2, 5, 8, 100])
def test_byte_ids_are_the_bytes(length):
    found = text.byte_ids(tf.constant(TEXTS), length)
    assert found.dtype == tf.int32 and found.shape == [len(TEXTS), length]
    np.testing.assert_array_equal(found, [_byte_ids(one, length) for one in TEXTS])
    for one, ids in zip(TEXTS, found, strict=True):
        np.testing.assert_array_equal(text.byte_ids(tf.constant(one), length), ids)


def test_any_byte_has_its_id():
    every = bytes(range(256))
    found = text.byte_ids(tf.constant(every), 300)
    np.testing.assert_array_equal(found, [*range(1, 257), *[0] * 44])
    assert int(tf.reduce_max(found)) == text.BYTE_IDS - 1


def test_no_texts_are_no_ids():
    assert text.byte_ids(tf.constant([], tf.string), 4).shape == [0, 4]
    assert text.pad_ids(
        tf.ragged.constant([], ragged_rank=1, dtype=tf.int32), 4
    ).shape == [0, 4]


def test_byte_ids_in_a_map():
    dataset = tf.data.Dataset.from_tensor_slices(TEXTS)
    one_by_one = dataset.map(lambda one: text.byte_ids(one, 6))
    assert one_by_one.element_spec == tf.TensorSpec([6], tf.int32)
    batched = dataset.batch(4).map(lambda some: text.byte_ids(some, 6))
    assert batched.element_spec == tf.TensorSpec([None, 6], tf.int32)
    wanted = [_byte_ids(one, 6) for one in TEXTS]
    np.testing.assert_array_equal(list(one_by_one), wanted)
    np.testing.assert_array_equal(np.concatenate(list(batched)), wanted)


@pytest.mark.parametrize("dtype", [tf.uint8, tf.int32, tf.int64])
@pytest.mark.parametrize("length", [1, 3, 9])
def test_pad_ids_cuts_and_pads(dtype, length):
    sequences = [[], [5], [1, 2, 3], [9, 8, 7, 6, 5]]
    wanted = [_padded(one, length) for one in sequences]
    found = text.pad_ids(tf.ragged.constant(sequences, dtype=dtype), length)
    assert found.dtype == tf.int32 and found.shape == [4, length]
    np.testing.assert_array_equal(found, wanted)
    for one, ids in zip(sequences, wanted, strict=True):
        found = text.pad_ids(tf.constant(one, dtype), length)
        assert found.dtype == tf.int32
        np.testing.assert_array_equal(found, ids)


def test_pad_ids_in_a_map_has_a_known_length():
    dataset = tf.data.Dataset.range(7).map(lambda n: text.pad_ids(tf.range(n), 4))
    assert dataset.element_spec == tf.TensorSpec([4], tf.int32)
    np.testing.assert_array_equal(
        list(dataset), [_padded(range(n), 4) for n in range(7)]
    )


def _buckets(sequences, boundaries, batch_size):
    """Each batch of (ids, labels), in the order in which buckets fill."""
    waiting = {boundary: [] for boundary in boundaries}
    for label, ids in enumerate(sequences):
        ids = ids[: boundaries[-1]]
        boundary = min(limit for limit in boundaries if len(ids) <= limit)
        waiting[boundary].append((_padded(ids, boundary), label))
        if len(waiting[boundary]) == batch_size:
            yield waiting.pop(boundary)
            waiting[boundary] = []
    yield from (batch for batch in waiting.values() if batch)


@pytest.mark.parametrize("boundaries", [[3], [2, 5, 9], (1, 30)])
@pytest.mark.parametrize("batch_size", [slow(1), 4, slow(100)])
def test_buckets_hold_similar_lengths(boundaries, batch_size):
    rng = np.random.default_rng(0)
    lengths = [0, 1, 2, 3, 5, 9, 30, *rng.integers(0, 20, 40)]
    sequences = [list(rng.integers(1, 100, length)) for length in lengths]
    dataset = tf.data.Dataset.from_tensor_slices(
        (tf.ragged.constant(sequences, dtype=tf.int32), range(len(sequences)))
    ).map(lambda ids, label: (tf.ensure_shape(ids, [None]), label))
    found = text.bucket_batches(dataset, boundaries, batch_size)
    assert [spec.shape.rank for spec in found.element_spec] == [2, 1]
    found = [(ids.numpy().tolist(), labels.numpy().tolist()) for ids, labels in found]
    wanted = [
        tuple(list(part) for part in zip(*batch, strict=True))
        for batch in _buckets(sequences, list(boundaries), batch_size)
    ]
    full = [batch for batch in wanted if len(batch[1]) == batch_size]
    assert found[: len(full)] == full
    assert sorted(found) == sorted(wanted)


def test_ids_of_a_known_length_are_bucketed_too():
    dataset = tf.data.Dataset.from_tensors((tf.range(1, 4), 7)).repeat(3)
    batches = list(text.bucket_batches(dataset, [2, 5], 2))
    assert [ids.shape for ids, _ in batches] == [[2, 5], [1, 5]]
    np.testing.assert_array_equal(batches[1][0], [[1, 2, 3, 0, 0]])


def test_strings_become_buckets():
    dataset = tf.data.Dataset.from_tensor_slices((["no", "yes", "perhaps"], [0, 1, 2]))
    dataset = dataset.map(
        lambda one, label: (tf.cast(tf.io.decode_raw(one, tf.uint8), tf.int32), label)
    )
    batches = text.bucket_batches(dataset, [3, 6], 2)
    assert [ids.shape for ids, _ in batches] == [[2, 3], [1, 6]]


_IDS = tf.data.Dataset.from_tensors((tf.range(3), 0))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: text.byte_ids(tf.constant("a"), 0),
            "length is 0, expected at least 1",
        ),
        (lambda: text.byte_ids(tf.constant([1]), 3), "text is int32, expected strings"),
        (lambda: text.pad_ids(tf.constant([1]), -1), "length is -1, expected at least"),
        (lambda: text.pad_ids(tf.constant(["a"]), 3), "ids are string .1,., expected"),
        (lambda: text.pad_ids(tf.constant([[1]]), 3), "ids are int32 .1, 1., expected"),
        (lambda: text.pad_ids(tf.constant([0.5]), 3), "ids are float32"),
        (lambda: text.bucket_batches(_IDS, [], 2), r"boundaries are \[\], expected"),
        (
            lambda: text.bucket_batches(_IDS, [3, 2], 2),
            r"are \[3, 2\], expected rising",
        ),
        (
            lambda: text.bucket_batches(_IDS, [2, 2], 2),
            r"are \[2, 2\], expected rising",
        ),
        (
            lambda: text.bucket_batches(_IDS, [0, 2], 2),
            r"are \[0, 2\], expected rising",
        ),
        (
            lambda: text.bucket_batches(_IDS, [2], 0),
            "batch_size is 0, expected at least",
        ),
        (lambda: text.bucket_batches(_IDS.batch(2), [2], 2), "before it is batched"),
        (lambda: text.bucket_batches(_IDS.map(lambda x, y: x), [2], 2), "elements are"),
    ],
)
def test_a_bad_argument_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()
