"""SimCLR: two views of a picture are close, those of different pictures far.

    python -m examples.steps.simclr --gpus=2

Chen et al. 2020, "A simple framework for contrastive learning of visual
representations", https://arxiv.org/abs/2002.05709. Keras's example is
https://keras.io/examples/vision/semisupervised_simclr. The loss compares each picture
with all others of the batch. A second optimizer trains a linear probe, which tells how
much the representation knows of the labels.
"""

import keras
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

    def compile(self, of_views, of_labels):
        """Takes an optimizer for the contrastive loss, and one for the probe."""
        super().compile()
        self.of_views, self.of_labels = of_views, of_labels
        self.unlike = common.means("unlike", "pairs")
        self.probed = common.means("probe_loss", "probe_right")

    @property
    def metrics(self):
        """Loss and accuracy of both tasks, which Keras resets."""
        return [*self.unlike.values(), *self.probed.values()]

    def call(self, pictures):
        """Returns the probe's logits."""
        return self.probe(self.encoder(pictures))

    def contrast(self, views):
        """Compares the views of all pictures.

        Args:
            views: Two batches of the same pictures, each changed by chance.

        Returns:
            How unlike the two views of a picture are, compared with views of other
            pictures; and how often the right one is the most alike.
        """
        one, other = (
            ops.normalize(self.projection(self.encoder(view, training=True)), axis=1)
            for view in views
        )
        alike = ops.matmul(one, ops.transpose(other)) / self.temperature
        # Each view looks for its pair: along rows, and along columns.
        pairs = ops.diagonal(alike)
        sums = ops.logsumexp(alike, axis=1) + ops.logsumexp(alike, axis=0)
        right = [pairs >= ops.max(alike, axis=axis) for axis in (0, 1)]
        return ops.mean(sums / 2 - pairs), ops.mean(ops.cast(right, "float32"))

    def answers(self, pictures, labels):
        """Returns the probe's loss, and how often it is right."""
        # The encoder learns nothing of the labels.
        logits = self(pictures, training=False)
        wrong = keras.losses.sparse_categorical_crossentropy(
            labels, logits, from_logits=True
        )
        right = keras.metrics.sparse_categorical_accuracy(labels, logits)
        return ops.mean(wrong), ops.mean(right)

    def train_step(self, data):
        """Trains encoder and projection, then the probe."""
        pictures, labels = data
        views = [self.augmenter(pictures, training=True) for _ in range(2)]
        unlike = common.descend(
            self.of_views,
            self.encoder.trainable_weights + self.projection.trainable_weights,
            lambda: self.contrast(views),
        )
        probed = common.descend(
            self.of_labels,
            self.probe.trainable_weights,
            lambda: self.answers(pictures, labels),
        )
        return common.log(self.unlike, unlike) | common.log(self.probed, probed)

    def test_step(self, data):
        """Tries the probe."""
        return common.log(self.probed, self.answers(*data))


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
        of_views=keras.optimizers.Adam(0.001),
        of_labels=keras.optimizers.Adam(0.001),
    )
    return model


def data():
    """Pictures of digits, and labels."""
    return common.digits()


if __name__ == "__main__":
    common.main(build, data)
