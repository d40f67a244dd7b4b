"""VAE: an autoencoder whose code is close to a normal distribution.

    python -m examples.steps.vae --gpus=2

Kingma and Welling 2014, "Auto-encoding variational Bayes",
https://arxiv.org/abs/1312.6114. What is minimized is the negative of the paper's lower
bound: how unlikely a picture is by what its code draws, and how far the code is from a
normal distribution, by its divergence.
"""

import keras
from keras import layers, ops

from examples.steps import common

LATENT = 4


class VAE(keras.Model):
    """Reads a picture into the mean and spread of a code, and draws a code again."""

    def __init__(self, reader, drawer):
        super().__init__()
        self.reader, self.drawer = reader, drawer
        self.noise = keras.random.SeedGenerator()
        self.bounds = common.means("bound", "unlikely", "divergence")

    def call(self, pictures):
        """Returns each pixel's probability to be white, by the mean of the code."""
        mean, _ = ops.split(self.reader(pictures), 2, axis=1)
        return ops.sigmoid(self.drawer(mean))

    def bound(self, pictures):
        """Returns the negative lower bound, and the two terms that it is the sum of."""
        mean, log_spread = ops.split(self.reader(pictures), 2, axis=1)
        spread = ops.exp(log_spread)
        drawn = keras.random.normal(ops.shape(mean), seed=self.noise)
        logits = self.drawer(mean + spread * drawn)
        # Of Bernoulli's distribution, written so that no logit overflows.
        each = ops.softplus(logits) - pictures * logits
        unlikely = ops.mean(ops.sum(each, axis=(1, 2, 3)))
        each = (ops.square(mean) + ops.square(spread) - 1) / 2 - log_spread
        divergence = ops.mean(ops.sum(each, axis=1))
        return unlikely + divergence, unlikely, divergence

    def train_step(self, pictures):
        """Trains both networks."""
        losses = common.descend(
            self.optimizer, self.trainable_weights, lambda: self.bound(pictures)
        )
        return common.log(self.bounds, losses)

    def test_step(self, pictures):
        """Evaluates the bound."""
        return common.log(self.bounds, self.bound(pictures))


def build():
    """A small VAE for pictures of 8 x 8."""
    reader = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 4, 2, activation="relu", padding="same"),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(2 * LATENT),
        ]
    )
    drawer = keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(32, activation="relu"),
            layers.Dense(4 * 4 * 8, activation="relu"),
            layers.Reshape((4, 4, 8)),
            layers.UpSampling2D(),
            layers.Conv2D(1, 3, padding="same"),
        ]
    )
    model = VAE(reader, drawer)
    model.compile(keras.optimizers.Adam(0.001))
    return model


def data():
    """Pictures of digits."""
    return common.digits()[0]


if __name__ == "__main__":
    common.main(build, data)
