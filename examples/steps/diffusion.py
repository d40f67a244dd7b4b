"""Denoising diffusion: a network learns to tell the noise in a picture.

    python -m examples.steps.diffusion --gpus=2

Ho et al. 2020, "Denoising diffusion probabilistic models",
https://arxiv.org/abs/2006.11239. Keras's example is
https://keras.io/examples/generative/ddpm. A second network has the moving averages of
the weights; the step assigns them.
"""

import keras
import numpy as np
from keras import layers, ops

from examples.steps import common

TIMES = 100
# What is left of the picture after each time, by Ho's linear schedule.
LEFT = np.cumprod(1 - np.linspace(1e-4, 0.1, TIMES)).astype("float32")


class Diffusion(keras.Model):
    """A network, and one with the moving averages of its weights."""

    def __init__(self, network, ema_network, ema=0.99):
        super().__init__()
        self.network, self.ema_network, self.ema = network, ema_network, ema
        self.seed_generator = keras.random.SeedGenerator()
        self.missed = common.means("missed")

    def call(self, inputs):
        """Tells the noise in a picture at a time."""
        return self.ema_network(inputs)

    def noisy(self, pictures):
        """Returns pictures with noise, their times and the noise."""
        n = ops.shape(pictures)[0]
        times = keras.random.randint((n,), 0, TIMES, seed=self.seed_generator)
        noise = keras.random.normal(ops.shape(pictures), seed=self.seed_generator)
        left = ops.reshape(ops.take(LEFT, times), (-1, 1, 1, 1))
        return ops.sqrt(left) * pictures + ops.sqrt(1 - left) * noise, times, noise

    def miss(self, network, pictures, training):
        """Returns by how much a network misses the noise in pictures."""
        mixed, times, noise = self.noisy(pictures)
        return self.compute_loss(
            y=noise, y_pred=network([mixed, times], training=training)
        )

    def train_step(self, pictures):
        """Trains the network, then moves the averages."""
        loss = common.descend(
            self.optimizer,
            self.network.trainable_weights,
            lambda: self.miss(self.network, pictures, True),
        )
        weights = zip(self.network.weights, self.ema_network.weights, strict=True)
        for weight, average in weights:
            average.assign(self.ema * average + (1 - self.ema) * weight)
        return common.log(self.missed, [loss])

    def test_step(self, pictures):
        """Computes the loss of the moving averages."""
        return common.log(self.missed, [self.miss(self.ema_network, pictures, False)])


def unet():
    """A small U-Net with the time added at each size.

    No BatchNormalization: Ho's network has GroupNormalization, too.
    """
    pictures, times = keras.Input((8, 8, 1)), keras.Input((), dtype="int32")
    time = layers.Embedding(TIMES, 16)(times)
    time = layers.Dense(16, activation="silu")(time)
    x, kept = pictures, []
    for width in (8, 16):
        x = block(x, time, width)
        kept.append(x)
        x = layers.AveragePooling2D(2)(x)
    x = block(x, time, 16)
    for width in (16, 8):
        x = layers.Concatenate()([layers.UpSampling2D()(x), kept.pop()])
        x = block(x, time, width)
    return keras.Model([pictures, times], layers.Conv2D(1, 1, use_bias=False)(x))


def block(x, time, width):
    """A convolution that knows the time."""
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
    x = layers.GroupNormalization(4)(x)
    x = layers.Add()([x, layers.Reshape((1, 1, width))(layers.Dense(width)(time))])
    return layers.Activation("silu")(x)


def build():
    """A small diffusion model for pictures of 8 x 8."""
    network, ema_network = unet(), unet()
    ema_network.set_weights(network.get_weights())
    model = Diffusion(network, ema_network)
    model.compile(keras.optimizers.Adam(0.001), keras.losses.MeanSquaredError())
    return model


def data():
    """Pictures of digits, from -1 to 1."""
    return 2 * common.digits()[0] - 1


if __name__ == "__main__":
    common.main(build, data)
