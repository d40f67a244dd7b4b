"""Makes what the contenders read, out of photographs that are inside two packages."""

import contextlib
import io
import itertools
import os
import pathlib
import sys
import tempfile

import numpy as np

from ..race import PACKAGES
from .works import CLASSES

# Any change to what is made needs another one.
VERSION = "v1"
PHOTOS = 1024
SMALL = 50_000
_SHARDS = 8


def make(
    data_dir: str | os.PathLike, photos: int = PHOTOS, small: int = SMALL
) -> pathlib.Path:
    """Makes the data in a folder, unless they are there already.

    It holds TFRecords of JPEGs, the same JPEGs as a folder for each class, TFRecords of
    small images' pixels, and these as arrays.

    Args:
        data_dir: Where the folder goes.
        photos: How many JPEGs.
        small: How many small images.

    Returns:
        The folder.

    Raises:
        ValueError: If a package that holds photographs is missing.
    """
    folder = pathlib.Path(data_dir).resolve() / VERSION
    if folder.is_dir():
        return folder
    pictures = _pictures()
    print(f"Making data in {folder}.", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when whole, so that half of it is never taken for all.
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = pathlib.Path(temporary, "made")
        made.mkdir()
        random = np.random.default_rng(0)
        _make_photos(made, pictures, photos, random)
        _make_small(made, pictures, small, random)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # Somebody else was faster.
                raise
    return folder


def _pictures():
    """Returns real photographs, as PIL images."""
    try:
        from PIL import Image
        from skimage import data
        from sklearn.datasets import load_sample_images
    except ModuleNotFoundError as error:
        raise ValueError(
            f"The data are made of photographs: {error}; {PACKAGES} brings it."
        ) from None
    arrays = [*load_sample_images().images, data.astronaut(), data.chelsea()]
    arrays += [data.coffee(), data.rocket(), data.stereo_motorcycle()[0]]
    return [Image.fromarray(array).convert("RGB") for array in arrays]


def _make_photos(folder, pictures, count, random):
    def examples():
        for i in range(count):
            size = int(random.integers(460, 541)), int(random.integers(345, 406))
            if random.random() < 0.25:
                size = size[::-1]
            # Most of a picture, so that not much is made larger.
            image = _cut(pictures, size, (0.6, 1.0), random)
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=90, subsampling="4:2:0")
            label = i % CLASSES
            path = folder / "folder" / f"class_{label}" / f"{i:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(buffer.getvalue())
            yield buffer.getvalue(), label, (size[1], size[0])

    _write(folder, "train", examples())


def _make_small(folder, pictures, count, random):
    cuts = (_cut(pictures, (32, 32), (0.01, 0.3), random) for _ in range(count))
    images = np.stack([np.asarray(cut) for cut in cuts])
    labels = np.arange(count, dtype=np.int64) % CLASSES
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    pairs = zip(images, labels, strict=True)
    _write(
        folder,
        "small",
        ((image.tobytes(), label, image.shape[:2]) for image, label in pairs),
    )


def _cut(pictures, size, area, random):
    """Cuts a part of a picture at random, of a share of its area, and resizes it."""
    picture = pictures[random.integers(len(pictures))]
    # As large as fits, then smaller.
    scale = min(
        there / wanted for there, wanted in zip(picture.size, size, strict=True)
    )
    scale *= random.uniform(*area) ** 0.5
    width, height = (scale * wanted for wanted in size)
    left = random.uniform(0, picture.width - width)
    top = random.uniform(0, picture.height - height)
    return picture.resize(size, box=(left, top, left + width, top + height))


def _write(folder, name, examples):
    """Writes (bytes, label, (height, width)) to shards of tf.Examples in turn."""
    import tensorflow as tf

    def number(value):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))

    with contextlib.ExitStack() as stack:
        paths = [
            os.fspath(folder / f"{name}-{i:05d}-of-{_SHARDS:05d}.tfrecord")
            for i in range(_SHARDS)
        ]
        writers = [stack.enter_context(tf.io.TFRecordWriter(path)) for path in paths]
        pairs = zip(examples, itertools.cycle(writers), strict=False)
        for (content, label, (height, width)), writer in pairs:
            content = tf.train.BytesList(value=[content])
            features = {
                "image/encoded": tf.train.Feature(bytes_list=content),
                "image/class/label": number(label),
                "image/height": number(height),
                "image/width": number(width),
                "image/channels": number(3),
            }
            features = tf.train.Features(feature=features)
            example = tf.train.Example(features=features)
            writer.write(example.SerializeToString())
