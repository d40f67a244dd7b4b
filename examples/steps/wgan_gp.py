"""WGAN-GP: a critic whose gradient has a norm of about 1.

    python -m examples.steps.wgan_gp --gpus=2

Gulrajani et al. 2017, "Improved training of Wasserstein GANs",
https://arxiv.org/abs/1704.00028. Keras's example is
https://keras.io/examples/generative/wgan_gp. The critic trains several times for each
step of the generator. Its loss contains a gradient, so a tape runs inside a tape. The
logs are the losses of the last step, not means, as in Keras's example.
"""

import keras
import tensorflow as tf
from keras import layers

from examples.steps import common

LATENT = 32


class WGAN(keras.Model):
    """A generator and a critic."""

    def __init__(self, discriminator, generator, d_steps=3, gp_weight=10.0):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.d_steps, self.gp_weight = d_steps, gp_weight
        self.seed_generator = keras.random.SeedGenerator()

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        """Takes an optimizer and a loss for each network."""
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_loss_fn, self.g_loss_fn = d_loss_fn, g_loss_fn

    def call(self, noise):
        """Makes pictures."""
        return self.generator(noise)

    def gradient_penalty(self, real, fake):
        """Returns how far the gradient is from 1, between real and made pictures."""
        shape = (tf.shape(real)[0], 1, 1, 1)
        alpha = keras.random.uniform(shape, seed=self.seed_generator)
        between = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            predicted = self.discriminator(between, training=True)
        gradients = tape.gradient(predicted, between)
        norm = tf.sqrt(tf.reduce_sum(tf.square(gradients), axis=[1, 2, 3]))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real):
        """Trains the critic several times, then the generator once."""
        shape = (tf.shape(real)[0], LATENT)
        for _ in range(self.d_steps):
            noise = keras.random.normal(shape, seed=self.seed_generator)
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                fake_logits = self.discriminator(fake, training=True)
                real_logits = self.discriminator(real, training=True)
                d_cost = self.d_loss_fn(real_logits, fake_logits)
                penalty = self.gradient_penalty(real, fake)
                d_loss = d_cost + self.gp_weight * penalty
            variables = self.discriminator.trainable_variables
            gradients = tape.gradient(d_loss, variables)
            self.d_optimizer.apply_gradients(zip(gradients, variables, strict=True))

        noise = keras.random.normal(shape, seed=self.seed_generator)
        with tf.GradientTape() as tape:
            fake = self.generator(noise, training=True)
            g_loss = self.g_loss_fn(self.discriminator(fake, training=True))
        variables = self.generator.trainable_variables
        gradients = tape.gradient(g_loss, variables)
        self.g_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


def discriminator_loss(real_logits, fake_logits):
    """Is low where real pictures have high logits, and made ones low logits."""
    return tf.reduce_mean(fake_logits) - tf.reduce_mean(real_logits)


def generator_loss(fake_logits):
    """Is low where made pictures have high logits."""
    return -tf.reduce_mean(fake_logits)


def build(width=8):
    """A WGAN-GP for pictures of 32 x 32.

    Args:
        width: Filters of the narrowest hidden layer. The others have twice as many.
    """
    # The paper's choice for the critic: BatchNormalization would mix examples, whose
    # gradients the penalty takes one by one.
    discriminator = keras.Sequential(
        [
            keras.Input((32, 32, 1)),
            layers.Conv2D(width, 5, 2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2D(2 * width, 5, 2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Flatten(),
            # A difference of two answers does not know of a bias.
            layers.Dense(1, use_bias=False),
        ]
    )
    generator = keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(8 * 8 * 2 * width, use_bias=False),
            layers.Reshape((8, 8, 2 * width)),
            layers.GroupNormalization(4),
            layers.LeakyReLU(0.2),
            layers.UpSampling2D(),
            layers.Conv2D(width, 3, padding="same", use_bias=False),
            layers.GroupNormalization(4),
            layers.LeakyReLU(0.2),
            layers.UpSampling2D(),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    model = WGAN(discriminator, generator)
    model.compile(
        d_optimizer=keras.optimizers.Adam(0.0002, beta_1=0.5, beta_2=0.9),
        g_optimizer=keras.optimizers.Adam(0.0002, beta_1=0.5, beta_2=0.9),
        d_loss_fn=discriminator_loss,
        g_loss_fn=generator_loss,
    )
    return model


def data():
    """Pictures of digits."""
    return common.digits(32)[0]


if __name__ == "__main__":
    common.main(build, data)
