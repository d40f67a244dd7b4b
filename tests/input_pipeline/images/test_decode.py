import functools
import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from sklearn.datasets import load_sample_image

from tests.variants import slow
from towers.input_pipeline import make_dataset, open_source
from towers.input_pipeline.images import augment, decode
from towers.input_pipeline.images.decode import Tricks, decode_window

pytestmark = pytest.mark.quick_one_in(2)

SLOW = Tricks(fused_crop=False, scaled=False, fast_dct=False, plain_upsampling=False)


@pytest.fixture(scope="module")
def photo():
    """A real photograph: uint8 [427, 640, 3]."""
    return load_sample_image("china.jpg")


@pytest.fixture(scope="module")
def encode():
    def encode_photo(pixels, image_format="JPEG", **options):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, image_format, **options)
        return buffer.getvalue()

    return encode_photo


@functools.cache
def _graph(size, **options):
    """Traced once for all images and windows."""
    return tf.function(
        lambda encoded, window: decode_window(
            encoded, lambda _: window, size, **options
        ),
        autograph=False,
    )


def _decode(encoded, window, size, **options):
    decoded = _graph(size, **options)(tf.constant(encoded), tf.constant(window))
    return decoded.numpy()


def _oracle(encoded, window, size):
    """The whole image by Pillow, then the crop, then Pillow's bilinear resize."""
    y, x, height, width = window
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    box = (x, y, x + width, y + height)
    resized = image.crop(box).resize(size[1::-1], Image.Resampling.BILINEAR)
    return np.asarray(resized, int)


@pytest.mark.parametrize(
    "window", [(0, 0, 427, 640), (33, 57, 120, 150), (300, 401, 127, 239)]
)
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "BMP"])
def test_a_window_is_what_pillow_makes(photo, encode, window, image_format):
    encoded = encode(photo, image_format)
    size = (96, 104, 3)
    image = _decode(encoded, window, size, antialias="exact")
    assert image.dtype == np.uint8
    off = np.abs(image - _oracle(encoded, window, size))
    # PNG and BMP are exact but for rounding; a JPEG's colours are upsampled plainly,
    # and the largest window is decoded at a quarter of its size.
    assert off.mean() < (5 if image_format == "JPEG" else 0.6)
    if image_format != "JPEG":
        assert off.max() <= 2


@pytest.mark.parametrize("name", ["fused_crop", "fast_dct", "plain_upsampling"])
def test_a_trick_changes_little(photo, encode, name):
    encoded = encode(photo, quality=90)
    window, size = (40, 60, 200, 250), (100, 110, 3)
    slow = _decode(encoded, window, size, tricks=SLOW).astype(int)
    options = {field: field == name for field in vars(SLOW)}
    fast = _decode(encoded, window, size, tricks=Tricks(**options))
    assert np.abs(fast - slow).mean() < 1.5


def test_the_fused_crop_is_the_crop(photo, encode):
    # Aligned with JPEG's blocks, nothing is interpolated across the border.
    encoded = encode(photo, subsampling=0)
    window = (64, 128, 160, 240)
    whole = tf.io.decode_jpeg(encoded, dct_method="INTEGER_FAST")
    image = _decode(encoded, window, (160, 240, 3))
    np.testing.assert_array_equal(image, augment.crop(whole, tf.constant(window)))


@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_large_windows_are_decoded_small(photo, encode, factor):
    large = np.asarray(Image.fromarray(photo).resize((640 * 2, 427 * 2)))
    encoded = encode(large, quality=95)
    window = (16, 32, 800, 1200)
    size = (800 // factor, 1200 // factor, 3)
    found = _decode(encoded, window, size)
    off = np.abs(found - _oracle(encoded, window, size))
    assert off.mean() < 3.5
    # Without, every eighth pixel is taken: what lies between is lost.
    plain = _decode(encoded, window, size, tricks=Tricks(scaled=False))
    if factor > 2:
        worse = np.abs(plain - _oracle(encoded, window, size)).mean()
        assert off.mean() < 0.75 * worse
    else:
        assert factor == 2 or np.array_equal(plain, found)


def test_odd_sizes_scale_without_leaving_the_image(photo, encode):
    for height, width in ((427, 639), (425, 633), (16, 17)):
        encoded = encode(np.ascontiguousarray(photo[:height, :width]))
        for target in (2, 3, 7):
            window = (0, 0, height, width)
            assert _decode(encoded, window, (target, target, 3)).shape[0] == target
            corner = (height - 9, width - 11, 9, 11)
            assert _decode(encoded, corner, (target, target, 3)).shape[0] == target


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
def test_channels_are_made_while_decoding(photo, encode, channels, image_format):
    encoded = encode(photo, image_format)
    image = _decode(encoded, (0, 0, 427, 640), (32, 32, channels), antialias="exact")
    assert image.shape == (32, 32, channels)
    grey = encode(photo[..., 0], image_format)
    assert _decode(grey, (0, 0, 427, 640), (32, 32, channels)).shape[2] == channels


@pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff", b"no image at all"])
def test_what_is_no_image_is_an_error(content):
    with pytest.raises(tf.errors.InvalidArgumentError):
        _decode(content, (0, 0, 1, 1), (4, 4, 3))


@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_a_scaled_window_stays_where_it_was(ratio):
    rng, scaled = np.random.default_rng(0), tf.function(decode._scaled)
    for _ in range(200):
        shape = rng.integers(20, 600, 2)
        size = np.minimum(rng.integers(ratio, 600, 2), shape)
        corner = rng.integers(0, shape - size + 1)
        window = tf.constant([*corner, *size], tf.int32)
        found = scaled(window, tf.constant(shape, tf.int32), ratio).numpy()
        begin, end = found[:2], found[:2] + found[2:]
        # Each border to the nearest pixel, inside of the image.
        assert np.abs(begin - corner / ratio).max() <= 0.5
        assert np.abs(end - (corner + size) / ratio).max() <= 0.5
        assert begin.min() >= 0 and np.all(end <= -(-shape // ratio))


def _psnr(image, wanted):
    return 10 * np.log10(255**2 / np.mean((image.astype(float) - wanted) ** 2))


# What the photograph becomes, the image wanted, and by how many dB the fast way may be
# farther from Lanczos' filter than exact antialiasing is. In the first, it mixes two of
# 2.2 pixels, as tf.image.resize does: 29.0 and 35.0 dB on this photograph of roofs. In
# all others, it is nearer.
_SIGHTS = {
    "JPEG 500 x 375": ("JPEG", (500, 375), (224, 224, 3), 6.5),
    "JPEG 1920 x 1281": ("JPEG", None, (224, 224, 3), 0.1),
    "PNG 1920 x 1281": ("PNG", None, (224, 224, 3), 0.1),
    "BMP of odd sides": ("BMP", (631, 423), (96, 104, 3), 0.1),
    "GIF made larger": ("GIF", (32, 32), (224, 224, 3), 0.1),
    "grey JPEG": ("JPEG", (640, 427), (128, 128, 1), 0.1),
    "long PNG": ("PNG", (1200, 150), (112, 112, 3), 0.1),
}


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("name", _SIGHTS)
def test_the_fast_way_is_near_to_lanczos(photo, name):
    kind, sides, size, less = _SIGHTS[name]
    # Larger, it is repeated: enlarged, it would have nothing to lose.
    image = Image.fromarray(photo if sides else np.tile(photo, (3, 3, 1)))
    image = image.resize(sides, Image.Resampling.LANCZOS) if sides else image
    image = image.convert("L") if size[2] == 1 else image
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"quality": 90} if kind == "JPEG" else {}))
    original = Image.open(buffer).convert("RGB" if size[2] == 3 else "L")
    wanted = original.resize(size[1::-1], Image.Resampling.LANCZOS)
    wanted = np.asarray(wanted).reshape(size)
    near = {}
    for how in ("fast", "exact"):
        encoded = tf.constant(buffer.getvalue())
        found = decode_window(encoded, None, size, antialias=how).numpy()
        again = decode_window(encoded, None, size, antialias=how).numpy()
        np.testing.assert_array_equal(found, again)
        near[how] = _psnr(found, wanted)
    assert near["fast"] >= near["exact"] - less
    assert near["fast"] > 28


def test_stripes_do_not_become_others():
    # Every seventh column: nothing of it is left in a fifteenth of the width.
    stripes = np.zeros([30, 1500, 3], np.uint8)
    stripes[:, ::7] = 210
    fast = augment.resize(tf.constant(stripes), 30, 100, antialias="fast").numpy()
    none = augment.resize(tf.constant(stripes), 30, 100, antialias="none").numpy()
    assert np.abs(fast.astype(int) - 30).max() <= 15 < 60 < none.max() - none.min()


@pytest.mark.parametrize(
    ("recipe", "training"),
    [
        ("none", True),
        ("imagenet", False),
        slow("none", False),
        slow("cifar", False),
    ],
)
def test_no_pipeline_takes_the_slow_kernel(
    tmp_path, encode, monkeypatch, recipe, training
):
    (tmp_path / "cat").mkdir()
    pixels = np.add.outer(np.arange(60), np.arange(80))[..., None] * [1, 2, 1]
    (tmp_path / "cat" / "a.png").write_bytes(encode(pixels.astype(np.uint8), "PNG"))
    resize, slow = tf.image.resize, []

    def record(*arguments, antialias=False, **options):
        slow.append(antialias)
        return resize(*arguments, antialias=antialias, **options)

    monkeypatch.setattr(tf.image, "resize", record)
    source = open_source(f"folder:{tmp_path}")
    options = {"batch_size": 1, "image_shape": (16, 16, 3), "recipe": recipe}
    dataset = make_dataset(source, "train", training=training, **options)
    assert next(iter(dataset))[0].shape == (1, 16, 16, 3)
    assert slow and not any(slow)
