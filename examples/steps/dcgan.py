"""DCGAN: a generator and a discriminator train against each other.

    python -m examples.steps.dcgan --gpus=2

Radford et al. 2016, "Unsupervised representation learning with deep convolutional
generative adversarial networks", https://arxiv.org/abs/1511.06434. Keras's example is
https://keras.io/examples/generative/dcgan_overriding_train_step. BatchNormalization,
which the paper has, takes the statistics of each tower by itself; so the norm is
GroupNormalization here, unless `build` gets norm="batch".
"""

import keras
from keras import layers, ops

from examples.steps import common

LATENT = 32


class DCGAN(keras.Model):
    """Two networks with an optimizer each."""

    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.noise = keras.random.SeedGenerator()

    def compile(self, d_optimizer, g_optimizer, loss):
        """Takes an optimizer for each network, and what tells real from made."""
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.wrong = loss
        self.rivals = common.means("d_loss", "g_loss")

    @property
    def metrics(self):
        """The mean losses of the two rivals, which Keras resets."""
        return [*self.rivals.values()]

    def call(self, noise):
        """Makes pictures."""
        return self.generator(noise)

    def made(self, n):
        """Makes n pictures, each of noise of its own."""
        noise = keras.random.normal((n, LATENT), seed=self.noise)
        return self.generator(noise, training=True)

    def train_step(self, real):
        """Trains the discriminator on real and made pictures, then the generator."""
        n = ops.shape(real)[0]
        pictures = ops.concatenate([real, self.made(n)], axis=0)
        # Labels that are not certain keep the discriminator from being too sure.
        unsure = 0.05 * keras.random.uniform((2 * n, 1), seed=self.noise)
        is_made = ops.concatenate([ops.zeros((n, 1)), ops.ones((n, 1))], axis=0)

        def told_apart():
            answers = self.discriminator(pictures, training=True)
            return self.wrong(is_made + unsure, answers)

        def taken_for_real():
            return self.wrong(ops.zeros((n, 1)), self.discriminator(self.made(n)))

        losses = (
            common.descend(
                self.d_optimizer, self.discriminator.trainable_weights, told_apart
            ),
            common.descend(
                self.g_optimizer, self.generator.trainable_weights, taken_for_real
            ),
        )
        return common.log(self.rivals, losses)


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
        loss=keras.losses.BinaryCrossentropy(),
    )
    return model


def data():
    """Pictures of digits."""
    return common.digits(32)[0]


if __name__ == "__main__":
    common.main(build, data)
