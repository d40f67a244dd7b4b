"""MixUp (Zhang et al. 2018) and CutMix (Yun et al. 2019): a batch with itself.

Each example is mixed with its neighbour in the batch, and so is its label. The
functions draw nothing: random numbers are arguments. ``Mix`` derives these from the
batch. All of it compiles with XLA, and works for batches of any size, also of 0 or 1.
"""

import dataclasses

import tensorflow as tf


def symmetric_beta(u: tf.Tensor, alpha: float) -> tf.Tensor:
    """Returns Beta(alpha, alpha) of two uniform numbers, in closed form.

    By the polar method for Student's t (Bailey 1994), and its relation to the symmetric
    beta distribution (Devroye 1996): exact for any alpha above 0.

    Args:
        u: float32 [2, ...], uniform in [0, 1).
        alpha: the parameter of the distribution.

    Returns:
        float32 [...], in [0, 1].
    """
    # t / sqrt(2 alpha + t^2), where t is Student's with 2 alpha degrees of freedom,
    # written so that nothing overflows for small alphas.
    power, cos = u[0] ** (1 / alpha), tf.cos(6.2831853 * u[1])
    ratio = tf.sqrt(1 - power) * cos * tf.math.rsqrt(power + (1 - power) * cos**2)
    return tf.clip_by_value(0.5 + 0.5 * ratio, 0.0, 1.0)


def mixup(
    images: tf.Tensor, labels: tf.Tensor, u: tf.Tensor, alpha: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Averages each example with the one before it (Zhang et al. 2018, mixup).

    Args:
        images: float [B, H, W, C].
        labels: float [B, classes], one-hot or soft.
        u: float32 [2, B], uniform in [0, 1).
        alpha: each example's weight is drawn from Beta(alpha, alpha).

    Returns:
        (images, labels) of the same shapes and types.
    """
    weight = symmetric_beta(u, alpha)
    return _average(images, weight), _average(labels, weight)


def cutmix(
    images: tf.Tensor, labels: tf.Tensor, u: tf.Tensor, alpha: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Pastes a box of the image before into each image (Yun et al. 2019, CutMix).

    The box is centred anywhere, and has the fraction of the area that the weight
    leaves; parts outside of the image are cut off, as in the authors' code, and labels
    are averaged by the remaining area.

    Args:
        images: float [B, H, W, C].
        labels: float [B, classes], one-hot or soft.
        u: float32 [4, B], uniform in [0, 1): two for the weight, and the box's centre.
        alpha: each example's weight is drawn from Beta(alpha, alpha).

    Returns:
        (images, labels) of the same shapes and types.
    """
    height, width = tf.unstack(tf.shape(images)[1:3])
    side = tf.sqrt(1 - symmetric_beta(u[:2], alpha))
    in_rows = _interval(height, side, u[2])
    in_columns = _interval(width, side, u[3])
    inside = in_rows[:, :, None, None] & in_columns[:, None, :, None]
    images = tf.where(inside, tf.roll(images, 1, axis=0), images)
    covered = tf.reduce_mean(tf.cast(inside, tf.float32), [1, 2, 3])
    return images, _average(labels, 1 - covered)


@dataclasses.dataclass(frozen=True)
class Mix:
    """Mixes training batches by mixup or by CutMix, or each batch by one of the two.

    The random numbers depend only on the seed and the batch. A run that is repeated or
    resumed therefore mixes in the same way.

    Args:
        num_classes: number of classes.
        mixup_alpha: alpha of ``mixup``; 0 turns it off.
        cutmix_alpha: alpha of ``cutmix``; 0 turns it off.
        seed: seed of the random numbers.
    """

    num_classes: int
    mixup_alpha: float = 0.2
    cutmix_alpha: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if min(self.mixup_alpha, self.cutmix_alpha) < 0 or not (
            self.mixup_alpha or self.cutmix_alpha
        ):
            raise ValueError(
                f"mixup_alpha is {self.mixup_alpha} and cutmix_alpha "
                f"{self.cutmix_alpha}, expected one above 0 and none below: 0 leaves "
                "out one of the two"
            )
        if self.num_classes < 1:
            raise ValueError(
                f"num_classes is {self.num_classes}, expected at least 1: give the "
                "data set's number of classes"
            )

    def __call__(
        self, images: tf.Tensor, labels: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Mixes one batch.

        Args:
            images: [B, H, W, C] of any real type.
            labels: int [B].

        Returns:
            images [B, H, W, C], of the same type if that is a float and float32
            otherwise; labels float32 [B, num_classes].
        """
        size = tf.shape(images)[0]
        u = _uniform(1 + 4 * size, [self.seed, _checksum(images, labels)])
        which, u = u[0], tf.reshape(u[1:], [4, size])
        if not images.dtype.is_floating:
            images = tf.cast(images, tf.float32)
        labels = tf.one_hot(labels, self.num_classes)
        if not self.cutmix_alpha:
            return mixup(images, labels, u[:2], self.mixup_alpha)
        if not self.mixup_alpha:
            return cutmix(images, labels, u, self.cutmix_alpha)
        return tf.cond(
            which < 0.5,
            lambda: mixup(images, labels, u[:2], self.mixup_alpha),
            lambda: cutmix(images, labels, u, self.cutmix_alpha),
        )


def _average(values: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Adds each row of [B, ...] by its weight [B], and the row before by the rest."""
    shape = tf.concat([tf.shape(weight), tf.ones([values.shape.rank - 1], tf.int32)], 0)
    weight = tf.cast(tf.reshape(weight, shape), values.dtype)
    return weight * values + (1 - weight) * tf.roll(values, 1, axis=0)


def _interval(size: tf.Tensor, share: tf.Tensor, centre: tf.Tensor) -> tf.Tensor:
    """Tells which pixels [B, size] are in a share [B] around a centre [B]."""
    length = tf.cast(size, tf.float32)
    half = tf.cast(length * share, tf.int32)[:, None] // 2
    centre = tf.cast(length * centre, tf.int32)[:, None]
    pixels = tf.range(size)[None]
    return (pixels >= centre - half) & (pixels < centre + half)


def _uniform(count: tf.Tensor, seed: list) -> tf.Tensor:
    """Returns float32 [count] in [0, 1), the same with XLA and without.

    Only whole numbers are the same: XLA converts them to floats in another way.
    """
    bits = tf.random.stateless_uniform(
        [count], seed, None, None, tf.uint32, alg="philox"
    )
    return tf.cast(tf.bitwise.right_shift(bits, 8), tf.float32) / 2**24


def _checksum(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns an int64 from a batch's labels and the middle row of each image.

    This costs nothing, and two batches hardly have the same number.
    """
    middle = tf.cast(images[:, tf.shape(images)[1] // 2], tf.float32)
    # Bits as whole numbers, which add up the same in any order.
    values = tf.concat(
        [tf.reshape(tf.bitcast(middle, tf.int32), [-1]), tf.cast(labels, tf.int32)], 0
    )
    weights = 2 * tf.range(tf.size(values, tf.int64)) + 1
    return tf.reduce_sum(weights * tf.cast(values, tf.int64))
