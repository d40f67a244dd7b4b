import functools

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageOps
from sklearn.datasets import load_sample_images

from tests.variants import slow
from towers.input_pipeline.images import randaugment as ra

pytestmark = pytest.mark.quick_one_in(2)

FACTORS = [0.0, slow(0.1), 0.19, slow(0.5), 0.73, 1.0, slow(1.27), 1.9]


@functools.cache
def _pictures():
    """Grey and colour: photographs, noise, flat ones and small ones."""
    china, flower = load_sample_images().images
    rng = np.random.default_rng(0)
    steps = np.repeat(np.arange(0, 250, 50, dtype=np.uint8), 12).reshape(6, 10)
    colour = [
        china[100:164, 200:296],
        flower[150:247, 250:315],
        china[::7, ::7],
        rng.integers(0, 256, [32, 32, 3], np.uint8),
        rng.integers(90, 130, [33, 21, 3], np.uint8),
        np.full([8, 9, 3], 200, np.uint8),
        np.zeros([5, 5, 3], np.uint8),
        np.stack([steps, 0 * steps + 7, 255 - steps], axis=-1),
        rng.integers(0, 256, [2, 7, 3], np.uint8),
        rng.integers(0, 256, [1, 1, 3], np.uint8),
    ]
    return colour + [picture[..., 1:2] for picture in colour]


def _pillow(function, picture):
    """The picture [H, W, C] that a function of Pillow makes of one."""
    made = function(
        Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
    )
    return np.asarray(made).reshape(picture.shape)


def _assert_exact(ours, pillows):
    for picture in _pictures():
        found = ours(tf.constant(picture))
        assert found.dtype == tf.uint8
        np.testing.assert_array_equal(found, _pillow(pillows, picture))


def test_identity_is_the_image():
    _assert_exact(ra.identity, lambda picture: picture)


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
def test_histograms_are_pillows(name):
    _assert_exact(getattr(ra, name), getattr(ImageOps, name))


@pytest.mark.parametrize("threshold", [0, 1, 25.6, 26, 128, 255, 256])
def test_solarize_is_pillows(threshold):
    _assert_exact(
        lambda image: ra.solarize(image, threshold),
        lambda picture: ImageOps.solarize(picture, threshold),
    )


@pytest.mark.parametrize("bits", range(1, 9))
def test_posterize_is_pillows(bits):
    _assert_exact(
        lambda image: ra.posterize(image, bits),
        lambda picture: ImageOps.posterize(picture, bits),
    )


@pytest.mark.parametrize("name", ["color", "contrast", "brightness", "sharpness"])
@pytest.mark.parametrize("factor", FACTORS)
def test_enhancers_are_pillows(name, factor):
    _assert_exact(
        lambda image: getattr(ra, name)(image, factor),
        lambda picture: getattr(ImageEnhance, name.title())(picture).enhance(factor),
    )


def test_the_mean_of_a_large_image_is_exact():
    picture = np.full([3000, 3000, 1], 255, np.uint8)
    picture[:1000] = 1
    np.testing.assert_array_equal(
        ra.contrast(tf.constant(picture), 0.3),
        _pillow(lambda image: ImageEnhance.Contrast(image).enhance(0.3), picture),
    )


def _assert_moved(ours, matrix):
    """Equals Pillow's, but for points on the border between two pixels.

    Pillow rounds coordinates to a 65536th of a pixel and TensorFlow to float32, so a
    point less than a 500th from that border may fall to either side.
    """
    for picture in _pictures():
        height, width, channels = picture.shape
        fill = (128,) * channels if channels == 3 else 128
        found, rows = ours(tf.constant(picture)), matrix(height, width)
        assert found.dtype == tf.uint8
        wanted = _pillow(
            lambda image, rows=rows, fill=fill: image.transform(
                image.size, Image.Transform.AFFINE, rows, fillcolor=fill
            ),
            picture,
        )
        y, x = np.mgrid[:height, :width] + 0.5
        points = np.stack(
            [a * x + b * y + c for a, b, c in (rows[:3], rows[3:])], axis=-1
        )
        clear = (np.abs(points - np.round(points)) > 0.002).all(axis=-1)
        assert clear.mean() > 0.8
        np.testing.assert_array_equal(found.numpy()[clear], wanted[clear])


@pytest.mark.parametrize("slope", [-0.3, -0.27, -0.061, 0.0, 0.03, 0.27])
def test_shears_are_pillows(slope):
    _assert_moved(
        lambda image: ra.shear_x(image, slope), lambda *_: (1, slope, 0, 0, 1, 0)
    )
    _assert_moved(
        lambda image: ra.shear_y(image, slope), lambda *_: (1, 0, 0, slope, 1, 0)
    )


@pytest.mark.parametrize("pixels", [-40, -3, 0, 1, 12, 1000])
def test_translations_are_pillows(pixels):
    _assert_moved(
        lambda image: ra.translate_x(image, pixels), lambda *_: (1, 0, pixels, 0, 1, 0)
    )
    _assert_moved(
        lambda image: ra.translate_y(image, pixels), lambda *_: (1, 0, 0, 0, 1, pixels)
    )


@pytest.mark.parametrize("degrees", [-30.0, -27.0, -3.3, 0.0, 1.7, 27.0])
def test_rotate_is_pillows(degrees):
    def matrix(height, width):
        sin, cos = np.sin(np.radians(degrees)), np.cos(np.radians(degrees))
        x, y = width / 2, height / 2
        return cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y

    _assert_moved(lambda image: ra.rotate(image, degrees), matrix)


def test_rotate_turns_as_image_rotate():
    picture = load_sample_images().images[0][::5, ::5]
    wanted = Image.fromarray(picture).rotate(27, fillcolor=(128,) * 3)
    same = ra.rotate(tf.constant(picture), 27) == np.asarray(wanted)
    assert np.mean(same) > 0.995


@pytest.mark.parametrize("name", ra.OPERATIONS)
def test_magnitudes_reach_the_papers_range(name):
    """Level 0 is the image (of histograms: themselves), and 1 is AutoAugment's end."""
    image = tf.constant(_pictures()[0])
    ends = {
        "identity": ra.identity,
        "autocontrast": ra.autocontrast,
        "equalize": ra.equalize,
        "rotate": lambda image: ra.rotate(image, 30),
        "solarize": lambda image: 255 - image,
        "color": lambda image: ra.color(image, 1.9),
        "posterize": lambda image: ra.posterize(image, 4),
        "contrast": lambda image: ra.contrast(image, 1.9),
        "brightness": lambda image: ra.brightness(image, 1.9),
        "sharpness": lambda image: ra.sharpness(image, 1.9),
        "shear_x": lambda image: ra.shear_x(image, 0.3),
        "shear_y": lambda image: ra.shear_y(image, 0.3),
        "translate_x": lambda image: ra.translate_x(image, 44),  # 96 * 150 / 331
        "translate_y": lambda image: ra.translate_y(image, 29),  # 64 * 150 / 331
    }
    operation = ra.OPERATIONS[name]
    np.testing.assert_array_equal(operation(image, tf.constant(1.0)), ends[name](image))
    if name not in ("autocontrast", "equalize"):
        np.testing.assert_array_equal(operation(image, tf.constant(0.0)), image)
    if name.startswith(("rotate", "shear", "translate")):
        opposite = operation(image, tf.constant(-1.0))
        assert not np.array_equal(opposite, ends[name](image))


def test_the_papers_fourteen_are_chosen_evenly():
    image = tf.constant(_pictures()[0])
    assert len(ra.OPERATIONS) == 14
    for index, operation in enumerate(ra.OPERATIONS.values()):
        for direction, level in ((0.1, -0.9), (0.9, 0.9)):
            for which in (index / 14 + 1e-3, (index + 1) / 14 - 1e-3):
                u = tf.constant([which, direction])
                np.testing.assert_array_equal(
                    ra.randaugment(image, u, layers=1, magnitude=9),
                    operation(image, tf.constant(level)),
                )


def test_the_largest_draw_takes_the_last_operation():
    image = tf.constant(_pictures()[0])
    u = tf.constant([np.nextafter(np.float32(1), np.float32(0)), 0.9])
    np.testing.assert_array_equal(
        ra.randaugment(image, u, layers=1, magnitude=10), ra.translate_y(image, 29)
    )


def test_layers_follow_one_another():
    image = tf.constant(_pictures()[1])
    u = tf.constant([[4.5 / 14, 0.9], [10.5 / 14, 0.1]])
    wanted = ra.OPERATIONS["shear_x"](
        ra.OPERATIONS["solarize"](image, tf.constant(0.4)), tf.constant(-0.4)
    )
    for draws in (u, tf.reshape(u, [-1])):
        np.testing.assert_array_equal(ra.randaugment(image, draws, magnitude=4), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_a_map_over_images_of_any_size_gives_the_same(channels):
    pictures = [picture for picture in _pictures() if picture.shape[2] == channels] * 6
    u = np.random.default_rng(1).random(
        [len(pictures), ra.randaugment_draws(2)], np.float32
    )
    dataset = tf.data.Dataset.from_tensor_slices(
        (tf.ragged.stack([tf.reshape(p, [-1]) for p in pictures]), u)
    )
    dataset = tf.data.Dataset.zip(
        dataset, tf.data.Dataset.from_tensor_slices([p.shape for p in pictures])
    )

    @tf.autograph.experimental.do_not_convert
    def augment(flat_and_draws, shape):
        flat, draws = flat_and_draws
        image = tf.reshape(flat, shape)
        image.set_shape([None, None, channels])
        return ra.randaugment(image, draws, layers=2)

    dataset = dataset.map(augment, num_parallel_calls=2)
    assert dataset.element_spec == tf.TensorSpec([None, None, channels], tf.uint8)
    for found, picture, draws in zip(dataset, pictures, u, strict=True):
        wanted = ra.randaugment(tf.constant(picture), tf.constant(draws), layers=2)
        np.testing.assert_array_equal(found, wanted)


def test_a_known_shape_stays_known():
    dataset = tf.data.Dataset.from_tensors(tf.zeros([8, 6, 3], tf.uint8))
    dataset = dataset.map(lambda image: ra.randaugment(image, tf.zeros([2]), layers=1))
    assert dataset.element_spec.shape == [8, 6, 3]


def test_no_layers_leave_the_image_alone():
    image = tf.constant(_pictures()[0])
    assert ra.randaugment(image, tf.zeros([0]), layers=0) is image


@pytest.mark.parametrize(
    ("image", "draws", "magnitude", "said"),
    [
        (tf.zeros([4, 4, 3]), 4, 9, "the image is float32"),
        (tf.zeros([4, 4, 2], tf.uint8), 4, 9, r"expected uint8 \[H, W, 1\]"),
        (tf.zeros([2, 4, 4, 3], tf.uint8), 4, 9, r"uint8 \(2, 4, 4, 3\)"),
        (tf.zeros([4, 4, 3], tf.uint8), 4, 11, "magnitude is 11, expected 0 to 10"),
        (tf.zeros([4, 4, 3], tf.uint8), 4, -1, "magnitude is -1, expected 0 to 10"),
        (tf.zeros([4, 4, 3], tf.uint8), 3, 9, "u has shape .3,., expected 4 numbers"),
    ],
)
def test_a_bad_argument_is_named(image, draws, magnitude, said):
    with pytest.raises(ValueError, match=said):
        ra.randaugment(image, tf.zeros([draws]), magnitude=magnitude)
