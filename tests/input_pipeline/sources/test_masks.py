"""Pictures with a class for each pixel: from folders and arrays to batches."""

import io
import re

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.variants import slow
from towers.input_pipeline import (
    ArraySource,
    blame_records,
    cached,
    make_dataset,
    open_source,
)
from towers.input_pipeline.images import masks
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.sources.files.record import BadRecordError
from towers.input_pipeline.sources.targets import Target

# In a picture, a pixel's red is its place in its row, and green that in its column: so
# it tells where it comes from.
SIDE = 16
PLACES = np.stack(
    [*np.meshgrid(np.arange(SIDE), np.arange(SIDE)), np.zeros([SIDE, SIDE])], axis=-1
).astype(np.uint8)
# Of each pixel, by its place; some are ignored.
CLASSES = (PLACES[..., 0] // 4 + PLACES[..., 1] // 8 * 4).astype(np.uint8)
CLASSES[3, 5] = 255


def _png(pixels, palette=False, **options):
    image = Image.fromarray(np.asarray(pixels, np.uint8))
    if palette:
        image = Image.fromarray(np.asarray(pixels, np.uint8), "P")
        colors = np.random.default_rng(0).integers(0, 256, 768)
        image.putpalette(colors.astype(np.uint8).tobytes())
    if options.pop("bit", False):
        image = Image.fromarray(np.asarray(pixels, bool))
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def _write(folder, count=10, palette=False):
    """Pictures and masks."""
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        name = f"{number:02}.png"
        (folder / "images" / name).write_bytes(_png(PLACES + number))
        (folder / "masks" / name).write_bytes(_png(CLASSES, palette))
    return f"folder:{folder}"


@pytest.mark.parametrize(
    ("classes", "options"),
    [
        (256, {}),
        (256, {"palette": True}),
        (16, {"palette": True, "bits": 4}),
        (4, {"palette": True, "bits": 2, "transparency": 0}),
        (2, {"palette": True, "bits": 1}),
        (2, {"bit": True}),
    ],
)
def test_a_mask_is_decoded_to_its_numbers(classes, options):
    numbers = np.random.default_rng(1).integers(0, classes, (5, 11))
    encoded = _png(numbers, **options)
    assert masks.fault(encoded) == ""
    np.testing.assert_array_equal(masks.decode(tf.constant(encoded)), numbers)


def test_what_is_no_mask():
    colours = _png(PLACES)
    deep = io.BytesIO()
    Image.fromarray(np.zeros([2, 2], np.uint16)).save(deep, "PNG")
    for encoded, reason in (
        (colours, "a PNG of colours"),
        (deep.getvalue(), "a PNG of 16 bits"),
        (b"", "no PNG"),
    ):
        assert masks.fault(encoded).startswith(f"{reason}, expected a PNG of grey")
        with pytest.raises(tf.errors.InvalidArgumentError):
            masks.decode(tf.constant(encoded))


@pytest.mark.slow
@pytest.mark.parametrize("palette", [True, False])
def test_a_folder_of_pictures_with_masks(tmp_path, palette):
    source = open_source(_write(tmp_path, palette=palette))
    assert source.target == Target("mask", 8) and source.num_classes == 8
    assert source.splits == {"train": 9, "test": 1} and source.input_kind == "image"
    shape = (SIDE, SIDE, 3)
    for of_batch in make_dataset(source, "train", 4, image_shape=shape, training=False):
        images, found, weights = of_batch
        np.testing.assert_array_equal(weights, found != 255)
        assert found.dtype == tf.int64
        np.testing.assert_array_equal(images[0] - images[0, 0, 0], PLACES)
        np.testing.assert_array_equal(found, [CLASSES] * len(images))
    data = make_dataset(source, "test", 4, image_shape=(8, 32, 3))
    ((_, found, weights),) = data
    np.testing.assert_array_equal(weights, found != 255)
    assert found.shape == (1, 8, 32) and {*np.unique(found)} <= {*range(8), 255}
    # Half as high: of two rows, one stays.
    assert np.all(
        (found[0] == CLASSES[1::2].repeat(2, 1))
        | (found[0] == CLASSES[::2].repeat(2, 1))
    )


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("recipe", "keep"),
    [
        *(("cifar", "memory"), ("imagenet", "none")),
        *(slow("cifar", "disk"), slow("cifar", "none"), slow("imagenet", "memory")),
    ],
)
def test_a_mask_moves_with_its_picture(tmp_path, recipe, keep):
    source = open_source(_write(tmp_path / "data", count=6), eval_fraction=0)
    shape = (SIDE, SIDE, 3)
    kept = cached(source, keep, str(tmp_path / "kept"), True, shape, recipe)
    assert (kept is source) == (keep == "none") and kept.target == source.target
    ((images, found, weights),) = make_dataset(
        kept, "train", 6, image_shape=shape, recipe=recipe
    )
    np.testing.assert_array_equal(weights, found != 255)
    images, found = images.numpy().astype(int), found.numpy()
    changed = 0
    for image, mask in zip(images, found, strict=True):
        changed += not np.array_equal(mask, CLASSES)
        if recipe == "cifar":
            # Where something moved in, all of a pixel is black, and its class ignored.
            inside = image[..., 2] > 0
            number = image[..., 2].max()
            place = image - number
            expected = np.full([SIDE, SIDE], 255)
            rows, columns = place[inside][:, 1], place[inside][:, 0]
            expected[inside] = CLASSES[rows, columns]
            if number:
                np.testing.assert_array_equal(mask, expected)
        else:
            place = image - image[..., 2:]
            rows, columns = place[..., 1].clip(0), place[..., 0].clip(0)
            # Interpolated: at the borders of classes, it may be the neighbour.
            same = CLASSES[rows, columns] == mask
            assert same.mean() > 0.7
    assert changed >= 4


def test_masks_of_arrays():
    x, y = np.stack([PLACES] * 3), np.stack([CLASSES] * 3)
    source = ArraySource(x, y, class_names="abcdefgh")
    assert source.target == Target("mask", 8, (*"abcdefgh",))
    ((_, found, _),) = make_dataset(source, "train", 3, image_shape=(32, 32, 3))
    np.testing.assert_array_equal(found[0], CLASSES.repeat(2, 0).repeat(2, 1))
    ((_, found, _),) = make_dataset(source, "train", 3, recipe="imagenet")
    assert found.shape == (3, SIDE, SIDE) and found.dtype == tf.int64
    with pytest.raises(ValueError, match="masks as large as images"):
        ArraySource(x, y[:, :-1])
    with pytest.raises(ValueError, match="labels go from 0 to 7: expected 0 to 6"):
        ArraySource(x, y, num_classes=7)
    with pytest.raises(ValueError, match="train masks go from -1 to 254: expected cla"):
        ArraySource(x, y.astype(int) - 1)
    with pytest.raises(ValueError, match="training and test have different shapes"):
        ArraySource(x, y, x[:, 1:], y[:, 1:])
    with pytest.raises(ValueError, match=r"randaugment is .* has masks: expected None"):
        make_dataset(source, "train", 3, randaugment=(2, 9))


def test_folders_of_masks_are_splits_and_names_stand_in_a_file(tmp_path):
    spec = _write(tmp_path / "train", count=3)
    _write(tmp_path / "val", count=2)
    (tmp_path / "classes.txt").write_text("\n".join("abcdefgh"))
    spec = f"folder:{tmp_path}"
    source = open_source(spec)
    assert source.splits == {"train": 3, "test": 2}
    assert source.class_names == (*"abcdefgh",)
    with pytest.raises(ValueError, match=r"num_classes is 5, but .* names of 8"):
        open_source(spec, num_classes=5)
    with pytest.raises(ValueError, match="held out by its name"):
        open_source(spec, eval_fraction=0.5)


@pytest.mark.parametrize("is_smaller", [True, False])
def test_masks_of_another_size_are_said(tmp_path, is_smaller):
    spec = _write(tmp_path, count=3)
    if is_smaller:
        for path in (tmp_path / "masks").iterdir():
            path.write_bytes(_png(CLASSES[::2, ::2]))
    notes = " ".join(open_source(spec).notes)
    assert ("00.png is 8x8, and its picture 16x16." in notes) == is_smaller


def test_masks_that_are_not_there(tmp_path):
    spec = _write(tmp_path, count=3)
    (tmp_path / "masks" / "other.png").write_bytes(_png(CLASSES))
    assert any(
        "1 mask in" in note and "other.png" in note for note in open_source(spec).notes
    )
    (tmp_path / "masks" / "01.png").unlink()
    wanted = re.escape(str(tmp_path / "masks" / "01.png"))
    with pytest.raises(
        ValueError, match=rf"1 picture of 3 in .* such as 01.png.*{wanted}"
    ):
        open_source(spec)
    for path in (tmp_path / "images").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"images has no pictures: expected .* with a"):
        open_source(spec)
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="no folders images and masks"):
        open_source(f"folder:{tmp_path / 'other'}", target="mask")
    with pytest.raises(ValueError, match="target is 'numbers': expected class or mask"):
        open_source(spec, target="numbers")


def test_a_folder_of_0_and_255_is_told_from_classes(tmp_path):
    spec = _write(tmp_path, count=2)
    for path in (tmp_path / "masks").iterdir():
        path.write_bytes(_png((CLASSES > 3) * 255))
    with pytest.raises(ValueError, match="no class but 0 and 255, which is ignored"):
        open_source(spec)


def test_bad_masks_are_bad_records(tmp_path):
    spec = _write(tmp_path, count=5)
    (tmp_path / "masks" / "01.png").write_bytes(_png(PLACES))
    (tmp_path / "masks" / "02.png").write_bytes(_png(CLASSES)[:60])
    (tmp_path / "masks" / "03.png").write_bytes(b"nothing")
    with pytest.raises(BadRecordError, match=r"masks/01.png: a PNG of colours, exp"):
        open_source(spec)
    source = open_source(spec, skip_bad=True, eval_fraction=0)
    found = quarantine.inspect(source, ["train"], most=3)
    cut = found.bad["train"].pop(1)
    assert str(cut).startswith(f"{tmp_path}/images/02.png: mask: ")
    assert [str(bad) for bad in found.bad["train"]] == [
        f"{tmp_path}/images/01.png: mask: a PNG of colours, expected {masks.EXPECTED}",
        f"{tmp_path}/images/03.png: mask: no PNG, expected {masks.EXPECTED}",
    ]
    found.bad["train"].append(cut)
    source = source.without(found.bad, found.splits)
    (batch,) = make_dataset(source, "train", 5, image_shape=(SIDE, SIDE, 3))
    assert len(batch[0]) == 2
    # A number that is no class.
    source = open_source(spec, num_classes=7, eval_fraction=0)
    reason = "00.png: mask is 7, expected 0 to 6, or 255 to ignore a pixel"
    with pytest.raises(BadRecordError, match=reason), blame_records(source):
        list(make_dataset(source, "train", 5, image_shape=(SIDE, SIDE, 3)))
