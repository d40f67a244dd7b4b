"""Distillation: a small network learns what a large one answers.

    python -m examples.steps.distillation --gpus=2

Hinton et al. 2015, "Distilling the knowledge in a neural network",
https://arxiv.org/abs/1503.02531. Keras's example is
https://keras.io/examples/vision/knowledge_distillation.
"""

import keras
from keras import layers, ops

from examples.steps import common


class Distiller(keras.Model):
    """A student that trains, and a teacher that does not."""

    def __init__(self, student, teacher, of_labels=0.1, temperature=3.0):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.of_labels, self.temperature = of_labels, temperature

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

    def unlike(self, answers, logits):
        """Tells how unlike the student's logits are to the teacher's answers."""
        teacher, student = (
            ops.log_softmax(each / self.temperature) for each in (answers, logits)
        )
        apart = ops.sum(ops.exp(teacher) * (teacher - student), axis=1)
        # Gradients shrink with the square of the temperature.
        return self.temperature**2 * ops.mean(apart)

    def train_step(self, data):
        """Trains the student on the labels and on the teacher's answers."""
        x, y = data
        answers = self.teacher(x, training=False)

        def losses():
            logits = self.student(x, training=True)
            wrong = self.compute_loss(x, y, logits)
            unlike = self.unlike(answers, logits)
            loss = self.of_labels * wrong + (1 - self.of_labels) * unlike
            return loss, wrong, unlike, logits

        loss, wrong, unlike, logits = common.descend(
            self.optimizer, self.student.trainable_weights, losses
        )
        return self.report(y, logits, loss) | {"wrong": wrong, "unlike": unlike}

    def test_step(self, data):
        """Evaluates the student."""
        x, y = data
        logits = self.student(x, training=False)
        return self.report(y, logits, self.compute_loss(x, y, logits))


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
        loss=loss,
        metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
    )
    return model


def data():
    """Pictures of digits, and labels."""
    return common.digits()


if __name__ == "__main__":
    common.main(build, data)
