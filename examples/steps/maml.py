"""MAML: weights from which one step of gradient descent learns a new task.

    python -m examples.steps.maml --gpus=2

Finn et al. 2017, "Model-agnostic meta-learning for fast adaptation of deep networks",
https://arxiv.org/abs/1703.03400, with its sines. Keras's example of meta-learning is
https://keras.io/examples/vision/reptile. An example is a task: points of a sine to
learn from, and points to be judged by. Each task gets its own copy of the weights, so
one call computes all tasks. The gradient passes through the inner gradient.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from examples.steps import common


class MAML(keras.Model):
    """A network of dense layers that adapts to tasks."""

    def __init__(self, network, inner_rate=0.02):
        super().__init__()
        self.network, self.inner_rate = network, inner_rate
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.before_tracker = keras.metrics.Mean(name="before")

    @property
    def metrics(self):
        """The loss after and before the inner step."""
        return [self.loss_tracker, self.before_tracker]

    def call(self, x):
        """Computes without adapting."""
        return self.network(x)

    def predicted(self, weights, x):
        """Computes each task with its own weights.

        Args:
            weights: Kernels of shape (tasks, in, out) and biases of shape (tasks, out).
            x: Shape (tasks, points, in).

        Returns:
            Shape (tasks, points, out).
        """
        for i in range(0, len(weights), 2):
            x = tf.matmul(x, weights[i]) + weights[i + 1][:, None]
            x = tf.nn.tanh(x) if i + 2 < len(weights) else x
        return x

    def losses_of(self, data):
        """Returns each task's loss after and before the inner step."""
        (x, y), (x_query, y_query) = data
        tasks = tf.shape(x)[0]
        weights = [
            tf.broadcast_to(each, tf.concat([[tasks], tf.shape(each)], 0))
            for each in self.network.trainable_variables
        ]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            each = tf.square(self.predicted(weights, x) - y)
            before = tf.reduce_mean(each, axis=[1, 2])
        # Of the sum over tasks: no task's weights have a part in another one's loss.
        gradients = tape.gradient(before, weights)
        adapted = [
            weight - self.inner_rate * gradient
            for weight, gradient in zip(weights, gradients, strict=True)
        ]
        each = tf.square(self.predicted(adapted, x_query) - y_query)
        return tf.reduce_mean(each, axis=[1, 2]), before

    def train_step(self, data):
        """Trains the weights that tasks start from."""
        with tf.GradientTape() as tape:
            losses, before = self.losses_of(data)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(losses)
        self.before_tracker.update_state(before)
        return {each.name: each.result() for each in self.metrics}

    def test_step(self, data):
        """Computes the losses of tasks."""
        losses, before = self.losses_of(data)
        self.loss_tracker.update_state(losses)
        self.before_tracker.update_state(before)
        return {each.name: each.result() for each in self.metrics}


def build():
    """A network of one number to one number."""
    network = keras.Sequential(
        [
            keras.Input((1,)),
            layers.Dense(32, activation="tanh"),
            layers.Dense(32, activation="tanh"),
            layers.Dense(1),
        ]
    )
    model = MAML(network)
    model.compile(keras.optimizers.Adam(0.001))
    return model


def data():
    """Sines of different amplitude and phase, ten points each to learn and to judge."""
    random = np.random.default_rng(0)
    shape = 1000, 1, 1
    amplitude = random.uniform(0.1, 5, shape)
    phase = random.uniform(0, np.pi, shape)
    x = random.uniform(-5, 5, (2, 1000, 10, 1))
    y = amplitude * np.sin(x + phase)
    x, y = x.astype("float32"), y.astype("float32")
    return (x[0], y[0]), (x[1], y[1])


if __name__ == "__main__":
    common.main(build, data)
