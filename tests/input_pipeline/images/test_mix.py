import numpy as np
import pytest
import tensorflow as tf

from tests.variants import slow
from towers.input_pipeline.images import mix

pytestmark = pytest.mark.quick_one_in(2)


def _uniform(*shape, seed=0):
    return np.random.default_rng(seed).random(shape, np.float32)


def _batch(size, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, [size, 6, 9, 3]).astype(dtype)
    return tf.constant(images), tf.constant(rng.integers(0, 5, [size]), tf.int64)


def _one_hot(labels):
    return np.eye(5, dtype=np.float32)[np.asarray(labels)]


def _mixup(images, labels, weights):
    mixed = [np.zeros_like(images), np.zeros_like(labels)]
    for i, weight in enumerate(weights):
        for result, values in zip(mixed, (images, labels), strict=True):
            result[i] = weight * values[i] + (1 - weight) * values[i - 1]
    return mixed


def _cutmix(images, labels, weights, centres):
    """As in the authors' code: rand_bbox and the lines around its call."""
    mixed, soft = images.copy(), labels.copy()
    height, width = images.shape[1:3]
    for i, weight in enumerate(weights):
        cut = np.sqrt(np.float32(1) - weight)
        cut_h, cut_w = int(height * cut), int(width * cut)
        cy, cx = int(height * centres[0, i]), int(width * centres[1, i])
        y1, y2 = np.clip([cy - cut_h // 2, cy + cut_h // 2], 0, height)
        x1, x2 = np.clip([cx - cut_w // 2, cx + cut_w // 2], 0, width)
        mixed[i, y1:y2, x1:x2] = images[i - 1, y1:y2, x1:x2]
        weight = 1 - (y2 - y1) * (x2 - x1) / (height * width)
        soft[i] = weight * labels[i] + (1 - weight) * labels[i - 1]
    return mixed, soft


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 1.0, 3.0, 20.0])
def test_weights_are_of_the_beta_distribution(alpha):
    count = 200_000
    weights = mix.symmetric_beta(tf.constant(_uniform(2, count)), alpha).numpy()
    assert weights.dtype == np.float32
    assert ((weights >= 0) & (weights <= 1)).all()
    # Moments of Beta(a, a) around 1/2, each within 5 standard errors.
    second = 1 / (4 * (2 * alpha + 1))
    fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))
    eighth = fourth * 35 / (16 * (2 * alpha + 5) * (2 * alpha + 7))
    centred = weights.astype(np.float64) - 0.5
    for found, wanted, variance in (
        (centred, 0, second),
        (centred**2, second, fourth - second**2),
        (centred**4, fourth, eighth - fourth**2),
    ):
        assert abs(found.mean() - wanted) < 5 * np.sqrt(variance / count)


@pytest.mark.parametrize(
    ("alpha", "cumulative"),
    [
        (0.5, lambda x: 2 / np.pi * np.arcsin(np.sqrt(x))),
        (1.0, lambda x: x),
        (2.0, lambda x: x**2 * (3 - 2 * x)),
    ],
)
def test_weights_have_the_distribution_function(alpha, cumulative):
    count = 100_000
    weights = np.sort(mix.symmetric_beta(tf.constant(_uniform(2, count)), alpha))
    distance = np.abs(cumulative(weights) - (np.arange(count) + 0.5) / count).max()
    assert distance < 2 / np.sqrt(count)  # Kolmogorov: 0.07% of all seeds are worse.


@pytest.mark.parametrize("alpha", [1e-3, 0.2, 1.0, 1e3])
def test_the_ends_of_the_draws_give_weights(alpha):
    ends = np.array([0, 2**-24, 0.25, 0.5, 0.75, 1 - 2**-24], np.float32)
    u = tf.constant(np.stack(np.meshgrid(ends, ends)))
    weights = mix.symmetric_beta(u, alpha).numpy()
    assert ((weights >= 0) & (weights <= 1)).all()


# XLA compiles for each size.
@pytest.mark.parametrize(
    ("size", "jit"),
    [(0, False), (1, False), (2, False), (7, False)]
    + [slow(0, True), slow(1, True), slow(2, True), (7, True)],
)
def test_mixup_averages_with_the_one_before(size, jit):
    images, labels = _batch(size)
    u, labels = tf.constant(_uniform(2, size)), tf.constant(_one_hot(labels))
    mixup = tf.function(mix.mixup, jit_compile=jit)
    wanted = _mixup(images.numpy(), labels.numpy(), mix.symmetric_beta(u, 0.4).numpy())
    for found, right in zip(mixup(images, labels, u, 0.4), wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "jit"),
    [(0, False), (1, False), (2, False), (50, False)]
    + [slow(0, True), slow(1, True), slow(2, True), (50, True)],
)
def test_cutmix_pastes_the_authors_box(size, jit):
    images, labels = _batch(size)
    u, labels = tf.constant(_uniform(4, size)), tf.constant(_one_hot(labels))
    cutmix = tf.function(mix.cutmix, jit_compile=jit)
    weights = mix.symmetric_beta(u[:2], 1.0).numpy()
    wanted = _cutmix(images.numpy(), labels.numpy(), weights, u[2:].numpy())
    found = cutmix(images, labels, u, 1.0)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-6)


def test_a_cutmix_label_is_the_share_of_its_pixels():
    ours, others = np.zeros([6, 9, 1]), np.ones([6, 9, 1])
    images = tf.constant(np.stack([ours, others]), tf.float32)
    for seed in range(20):
        u = tf.constant(_uniform(4, 2, seed=seed))
        mixed, soft = mix.cutmix(images, tf.eye(2), u, 1.0)
        np.testing.assert_allclose(np.mean(mixed, (1, 2, 3)), soft[:, 1], atol=1e-6)


# Each type with both, and each of the two by itself: XLA takes its time.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "mixup", "cutmix"),
    [
        ("uint8", 0.2, 1.0),
        ("float16", 0, 1.0),
        ("float16", 0.2, 1.0),
        ("bfloat16", 0.2, 1.0),
        ("float32", 0.2, 1.0),
        ("uint8", 0.2, 0),
    ],
)
def test_a_mix_is_the_same_compiled_and_not(dtype, mixup, cutmix):
    mixed = mix.Mix(5, mixup, cutmix, seed=3)
    signature = [tf.TensorSpec([None, 6, 9, 3], dtype), tf.TensorSpec([None], tf.int64)]
    compiled = tf.function(mixed, jit_compile=True, input_signature=signature)
    signature[0] = tf.TensorSpec([None] * 3 + [3], dtype)
    traced = tf.function(mixed, input_signature=signature)
    # XLA compiles for each size.
    for size in (0, 1, 7) if dtype == "float32" else (7,):
        images, labels = _batch(size)
        images = tf.cast(images, dtype)
        wanted = mixed(images, labels)
        assert wanted[0].dtype == ("float32" if dtype == "uint8" else dtype)
        assert wanted[1].dtype == tf.float32
        for function in (traced, compiled):
            for found, right in zip(function(images, labels), wanted, strict=True):
                assert found.dtype == right.dtype
                tolerance = {"rtol": 1e-5, "atol": 1e-4}
                if "16" in dtype and found.dtype != tf.float32:
                    tolerance = {"rtol": 0.02, "atol": 2}
                found, right = (tf.cast(x, tf.float32) for x in (found, right))
                np.testing.assert_allclose(found, right, **tolerance)


def test_soft_labels_add_up_to_one():
    for seed in range(10):
        images, labels = _batch(8, seed=seed)
        _, soft = mix.Mix(5)(images, labels)
        assert soft.shape == [8, 5]
        np.testing.assert_allclose(tf.reduce_sum(soft, -1), np.ones(8), atol=1e-6)


def test_a_batch_of_one_is_mixed_with_itself():
    images, labels = _batch(1)
    for alphas in ((0.2, 0), (0, 1.0)):
        mixed, soft = mix.Mix(5, *alphas)(images, labels)
        np.testing.assert_allclose(mixed, images, rtol=1e-6)
        np.testing.assert_allclose(soft, _one_hot(labels), rtol=1e-6)


def test_half_of_the_batches_are_cut():
    """CutMix alone leaves each pixel one of two whole numbers."""
    mixed, cut = tf.function(mix.Mix(5, 1.0, 1.0)), 0
    for seed in range(200):
        found, _ = mixed(*_batch(4, seed=seed))
        cut += np.array_equal(found, np.round(found))
    assert 65 <= cut <= 135  # 5 standard deviations.


def test_what_is_drawn_depends_on_seed_and_batch_alone():
    images, labels = _batch(4, "uint8")
    first, _ = mix.Mix(5, 1.0, 0, seed=1)(images, labels)
    tf.random.set_seed(7)
    again, _ = mix.Mix(5, 1.0, 0, seed=1)(images, labels)
    np.testing.assert_array_equal(first, again)
    pixel = tf.tensor_scatter_nd_add(images, [[0, 3, 0, 0]], tf.ones([1], "uint8"))
    for seed, changed, classes in (
        (2, images, labels),
        (1, pixel, labels),
        (1, images, 4 - labels),
    ):
        other, _ = mix.Mix(5, 1.0, 0, seed=seed)(changed, classes)
        assert np.abs(other - first).mean() > 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((5, 0, 0), "mixup_alpha is 0 and cutmix_alpha 0, expected one above 0"),
        ((5, -1, 1), "mixup_alpha is -1"),
        ((5, 1, -0.5), "cutmix_alpha -0.5"),
        ((0,), "num_classes is 0, expected at least 1"),
    ],
)
def test_a_bad_argument_is_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        mix.Mix(*arguments)
