import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from towers.input_pipeline.images import augment


def _random_image(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("size", [(10, 14), (7, 40), (64, 64)])
def test_resize_is_what_pillow_does(size):
    pixels = _random_image(32, 28, 3)
    wanted = Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR)
    resized = augment.resize(tf.constant(pixels), *size)
    assert resized.dtype == tf.uint8
    np.testing.assert_allclose(np.int32(resized), np.int32(wanted), atol=1)


def test_resize_leaves_a_fitting_image_alone():
    image = tf.constant(_random_image(8, 6, 1))
    assert augment.resize(image, 8, 6) is image


def test_channels_convert_both_ways():
    grey, colour = _random_image(5, 4, 1), _random_image(5, 4, 3)
    np.testing.assert_array_equal(
        augment.convert_channels(tf.constant(grey), 3), np.repeat(grey, 3, axis=-1)
    )
    wanted = np.asarray(Image.fromarray(colour).convert("L"))[..., None]
    back = augment.convert_channels(tf.constant(colour), 1)
    assert back.dtype == tf.uint8
    assert np.abs(back.numpy().astype(int) - wanted).max() <= 1


def test_channels_that_do_not_convert_are_named():
    with pytest.raises(ValueError, match="have 2 channels but 3 are wanted"):
        augment.convert_channels(tf.zeros([4, 4, 2]), 3)


def test_normalize_maps_the_ends():
    image = augment.normalize(tf.constant([0, 51, 255], tf.uint8))
    assert image.dtype == tf.float32
    np.testing.assert_allclose(image, [-1.0, -0.6, 1.0], atol=1e-6)


def test_resize_without_antialias_is_bilinear_at_pixel_centres():
    pixels = _random_image(9, 7, 3)
    height, width = 5, 12
    wanted = np.zeros([height, width, 3])
    for row in range(height):
        for column in range(width):
            y = np.clip((row + 0.5) * 9 / height - 0.5, 0, 8)
            x = np.clip((column + 0.5) * 7 / width - 0.5, 0, 6)
            for (i, a), (j, b) in itertools.product(
                _neighbours(y, 8), _neighbours(x, 6)
            ):
                wanted[row, column] += a * b * pixels[i, j]
    resized = augment.resize(tf.constant(pixels), height, width, antialias="none")
    np.testing.assert_allclose(np.int32(resized), np.rint(wanted), atol=1)
    assert np.mean(np.int32(resized) == np.rint(wanted)) > 0.98


def _neighbours(position, last):
    low = int(position)
    return (low, 1 - position % 1), (min(low + 1, last), position % 1)


def test_resize_takes_batches():
    pixels = _random_image(3, 9, 7, 1)
    resized = augment.resize(tf.constant(pixels), 4, 5)
    for image, alone in zip(resized, pixels, strict=True):
        np.testing.assert_array_equal(image, augment.resize(tf.constant(alone), 4, 5))


def _windows(shape, count):
    draws = np.random.default_rng(1).random([count, augment.WINDOW_DRAWS], np.float32)
    return draws, _each(
        lambda u: augment.random_window(tf.constant(shape), u), draws, tf.int32
    )


def _each(function, values, dtype):
    """What a function makes of each value, traced once."""
    mapped = tf.function(
        lambda: tf.map_fn(function, values, fn_output_signature=dtype),
        autograph=False,
    )
    return mapped().numpy()


def _window(shape, u):
    """The same in plain Python."""
    height, width = shape[:2]
    ratio = 3 / 4 + (4 / 3 - 3 / 4) * float(u[0])  # width over height
    most = min(height, width / ratio)
    least = min(math.sqrt(0.08 * height * width / ratio), most)
    drawn = least + (most - least) * float(u[1])
    chosen = max(round(drawn), 1), min(max(round(drawn * ratio), 1), width)
    corner = [
        int(float(place) * (side - taken + 1))
        for place, side, taken in zip(u[2:], (height, width), chosen, strict=True)
    ]
    return [*corner, *chosen]


@pytest.mark.parametrize("shape", [(375, 500, 3), (600, 200, 3), (8, 1000, 3)])
def test_random_window_is_that_of_plain_python(shape):
    draws, windows = _windows(shape, 100)
    wanted = np.array([_window(shape, u) for u in draws])
    # A side may be rounded the other way.
    assert np.abs(windows - wanted).max() <= 1
    assert np.mean(np.all(windows == wanted, axis=1)) > 0.95


def test_random_windows_are_distributed_as_tensorflows():
    shape = 375, 500, 3
    _, windows = _windows(shape, 2000)

    def theirs(seed):
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            shape,
            tf.zeros([1, 0, 4]),
            seed=[seed, 1],
            min_object_covered=0,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.08, 1),
            use_image_if_no_bounding_boxes=True,
        )
        return tf.concat([begin[:2], size[:2]], axis=0)

    others = _each(theirs, np.arange(2000, dtype=np.int32), tf.int32)
    for mine, other in (
        *zip(windows.T, others.T, strict=True),
        (windows[:, 3] / windows[:, 2], others[:, 3] / others[:, 2]),
    ):
        # The two-sample test of Kolmogorov and Smirnov, at 0.1%.
        both = np.sort(np.concatenate([mine, other]))
        counts = [np.searchsorted(np.sort(x), both, "right") for x in (mine, other)]
        assert np.abs(counts[0] - counts[1]).max() / 2000 < 1.95 * np.sqrt(2 / 2000)
    assert np.all(windows[:, :2] + windows[:, 2:] <= shape[:2])


@pytest.mark.parametrize(
    ("shape", "size", "wanted"),
    [
        # 224 of 256: what resizing the shorter side to 256 and cropping 224 shows.
        ((256, 256, 3), (224, 224), [16, 16, 224, 224]),
        ((512, 800, 3), (224, 224), [32, 176, 448, 448]),
        ((300, 100, 3), (50, 50), [106, 6, 88, 88]),
        ((100, 100, 3), (20, 40), [28, 6, 44, 88]),
        ((1, 1, 3), (8, 8), [0, 0, 1, 1]),
    ],
)
def test_center_window(shape, size, wanted):
    np.testing.assert_array_equal(
        augment.center_window(tf.constant(shape), *size), wanted
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_pad_crop_flip_is_what_numpy_does(channels):
    rng = np.random.default_rng(2)
    images = rng.integers(1, 256, [200, 7, 5, channels], np.uint8)
    u = rng.random([200, augment.PAD_CROP_FLIP_DRAWS], np.float32)
    changed = tf.function(augment.pad_crop_flip)(tf.constant(images), tf.constant(u))
    assert changed.dtype == tf.uint8
    offsets = set()
    for image, (down, right, mirrored), found in zip(images, u, changed, strict=True):
        padded = np.pad(image, [(4, 4), (4, 4), (0, 0)])
        y, x = int(down * 9), int(right * 9)
        wanted = padded[y : y + 7, x : x + 5]
        offsets |= {y, x}
        np.testing.assert_array_equal(
            found, wanted[:, ::-1] if mirrored < 0.5 else wanted
        )
    assert offsets == set(range(9))


def test_pad_crop_flip_of_no_image():
    images = augment.pad_crop_flip(tf.zeros([0, 4, 4, 3], tf.uint8), tf.zeros([0, 3]))
    assert images.shape == (0, 4, 4, 3)


def test_flip():
    image = _random_image(3, 4, 3)
    np.testing.assert_array_equal(
        augment.flip(image, tf.constant(0.49)), image[:, ::-1]
    )
    np.testing.assert_array_equal(augment.flip(image, tf.constant(0.5)), image)


def test_crop():
    image = _random_image(9, 8, 3)
    window = tf.constant([2, 3, 4, 5])
    np.testing.assert_array_equal(augment.crop(image, window), image[2:6, 3:8])


def test_normalize_computes_in_16_bits():
    image = augment.normalize(tf.constant([0, 255], tf.uint8), tf.float16)
    assert image.dtype == tf.float16
    np.testing.assert_allclose(image, [-1, 1], atol=1e-3)
