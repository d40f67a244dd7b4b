"""VAE: an autoencoder whose code is close to a normal distribution.

    python -m examples.steps.vae --gpus=2

Kingma and Welling 2014, "Auto-encoding variational Bayes",
https://arxiv.org/abs/1312.6114. Keras's example is
https://keras.io/examples/generative/vae. A loss sums over pixels and takes the mean
over examples.
"""

import keras
import tensorflow as tf
from keras import layers, ops

from examples.steps import common

LATENT = 4


class Sampling(layers.Layer):
    """Draws a code from its mean and the logarithm of its variance."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator()

    def call(self, inputs):
        """Draws."""
        mean, log_var = inputs
        epsilon = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * epsilon


class VAE(keras.Model):
    """An encoder and a decoder."""

    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(
            name="reconstruction_loss"
        )
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        """The means of the losses, which Keras resets."""
        return [
            self.total_loss_tracker,
            self.reconstruction_loss_tracker,
            self.kl_loss_tracker,
        ]

    def call(self, pictures):
        """Encodes and decodes."""
        return self.decoder(self.encoder(pictures)[2])

    def losses_of(self, pictures):
        """Returns the whole loss, and its two parts."""
        mean, log_var, code = self.encoder(pictures)
        decoded = self.decoder(code)
        pixels = keras.losses.binary_crossentropy(pictures, decoded)
        reconstruction_loss = ops.mean(ops.sum(pixels, axis=(1, 2)))
        kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
        kl_loss = ops.mean(ops.sum(kl, axis=1))
        return reconstruction_loss + kl_loss, reconstruction_loss, kl_loss

    def report(self, losses):
        """Updates the trackers."""
        for tracker, loss in zip(self.metrics, losses, strict=True):
            tracker.update_state(loss)
        return {each.name: each.result() for each in self.metrics}

    def train_step(self, pictures):
        """Trains both networks."""
        with tf.GradientTape() as tape:
            losses = self.losses_of(pictures)
        gradients = tape.gradient(losses[0], self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_weights, strict=True)
        )
        return self.report(losses)

    def test_step(self, pictures):
        """Computes the losses."""
        return self.report(self.losses_of(pictures))


def build():
    """A small VAE for pictures of 8 x 8."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, 2, activation="relu", padding="same")(inputs)
    x = layers.Conv2D(16, 3, 2, activation="relu", padding="same")(x)
    x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
    mean, log_var = layers.Dense(LATENT)(x), layers.Dense(LATENT)(x)
    encoder = keras.Model(inputs, [mean, log_var, Sampling()([mean, log_var])])
    decoder = keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(2 * 2 * 16, activation="relu"),
            layers.Reshape((2, 2, 16)),
            layers.Conv2DTranspose(16, 3, 2, activation="relu", padding="same"),
            layers.Conv2DTranspose(8, 3, 2, activation="relu", padding="same"),
            layers.Conv2D(1, 3, activation="sigmoid", padding="same"),
        ]
    )
    model = VAE(encoder, decoder)
    model.compile(keras.optimizers.Adam(0.001))
    return model


def data():
    """Pictures of digits."""
    return common.digits()[0]


if __name__ == "__main__":
    common.main(build, data)
