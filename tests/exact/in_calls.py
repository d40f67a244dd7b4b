"""Cases of metrics that a layer or a model updates while it is called: data."""

import functools

import keras
from keras import layers, metrics, ops

from tests.exact import cases
from tests.exact.cases import OUTPUTS


def _mean_of_rows(metric, x, training):
    metric.update_state(ops.mean(ops.abs(x), axis=-1))


def _one_number(metric, x, training):
    metric.update_state(ops.mean(ops.square(x)))


def _with_weights(metric, x, training):
    metric.update_state(ops.sum(x, axis=-1), sample_weight=ops.abs(x[:, 0]))


def _in_training_alone(metric, x, training):
    if training:
        metric.update_state(ops.mean(x, axis=-1))


def _errors(metric, x, training):
    metric.update_state(ops.zeros_like(x), x)


# By the name of the metric.
UPDATES = {
    "of_rows": (metrics.Mean, _mean_of_rows),
    "of_one_number": (metrics.Mean, _one_number),
    "weighted": (metrics.Mean, _with_weights),
    "sum": (metrics.Sum, _mean_of_rows),
    "in_training": (metrics.Mean, _in_training_alone),
    "errors": (metrics.MeanAbsoluteError, _errors),
}


class Watches(layers.Layer):
    """Hands on what it gets, and updates a metric with some of it."""

    def __init__(self, name):
        super().__init__()
        kind, self.update = UPDATES[name]
        self.metric = kind(name=name)

    def call(self, x, training=False):
        self.update(self.metric, x, training)
        return x


class Own(keras.Model):
    """Holds a metric itself."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(4, "tanh"), layers.Dense(OUTPUTS)
        self.seen = metrics.Mean(name="seen")

    def call(self, x):
        hidden = self.hidden(x)
        _mean_of_rows(self.seen, hidden, None)
        return self.out(hidden)


class OwnLoss(Own):
    """Computes its loss itself, which towers do not cut."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred))


class ReturnsHidden(cases.Plain):
    """Returns what a metric is to see, as the refusal of one that is no sum advises."""

    def call(self, x):
        hidden = self.hidden(x)
        return {"out": self.out(hidden), "hidden": hidden}


class LargestOutput(cases.LargestError):
    """The largest output so far, which no sum puts together."""

    def update_state(self, y, p, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max(p)))


_case = functools.partial(cases._case, "metrics in calls")


def _cases():
    watching = [cases._layer(Watches, name) for name in UPDATES]
    for name, make in {
        "layers": cases._of(cases._dense(4, "tanh"), *watching, cases._dense(OUTPUTS)),
        "a model": Own,
        "a model with a loss of its own": OwnLoss,
    }.items():
        yield _case(
            name,
            make,
            # The last batch leaves a tower idle.
            cases._numbers((8, 8, 2)),
            compile=lambda: {"metrics": ["mae"]},
            fit={
                "validation_data": cases._numbers((7,))()[0],
                "validation_batch_size": 4,
            },
        )
    yield _case(
        "what a model returns instead",
        ReturnsHidden,
        lambda: [(x, {"out": y, "hidden": y}) for x, y in cases._numbers()()],
        {"out": "mse", "hidden": None},
        compile=lambda: {"metrics": {"hidden": [LargestOutput()]}},
    )


CASES = [*_cases()]
