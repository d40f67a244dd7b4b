"""The stages of a pipeline, from batches of raw records to batches of images.

Starting an operation takes microseconds. So small records are parsed, and draw, in
batches; images are decoded one by one, in parallel, unless a decoder takes batches.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from towers.input_pipeline.images import augment, draws, masks
from towers.input_pipeline.images import decode as decoding
from towers.input_pipeline.images.decode import Tricks, decode_image, decode_window
from towers.input_pipeline.images.recipes import Recipe
from towers.input_pipeline.pipeline.room import THREADS
from towers.input_pipeline.pipeline.scaling import Scaling, as_float32
from towers.input_pipeline.records.checks import assert_good
from towers.input_pipeline.sources import Source
from towers.input_pipeline.sources.targets import smallest_dtype
from towers.program.python_calls import until_exit

_FEW_CORES = 8


class BatchDecoder(Protocol):
    """Decodes batches of images.

    Attributes:
        count: the number of calls that run at the same time.
    """

    count: int

    def __call__(self, encoded: Sequence[bytes], cuts: np.ndarray) -> np.ndarray:
        """Returns uint8 images [B, H, W, C] of files and their cuts (`decode.cut`)."""


@dataclasses.dataclass(frozen=True)
class RecordStages:
    """Prepares raw records; see ``Pipeline`` for the attributes.

    Attributes:
        rows: number of rows of each batch, except an epoch's last one.
        compact: whether integers have the smallest types; see ``Pipeline``.
        decoder: decodes whole batches of encoded images; None decodes one by one.
    """

    source: Source
    rows: int
    image_shape: tuple[int, ...]
    recipe: Recipe
    tricks: Tricks
    scaling: Scaling | None = None
    exact: bool = False
    compact: bool = False
    decoder: BatchDecoder | None = None

    def behind(self, raw: tf.data.Dataset) -> list[tuple[str, tf.data.Dataset]]:
        """Returns the names of the stages, and the datasets that end with each.

        Args:
            raw: the first stage: batches of (augmentation seed, numbers, raw records),
                and of values beside the rows, if any.
        """
        recipe, auto = self.recipe, tf.data.AUTOTUNE
        # In batches: starting an operation takes longer than parsing a small record.
        dataset = raw.map(self._parse(), num_parallel_calls=auto, name="parse")
        stages = [("read", raw), ("parse", dataset)]
        if self.source.encoded or recipe.window or recipe.one:
            dataset = dataset.unbatch()
            if self.source.is_far:
                # One by one, in order of arrival: a decoder that waited for a later
                # image could not decode the images that are there.
                dataset = dataset.map(self._load, name="load")
                stages.append(("load", dataset))
            # Decoding is the costly stage: image by image, on all cores.
            if self.decoder is None:
                one, name = self._one(), "decode"
            else:
                one, name = self._cut(), "window"
            dataset = dataset.map(one, num_parallel_calls=auto, name=name)
            stages.append((name, dataset))
            # The short last batch stays: every example is seen once in an epoch.
            # Copying in parallel costs more than it gains, except on many cores.
            copies = auto if THREADS > _FEW_CORES else None
            dataset = dataset.batch(self.rows, num_parallel_calls=copies)
            stages.append(("batch", dataset))
            if self.decoder is not None:
                calls = self.decoder.count
                dataset = dataset.map(self._decoded(), calls, name="decode")
                stages.append(("decode", dataset))
        dataset = dataset.map(self._many(), num_parallel_calls=auto, name="augment")
        if self.source.input_kind == "tokens":
            # Several batches came at once.
            dataset = dataset.rebatch(self.rows)
        return [*stages, ("augment", dataset)]

    def _parse(self) -> Callable:
        @tf.autograph.experimental.do_not_convert
        def parse(seed, numbers, records, *beside):
            images, labels = self.source.parse(records)
            if self.source.target.kind != "tokens":  # which need no check
                may_be_missing = self.source.missing != "fail"
                assert_good(images, labels, self.source.target, may_be_missing)
            if not self.source.encoded and len(self.image_shape) == 3:
                images = augment.convert_channels(images, self.image_shape[-1])
            # At least one draw: `unbatch` crashes on empty rows.
            if self.recipe.draws:
                u = draws.uniform(seed, numbers, self.recipe.draws)
            else:
                u = tf.zeros([tf.size(numbers), 1])
            return images, u, labels, *beside

        return parse

    @property
    def _of_masks(self) -> bool:
        return self.source.target.kind == "mask"

    @tf.autograph.experimental.do_not_convert
    def _load(self, image, u, label, *beside):
        if self._of_masks and label.dtype == tf.string:
            label = self.source.load_mask(label)
        return self.source.load(image), u, label, *beside

    def _one(self) -> Callable:
        recipe, (height, width) = self.recipe, self.image_shape[:2]
        fits = self.source.image_shape[:2] == (height, width)

        @tf.autograph.experimental.do_not_convert
        def one(image, u, label, *beside):
            if self.source.encoded and not self.source.is_far:
                image, u, label, *beside = self._load(image, u, label, *beside)
            window = recipe.window and (lambda shape: recipe.window(shape, u))
            if not self.source.encoded:
                if window is not None:
                    cut = window(tf.shape(image))
                    image = augment.crop(image, cut)
                    if self._of_masks:
                        label = augment.crop(label[..., None], cut)[..., 0]
                image = augment.resize(image, height, width, antialias=recipe.antialias)
            elif fits and window is None:
                image = decode_image(image, self.image_shape)
            elif self._of_masks and window is not None:
                image, label = self._cut_both(image, label, window)
            else:
                image = decode_window(
                    image,
                    window,
                    self.image_shape,
                    antialias=recipe.antialias,
                    tricks=self.tricks,
                )
            if self._of_masks:
                label = masks.resize(self._mask(label), height, width)
                label = tf.ensure_shape(label, [height, width])
            if recipe.mirror is not None:
                image, label = self._changed(
                    lambda image, u: augment.flip(image, u[recipe.mirror]),
                    *(image, label, u),
                )
            if recipe.one is not None:
                image, label = self._changed(recipe.one, image, label, u)
            return tf.ensure_shape(image, self.image_shape), u, label, *beside

        return one

    def _cut(self) -> Callable:
        recipe, size = self.recipe, self.image_shape[:2]
        fits = self.source.image_shape[:2] == size

        def whole(shape):
            tf.debugging.assert_equal(shape[:2], size)
            return augment.whole_window(shape)

        @tf.autograph.experimental.do_not_convert
        def cut(image, u, label, *beside):
            if not self.source.is_far:
                image, u, label, *beside = self._load(image, u, label, *beside)
            window = recipe.window and (lambda shape: recipe.window(shape, u))
            file, chosen = decoding.cut(
                image,
                window or (whole if fits else None),
                self.image_shape,
                recipe.mirror is not None and u[recipe.mirror] < 0.5,
                antialias=recipe.antialias,
            )
            return (file, chosen), u, label, *beside

        return cut

    def _decoded(self) -> Callable:
        decode = until_exit(self.decoder)

        @tf.autograph.experimental.do_not_convert
        def decoded(cut, u, *others):
            images = tf.numpy_function(decode, cut, tf.uint8)
            return tf.ensure_shape(images, [None, *self.image_shape]), u, *others

        return decoded

    def _mask(self, mask: tf.Tensor) -> tf.Tensor:
        if mask.dtype != tf.string:
            return mask
        mask = masks.decode(mask)
        assert_good(mask, mask, self.source.target)
        return mask

    def _cut_both(
        self, image: tf.Tensor, mask: tf.Tensor, window: Callable
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a window of an encoded image, resized, and the same of its mask."""
        height, width, channels = self.image_shape
        image = decode_image(image, (None, None, channels))
        shape = tf.shape(image)
        cut, mask = window(shape), masks.resize(self._mask(mask), shape[0], shape[1])
        image = augment.crop(image, cut)
        image = augment.resize(image, height, width, antialias=self.recipe.antialias)
        return image, augment.crop(mask[..., None], cut)[..., 0]

    def _changed(
        self, change: Callable, images: tf.Tensor, labels: tf.Tensor, u: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Changes images, and masks with them."""
        if self._of_masks:
            return masks.with_mask(change, images, labels, u)
        return change(images, u), labels

    def _many(self) -> Callable:
        recipe, size = self.recipe, self.image_shape[:-1]

        @tf.autograph.experimental.do_not_convert
        def many(images, u, labels, *beside):
            if size:
                images = augment.resize(images, *size, antialias=recipe.antialias)
                if self._of_masks:
                    labels = masks.resize(labels, *size)
            if recipe.batch is not None:
                images, labels = self._changed(recipe.batch, images, labels, u)
            if self.scaling is not None:
                images = self.scaling(images)
            elif not self.exact:
                images = as_float32(images)
            target = self.source.target
            labels = tf.cast(
                labels, target.compact_dtype if self.compact else target.dtype
            )
            weights = target.weights(labels)
            if target.kind == "tokens" and self.source.has_padding:
                weights = tf.cast(images != 0, tf.float32)
            if self.compact:
                images = self._compact(images)
                # They are 0 or 1.
                weights = None if weights is None else tf.cast(weights, tf.uint8)
            weights = () if weights is None else (weights,)
            return images, labels, *weights, *beside

        return many

    def _compact(self, x: Any) -> Any:
        """Returns tokens, or columns of ids, in the smallest types that hold them."""
        if self.source.tokenizer is not None:
            return _in_smallest(x, self.source.tokenizer.size)
        sizes = self.source.table_sizes
        if not sizes:
            return x
        return {
            name: _in_smallest(column, sizes[name]) if name in sizes else column
            for name, column in x.items()
        }


def _in_smallest(ids: tf.Tensor, count: int) -> tf.Tensor:
    """Returns ids from 0 to `count` - 1 in the smallest type."""
    small = tf.cast(ids, smallest_dtype(0, count - 1))
    # Another id would become one of those, without an error of the model.
    same = tf.reduce_all(tf.cast(small, ids.dtype) == ids)
    tf.debugging.Assert(same, [f"an id is not 0 to {count - 1}:", ids])
    return small
