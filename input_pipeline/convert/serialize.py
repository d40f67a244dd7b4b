"""Converts the records of a source to serialized tf.Examples, for `convert`."""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from towers.input_pipeline.images import augment
from towers.input_pipeline.images.decode import Tricks, decode_image, decode_window
from towers.input_pipeline.records.checks import assert_good
from towers.input_pipeline.sources import Source
from towers.input_pipeline.sources.examples.fields import ROW
from towers.machine import limits

AT_ONCE = 64
# Images of at most this size are kept as pixels.
_SMALL = 64 * 2**10
_ACCURATE = Tricks(scaled=False, fast_dct=False, plain_upsampling=False)


@dataclasses.dataclass(frozen=True)
class Form:
    """The form in which images are written.

    Attributes:
        shape: (H, W, C), None where it varies; (F,) for rows of numbers, which stay as
            they are.
        resized: whether images are resized to this shape.
        raw: whether pixels are written.
    """

    shape: tuple[int | None, ...]
    resized: bool
    raw: bool

    def one(self, source: Source, image: tf.Tensor) -> tf.Tensor:
        """Returns the bytes to write for an image from ``source.parse``."""
        if len(self.shape) == 1:
            return image
        if source.encoded:
            encoded = source.load(image)
            if self.resized:
                image = decode_window(
                    encoded,
                    None,
                    self.shape,
                    antialias="exact",
                    tricks=_ACCURATE,
                )
            elif self.raw:
                image = decode_image(encoded, self.shape)
            else:
                # Decoded all the same, as small as possible, to test it.
                size = (1, 1, self.shape[-1])
                tested = decode_window(encoded, None, size)
                with tf.control_dependencies([tested]):
                    return tf.identity(encoded)
        elif self.resized:
            image = augment.resize(image, *self.shape[:2])
        if self.raw:
            # The pixels are the last field of a TensorProto.
            size = math.prod(self.shape)
            return tf.strings.substr(tf.io.serialize_tensor(image), -size, size)
        # Only former photographs may be compressed with a loss.
        if source.encoded and self.shape[-1] in (1, 3):
            return tf.io.encode_jpeg(image)
        return tf.io.encode_png(image)


def choose_form(source: Source, size: tuple[int, int] | None, raw: str) -> Form:
    """Decides in which form a source's images are written.

    Args:
        source: a prepared source.
        size: the requested (H, W); None keeps the images' own sizes.
        raw: see ``convert``.

    Raises:
        ValueError: the images cannot have this form.
    """
    if source.input_kind not in ("image", "row") or source.target.kind != "class":
        raise ValueError(
            f"{source.name} has examples of kind {source.input_kind!r} and a target of "
            f"kind {source.target.kind!r}: expected images or rows of numbers, and "
            "classes, as nothing else can be written; train on the files as they are"
        )
    if len(source.image_shape) != 3:
        if size is not None or raw != "auto":
            raise ValueError(
                f"{source.name} gives rows of numbers, not images: leave out "
                "image_size and raw"
            )
        return Form(tuple(source.image_shape), resized=False, raw=False)
    shape = source.image_shape
    if size is not None:
        shape = (*size, shape[-1])
    elif None in shape and raw != "false":
        shape = _common_shape(source, math.inf if raw == "true" else _SMALL)
    known = None not in shape
    if raw == "true" and not known:
        raise ValueError(
            f"the images of {source.name} differ in size: expected one for raw pixels, "
            "choose an image_size, or encoded images"
        )
    png = shape[-1] in (1, 3, 4)
    if raw == "false" and not source.encoded and not png:
        raise ValueError(
            f"the images of {source.name} have {shape[-1]} channels: expected 1, 3 or "
            "4 to encode them, choose raw pixels"
        )
    pixels = known and (math.prod(shape) <= _SMALL or not png)
    resized = size is not None and shape != source.image_shape
    return Form(shape, resized, raw == "true" or (raw == "auto" and pixels))


@tf.autograph.experimental.do_not_convert
def _common_shape(source: Source, limit: float) -> tuple[int | None, int | None, int]:
    """Returns the shape of all images, if they share one of at most ``limit`` bytes."""
    first = None
    for split in source.splits:
        images = _images(source, split).map(
            lambda image, _: tf.shape(
                decode_image(source.load(image), source.image_shape)
            ),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        for shapes in images.batch(AT_ONCE).as_numpy_iterator():
            first = shapes[0] if first is None else first
            if (shapes != first).any() or math.prod(first.tolist()) > limit:
                return source.image_shape
    return tuple(first.tolist())


def _images(source: Source, split: str, start: int = 0) -> tf.data.Dataset:
    """Returns images and labels from ``source.parse``, one by one."""

    def parse(_, records):
        images, labels = source.parse(records)
        assert_good(images, labels, source.target)
        return images, labels

    batches = source.batches(split, AT_ONCE, start=start)
    return batches.map(parse, num_parallel_calls=tf.data.AUTOTUNE).unbatch()


@tf.autograph.experimental.do_not_convert
def serialized(
    source: Source, split: str, form: Form, start: int, count: int
) -> tf.data.Dataset:
    """Returns batches of tf.Examples of consecutive records."""
    images = _images(source, split, start).take(count)
    images = images.map(
        lambda image, label: (form.one(source, image), label),
        # The costly part; autotuning would take longer than it gains.
        num_parallel_calls=limits.cpu_count(),
    )
    shape = form.shape if form.raw else None
    return (
        images.batch(AT_ONCE)
        .map(
            lambda images, labels: _examples(images, labels, shape),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        .prefetch(tf.data.AUTOTUNE)
    )


def _examples(
    images: tf.Tensor, labels: tf.Tensor, shape: Sequence[int] | None
) -> tf.Tensor:
    """Serializes tf.Examples [B], in TensorFlow, which uses all cores."""

    def message(name, **fields):
        """Encodes a message with fields [B, N]."""
        sizes = tf.tile([[value.shape[1] for value in fields.values()]], [count, 1])
        return tf.io.encode_proto(
            sizes, [*fields.values()], [*fields], f"tensorflow.{name}"
        )[:, None]

    def entry(key, **values):
        ((kind, value),) = values.items()
        lists = {"bytes_list": "BytesList", "int64_list": "Int64List"}
        value = value if kind == "float_list" else value[:, None]
        value = message(lists.get(kind, "FloatList"), value=value)
        feature = message("Feature", **{kind: value})
        keys = tf.fill([count, 1], key)
        return message("Features.FeatureEntry", key=keys, value=feature)

    count = tf.size(labels)
    of_rows = images.dtype.is_floating
    entries = [
        # A tf.Example has no float64.
        entry(ROW, float_list=tf.cast(images, tf.float32))
        if of_rows
        else entry("image/encoded", bytes_list=images),
        entry("image/class/label", int64_list=labels),
    ]
    for name, size in zip(("height", "width", "channels"), shape or (), strict=False):
        sizes = tf.fill([count], tf.constant(size, tf.int64))
        entries.append(entry(f"image/{name}", int64_list=sizes))
    features = message("Features", feature=tf.concat(entries, axis=1))
    return message("Example", features=features)[:, 0]
