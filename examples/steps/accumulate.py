"""Gradient accumulation by hand: an update for several batches.

    python -m examples.steps.accumulate --gpus=2

As in answers to https://stackoverflow.com/q/66472201, which programs copied before
Keras's optimizers had `gradient_accumulation_steps`. Variables add up gradients. Every
fourth batch, a condition in the graph applies them.
"""

import keras
import tensorflow as tf
from keras import layers

from examples.steps import common


class Accumulating(keras.Model):
    """Applies the mean gradient of some batches."""

    def __init__(self, network, batches=4):
        super().__init__()
        self.network, self.batches = network, batches
        self.seen = self._counter("seen", ())
        self.sums = [
            self._counter(f"sum_{i}", each.shape, "float32")
            for i, each in enumerate(network.trainable_variables)
        ]

    def _counter(self, name, shape, dtype="int32"):
        return self.add_weight(
            name=name, shape=shape, dtype=dtype, initializer="zeros", trainable=False
        )

    def call(self, x, training=None):
        """Returns logits."""
        return self.network(x, training=training)

    def train_step(self, data):
        """Adds a gradient, and applies them if there are enough."""
        x, y = data
        self.seen.assign_add(1)
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x, y, logits)
        gradients = tape.gradient(loss, self.network.trainable_variables)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient / self.batches)
        tf.cond(self.seen == self.batches, self.apply, lambda: None)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, logits)
        return {each.name: each.result() for each in self.metrics}

    def apply(self):
        """Applies what was added up, and begins anew."""
        sums = [tf.convert_to_tensor(each) for each in self.sums]
        self.optimizer.apply(sums, self.network.trainable_variables)
        self.seen.assign(0)
        for total in self.sums:
            total.assign(tf.zeros_like(total))


def build():
    """A small network for pictures of 8 x 8."""
    network = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )
    model = Accumulating(network)
    optimizer = keras.optimizers.Adam(0.001)
    # A condition cannot create variables.
    optimizer.build(network.trainable_variables)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
    )
    return model


def data():
    """Pictures of digits, and labels."""
    return common.digits()


if __name__ == "__main__":
    common.main(build, data)
