"""FixMatch: a network's sure answers are the labels of pictures without one.

    python -m examples.steps.fixmatch --gpus=2

Sohn et al. 2020, "FixMatch: simplifying semi-supervised learning with consistency and
confidence", https://arxiv.org/abs/2001.07685. Keras's example of this kind is AdaMatch,
https://keras.io/examples/vision/adamatch. The answer for a picture with a small change
trains the network on the same picture with a large one.
"""

import keras
import tensorflow as tf
from keras import layers, ops

from examples.steps import common

LABELLED = 200


class FixMatch(keras.Model):
    """A network that labels pictures for itself."""

    def __init__(self, network, weak, strong, threshold=0.5, weight=1.0):
        super().__init__()
        self.network, self.weak, self.strong = network, weak, strong
        self.threshold, self.weight = threshold, weight
        self.unlabelled_tracker = keras.metrics.Mean(name="unlabelled_loss")
        self.used_tracker = keras.metrics.Mean(name="used")

    def call(self, x, training=None):
        """Returns logits."""
        return self.network(x, training=training)

    def report(self, x, y, logits, loss):
        """Updates Keras's own loss, and the compiled metrics."""
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return self.compute_metrics(x, y, logits)

    def train_step(self, data):
        """Trains on labels, and on sure answers."""
        (x, y), unlabelled = data
        # In one call, as the paper has it.
        both = ops.concatenate([x, unlabelled], axis=0)
        weak = self.weak(both, training=True)
        strong = self.strong(unlabelled, training=True)
        n = ops.shape(x)[0]
        with tf.GradientTape() as tape:
            logits = self(weak, training=True)
            loss = self.compute_loss(x, y, logits[:n])
            answers = ops.softmax(ops.stop_gradient(logits[n:]))
            used = ops.cast(ops.max(answers, axis=1) >= self.threshold, "float32")
            each = keras.losses.sparse_categorical_crossentropy(
                ops.argmax(answers, axis=1),
                self(strong, training=True),
                from_logits=True,
            )
            unlabelled_loss = ops.mean(each * used)
            total = loss + self.weight * unlabelled_loss
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(total, variables), variables)
        self.unlabelled_tracker.update_state(unlabelled_loss)
        self.used_tracker.update_state(used)
        return self.report(x, y, logits[:n], total)

    def test_step(self, data):
        """Evaluates the network on labelled pictures."""
        (x, y), _ = data
        logits = self(x, training=False)
        return self.report(x, y, logits, self.compute_loss(x, y, logits))


def build():
    """A small network for pictures of 8 x 8."""
    network = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, 2, padding="same", activation="relu"),
            layers.Conv2D(16, 3, 2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    weak = layers.RandomTranslation(0.1, 0.1, fill_mode="constant")
    strong = keras.Sequential(
        [
            layers.RandomTranslation(0.2, 0.2, fill_mode="constant"),
            layers.GaussianNoise(0.2),
            layers.Dropout(0.2),
        ]
    )
    model = FixMatch(network, weak, strong)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
    )
    return model


def data():
    """Some labelled pictures, again and again, each with one that has no label."""
    x, y = common.digits()
    unlabelled = x[LABELLED:]
    again = [i % LABELLED for i in range(len(unlabelled))]
    return (x[again], y[again]), unlabelled


if __name__ == "__main__":
    common.main(build, data)
