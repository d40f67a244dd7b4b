"""Siamese network: do two pictures show the same digit?

    python -m examples.steps.siamese --gpus=2

Hadsell et al. 2006, "Dimensionality reduction by learning an invariant mapping",
https://ieeexplore.ieee.org/document/1640964. Keras's example is
https://keras.io/examples/vision/siamese_contrastive. One network embeds both pictures.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from examples.steps import common


class Siamese(keras.Model):
    """Compares two pictures by the distance of their embeddings."""

    def __init__(self, network, margin=1.0):
        super().__init__()
        self.network, self.margin = network, margin
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy_tracker = keras.metrics.BinaryAccuracy("accuracy")

    @property
    def metrics(self):
        """The mean loss, and how often the answer is right."""
        return [self.loss_tracker, self.accuracy_tracker]

    def call(self, pair, training=None):
        """Returns the distances."""
        first, second = (self.network(each, training=training) for each in pair)
        # The square root has no gradient at zero.
        squares = ops.sum(ops.square(first - second), axis=1)
        return ops.sqrt(ops.maximum(squares, keras.config.epsilon()))

    def contrastive_loss(self, same, distances):
        """Pulls the same together, and pushes others apart up to a margin."""
        near, far = distances, ops.maximum(self.margin - distances, 0.0)
        return ops.mean(same * ops.square(near) + (1 - same) * ops.square(far))

    def report(self, loss, same, distances):
        """Updates the metrics."""
        self.loss_tracker.update_state(loss)
        self.accuracy_tracker.update_state(
            same[:, None], ops.cast(distances < self.margin / 2, "float32")[:, None]
        )
        return {each.name: each.result() for each in self.metrics}

    def train_step(self, data):
        """Trains the network."""
        pair, same = data
        with tf.GradientTape() as tape:
            distances = self(pair, training=True)
            loss = self.contrastive_loss(same, distances)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return self.report(loss, same, distances)

    def test_step(self, data):
        """Evaluates the network."""
        pair, same = data
        distances = self(pair, training=False)
        return self.report(self.contrastive_loss(same, distances), same, distances)


def build():
    """A small network for pictures of 8 x 8."""
    network = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, 2, padding="same", activation="tanh"),
            layers.Flatten(),
            layers.Dense(16, activation="tanh"),
            # A distance does not know of a bias.
            layers.Dense(8, use_bias=False),
        ]
    )
    model = Siamese(network)
    model.compile(keras.optimizers.RMSprop(0.001))
    return model


def data():
    """Pairs of pictures; half of them show the same digit."""
    x, y = common.digits()
    random = np.random.default_rng(0)
    wanted = np.where(np.arange(len(y)) % 2, y, (y + random.integers(1, 10)) % 10)
    others = np.array([random.choice(np.flatnonzero(y == each)) for each in wanted])
    return (x, x[others]), (y == y[others]).astype("float32")


if __name__ == "__main__":
    common.main(build, data)
