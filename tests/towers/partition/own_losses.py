"""Published losses whose examples meet, and alike ones."""

import keras
import tensorflow as tf
from keras import ops


def similar(first, second):
    first, second = tf.nn.l2_normalize(first, 1), tf.nn.l2_normalize(second, 1)
    return tf.matmul(first, second, transpose_b=True) / 0.5


class Losses:
    """Losses of rows and weights, whose examples meet."""

    def contrastive(self, x, w):
        """SimCLR's, of Keras's example."""
        matrix = similar(x @ w, tf.tanh(x) @ w)
        labels = tf.range(tf.shape(x)[0])
        losses = [
            keras.losses.sparse_categorical_crossentropy(labels, each, from_logits=True)
            for each in (matrix, tf.transpose(matrix))
        ]
        return tf.reduce_mean(sum(losses)) / 2

    def nt_xent(self, x, w):
        """SimCLR's, of its authors: both views in one batch, and itself masked."""
        n = tf.shape(x)[0]
        a, b = tf.nn.l2_normalize(x @ w, 1), tf.nn.l2_normalize(tf.tanh(x) @ w, 1)
        labels = tf.one_hot(tf.range(n), n * 2)
        masks = tf.one_hot(tf.range(n), n) * 1e9
        aa = tf.matmul(a, a, transpose_b=True) - masks
        ab = tf.matmul(a, b, transpose_b=True)
        logits = tf.concat([ab, aa], 1)
        return tf.reduce_mean(
            tf.nn.softmax_cross_entropy_with_logits(tf.stop_gradient(labels), logits)
        )

    def both_views(self, x, w):
        """Both views one behind the other, without the similarity to itself."""
        both = tf.concat([x, tf.tanh(x)], 0) @ w
        n = tf.shape(x)[0]
        matrix = similar(both, both) - 1e9 * tf.eye(2 * n)
        labels = tf.concat([tf.range(n, 2 * n), tf.range(n)], 0)
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels, matrix)
        )

    def pairs_but_itself(self, x, w):
        """A mean over the pairs of different rows."""
        matrix, n = similar(x @ w, x @ w) ** 2, tf.cast(tf.shape(x)[0], tf.float32)
        pairs = n * (n - 1)
        total = tf.reduce_sum(matrix) - tf.reduce_sum(tf.linalg.diag_part(matrix))
        return total / tf.maximum(pairs, 1.0)

    def divided_first(self, x, w):
        """A sum of what is divided by a number of rows before."""
        n = tf.shape(x)[0]
        weights = 1 / tf.cast(n * n, tf.float32)
        return tf.reduce_sum(tf.nn.softplus(similar(x @ w, x[:, :3])[:, :1] * weights))

    def variance(self, x, w):
        """Of VICReg: a hinge on each feature's deviation."""
        h = x @ w
        return tf.reduce_mean(tf.nn.relu(1 - tf.sqrt(tf.math.reduce_variance(h) + 0.1)))

    def barlow(self, x, w):
        """Of Barlow Twins: a matrix of correlations near to the identity."""
        first, second = x @ w, tf.tanh(x) @ w
        n = tf.shape(x)[0] - 1
        matrix = tf.matmul(first, second, transpose_a=True)
        matrix /= tf.maximum(tf.cast(n, tf.float32), 1.0)
        return tf.reduce_sum((matrix - tf.eye(3)) ** 2)

    def root(self, x, w):
        """A root of a mean."""
        return tf.sqrt(tf.reduce_mean(tf.square(x @ w)))

    def ratio(self, x, w):
        """A ratio of sums that weights decide."""
        h = tf.square(x @ w)
        return tf.reduce_sum(h * x[:, :1] ** 2) / tf.reduce_sum(h)

    def weighted(self, x, w):
        """A mean weighted by the data, of what meets."""
        weight = tf.abs(x[:, 0])
        rows = tf.reduce_logsumexp(similar(x @ w, x @ w), 1)
        return tf.reduce_sum(rows * (weight / tf.reduce_sum(weight)))

    def log_of_all(self, x, w):
        """A logarithm of a sum of exponentials over all pairs."""
        return tf.reduce_logsumexp(similar(x @ w, x @ w))

    def neighbours(self, x, w):
        """Nearest neighbours within the batch."""
        h = x @ w
        n = tf.shape(x)[0]
        matrix = similar(h, h) - 10 * tf.eye(n)
        near = tf.gather(h, tf.argmax(matrix, 1))
        return tf.reduce_mean(tf.square(h - tf.stop_gradient(near)))

    def centred(self, x, w):
        """Rows without their mean, by hand."""
        h = x @ w
        return tf.reduce_mean(tf.square(h - tf.reduce_mean(h, 0)) ** 2)

    def attention(self, x, w):
        """Attention over the examples."""
        h = x @ w
        weights = tf.nn.softmax(tf.matmul(h, h, transpose_b=True))
        return tf.reduce_mean(tf.square(weights @ h - x[:, :3]))

    def columns(self, x, w):
        """A sum over the first axis of all pairs."""
        total = tf.reduce_sum(tf.exp(similar(x @ w, x[:, :3])), 0)
        return tf.reduce_mean(tf.math.log(total))

    def beside_a_mean(self, x, w):
        """The same, and what adds up."""
        weights = 0.01 * tf.reduce_sum(w**2)
        return self.contrastive(x, w) + 0.3 * tf.reduce_mean((x @ w) ** 2) + weights

    def supervised(self, x, w):
        """Of supervised contrastive learning: all of a class belong together."""
        y = tf.cast(x[:, 3] > 0, tf.int32)
        logits = similar(x @ w, x @ w)
        logits -= tf.stop_gradient(tf.reduce_max(logits, 1, keepdims=True))
        others = 1 - tf.eye(tf.shape(x)[0])
        alike = tf.cast(tf.equal(y[:, None], y[None, :]), tf.float32) * others
        total = tf.reduce_sum(tf.exp(logits) * others, 1, keepdims=True)
        rows = tf.reduce_sum(alike * (logits - tf.math.log(total + 1e-6)), 1)
        return -tf.reduce_mean(rows / (tf.reduce_sum(alike, 1) + 1e-6))

    def hardest_triplets(self, x, w):
        """Each example with the farthest of its class, and the nearest of another."""
        y, h = tf.cast(x[:, 3] > 0, tf.int32), x @ w
        squares = tf.reduce_sum(h * h, 1)
        products = tf.matmul(h, tf.transpose(h))
        far = tf.maximum(squares[:, None] - 2 * products + squares[None, :], 0.0)
        far, same = tf.sqrt(far + 1e-6), tf.equal(y[None], y[:, None])
        farthest = tf.reduce_max(tf.where(same, far, 0.0), 1)
        nearest = tf.reduce_min(tf.where(same, far + tf.reduce_max(far), far), 1)
        rows = tf.maximum(farthest - nearest + 0.5, 0.0)
        count = tf.reduce_sum(tf.cast(rows > 0, tf.float32))
        return tf.reduce_sum(rows) / (count + 1e-6)

    def all_triplets(self, x, w):
        """A mean over the triplets that are not far enough apart."""
        y, h = tf.cast(x[:, 3] > 0, tf.int32), x @ w
        far = tf.reduce_sum((h[:, None] - h[None, :]) ** 2, -1)
        same = tf.cast(tf.equal(y[:, None], y[None, :]), tf.float32)
        triplets = far[:, :, None] - far[:, None, :] + 0.3
        triplets *= same[:, :, None] * (1 - same)[:, None, :]
        triplets = tf.maximum(triplets, 0.0)
        count = tf.reduce_sum(tf.cast(triplets > 1e-6, tf.float32))
        return tf.reduce_sum(triplets) / (count + 1)

    def vicreg(self, x, w):
        """Of VICReg, by Keras: each feature's deviation, and all covariances."""
        h = x @ w
        n = ops.shape(h)[0]
        h -= ops.mean(h, axis=0)
        deviation = ops.sqrt(ops.var(h, axis=0) + 1e-4)
        covariance = ops.matmul(ops.transpose(h), h)
        covariance /= ops.cast(ops.maximum(n - 1, 1), "float32")
        others = covariance - ops.diag(ops.diagonal(covariance))
        return ops.mean(ops.relu(1 - deviation)) + ops.sum(others**2) / 3

    def uniformity(self, x, w):
        """A logarithm of a mean over pairs."""
        h = tf.nn.l2_normalize(x @ w, 1)
        far = tf.reduce_sum((h[:, None] - h[None, :]) ** 2, -1)
        return tf.math.log(tf.reduce_mean(tf.exp(-2 * far)))

    def sinkhorn(self, x, w):
        """Of SwAV: codes that use all clusters alike."""
        scores, n = x @ w, tf.cast(tf.shape(x)[0], tf.float32)
        codes = tf.transpose(tf.exp(scores / 2))
        codes /= tf.reduce_sum(codes)
        for _ in range(2):
            codes /= 3 * tf.reduce_sum(codes, 1, keepdims=True)
            codes /= n * tf.reduce_sum(codes, 0, keepdims=True)
        codes = tf.stop_gradient(tf.transpose(codes * n))
        return -tf.reduce_mean(tf.reduce_sum(codes * tf.nn.log_softmax(scores), 1))

    def dice(self, x, w):
        """Of Keras: a ratio of sums."""
        return keras.losses.Dice()(tf.abs(x[:, :3]), tf.sigmoid(x @ w))

    def discrepancy(self, x, w):
        """How far two distributions are apart, by a kernel."""

        def kernel(a, b):
            return tf.reduce_mean(
                tf.exp(-tf.reduce_sum((a[:, None] - b[None]) ** 2, 2))
            )

        h, other = x @ w, x[:, :3]
        return kernel(h, h) + kernel(other, other) - 2 * kernel(h, other)

    def sorted(self, x, w):
        """Values of the same rank."""
        return tf.reduce_mean((tf.sort(x @ w, axis=0) - tf.sort(x[:, :3], axis=0)) ** 2)

    def mixed(self, x, w):
        """Each example mixed with another, as by mixup."""
        return tf.reduce_mean(((0.3 * x + 0.7 * tf.reverse(x, [0])) @ w) ** 2)

    def einsum(self, x, w):
        """All pairs, by letters."""
        pairs = tf.einsum("id,jd->ij", x @ w, x @ w)
        labels = tf.eye(tf.shape(x)[0])
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, pairs))

    def siglip(self, x, w):
        """Of SigLIP: a sum over all pairs, divided by the number of rows."""
        n = tf.shape(x)[0]
        pairs = tf.matmul(x @ w, x[:, :3], transpose_b=True)
        labels = 2 * tf.eye(n) - tf.ones([n, n])
        total = tf.reduce_sum(tf.math.log_sigmoid(labels * pairs))
        return -total / tf.cast(n, tf.float32)

    def sizes(self, x, w):
        """Divisors of the shape of a matrix of pairs."""
        pairs = tf.nn.softplus(tf.matmul(x @ w, x @ w, transpose_b=True))
        rows = pairs / tf.cast(tf.shape(pairs)[1], tf.float32)
        mean = tf.reduce_sum(rows) / tf.cast(tf.shape(pairs)[0], tf.float32)
        return mean + tf.reduce_sum(pairs**2) / tf.cast(tf.size(pairs), tf.float32)

    def blocks(self, x, w):
        """Blocks of a matrix of both views."""
        both, n = tf.concat([x, -0.5 * x], 0) @ w, tf.shape(x)[0]
        pairs = tf.matmul(both, both, transpose_b=True)
        of_two = tf.linalg.diag_part(pairs[n:, :n])
        return tf.reduce_mean(pairs[:n, n:] ** 2) - tf.reduce_mean(of_two)

    def picked(self, x, w):
        """Pairs that are picked one by one."""
        n, h = tf.shape(x)[0], x @ w
        places = tf.where(tf.not_equal(tf.eye(n), 1.0))
        pairs = tf.gather_nd(tf.matmul(h, h, transpose_b=True), places)
        return tf.reduce_sum(pairs**2) / tf.cast(n * n, tf.float32)
