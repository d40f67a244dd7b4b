import numpy as np
import pytest
import tensorflow as tf

from towers.input_pipeline.images import draws


def _mix(z):
    """SplitMix64's finalizer, in Python's integers."""
    mask = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _uniform(seed, record, count):
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    state = _mix((record * golden + seed) & mask)
    hashed = [_mix((state + golden * (draw + 1)) & mask) for draw in range(count)]
    return [(z >> 40) / 2**24 for z in hashed]


def _draw(seed, records, count):
    seed, records = tf.constant(seed, tf.int64), tf.constant(records, tf.int64)
    return draws.uniform(seed, records, count).numpy()


@pytest.mark.parametrize("in_graph", [False, True])
def test_uniform_is_the_hash_that_it_names(in_graph):
    records = [0, 1, 2**40 + 7, 2**63 - 1]
    wanted = [_uniform(12345, record, 5) for record in records]
    draw = _draw
    if in_graph:
        draw = tf.function(draws.uniform)
        records = tf.constant(records, tf.int64)
    found = draw(tf.constant(12345, tf.int64), records, 5)
    np.testing.assert_array_equal(found, np.float32(wanted))


def test_a_record_draws_the_same_alone_and_in_any_batch():
    alone = _draw(3, 17, 4)
    assert alone.shape == (4,)
    np.testing.assert_array_equal(_draw(3, [5, 17], 4)[1], alone)
    np.testing.assert_array_equal(_draw(3, [[17], [9]], 6)[0, 0, :4], alone)


def test_draws_are_uniform_and_independent():
    u = _draw(1, np.arange(100_000), 3)
    assert 0 <= u.min() and u.max() < 1
    # Five standard deviations.
    counts = np.stack([np.histogram(c, 20, (0, 1))[0] for c in u.T])
    assert np.abs(counts - 5000).max() < 5 * np.sqrt(5000 * 0.95)
    others = [u, np.roll(u[:, :1], 1), _draw(2, np.arange(100_000), 1)]
    correlation = np.corrcoef(np.concatenate(others, axis=1).T)
    assert np.abs(correlation - np.eye(5)).max() < 5 / np.sqrt(100_000)


def test_epochs_and_seeds_have_seeds_of_their_own():
    seeds = [draws.epoch_seeds(s, e) for s in range(4) for e in range(4)]
    assert len({int(word) for words in seeds for word in words}) == 3 * 16
    assert min(word for words in seeds for word in words) >= 0
