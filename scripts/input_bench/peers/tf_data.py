"""Contenders: `tf.data` as tutorials write it, and as those who know it tune it."""

import numpy as np
import tensorflow as tf

from ..works import AREA, FILES, PADDING, RATIO, WORKS


def batches(contender, work, folder):
    """Yields batches for ever."""
    if contender.startswith("naive"):
        dataset = naive(work, folder, cast_last=contender == "naive_cast_last")
    else:
        finish = {"tuned": _uint8, "tuned_float": _float}[contender]
        dataset = tuned(work, folder, finish)
    while True:
        yield from dataset


def naive(work, folder, cast_last):
    """One thing after the other, as in a tutorial; an epoch.

    TensorFlow's own (tensorflow.org/tutorials/images/data_augmentation) makes floats of
    an image first; `cast_last` crops and resizes before.
    """
    if work == "arrays":
        dataset = _arrays(folder).shuffle(50_000)
    else:
        dataset = tf.data.TFRecordDataset(_files(work, folder)).shuffle(1000)
    begin = _same if cast_last else _cast
    return dataset.map(_example(work, _float, begin)).batch(WORKS[work].batch)


def tuned(work, folder, finish):
    """Everything in parallel, each example by itself; without an end."""
    if work == "arrays":
        dataset = _arrays(folder).shuffle(50_000)
    else:
        files = _files(work, folder)
        dataset = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files))
        dataset = dataset.interleave(
            tf.data.TFRecordDataset,
            cycle_length=len(files),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=False,
        )
        dataset = dataset.shuffle(10_000 if work == "small" else 1024)
    dataset = dataset.repeat()
    dataset = dataset.map(
        _example(work, finish), num_parallel_calls=tf.data.AUTOTUNE, deterministic=False
    )
    return dataset.batch(WORKS[work].batch).prefetch(tf.data.AUTOTUNE)


def _same(image):
    return image


def _cast(image):
    return tf.cast(image, tf.float32)


def _example(work, finish, begin=_same):
    """Returns what makes an example of a record, or of an element of arrays."""

    def example(*record):
        image, label = record if work == "arrays" else _PARSE[work](*record)
        return finish(_AUGMENT[work](begin(image))), label

    return example


def _files(work, folder):
    return sorted(map(str, folder.glob(FILES[work])))


def _arrays(folder):
    arrays = (np.load(folder / f"{name}.npy") for name in ("images", "labels"))
    return tf.data.Dataset.from_tensor_slices(tuple(arrays))


_FIELDS = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
}


def _photo(record):
    fields = tf.io.parse_single_example(record, _FIELDS)
    image = tf.io.decode_jpeg(fields["image/encoded"], channels=3)
    return image, fields["image/class/label"]


def _small(record):
    fields = tf.io.parse_single_example(record, _FIELDS)
    image = tf.io.decode_raw(fields["image/encoded"], tf.uint8)
    return tf.reshape(image, WORKS["small"].shape), fields["image/class/label"]


def _resized_crop(image):
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.shape(image),
        tf.zeros([1, 0, 4]),
        min_object_covered=0,
        aspect_ratio_range=RATIO,
        area_range=AREA,
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    image = tf.slice(image, begin, size)
    image.set_shape([None, None, 3])
    image = tf.image.resize(image, WORKS["photos"].shape[:2])
    return tf.image.random_flip_left_right(image)


def _whole(image):
    return tf.image.resize(image, WORKS["whole"].shape[:2])


def _padded_crop(image):
    image = tf.pad(image, [[PADDING] * 2, [PADDING] * 2, [0, 0]])
    image = tf.image.random_crop(image, WORKS["small"].shape)
    return tf.image.random_flip_left_right(image)


def _float(image):
    return tf.cast(image, tf.float32) / 127.5 - 1


def _uint8(image):
    return tf.cast(image, tf.uint8)


_PARSE = {"photos": _photo, "whole": _photo, "small": _small}
_AUGMENT = {
    "photos": _resized_crop,
    "whole": _whole,
    "small": _padded_crop,
    "arrays": _padded_crop,
}
