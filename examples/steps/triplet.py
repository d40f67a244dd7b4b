"""Triplet network: a picture is closer to one of its class than to another.

    python -m examples.steps.triplet --gpus=2

Schroff et al. 2015, "FaceNet: a unified embedding for face recognition and
clustering", https://arxiv.org/abs/1503.03832. Keras's example is
https://keras.io/examples/vision/siamese_network.
"""

import keras
import numpy as np
from keras import layers, ops

from examples.steps import common


class Triplet(keras.Model):
    """Compares a picture with one of its class, and with one of another."""

    def __init__(self, embedding, margin=0.5):
        super().__init__()
        self.embedding, self.margin = embedding, margin
        self.hinge = common.means("hinge")

    def call(self, triplet):
        """Returns the squared distances to the one of its class, and to the other."""
        picture, *others = (self.embedding(each) for each in triplet)
        return [ops.sum(ops.square(picture - each), axis=1) for each in others]

    def too_near(self, triplet):
        """Returns by how much the other one is too near, for each triplet."""
        same, other = self(triplet)
        return ops.maximum(self.margin + same - other, 0.0)

    def train_step(self, triplet):
        """Trains the embedding.

        The gradient is that of the sum over examples, as the loss is no mean.
        """
        losses = common.descend(
            self.optimizer, self.trainable_weights, lambda: self.too_near(triplet)
        )
        return common.log(self.hinge, [losses])

    def test_step(self, triplet):
        """Evaluates the embedding."""
        return common.log(self.hinge, [self.too_near(triplet)])


def build():
    """A small embedding of pictures of 8 x 8."""
    embedding = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, 2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(32, use_bias=False),
            layers.LayerNormalization(center=False),
            layers.Activation("relu"),
            # A distance does not know of a bias.
            layers.Dense(8, use_bias=False),
        ]
    )
    model = Triplet(embedding)
    model.compile(keras.optimizers.Adam(0.001))
    return model


def data():
    """Pictures, each with one of the same digit and one of another."""
    x, y = common.digits()
    random = np.random.default_rng(0)
    same = [random.choice(np.flatnonzero(y == each)) for each in y]
    other = [random.choice(np.flatnonzero(y != each)) for each in y]
    return x, x[same], x[other]


if __name__ == "__main__":
    common.main(build, data)
