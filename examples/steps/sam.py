"""Sharpness-aware minimisation: the gradient where the loss nearby is highest.

    python -m examples.steps.sam --gpus=2

Foret et al. 2021, "Sharpness-aware minimization for efficiently improving
generalization", https://arxiv.org/abs/2010.01412. Keras's example is
https://keras.io/examples/vision/sharpness_aware_minimization. A step has two passes:
the first gradient tells where to look, the second one trains. It takes the norm of the
first gradient, which is that of the whole batch.
"""

import keras
import tensorflow as tf
from keras import layers

from examples.steps import common


class SAM(keras.Model):
    """Trains a network in two passes."""

    def __init__(self, network, rho=0.05):
        super().__init__()
        self.network, self.rho = network, rho

    def call(self, x, training=None):
        """Returns logits."""
        return self.network(x, training=training)

    def report(self, y, logits, loss):
        """Updates the metrics, of which Keras's own loss is one."""
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, logits)
        return {each.name: each.result() for each in self.metrics}

    def train_step(self, data):
        """Climbs, takes the gradient there, returns, and descends."""
        x, y = data
        variables = self.network.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, variables)
        norm = tf.norm([tf.norm(each) for each in gradients])
        steps = [each * self.rho / (norm + 1e-12) for each in gradients]
        for variable, step in zip(variables, steps, strict=True):
            variable.assign_add(step)

        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x, y, logits)
        gradients = tape.gradient(loss, variables)
        for variable, step in zip(variables, steps, strict=True):
            variable.assign_sub(step)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return self.report(y, logits, loss)

    def test_step(self, data):
        """Evaluates the network."""
        x, y = data
        logits = self(x, training=False)
        return self.report(y, logits, self.compute_loss(x, y, logits))


def build():
    """A small network for pictures of 8 x 8."""
    network = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, 2, padding="same", activation="relu"),
            layers.Conv2D(16, 3, 2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    model = SAM(network)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
    )
    return model


def data():
    """Pictures of digits, and labels."""
    return common.digits()


if __name__ == "__main__":
    common.main(build, data)
