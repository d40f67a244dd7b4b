"""Ten small models with data, each of another kind; nothing here is of Towers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

# 50 steps: the last batch of each epoch has 7 examples.
EPOCHS, EXAMPLES, BATCH = 5, 115, 12
STEPS = EPOCHS * -(-EXAMPLES // BATCH)


@dataclasses.dataclass(frozen=True)
class Curve:
    """A model and what it learns.

    Attributes:
        build: makes the compiled model.
        data: makes inputs, and targets and weights if there are some, by a random
            generator.
        tolerance: how far a loss may be from that of another machine, relatively.
            Rounding grows over the steps, most of all where little is left to learn.
        policy: of the types of numbers.
    """

    build: Callable[[], keras.Model]
    data: Callable[[np.random.Generator], tuple[Any, ...]]
    tolerance: float = 2e-5
    policy: str = "float32"


class Losses(keras.callbacks.Callback):
    """Keeps the loss of each step: Keras's mean over the steps of the epoch so far."""

    def __init__(self):
        super().__init__()
        self.values: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        """Keeps a step's loss."""
        self.values.append(float(logs["loss"]))


def losses(
    curve: Curve, wrap: Callable[[keras.Model], keras.Model] = lambda model: model
) -> list[float]:
    """Trains a model, and returns the loss of each step.

    Args:
        curve: the model and its data.
        wrap: replaces the compiled model before it is trained.
    """
    keras.backend.clear_session()
    keras.config.set_dtype_policy(curve.policy)
    keras.utils.set_random_seed(5)
    kept, data = Losses(), curve.data(np.random.default_rng(3))
    model = wrap(curve.build())
    model.fit(
        **dict(zip(("x", "y", "sample_weight"), data, strict=False)),
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[kept],
    )
    return kept.values


def _classes(rng, shape=(6,), classes=3):
    x = rng.normal(size=(EXAMPLES, *shape)).astype(np.float32)
    return x, rng.integers(0, classes, EXAMPLES)


def _weighted(rng):
    return *_classes(rng), rng.uniform(0.2, 3, EXAMPLES).astype(np.float32)


def _numbers(rng):
    x = rng.normal(size=(EXAMPLES, 6)).astype(np.float32)
    return x, np.tanh(x @ rng.normal(size=(6, 2))).astype(np.float32)


def _tokens(rng, length=9, vocabulary=11):
    """Tokens, the next ones, and zeros where a text has ended."""
    x = rng.integers(1, vocabulary, (EXAMPLES, length + 1))
    ends = rng.integers(3, length + 2, (EXAMPLES, 1))
    x = np.where(np.arange(length + 1) < ends, x, 0)
    return x[:, :-1], x[:, 1:]


def _many_ids(rng):
    return rng.integers(0, 200, (EXAMPLES, 4)), rng.integers(0, 3, EXAMPLES)


def _cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def _compiled(body, optimizer, loss, **options):
    model = keras.Sequential(body)
    model.compile(optimizer, loss, **options)
    return model


def _dense():
    body = [
        keras.Input((6,)),
        layers.Dense(16, "gelu", kernel_regularizer="l2"),
        layers.Dense(3),
    ]
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
    return _compiled(body, optimizer, _cross_entropy(), metrics=["accuracy"])


def _convolutional():
    body = [
        keras.Input((8, 8, 3)),
        layers.Conv2D(6, 3),
        layers.BatchNormalization(synchronized=True),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3),
    ]
    rate = keras.optimizers.schedules.CosineDecay(0.1, STEPS)
    return _compiled(body, keras.optimizers.SGD(rate, momentum=0.9), _cross_entropy())


def _recurrent():
    body = [
        keras.Input((9,)),
        layers.Embedding(11, 6, mask_zero=True),
        layers.LSTM(8, return_sequences=True),
        layers.Dense(11),
    ]
    optimizer = keras.optimizers.RMSprop(0.01, epsilon=1e-4)
    return _compiled(body, optimizer, _cross_entropy())


class _Block(layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm = layers.LayerNormalization()
        self.attend = layers.MultiHeadAttention(2, 4)
        self.dense = layers.Dense(8, "gelu")

    def call(self, x):
        y = self.norm(x)
        x = x + self.attend(y, y, use_causal_mask=True)
        return x + self.dense(x)


def _transformer():
    body = [keras.Input((9,)), layers.Embedding(11, 8), _Block()]
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.05, epsilon=1e-4)
    # Padding counts for nothing.
    loss = _cross_entropy(ignore_class=0)
    return _compiled([*body, layers.Dense(11)], optimizer, loss)


def _embedding():
    body = [
        keras.Input((4,)),
        layers.Embedding(200, 5),
        layers.Flatten(),
        layers.Dense(3),
    ]
    return _compiled(body, keras.optimizers.Adagrad(0.1), _cross_entropy())


class _TwoOptimizers(keras.Model):
    """Draws examples like those it sees: one network makes them, another one judges."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(6)])
        self.judge = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(1)])
        self.noise = keras.random.SeedGenerator(4)
        self.maker.build((None, 4))
        self.judge.build((None, 6))
        self.built = True

    def compile(self, **options):
        super().compile(**options)
        self.of_judge = keras.optimizers.Adam(0.003, epsilon=1e-4)
        self.mean = keras.metrics.Mean("loss")

    @property
    def metrics(self):
        return [self.mean]

    def train_step(self, x):
        noise = keras.random.normal((ops.shape(x)[0], 4), seed=self.noise)
        with tf.GradientTape(persistent=True) as tape:
            made = self.maker(noise, training=True)
            seen, drawn = self.judge(x), self.judge(made)
            judged = ops.mean(ops.softplus(-seen)) + ops.mean(ops.softplus(drawn))
            loss = ops.mean(ops.softplus(-drawn))
        variables = self.judge.trainable_variables
        gradients = tape.gradient(judged, variables)
        self.of_judge.apply_gradients(zip(gradients, variables, strict=True))
        variables = self.maker.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.mean.update_state(loss + judged)
        return {"loss": self.mean.result()}


def _own_step():
    model = _TwoOptimizers()
    model.compile(optimizer=keras.optimizers.Adam(0.003, epsilon=1e-4))
    return model


def _mixed():
    body = [keras.Input((6,)), layers.Dense(16, "relu"), layers.Dense(2)]
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=1024, dynamic_growth_steps=8
    )
    return _compiled(
        [*body, layers.Activation("linear", dtype="float32")], optimizer, "mse"
    )


def _accumulated():
    optimizer = keras.optimizers.Adam(
        0.01, epsilon=1e-4, gradient_accumulation_steps=3, use_ema=True
    )
    body = [keras.Input((6,)), layers.Dense(16, "tanh"), layers.Dense(2)]
    return _compiled(body, optimizer, keras.losses.Huber())


def _clipped():
    body = [keras.Input((6,)), layers.Dense(16, "tanh"), layers.Dense(3)]
    optimizer = keras.optimizers.Lion(0.002, global_clipnorm=0.1)
    return _compiled(body, optimizer, _cross_entropy(), weighted_metrics=["accuracy"])


def _several_outputs():
    x = keras.Input((6,))
    hidden = layers.Dense(12, "tanh", activity_regularizer="l2")(x)
    hidden = layers.GroupNormalization(3)(hidden)
    model = keras.Model(x, {"a": layers.Dense(2)(hidden), "b": layers.Dense(3)(hidden)})
    losses = {"a": "mse", "b": _cross_entropy()}
    optimizer = keras.optimizers.Adamax(0.01, epsilon=1e-4, clipvalue=0.05)
    model.compile(optimizer, losses, loss_weights={"a": 2.0, "b": 0.5})
    return model


def _two_targets(rng):
    x, numbers = _numbers(rng)
    return x, {"a": numbers, "b": rng.integers(0, 3, EXAMPLES)}


MODELS = {
    "dense": Curve(_dense, _classes),
    "convolutional": Curve(_convolutional, lambda rng: _classes(rng, (8, 8, 3))),
    "recurrent": Curve(_recurrent, _tokens),
    "transformer": Curve(_transformer, _tokens),
    "embedding": Curve(_embedding, _many_ids),
    "own_step": Curve(_own_step, lambda rng: _classes(rng)[:1]),
    "mixed_precision": Curve(_mixed, _numbers, 5e-3, "mixed_float16"),
    "accumulated": Curve(_accumulated, _numbers),
    "weighted_and_clipped": Curve(_clipped, _weighted),
    "several_outputs": Curve(_several_outputs, _two_targets),
}
