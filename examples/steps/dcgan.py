"""DCGAN: a generator and a discriminator train against each other.

    python -m examples.steps.dcgan --gpus=2

Radford et al. 2016, "Unsupervised representation learning with deep convolutional
generative adversarial networks", https://arxiv.org/abs/1511.06434. Keras's example is
https://keras.io/examples/generative/dcgan_overriding_train_step. BatchNormalization,
which the paper has, takes the statistics of each tower by itself; so the norm is
GroupNormalization here, unless `build` gets norm="batch".
"""

import keras
import tensorflow as tf
from keras import layers, ops

from examples.steps import common

LATENT = 32


class DCGAN(keras.Model):
    """Two networks with an optimizer each."""

    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.seed_generator = keras.random.SeedGenerator()
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        """Takes an optimizer for each network."""
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        """The means of both losses, which Keras resets."""
        return [self.d_loss_tracker, self.g_loss_tracker]

    def call(self, noise):
        """Makes pictures."""
        return self.generator(noise)

    def train_step(self, real):
        """Trains the discriminator on real and made pictures, then the generator."""
        n = ops.shape(real)[0]
        noise = keras.random.normal((n, LATENT), seed=self.seed_generator)
        pictures = ops.concatenate([self.generator(noise), real], axis=0)
        labels = ops.concatenate([ops.ones((n, 1)), ops.zeros((n, 1))], axis=0)
        # Labels that are not certain keep the discriminator from being too sure.
        labels += 0.05 * keras.random.uniform((2 * n, 1), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            predicted = self.discriminator(pictures, training=True)
            d_loss = self.loss_fn(labels, predicted)
        variables = self.discriminator.trainable_weights
        gradients = tape.gradient(d_loss, variables)
        self.d_optimizer.apply_gradients(zip(gradients, variables, strict=True))

        noise = keras.random.normal((n, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            predicted = self.discriminator(self.generator(noise, training=True))
            # The generator wants its pictures to be taken for real ones.
            g_loss = self.loss_fn(ops.zeros((n, 1)), predicted)
        variables = self.generator.trainable_weights
        gradients = tape.gradient(g_loss, variables)
        self.g_optimizer.apply_gradients(zip(gradients, variables, strict=True))

        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {each.name: each.result() for each in self.metrics}


def build(norm="group", width=8):
    """A DCGAN for pictures of 32 x 32.

    Args:
        norm: "group" or "batch".
        width: Filters of the narrowest hidden layer. The others have twice as many.
    """
    make = {"group": lambda: layers.GroupNormalization(4)}
    make["batch"] = layers.BatchNormalization
    generator = keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(8 * 8 * 2 * width, use_bias=False),
            layers.Reshape((8, 8, 2 * width)),
            make[norm](),
            layers.LeakyReLU(0.2),
            layers.Conv2DTranspose(2 * width, 4, 2, padding="same", use_bias=False),
            make[norm](),
            layers.LeakyReLU(0.2),
            layers.Conv2DTranspose(width, 4, 2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2D(1, 5, padding="same", use_bias=False, activation="sigmoid"),
        ]
    )
    discriminator = keras.Sequential(
        [
            keras.Input((32, 32, 1)),
            layers.Conv2D(width, 4, 2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2D(2 * width, 4, 2, padding="same", use_bias=False),
            make[norm](),
            layers.LeakyReLU(0.2),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model = DCGAN(generator, discriminator)
    model.compile(
        d_optimizer=keras.optimizers.Adam(0.0002, beta_1=0.5),
        g_optimizer=keras.optimizers.Adam(0.0002, beta_1=0.5),
        loss_fn=keras.losses.BinaryCrossentropy(),
    )
    return model


def data():
    """Pictures of digits."""
    return common.digits(32)[0]


if __name__ == "__main__":
    common.main(build, data)
