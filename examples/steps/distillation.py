"""Distillation: a small network learns what a large one answers.

    python -m examples.steps.distillation --gpus=2

Hinton et al. 2015, "Distilling the knowledge in a neural network",
https://arxiv.org/abs/1503.02531. Keras's example is
https://keras.io/examples/vision/knowledge_distillation.
"""

import keras
import tensorflow as tf
from keras import layers, ops

from examples.steps import common


class Distiller(keras.Model):
    """A student that trains, and a teacher that does not."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(
        self,
        optimizer,
        metrics,
        student_loss_fn,
        distillation_loss_fn,
        alpha=0.1,
        temperature=3.0,
    ):
        """Takes the loss of labels, that of answers, and how they are weighed."""
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def call(self, pictures):
        """Returns the student's logits."""
        return self.student(pictures)

    def report(self, y, logits, loss):
        """Updates the metrics, of which Keras's own loss is one."""
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, logits)
        return {each.name: each.result() for each in self.metrics}

    def train_step(self, data):
        """Trains the student on the labels and on the teacher's answers."""
        x, y = data
        answers = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            logits = self.student(x, training=True)
            student_loss = self.student_loss_fn(y, logits)
            # Gradients shrink with the square of the temperature.
            distillation_loss = self.temperature**2 * self.distillation_loss_fn(
                ops.softmax(answers / self.temperature, axis=1),
                ops.softmax(logits / self.temperature, axis=1),
            )
            loss = self.alpha * student_loss + (1 - self.alpha) * distillation_loss
        variables = self.student.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return self.report(y, logits, loss) | {
            "student_loss": student_loss,
            "distillation_loss": distillation_loss,
        }

    def test_step(self, data):
        """Evaluates the student."""
        x, y = data
        logits = self.student(x, training=False)
        return self.report(y, logits, self.student_loss_fn(y, logits))


def network(width):
    """A network for pictures of 8 x 8, which returns logits."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(width, 3, 2, padding="same", activation="relu"),
            layers.Conv2D(2 * width, 3, 2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def build():
    """A student, and a teacher that is trained here."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    teacher = network(16)
    teacher.compile(keras.optimizers.Adam(0.01), loss)
    teacher.fit(*data(), epochs=2, verbose=0)
    model = Distiller(network(4), teacher)
    model.compile(
        optimizer=keras.optimizers.Adam(0.005),
        metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
        student_loss_fn=loss,
        distillation_loss_fn=keras.losses.KLDivergence(),
    )
    return model


def data():
    """Pictures of digits, and labels."""
    return common.digits()


if __name__ == "__main__":
    common.main(build, data)
