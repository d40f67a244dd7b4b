"""A model whose step lets examples meet, and what towers make of it by themselves.

`on_towers` trains it with `loss_placement="tower"`. `of_each_tower` does the same by
plain Keras: loss and gradients for the rows of each tower, weighted by their number.
"""

import keras
import numpy as np
import tensorflow as tf

from towers.plan import Plan

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=[40, 6]).astype("float32")
Y = RANDOM.integers(0, 3, size=[40]).astype("int32")
# Uneven batches, and some with fewer examples than towers.
ENDS = np.cumsum([7, 5, 8, 3, 6, 1, 2])


class Views(keras.Model):
    """SimCLR with a probe, whose labels of 0 do not count."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.Input([6]), keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)]
        )
        self.probe = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
        self.tracker = keras.metrics.Mean(name="contrast")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    @property
    def metrics(self):
        """Of the contrastive task."""
        return [self.tracker, self.accuracy]

    def call(self, x):
        """Returns the probe's logits."""
        return self.probe(self.encoder(x))

    def contrast(self, x, training):
        """Tells the views of an example from those of all others."""
        n = tf.shape(x)[0]
        both = self.encoder(tf.concat([x, tf.tanh(2 * x)], 0), training=training)
        both = tf.nn.l2_normalize(both, 1)
        matrix = tf.matmul(both, both, transpose_b=True) / 0.2 - 1e9 * tf.eye(2 * n)
        labels = tf.concat([tf.range(n, 2 * n), tf.range(n)], 0)
        rows = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, matrix)
        return tf.reduce_mean(rows), labels, matrix

    def probed(self, x, y):
        """The probe's loss: a mean over the examples that count."""
        logits = self.probe(tf.stop_gradient(self.encoder(x)))
        rows = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        mask = tf.cast(y > 0, tf.float32)
        return tf.reduce_sum(rows * mask) / (tf.reduce_sum(mask) + 1)

    def train_step(self, data):
        """Trains the encoder, and the probe."""
        x, y = data[:2]
        with tf.GradientTape(persistent=True) as tape:
            loss, labels, matrix = self.contrast(x, True)
            probed = self.probed(x, y)
        encoder, probe = self.encoder.trainable_weights, self.probe.trainable_weights
        gradients = [*tape.gradient(loss, encoder), *tape.gradient(probed, probe)]
        self.optimizer.apply(gradients, [*encoder, *probe])
        self.accuracy.update_state(labels, matrix)
        self.tracker.update_state(loss)
        return {"loss": loss, "probed": probed, "accuracy": self.accuracy.result()}

    def test_step(self, data):
        """Tells how good it is."""
        loss, labels, matrix = self.contrast(data[0], False)
        self.accuracy.update_state(labels, matrix)
        self.tracker.update_state(loss)
        return {each.name: each.result() for each in self.metrics}


def batches():
    """Uneven ones."""
    cuts = zip([0, *ENDS[:-1]], ENDS, strict=True)
    return [(X[begin:end], Y[begin:end]) for begin, end in cuts]


def made():
    """A model that is compiled."""
    keras.utils.set_random_seed(3)
    model = Views()
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-4))
    model.build([None, 6])
    return model


def on_towers(wrap):
    """Trains and evaluates on towers: what has to be equal, by name."""
    model, found = made(), {}
    parallel = wrap(model)
    for i, (x, y) in enumerate(batches()):
        logs = parallel.train_on_batch(x, y, return_dict=True)
        found |= {f"step {i} {name}": value for name, value in logs.items()}
        model.reset_metrics()
    for i, (x, y) in enumerate(batches()):
        parallel.reset_metrics()
        logs = parallel.test_on_batch(x, y, return_dict=True)
        found |= {f"evaluation {i} {name}": value for name, value in logs.items()}
    found["predicted"] = parallel.predict(X, batch_size=7, verbose=0)
    return _arrays(found | _variables(model))


def of_each_tower(ratios):
    """What `on_towers` returns, by plain Keras for one tower after the other."""
    model, found = made(), {}
    names = [f"/cpu:{k}" for k in range(len(ratios))]
    plan = Plan.of(names, ratios, names[0])
    encoder, probe = model.encoder.trainable_weights, model.probe.trainable_weights
    for i, (x, y) in enumerate(batches()):
        loss, gradients, accuracy = _contrast(model, x, plan, encoder)
        with tf.GradientTape() as tape:
            probed = model.probed(x, y)
        gradients = [*gradients, *tape.gradient(probed, probe)]
        model.optimizer.apply(gradients, [*encoder, *probe])
        found |= {f"step {i} loss": loss, f"step {i} probed": probed}
        found[f"step {i} accuracy"] = accuracy
    for i, (x, _) in enumerate(batches()):
        loss, _, accuracy = _contrast(model, x, plan, encoder)
        found[f"evaluation {i} contrast"] = loss
        found[f"evaluation {i} accuracy"] = accuracy
    found["predicted"] = model(X)
    return _arrays(found | _variables(model))


def _contrast(model, x, plan, weights):
    model.accuracy.reset_state()
    loss, total = 0.0, [tf.zeros_like(each) for each in weights]
    for begin, end in plan.bounds(len(x)):
        if end == begin:
            continue
        with tf.GradientTape() as tape:
            mine, labels, matrix = model.contrast(x[begin:end], True)
        model.accuracy.update_state(labels, matrix)
        share = (end - begin) / len(x)
        loss += share * mine
        pairs = zip(total, tape.gradient(mine, weights), strict=True)
        total = [one + share * other for one, other in pairs]
    return loss, total, model.accuracy.result()


def _variables(model):
    weights = [*model.trainable_variables, *model.optimizer.variables]
    return {f"variable {i}": each.value for i, each in enumerate(weights)}


def _arrays(found):
    return {name: np.array(value) for name, value in found.items()}
