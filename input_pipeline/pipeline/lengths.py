"""Makes batches of rows of tokens of like length, which need little padding."""

import tensorflow as tf

# As many as Hugging Face's LengthGroupedSampler takes. For a small set fewer, so that
# each epoch has other batches.
_MOST, _LEAST_GROUPS = 50, 4
# Batches have at most this many lengths, as each shape is compiled.
_LENGTHS = 8


def grouped(rows: int, batch_size: int) -> int:
    """Returns the number of batches whose rows are sorted by length together.

    Args:
        rows: the number of rows of an epoch.
        batch_size: the number of rows of a batch.
    """
    return max(min(rows // batch_size // _LEAST_GROUPS, _MOST), 1)


def shorten(dataset: tf.data.Dataset, of_each: bool) -> tf.data.Dataset:
    """Cuts padding off that all rows of a batch have at their end.

    The rest is a multiple of an eighth of the rows' length, rounded up.

    Args:
        dataset: has batches (int32 tokens [B, T], targets, ...).
        of_each: whether targets, and their weights, are per token.
    """
    length = dataset.element_spec[0].shape[1]
    step = -(-length // _LENGTHS)

    @tf.autograph.experimental.do_not_convert
    def shorter(tokens, *others):
        used = tf.reduce_any(tokens != 0, axis=0)
        longest = tf.reduce_max(tf.where(used, tf.range(1, length + 1), 1))
        new = tf.minimum(-(-longest // step) * step, length)
        return tokens[:, :new], *(y[:, :new] if of_each else y for y in others)

    return dataset.map(shorter, num_parallel_calls=tf.data.AUTOTUNE, name="shorten")
