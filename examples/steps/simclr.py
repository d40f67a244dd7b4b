"""SimCLR: two views of a picture are close, those of different pictures far.

    python -m examples.steps.simclr --gpus=2

Chen et al. 2020, "A simple framework for contrastive learning of visual
representations", https://arxiv.org/abs/2002.05709. Keras's example is
https://keras.io/examples/vision/semisupervised_simclr. The loss compares each picture
with all others of the batch. A second optimizer trains a linear probe, which tells how
much the representation knows of the labels.
"""

import keras
import tensorflow as tf
from keras import layers, ops

from examples.steps import common

WIDTH = 32


class SimCLR(keras.Model):
    """An encoder, a projection for the contrastive loss, and a linear probe."""

    def __init__(self, augmenter, encoder, projection, probe, temperature=0.1):
        super().__init__()
        self.augmenter, self.encoder = augmenter, encoder
        self.projection, self.probe = projection, probe
        self.temperature = temperature

    def compile(self, contrastive_optimizer, probe_optimizer):
        """Takes an optimizer for the contrastive loss, and one for the probe."""
        super().compile()
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(
            name="c_acc"
        )
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        """Loss and accuracy of both tasks."""
        return [
            self.contrastive_loss_tracker,
            self.contrastive_accuracy,
            self.probe_loss_tracker,
            self.probe_accuracy,
        ]

    def call(self, pictures):
        """Returns the probe's logits."""
        return self.probe(self.encoder(pictures))

    def contrastive_loss(self, first, second):
        """Tells which of all second views belongs to a first view, and vice versa."""
        first, second = ops.normalize(first, axis=1), ops.normalize(second, axis=1)
        similar = ops.matmul(first, ops.transpose(second)) / self.temperature
        labels = ops.arange(ops.shape(first)[0])
        self.contrastive_accuracy.update_state(labels, similar)
        self.contrastive_accuracy.update_state(labels, ops.transpose(similar))
        each_way = [
            keras.losses.sparse_categorical_crossentropy(labels, each, from_logits=True)
            for each in (similar, ops.transpose(similar))
        ]
        return ops.mean(sum(each_way)) / 2

    def train_step(self, data):
        """Trains encoder and projection, then the probe."""
        pictures, labels = data
        views = [self.augmenter(pictures, training=True) for _ in range(2)]
        with tf.GradientTape() as tape:
            first, second = (
                self.projection(self.encoder(each, training=True), training=True)
                for each in views
            )
            loss = self.contrastive_loss(first, second)
        variables = self.encoder.trainable_weights + self.projection.trainable_weights
        gradients = tape.gradient(loss, variables)
        self.contrastive_optimizer.apply_gradients(
            zip(gradients, variables, strict=True)
        )
        self.contrastive_loss_tracker.update_state(loss)

        with tf.GradientTape() as tape:
            # The encoder learns nothing of the labels.
            logits = self.probe(self.encoder(pictures, training=False), training=True)
            probe_loss = self.probe_loss(labels, logits)
        variables = self.probe.trainable_weights
        gradients = tape.gradient(probe_loss, variables)
        self.probe_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.probe_loss_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(labels, logits)
        return {each.name: each.result() for each in self.metrics}

    def test_step(self, data):
        """Tries the probe."""
        pictures, labels = data
        logits = self(pictures, training=False)
        self.probe_loss_tracker.update_state(self.probe_loss(labels, logits))
        self.probe_accuracy.update_state(labels, logits)
        return {each.name: each.result() for each in self.metrics[2:]}


def build():
    """A small SimCLR for pictures of 8 x 8."""
    model = SimCLR(
        keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.RandomTranslation(0.2, 0.2, fill_mode="constant"),
                layers.GaussianNoise(0.1),
            ]
        ),
        keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(16, 3, 2, activation="relu", padding="same"),
                layers.Conv2D(16, 3, 2, activation="relu", padding="same"),
                layers.Flatten(),
                layers.Dense(WIDTH, activation="relu"),
            ]
        ),
        keras.Sequential(
            [
                keras.Input((WIDTH,)),
                layers.Dense(WIDTH, activation="relu"),
                layers.Dense(WIDTH),
            ]
        ),
        keras.Sequential([keras.Input((WIDTH,)), layers.Dense(10)]),
    )
    model.compile(
        contrastive_optimizer=keras.optimizers.Adam(0.001),
        probe_optimizer=keras.optimizers.Adam(0.001),
    )
    return model


def data():
    """Pictures of digits, and labels."""
    return common.digits()


if __name__ == "__main__":
    common.main(build, data)
