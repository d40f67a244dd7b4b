import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from input_pipeline import augment


def _random_image(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("size", [(10, 14), (7, 40), (64, 64)])
def test_resize_is_what_pillow_does(size):
    pixels = _random_image(32, 28, 3)
    wanted = Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR)
    resized = augment.resize(tf.constant(pixels), *size)
    np.testing.assert_allclose(resized, np.asarray(wanted), atol=1.0)


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
