"""Ids of bytes, a fixed length, batches of similar lengths.

Id 0 is padding everywhere. All of it runs inside of ``Dataset.map``.
"""

from collections.abc import Sequence

import tensorflow as tf

BYTE_IDS = 257  # the number of ids of ``byte_ids``: padding and 256 bytes


def byte_ids(text: tf.Tensor, length: int) -> tf.Tensor:
    """Turns text into the ids of its UTF-8 bytes, which needs no vocabulary.

    Text that is too long is truncated after a byte, even within a character.

    Args:
        text: strings [] or [B].
        length: number of ids for each text.

    Returns:
        int32 [length] or [B, length]: byte b becomes b + 1, and padding is 0.

    Raises:
        ValueError: these are no strings, or the length is not positive.
    """
    _check_positive("length", length)
    if text.dtype != tf.string:
        raise ValueError(
            f"text is {text.dtype.name}, expected strings: take pad_ids for tokens"
        )
    # The number of bytes distinguishes this padding from bytes of 0.
    padded = tf.io.decode_raw(text, tf.uint8, fixed_length=length)
    given = tf.range(length) < tf.strings.length(text)[..., None]
    return tf.where(given, tf.cast(padded, tf.int32) + 1, 0)


def pad_ids(ids: tf.Tensor | tf.RaggedTensor, length: int) -> tf.Tensor:
    """Cuts and pads token ids to one length.

    Args:
        ids: whole numbers, [N] for one text, or ragged [B, None].
        length: number of ids for each text.

    Returns:
        int32 [length] or [B, length], padded with 0 at the end.

    Raises:
        ValueError: these are no whole numbers of this shape, or no positive length.
    """
    _check_positive("length", length)
    ragged = isinstance(ids, tf.RaggedTensor)
    if not ids.dtype.is_integer or ids.shape.rank != 1 + ragged:
        raise ValueError(
            f"ids are {ids.dtype.name} {ids.shape}, expected whole numbers [N] or a "
            "RaggedTensor [B, None]: take byte_ids for strings"
        )
    if ragged:
        return tf.cast(ids.to_tensor(shape=[None, length]), tf.int32)
    ids = tf.cast(ids[:length], tf.int32)
    padded = tf.pad(ids, [[0, length - tf.size(ids)]])
    return tf.ensure_shape(padded, [length])


def bucket_batches(
    dataset: tf.data.Dataset, boundaries: Sequence[int], batch_size: int
) -> tf.data.Dataset:
    """Batches texts of similar length, so that there is little padding.

    There is one shape for each boundary, so a model is traced or compiled that often.
    At the end of the dataset, each bucket may yield a short batch.

    Args:
        dataset: a dataset of (ids [N], label), where N differs.
        boundaries: the longest length in each bucket, in rising order. Texts longer
            than the last one are truncated.
        batch_size: number of texts in a batch.

    Returns:
        A dataset of (ids [B, boundary of the bucket], labels [B]), padded with 0 at the
        end. A bucket yields a batch when it is full.

    Raises:
        ValueError: the boundaries do not rise, a number is too small, or the elements
            have another form.
    """
    boundaries = list(boundaries)
    if not boundaries or boundaries != sorted(set(boundaries)) or boundaries[0] < 1:
        raise ValueError(
            f"boundaries are {boundaries}, expected rising numbers of at least 1: name "
            "the longest length in each bucket"
        )
    _check_positive("batch_size", batch_size)
    spec = dataset.element_spec
    if not (
        isinstance(spec, tuple)
        and len(spec) == 2
        and isinstance(spec[0], tf.TensorSpec)
        and spec[0].shape.rank == 1
    ):
        raise ValueError(
            f"elements are {spec}, expected (ids [N], label): give a dataset of single "
            "texts, before it is batched"
        )

    def cut(ids: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        ids = ids[: boundaries[-1]]
        # Forgets a known length, as tf.data pads only unknown lengths.
        return tf.raw_ops.PlaceholderWithDefault(input=ids, shape=[None]), label

    dataset = dataset.map(cut, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.bucket_by_sequence_length(
        lambda ids, label: tf.size(ids),
        # TensorFlow's boundaries are the first lengths of the next bucket. Its last
        # bucket is for longer texts: there are none.
        bucket_boundaries=[boundary + 1 for boundary in boundaries],
        bucket_batch_sizes=[batch_size] * (len(boundaries) + 1),
        pad_to_bucket_boundary=True,
    )


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}, expected at least 1")
