"""CycleGAN: pictures of one kind become those of another, without pairs.

    python -m examples.steps.cyclegan --gpus=2

Zhu et al. 2017, "Unpaired image-to-image translation using cycle-consistent adversarial
networks", https://arxiv.org/abs/1703.10593. Keras's example is
https://keras.io/examples/generative/cyclegan. Four networks have an optimizer each; one
tape gives the gradients of all.
"""

import keras
import tensorflow as tf
from keras import layers

from examples.steps import common


class CycleGAN(keras.Model):
    """Generators G from X to Y and F back, and a discriminator of each kind."""

    def __init__(self, generator_g, generator_f, discriminator_x, discriminator_y):
        super().__init__()
        self.gen_g, self.gen_f = generator_g, generator_f
        self.disc_x, self.disc_y = discriminator_x, discriminator_y
        self.lambda_cycle, self.lambda_identity = 10.0, 0.5

    def compile(self, gen_g, gen_f, disc_x, disc_y):
        """Takes an optimizer for each network."""
        super().compile()
        self.gen_g_optimizer, self.gen_f_optimizer = gen_g, gen_f
        self.disc_x_optimizer, self.disc_y_optimizer = disc_x, disc_y
        self.cycle_loss_fn = keras.losses.MeanAbsoluteError()
        self.adversarial_loss_fn = keras.losses.MeanSquaredError()

    def call(self, x):
        """Makes a Y of each X."""
        return self.gen_g(x)

    def generator_loss(self, fake):
        """Is low where made pictures are taken for real ones."""
        return self.adversarial_loss_fn(tf.ones_like(fake), fake)

    def discriminator_loss(self, real, fake):
        """Is low where real and made pictures are told apart."""
        real_loss = self.adversarial_loss_fn(tf.ones_like(real), real)
        return 0.5 * (real_loss + self.adversarial_loss_fn(tf.zeros_like(fake), fake))

    def train_step(self, data):
        """Trains the four networks."""
        real_x, real_y = data
        with tf.GradientTape(persistent=True) as tape:
            fake_y = self.gen_g(real_x, training=True)
            fake_x = self.gen_f(real_y, training=True)
            cycled_x = self.gen_f(fake_y, training=True)
            cycled_y = self.gen_g(fake_x, training=True)
            same_x = self.gen_f(real_x, training=True)
            same_y = self.gen_g(real_y, training=True)
            disc_real_x = self.disc_x(real_x, training=True)
            disc_fake_x = self.disc_x(fake_x, training=True)
            disc_real_y = self.disc_y(real_y, training=True)
            disc_fake_y = self.disc_y(fake_y, training=True)

            cycle = self.lambda_cycle
            identity = self.lambda_cycle * self.lambda_identity
            g_loss = (
                self.generator_loss(disc_fake_y)
                + cycle * self.cycle_loss_fn(real_y, cycled_y)
                + identity * self.cycle_loss_fn(real_y, same_y)
            )
            f_loss = (
                self.generator_loss(disc_fake_x)
                + cycle * self.cycle_loss_fn(real_x, cycled_x)
                + identity * self.cycle_loss_fn(real_x, same_x)
            )
            x_loss = self.discriminator_loss(disc_real_x, disc_fake_x)
            y_loss = self.discriminator_loss(disc_real_y, disc_fake_y)

        gradients = [
            tape.gradient(loss, network.trainable_variables)
            for loss, network in (
                (g_loss, self.gen_g),
                (f_loss, self.gen_f),
                (x_loss, self.disc_x),
                (y_loss, self.disc_y),
            )
        ]
        self.gen_g_optimizer.apply(gradients[0], self.gen_g.trainable_variables)
        self.gen_f_optimizer.apply(gradients[1], self.gen_f.trainable_variables)
        self.disc_x_optimizer.apply(gradients[2], self.disc_x.trainable_variables)
        self.disc_y_optimizer.apply(gradients[3], self.disc_y.trainable_variables)
        return {
            "g_loss": g_loss,
            "f_loss": f_loss,
            "x_loss": x_loss,
            "y_loss": y_loss,
        }


def generator():
    """A small residual network.

    With InstanceNormalization, as the paper, which is GroupNormalization with a group
    for each channel.
    """
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU()(layers.GroupNormalization(-1)(x))
    y = layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
    x = layers.Add()([x, layers.GroupNormalization(-1)(y)])
    x = layers.Conv2D(1, 3, padding="same", activation="tanh")(x)
    return keras.Model(inputs, x)


def discriminator():
    """Tells for each patch whether it is real."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, 2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.GroupNormalization(-1),
            layers.LeakyReLU(0.2),
            layers.Conv2D(1, 3, padding="same"),
        ]
    )


def build():
    """Four small networks for pictures of 8 x 8."""
    model = CycleGAN(generator(), generator(), discriminator(), discriminator())
    names = "gen_g", "gen_f", "disc_x", "disc_y"
    model.compile(**{each: keras.optimizers.Adam(0.0002, beta_1=0.5) for each in names})
    return model


def data():
    """Digits in white on black, and others in black on white, from -1 to 1."""
    x = 2 * common.digits()[0] - 1
    half = len(x) // 2
    return x[:half], -x[half : 2 * half]


if __name__ == "__main__":
    common.main(build, data)
