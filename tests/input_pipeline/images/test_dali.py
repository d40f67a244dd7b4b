"""Decoding whole batches: by DALI's decoders for the CPU, where DALI is installed.

Everywhere, Pillow decodes in the place of DALI, to test what TensorFlow does around it.
"""

import dataclasses
import io
import sys
import types

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from sklearn.datasets import load_sample_image

from tests.input_pipeline.pipeline.test_rows import check
from towers.input_pipeline import ArraySource, blame_records, open_source
from towers.input_pipeline.images import decode
from towers.input_pipeline.images.decode import Tricks
from towers.input_pipeline.pipeline import Pipeline
from towers.input_pipeline.records.checks import BadRecordError

SIZE = 48, 56, 3
PLAIN = Tricks(fused_crop=False, scaled=False, fast_dct=False, plain_upsampling=False)


class PillowDecoder:
    """Does what `dali.Decoders` is to do."""

    count = 2

    def __call__(self, encoded, cuts):
        return np.stack(list(map(self._one, encoded, cuts)))

    def _one(self, encoded, cut):
        y, x, height, width, averages, mirrored = map(int, cut)
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        image = np.asarray(image.crop((x, y, x + width, y + height)), np.float32)
        image = tf.image.resize(image, SIZE[:2], antialias=bool(averages))
        image = np.rint(image.numpy()).astype(np.uint8)
        return image[:, ::-1] if mirrored else image


def _dali():
    reason = "needs nvidia-dali; pip install -e '.[dali]'"
    return pytest.importorskip("nvidia.dali", reason=reason)


@pytest.fixture(params=["pillow", "dali"])
def decoder(request, monkeypatch):
    """Who decodes batches."""
    if request.param == "pillow":
        monkeypatch.setattr(Pipeline, "_decoder", PillowDecoder())
    else:
        _dali()
    return request.param


@pytest.fixture(scope="module")
def photo():
    return load_sample_image("china.jpg")


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory, photo):
    """A folder of 22 JPEGs, none of which shrinks by half or more."""
    folder, random = tmp_path_factory.mktemp("jpegs"), np.random.default_rng(0)
    for k in range(22):
        height, width = random.integers(60, 90, 2)
        top, left = random.integers(0, [427 - height, 640 - width])
        image = Image.fromarray(photo[top : top + height, left : left + width])
        image = image.convert("L") if k == 5 else image
        path = folder / f"class_{k % 2}" / f"{k:02d}.jpg"
        path.parent.mkdir(exist_ok=True)
        image.save(path, quality=95, subsampling=0)
    source = open_source(f"folder:{folder}", eval_fraction=0.2)
    source.prepare()
    return source


def _batches(pipeline):
    return [tuple(map(np.asarray, batch)) for batch in pipeline.dataset()]


def _pipeline(source, split="train", **options):
    return Pipeline(source, split, batch_size=4, image_shape=SIZE, seed=3, **options)


@pytest.mark.parametrize(
    ("recipe", "split"), [("imagenet", "train"), ("imagenet", "test"), ("none", "test")]
)
def test_the_pixels_of_the_same_windows(jpegs, decoder, recipe, split):
    pipeline = _pipeline(jpegs, split, recipe=recipe)
    on_gpu = _batches(dataclasses.replace(pipeline, decode_on="gpu"))
    plain = _batches(dataclasses.replace(pipeline, tricks=PLAIN))
    assert len(on_gpu) == len(plain)
    for (images, labels), (wanted, wanted_labels) in zip(on_gpu, plain, strict=True):
        np.testing.assert_array_equal(labels, wanted_labels)
        assert images.dtype == np.uint8
        assert images.shape == wanted.shape
        # Another cosine transform, and other roundings.
        assert np.abs(images.astype(int) - wanted).max() <= 3


def test_goes_on_at_a_record_of_an_epoch(jpegs, decoder):
    pipeline = _pipeline(jpegs, recipe="imagenet", decode_on="gpu", start_epoch=1)
    whole = _batches(pipeline)
    rest = _batches(dataclasses.replace(pipeline, start_record=8))
    assert len(rest) == len(whole) - 2
    tf.nest.map_structure(np.testing.assert_array_equal, rest, whole[2:])


def test_hosts_decode_their_own_rows(jpegs, decoder):
    check(_pipeline(jpegs, recipe="imagenet", decode_on="gpu"), (1, 1, 2), (1, 2))


def test_large_windows_are_averaged(jpegs, decoder, photo, tmp_path):
    folder = tmp_path / "large" / "class_0"
    folder.mkdir(parents=True)
    for k in range(2):
        Image.fromarray(photo).save(folder / f"{k}.jpg", quality=95)
    source = open_source(f"folder:{tmp_path / 'large'}", eval_fraction=0)
    source.prepare()
    ((images, _),) = _batches(_pipeline(source, decode_on="gpu"))
    wanted = Image.fromarray(photo).resize(SIZE[1::-1], Image.Resampling.BILINEAR)
    assert np.abs(images - np.asarray(wanted, int)).mean() < 1.5


def _cut(file, **options):
    return decode.cut(tf.constant(file), None, SIZE, False, **options)


def _encoded(image, image_format):
    buffer = io.BytesIO()
    image.save(buffer, image_format)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("image_format", "mode"),
    [("PNG", "RGB"), ("BMP", "RGB"), ("GIF", "P"), ("WEBP", "RGB"), ("JPEG", "CMYK")],
)
def test_other_files_are_decoded_here(photo, image_format, mode):
    file = _encoded(Image.fromarray(photo).convert(mode), image_format)
    png, cut = _cut(file, antialias="fast")
    expected = decode.decode_window(tf.constant(file), None, SIZE, antialias="fast")
    assert [*cut.numpy()] == [0, 0, *SIZE[:2], 0, 0]
    assert np.array_equal(tf.io.decode_png(png), expected)


def test_a_picture_that_is_decoded_here_stays_as_it_is(photo, decoder):
    file = _encoded(Image.fromarray(photo), "PNG")
    png, cut = _cut(file)
    if decoder == "dali":
        from towers.input_pipeline.images import dali

        decoders = dali.decoders(SIZE, 4)
    else:
        decoders = PillowDecoder()
    (found,) = decoders([png.numpy()], cut.numpy()[None])
    assert np.array_equal(found, decode.decode_window(tf.constant(file), None, SIZE))


def test_a_jpeg_that_is_cut_off_is_an_error(photo):
    file = _encoded(Image.fromarray(photo), "JPEG")
    with pytest.raises(tf.errors.InvalidArgumentError):
        _cut(file[: len(file) // 2])


def test_a_jpeg_that_dali_cannot_decode_is_named(jpegs, photo, tmp_path):
    _dali()
    folder = tmp_path / "broken" / "class_0"
    folder.mkdir(parents=True)
    file = _encoded(Image.fromarray(photo), "JPEG")
    (folder / "good.jpg").write_bytes(file)
    # Its header is good, and its quantization tables are another kind of segment.
    bad = file.replace(b"\xff\xdb", b"\xff\xec")
    (folder / "bad.jpg").write_bytes(bad)
    assert _cut(bad)[0] == bad
    source = open_source(f"folder:{tmp_path / 'broken'}", eval_fraction=0)
    source.prepare()
    with pytest.raises(BadRecordError, match=r"bad\.jpg"), blame_records(source):
        _batches(_pipeline(source, decode_on="gpu"))


def test_images_of_one_size_have_it(photo, tmp_path, decoder, write_tfrecord, example):
    def record(height):
        file = _encoded(Image.fromarray(photo[:height, :56]), "JPEG")
        return example(
            image__encoded=file,
            image__class__label=0,
            image__height=48,
            image__width=56,
        )

    path = write_tfrecord(tmp_path / "train", [record(48), record(47)])
    source = open_source(f"tfrecord:{path}", num_classes=1)
    source.prepare()
    source.image_shape = SIZE
    with pytest.raises(tf.errors.InvalidArgumentError):
        _batches(_pipeline(source, decode_on="gpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_on": "tpu"}, "decode_on is 'tpu', expected one of cpu, gpu"),
        ({"randaugment": (2, 9)}, "decode_on is 'gpu' with randaugment: expected"),
        ({"data_service": "grpc://a:1"}, "decode_on is 'gpu' with data_service: exp"),
    ],
)
def test_what_is_refused(jpegs, options, message):
    with pytest.raises(ValueError, match=message):
        _pipeline(jpegs, **{"decode_on": "gpu", **options})


def test_where_there_is_nothing_to_decode(photo):
    source = ArraySource(photo[None, :8, :8], np.zeros(1, int))
    pipeline = Pipeline(source, "train", batch_size=8, decode_on="gpu")
    assert pipeline.decode_note.startswith("The GPU decodes nothing, as arrays has no")
    plain = _batches(dataclasses.replace(pipeline, decode_on="cpu"))
    tf.nest.map_structure(np.testing.assert_array_equal, _batches(pipeline), plain)


def test_a_missing_library_is_said(jpegs, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(
        ValueError, match=r"nvidia\.dali cannot be imported .*; run: pip"
    ):
        _pipeline(jpegs, decode_on="gpu").dataset()


def test_each_gpu_decodes_two_batches_at_once(monkeypatch):
    """With a stand-in for DALI: there is no GPU to see it on."""
    made = []

    class GpuPipeline:
        def __init__(self, size, device, **options):
            made.append((size, device, options["batch_size"], options["device_id"]))

        def build(self):
            pass

    stand_in = types.ModuleType("nvidia.dali")
    stand_in.fn = stand_in.types = None
    stand_in.pipeline_def = lambda **_: lambda define: GpuPipeline
    monkeypatch.setitem(sys.modules, "nvidia", types.ModuleType("nvidia"))
    monkeypatch.setitem(sys.modules, "nvidia.dali", stand_in)
    monkeypatch.delitem(sys.modules, "towers.input_pipeline.images.dali", raising=False)
    from towers.input_pipeline import images

    monkeypatch.delattr(images, "dali", raising=False)
    gpus = [
        tf.config.PhysicalDevice(f"/physical_device:GPU:{k}", "GPU") for k in (0, 2)
    ]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    from towers.input_pipeline.images import dali

    assert dali.decoders(SIZE, 8).count == 4
    assert sorted(made, key=lambda row: row[3]) == [
        (SIZE, "mixed", 8, gpu) for gpu in (0, 0, 2, 2)
    ]


def test_dali_knows_what_is_asked_of_a_gpu():
    """The operations and their arguments; none is run."""
    _dali()
    from towers.input_pipeline.images import dali

    pipeline = dali._pipeline(
        *(SIZE, "mixed"), batch_size=8, device_id=None, num_threads=1
    )
    assert b"mixed" in pipeline.serialize()
