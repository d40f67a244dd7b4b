"""Models with steps of their own, in the forms that Keras's published examples have.

What counts is the form: which methods a class overrides, when its trackers are made,
what `metrics` returns, what `compile` takes. The networks are as small as they can be.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, metrics, ops, random

WIDTH, NOISE, CLASSES = 6, 3, 4
ROWS = 20


class Example(NamedTuple):
    """A model of a published form.

    Attributes:
        make: Builds the model.
        compile: Returns the arguments of `compile`.
        data: Returns the rows: a nest of arrays.
        evaluates: Whether it has a `test_step` of its own.
    """

    make: Callable[[], keras.Model]
    compile: Callable[[], dict]
    data: Callable[[], Any]
    evaluates: bool = False


def _adam(rate=0.01):
    # With its usual epsilon, what is only rounding would become a step.
    return keras.optimizers.Adam(rate, epsilon=1e-4)


def _sgd():
    return keras.optimizers.SGD(0.05)


def _network(inputs, outputs, hidden=8, last=None, bias=True):
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(hidden, "tanh"),
            layers.Dense(outputs, last, use_bias=bias),
        ]
    )


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def _rows():
    return (_normal(ROWS, WIDTH),)


def _pairs():
    return _normal(ROWS, WIDTH), _normal(ROWS, WIDTH, seed=1)


def _labelled():
    labels = np.random.default_rng(2).integers(0, CLASSES, ROWS)
    return _normal(ROWS, WIDTH), labels


def _apply(tape, optimizer, loss, variables):
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


class _OfRows(keras.Model):
    """Is given (x,) by a data set of tuples of one, as one of x alone."""

    @staticmethod
    def rows(data):
        return data[0] if isinstance(data, tuple) else data


class Gan(_OfRows):
    """Makes its trackers in `compile`, which takes two optimizers and a loss."""

    def __init__(self):
        super().__init__()
        self.judge = _network(WIDTH, 1)
        self.maker = _network(NOISE, WIDTH)
        self.noise = random.SeedGenerator(5)

    def compile(self, judge_optimizer, maker_optimizer, loss_fn):
        super().compile()
        self.judge_optimizer, self.maker_optimizer = judge_optimizer, maker_optimizer
        self.loss_fn = loss_fn
        self.judge_loss = metrics.Mean(name="judge_loss")
        self.maker_loss = metrics.Mean(name="maker_loss")

    @property
    def metrics(self):
        return [self.judge_loss, self.maker_loss]

    def train_step(self, data):
        real = self.rows(data)
        count = ops.shape(real)[0]
        made = self.maker(random.normal((count, NOISE), seed=self.noise))
        both = ops.concatenate([made, real], axis=0)
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], axis=0)
        labels += 0.05 * random.uniform(ops.shape(labels), seed=self.noise)
        with tf.GradientTape() as tape:
            judge_loss = self.loss_fn(labels, self.judge(both))
        _apply(tape, self.judge_optimizer, judge_loss, self.judge.trainable_weights)
        drawn = random.normal((count, NOISE), seed=self.noise)
        with tf.GradientTape() as tape:
            judged = self.judge(self.maker(drawn))
            maker_loss = self.loss_fn(ops.zeros((count, 1)), judged)
        _apply(tape, self.maker_optimizer, maker_loss, self.maker.trainable_weights)
        self.judge_loss.update_state(judge_loss)
        self.maker_loss.update_state(maker_loss)
        return {each.name: each.result() for each in self.metrics}


def _two_optimizers():
    return {
        "judge_optimizer": _adam(),
        "maker_optimizer": _adam(),
        "loss_fn": losses.BinaryCrossentropy(from_logits=True),
    }


class ConditionalGan(keras.Model):
    """Makes its trackers in `__init__`; labels stand beside rows and noise."""

    def __init__(self):
        super().__init__()
        self.judge = _network(WIDTH + CLASSES, 1)
        self.maker = _network(NOISE + CLASSES, WIDTH)
        self.noise = random.SeedGenerator(5)
        self.maker_tracker = metrics.Mean(name="maker")
        self.judge_tracker = metrics.Mean(name="judge")

    @property
    def metrics(self):
        return [self.maker_tracker, self.judge_tracker]

    def compile(self, judge_optimizer, maker_optimizer, loss_fn):
        super().compile()
        self.judge_optimizer, self.maker_optimizer = judge_optimizer, maker_optimizer
        self.loss_fn = loss_fn

    def train_step(self, data):
        real, kinds = data
        kinds = ops.one_hot(kinds, CLASSES)
        count = ops.shape(real)[0]

        def made():
            drawn = random.normal((count, NOISE), seed=self.noise)
            rows = self.maker(ops.concatenate([drawn, kinds], axis=1))
            return ops.concatenate([rows, kinds], axis=-1)

        both = ops.concatenate(
            [made(), ops.concatenate([real, kinds], axis=-1)], axis=0
        )
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            judge_loss = self.loss_fn(labels, self.judge(both))
        _apply(tape, self.judge_optimizer, judge_loss, self.judge.trainable_weights)
        with tf.GradientTape() as tape:
            maker_loss = self.loss_fn(ops.zeros((count, 1)), self.judge(made()))
        _apply(tape, self.maker_optimizer, maker_loss, self.maker.trainable_weights)
        self.maker_tracker.update_state(maker_loss)
        self.judge_tracker.update_state(judge_loss)
        return {"g": self.maker_tracker.result(), "d": self.judge_tracker.result()}


class WassersteinGan(_OfRows):
    """Has no tracker; some steps of the judge, with a penalty on its gradient."""

    def __init__(self):
        super().__init__()
        self.judge = _network(WIDTH, 1)
        self.maker = _network(NOISE, WIDTH)
        self.noise = random.SeedGenerator(5)

    def compile(self, judge_optimizer, maker_optimizer, judge_loss_fn, maker_loss_fn):
        super().compile()
        self.judge_optimizer, self.maker_optimizer = judge_optimizer, maker_optimizer
        self.judge_loss_fn, self.maker_loss_fn = judge_loss_fn, maker_loss_fn

    def penalty(self, count, real, made):
        part = random.uniform((count, 1), seed=self.noise)
        between = real + part * (made - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.judge(between, training=True)
        slope = tape.gradient(judged, between)
        norm = ops.sqrt(ops.sum(ops.square(slope), axis=1) + 1e-6)
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, data):
        real = self.rows(data)
        count = ops.shape(real)[0]
        for _ in range(2):
            drawn = random.normal((count, NOISE), seed=self.noise)
            with tf.GradientTape() as tape:
                made = self.maker(drawn, training=True)
                cost = self.judge_loss_fn(
                    self.judge(real, training=True), self.judge(made, training=True)
                )
                judge_loss = cost + 10.0 * self.penalty(count, real, made)
            _apply(tape, self.judge_optimizer, judge_loss, self.judge.trainable_weights)
        drawn = random.normal((count, NOISE), seed=self.noise)
        with tf.GradientTape() as tape:
            made = self.maker(drawn, training=True)
            maker_loss = self.maker_loss_fn(self.judge(made, training=True))
        _apply(tape, self.maker_optimizer, maker_loss, self.maker.trainable_weights)
        return {"d_loss": judge_loss, "g_loss": maker_loss}


def _wasserstein():
    return {
        "judge_optimizer": _adam(),
        "maker_optimizer": _adam(),
        "judge_loss_fn": lambda real, made: ops.mean(made) - ops.mean(real),
        "maker_loss_fn": lambda made: -ops.mean(made),
    }


class CycleGan(keras.Model):
    """Has four optimizers, and one tape for four gradients."""

    def __init__(self):
        super().__init__()
        self.there, self.back = _network(WIDTH, WIDTH), _network(WIDTH, WIDTH)
        self.judge_x, self.judge_y = _network(WIDTH, 1), _network(WIDTH, 1)

    def call(self, inputs):
        return self.judge_x(inputs), self.judge_y(inputs), self.there(inputs)

    def compile(self, optimizers, maker_loss_fn, judge_loss_fn):
        super().compile()
        self.there_optimizer, self.back_optimizer, *others = optimizers
        self.judge_x_optimizer, self.judge_y_optimizer = others
        self.maker_loss_fn, self.judge_loss_fn = maker_loss_fn, judge_loss_fn
        self.cycle_loss_fn = losses.MeanAbsoluteError()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            made_y, made_x = self.there(x, training=True), self.back(y, training=True)
            cycled_x = self.back(made_y, training=True)
            cycled_y = self.there(made_x, training=True)
            there = self.maker_loss_fn(self.judge_y(made_y, training=True))
            back = self.maker_loss_fn(self.judge_x(made_x, training=True))
            there += 10 * self.cycle_loss_fn(y, cycled_y)
            back += 10 * self.cycle_loss_fn(x, cycled_x)
            judge_x = self.judge_loss_fn(self.judge_x(x), self.judge_x(made_x))
            judge_y = self.judge_loss_fn(self.judge_y(y), self.judge_y(made_y))
        for loss, network, optimizer in (
            (there, self.there, self.there_optimizer),
            (back, self.back, self.back_optimizer),
            (judge_x, self.judge_x, self.judge_x_optimizer),
            (judge_y, self.judge_y, self.judge_y_optimizer),
        ):
            _apply(tape, optimizer, loss, network.trainable_variables)
        return {"G": there, "F": back, "DX": judge_x, "DY": judge_y}


def _four_optimizers():
    square = losses.MeanSquaredError()
    return {
        "optimizers": [_adam() for _ in range(4)],
        "maker_loss_fn": lambda made: square(ops.ones_like(made), made),
        "judge_loss_fn": lambda real, made: (
            0.5 * square(ops.ones_like(real), real)
            + 0.5 * square(ops.zeros_like(made), made)
        ),
    }


class _Sampling(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seeds = random.SeedGenerator(3)

    def call(self, inputs):
        mean, spread = inputs
        drawn = random.normal(ops.shape(mean), seed=self.seeds)
        return mean + ops.exp(0.5 * spread) * drawn


class Vae(_OfRows):
    """Has three trackers, made in `__init__`, and two terms of a loss."""

    def __init__(self):
        super().__init__()
        inputs = keras.Input((WIDTH,))
        hidden = layers.Dense(8, "relu")(inputs)
        mean, spread = layers.Dense(2)(hidden), layers.Dense(2)(hidden)
        code = _Sampling()([mean, spread])
        self.encoder = keras.Model(inputs, [mean, spread, code])
        self.decoder = _network(2, WIDTH)
        self.trackers = [metrics.Mean(name=each) for each in ("all", "fit", "kl")]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        data = self.rows(data)
        with tf.GradientTape() as tape:
            mean, spread, code = self.encoder(data)
            squares = ops.square(data - self.decoder(code))
            fit = ops.mean(ops.sum(squares, axis=1))
            kl = -0.5 * (1 + spread - ops.square(mean) - ops.exp(spread))
            kl = ops.mean(ops.sum(kl, axis=1))
            loss = fit + kl
        _apply(tape, self.optimizer, loss, self.trainable_weights)
        for tracker, value in zip(self.trackers, (loss, fit, kl), strict=True):
            tracker.update_state(value)
        return {each.name: each.result() for each in self.metrics}


class _Quantizer(layers.Layer):
    def build(self, shape):
        self.codes = self.add_weight(shape=(shape[-1], 5), initializer="uniform")

    def call(self, x):
        flat = ops.reshape(x, (-1, ops.shape(x)[-1]))
        apart = ops.sum(flat**2, axis=1, keepdims=True) + ops.sum(self.codes**2, axis=0)
        nearest = ops.argmin(apart - 2 * ops.matmul(flat, self.codes), axis=1)
        chosen = ops.matmul(ops.one_hot(nearest, 5), ops.transpose(self.codes))
        chosen = ops.reshape(chosen, ops.shape(x))
        near = ops.mean((ops.stop_gradient(chosen) - x) ** 2)
        self.add_loss(0.25 * near + ops.mean((chosen - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(chosen - x)


class VqVae(_OfRows):
    """Adds losses of a layer in its step, by the `losses` of a network inside."""

    def __init__(self):
        super().__init__()
        inputs = keras.Input((WIDTH,))
        code = _Quantizer()(layers.Dense(4)(inputs))
        self.vqvae = keras.Model(inputs, layers.Dense(WIDTH)(code))
        self.total, self.fit_loss = metrics.Mean(name="total"), metrics.Mean(name="fit")
        self.code_loss = metrics.Mean(name="code")

    @property
    def metrics(self):
        return [self.total, self.fit_loss, self.code_loss]

    def train_step(self, data):
        x = self.rows(data)
        with tf.GradientTape() as tape:
            fit = ops.mean((x - self.vqvae(x)) ** 2) / 1.5
            total = fit + sum(self.vqvae.losses)
        _apply(tape, self.optimizer, total, self.vqvae.trainable_variables)
        self.total.update_state(total)
        self.fit_loss.update_state(fit)
        self.code_loss.update_state(sum(self.vqvae.losses))
        return {"loss": self.total.result(), "code": self.code_loss.result()}


class _Contrastive(keras.Model):
    """Trains an encoder by pairs, and a probe on its outputs by labels."""

    def __init__(self):
        super().__init__()
        self.noise = random.SeedGenerator(7)
        self.encoder = _network(WIDTH, 6)
        self.head = _network(6, 5)
        self.probe = layers.Dense(CLASSES)
        self.probe.build((None, 6))

    def compile(self, encoder_optimizer, linear_optimizer, **options):
        super().compile(**options)
        self.encoder_optimizer = encoder_optimizer
        self.linear_optimizer = linear_optimizer
        self.probe_loss = losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_tracker = metrics.Mean(name="c_loss")
        self.contrastive_accuracy = metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_tracker = metrics.Mean(name="p_loss")
        self.probe_accuracy = metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [
            *(self.contrastive_tracker, self.contrastive_accuracy),
            *(self.probe_tracker, self.probe_accuracy),
        ]

    def augmented(self, rows):
        return rows + 0.1 * random.normal(ops.shape(rows), seed=self.noise)

    def train_step(self, data):
        rows, labels = data
        with tf.GradientTape() as tape:
            first = self.head(self.encoder(self.augmented(rows), training=True))
            second = self.head(self.encoder(self.augmented(rows), training=True))
            loss = self.contrastive_loss(first, second)
        weights = self.encoder.trainable_weights + self.head.trainable_weights
        _apply(tape, self.encoder_optimizer, loss, weights)
        self.contrastive_tracker.update_state(loss)
        with tf.GradientTape() as tape:
            logits = self.probe(self.encoder(self.augmented(rows), training=False))
            loss = self.probe_loss(labels, logits)
        _apply(tape, self.linear_optimizer, loss, self.probe.trainable_weights)
        self.probe_tracker.update_state(loss)
        self.probe_accuracy.update_state(labels, logits)
        return {each.name: each.result() for each in self.metrics}

    def test_step(self, data):
        rows, labels = data
        logits = self.probe(self.encoder(rows, training=False))
        self.probe_tracker.update_state(self.probe_loss(labels, logits))
        self.probe_accuracy.update_state(labels, logits)
        return {each.name: each.result() for each in self.metrics[2:]}


class SimClr(_Contrastive):
    """Tells each example's two views from those of the others."""

    def contrastive_loss(self, first, second):
        first, second = ops.normalize(first, axis=1), ops.normalize(second, axis=1)
        alike = ops.matmul(first, ops.transpose(second)) / 0.1
        labels = ops.arange(ops.shape(first)[0])
        self.contrastive_accuracy.update_state(labels, alike)
        self.contrastive_accuracy.update_state(labels, ops.transpose(alike))
        one = losses.sparse_categorical_crossentropy(labels, alike, from_logits=True)
        other = losses.sparse_categorical_crossentropy(
            labels, ops.transpose(alike), from_logits=True
        )
        return ops.mean(one + other) / 2


class Nnclr(_Contrastive):
    """Compares with the nearest of a queue, to which it adds each batch."""

    def __init__(self):
        super().__init__()
        queue = ops.normalize(_normal(30, 5, seed=4), axis=1)
        self.queue = keras.Variable(queue, trainable=False, name="queue")

    def nearest(self, rows):
        alike = ops.matmul(rows, ops.transpose(self.queue))
        chosen = ops.take(self.queue, ops.argmax(alike, axis=1), axis=0)
        return rows + ops.stop_gradient(chosen - rows)

    def contrastive_loss(self, first, second):
        first, second = ops.normalize(first, axis=1), ops.normalize(second, axis=1)
        alike = ops.matmul(self.nearest(first), ops.transpose(second)) / 0.1
        labels = ops.arange(ops.shape(first)[0])
        loss = losses.sparse_categorical_crossentropy(labels, alike, from_logits=True)
        kept = self.queue[: -ops.shape(first)[0]]
        self.queue.assign(ops.concatenate([first, kept], axis=0))
        return ops.mean(loss)


def _probed():
    return {"encoder_optimizer": _sgd(), "linear_optimizer": _sgd()}


class Diffusion(_OfRows):
    """Has a second network that follows the first; its trackers come by `compile`."""

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.normalizer.adapt(_normal(ROWS, WIDTH))
        self.network = _network(WIDTH + 1, WIDTH)
        self.follower = keras.models.clone_model(self.network)
        self.noise = random.SeedGenerator(9)

    def compile(self, **options):
        super().compile(**options)
        self.noise_loss = metrics.Mean(name="n_loss")
        self.image_loss = metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_loss, self.image_loss]

    def losses_of(self, rows, network, training):
        rows = self.normalizer(rows, training=training)
        count = ops.shape(rows)[0]
        drawn = random.normal((count, WIDTH), seed=self.noise)
        times = random.uniform((count, 1), seed=self.noise)
        signal, level = ops.cos(1.4 * times), ops.sin(1.4 * times)
        mixed = signal * rows + level * drawn
        inputs = ops.concatenate([mixed, level**2], axis=1)
        found = network(inputs, training=training)
        return self.loss(drawn, found), self.loss(rows, mixed - level * found)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            noise, image = self.losses_of(self.rows(data), self.network, True)
        _apply(tape, self.optimizer, noise, self.network.trainable_weights)
        self.noise_loss.update_state(noise)
        self.image_loss.update_state(image)
        pairs = zip(self.network.weights, self.follower.weights, strict=True)
        for weight, following in pairs:
            following.assign(0.9 * following + 0.1 * weight)
        return {each.name: each.result() for each in self.metrics}

    def test_step(self, data):
        noise, image = self.losses_of(self.rows(data), self.follower, False)
        self.noise_loss.update_state(noise)
        self.image_loss.update_state(image)
        return {each.name: each.result() for each in self.metrics}


class Distiller(keras.Model):
    """Overrides `compile` and `compute_loss`, and leaves the step to Keras."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = _network(WIDTH, CLASSES, 16), _network(WIDTH, 4)

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False
    ):
        taught = self.teacher(x, training=False)
        student = self.student_loss_fn(y, y_pred)
        distilled = self.distillation_loss_fn(
            ops.softmax(taught / 3.0, axis=1), ops.softmax(y_pred / 3.0, axis=1)
        )
        return 0.1 * student + 0.9 * distilled * 3.0**2

    def call(self, x):
        return self.student(x)


class Distilled(Distiller):
    """Has a step of its own besides, and a test."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self.student(x, training=True)
            loss = self.compute_loss(x, y, predicted)
        _apply(tape, self.optimizer, loss, self.student.trainable_variables)
        return {**self.compute_metrics(x, y, predicted, None), "distilled": loss}

    def test_step(self, data):
        x, y = data
        predicted = self.student(x, training=False)
        loss = self.student_loss_fn(y, predicted)
        return {**self.compute_metrics(x, y, predicted, None), "student": loss}


def _distilled():
    return {
        "optimizer": _adam(),
        "metrics": ["sparse_categorical_accuracy"],
        "student_loss_fn": losses.SparseCategoricalCrossentropy(from_logits=True),
        "distillation_loss_fn": losses.KLDivergence(),
    }


class Centralized(keras.Sequential):
    """Changes gradients in a step; updates compiled metrics one by one."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        gradients = [
            g - ops.mean(g, axis=0, keepdims=True) if len(g.shape) > 1 else g
            for g in tape.gradient(loss, self.trainable_variables)
        ]
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {m.name: m.result() for m in self.metrics}


class MaskedAutoencoder(_OfRows):
    """Hides some patches of each example, others in each step, and fills them in."""

    def __init__(self):
        super().__init__()
        self.noise = random.SeedGenerator(11)
        self.embed, self.encoder = layers.Dense(8), layers.Dense(8, "tanh")
        self.decoder = layers.Dense(2)
        self.hidden = self.add_weight(shape=(1, 1, 8), name="hidden")

    def losses_of(self, rows, test=False):
        patches = ops.reshape(rows, (-1, WIDTH // 2, 2))
        count = ops.shape(patches)[0]
        order = ops.argsort(random.uniform((count, 3), seed=self.noise), axis=-1)
        shown, masked = order[:, :1], order[:, 1:]
        seen = tf.gather(patches, shown, axis=1, batch_dims=1)
        code = self.encoder(self.embed(seen), training=not test)
        places = ops.repeat(self.hidden, 2, axis=1) + ops.one_hot(masked, 8)
        filled = self.decoder(places + ops.mean(code, axis=1, keepdims=True))
        true = tf.gather(patches, masked, axis=1, batch_dims=1)
        return self.compute_loss(y=true, y_pred=filled), true, filled

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss, true, filled = self.losses_of(self.rows(data))
        weights = [
            *self.embed.trainable_variables,
            *self.encoder.trainable_variables,
            *self.decoder.trainable_variables,
        ]
        _apply(tape, self.optimizer, loss, weights)
        found = self.compute_metrics(None, true, filled, None)
        return {**found, "masked": loss}

    def test_step(self, data):
        loss, true, filled = self.losses_of(self.rows(data), test=True)
        return {**self.compute_metrics(None, true, filled, None), "masked": loss}


class BarlowTwins(keras.Model):
    """Compares columns of two views: a product of whole batches."""

    def __init__(self):
        super().__init__()
        # A bias would be taken out with the mean.
        self.encoder = _network(WIDTH, 5, bias=False)
        self.tracker = metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        one, other = data
        with tf.GradientTape() as tape:
            first, second = (
                self.encoder(one, training=True),
                self.encoder(other, training=True),
            )
            first, second = (
                (z - ops.mean(z, axis=0)) / (ops.std(z, axis=0) + 1e-1)
                for z in (first, second)
            )
            size = ops.cast(ops.shape(first)[0], "float32")
            product = ops.matmul(ops.transpose(first), second) / size
            apart = ops.square(product - ops.eye(5))
            loss = ops.sum(ops.where(ops.eye(5) > 0, apart, 5e-3 * apart))
        _apply(tape, self.optimizer, loss, self.encoder.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class Siamese(keras.Model):
    """Compares three networks' outputs; trains and tests by its own loss."""

    def __init__(self):
        super().__init__()
        # A bias would be taken out by the difference.
        self.network = _network(WIDTH, 4, bias=False)
        self.mean_loss = metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean_loss]

    def call(self, inputs):
        anchor, near, far = map(self.network, inputs)
        near = ops.sum(ops.square(anchor - near), axis=-1)
        return near, ops.sum(ops.square(anchor - far), axis=-1)

    def _loss(self, data):
        near, far = self(data)
        return ops.maximum(near - far + 0.5, 0.0)

    def train_step(self, data):
        (data,) = data
        with tf.GradientTape() as tape:
            loss = self._loss(data)
        _apply(tape, self.optimizer, loss, self.network.trainable_weights)
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}

    def test_step(self, data):
        (data,) = data
        self.mean_loss.update_state(self._loss(data))
        return {"loss": self.mean_loss.result()}


def _triplets():
    return (tuple(_normal(ROWS, WIDTH, seed=i) for i in range(3)),)


class Consistency(keras.Model):
    """Learns of a teacher that sees clean rows, and of labels of noisy ones."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = _network(WIDTH, CLASSES), _network(WIDTH, CLASSES)
        self.teacher.trainable = False
        self.mean_loss = metrics.Mean(name="total_loss")

    def compile(self, optimizer, metrics, loss, temperature=3):
        super().compile(optimizer=optimizer, metrics=metrics, loss=loss)
        self.temperature = temperature
        self.consistency = losses.KLDivergence()

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        (clean, noisy), y = data
        with tf.GradientTape() as tape:
            taught = self.teacher(clean, training=False)
            predicted = self.student(noisy, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
            loss += self.consistency(
                ops.softmax(taught / self.temperature),
                ops.softmax(predicted / self.temperature),
            )
        _apply(tape, self.optimizer, loss, self.student.trainable_variables)
        self.mean_loss.update_state(loss)
        found = self.compute_metrics(noisy, y, predicted, None)
        return {**found, "total_loss": self.mean_loss.result()}


def _two_views():
    rows, labels = _labelled()
    return (rows, rows + 0.1 * _normal(ROWS, WIDTH, seed=5)), labels


class AdaMatch(keras.Model):
    """Joins labelled and other rows, mixes logits by chance, and masks by trust."""

    def __init__(self):
        super().__init__()
        self.network = _network(WIDTH, CLASSES)
        self.noise = random.SeedGenerator(13)
        self.mean_loss = metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean_loss]

    def train_step(self, data):
        (weak, strong), labels = data
        count = ops.shape(weak)[0]
        with tf.GradientTape() as tape:
            joined = self.network(ops.concatenate([weak, strong], axis=0))
            known, other = joined[:count], joined[count:]
            alone = self.network(weak)
            part = random.uniform(ops.shape(known), seed=self.noise)
            mixed = part * known + (1 - part) * alone
            of_known, of_other = ops.softmax(mixed), ops.softmax(other)
            share = ops.mean(of_known, axis=0) / ops.mean(of_other, axis=0)
            pseudo = ops.stop_gradient(of_other * share)
            pseudo /= ops.sum(pseudo, axis=-1, keepdims=True)
            limit = 0.9 * ops.mean(ops.max(of_known, axis=-1))
            trusted = ops.cast(ops.max(pseudo, axis=-1) >= limit, "float32")
            labelled = ops.mean(
                losses.sparse_categorical_crossentropy(labels, mixed, from_logits=True)
            )
            unlabelled = ops.mean(
                trusted
                * losses.categorical_crossentropy(pseudo, other, from_logits=True)
            )
            loss = labelled + 0.3 * unlabelled
        _apply(tape, self.optimizer, loss, self.network.trainable_variables)
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}


class Adversarial(keras.Model):
    """Adds the sign of the loss's gradient to the rows (FGSM), and trains on both."""

    def __init__(self):
        super().__init__()
        self.network = _network(WIDTH, CLASSES)

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        attacked = x + 0.1 * ops.sign(tape.gradient(loss, x))
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
            loss += self.compute_loss(y=y, y_pred=self(attacked, training=True))
        _apply(tape, self.optimizer, loss, self.trainable_variables)
        return self.compute_metrics(x, y, predicted, None)


class RealNvp(_OfRows):
    """Calls itself in both directions, with a prior that is no layer."""

    def __init__(self):
        super().__init__()
        self.scales = [_network(WIDTH, WIDTH, last="tanh") for _ in range(2)]
        self.shifts = [_network(WIDTH, WIDTH) for _ in range(2)]
        half = np.arange(WIDTH) % 2
        self.masks = np.array([half, 1 - half], "float32")
        self.mean_loss = metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean_loss]

    def call(self, x, training=True):
        total, direction = 0.0, -1 if training else 1
        for i in range(2)[::direction]:
            kept, other = x * self.masks[i], 1 - self.masks[i]
            scale, shift = other * self.scales[i](kept), other * self.shifts[i](kept)
            gate = (direction - 1) / 2
            moved = x * ops.exp(direction * scale)
            moved += direction * shift * ops.exp(gate * scale)
            x = other * moved + kept
            total += gate * ops.sum(scale, axis=1)
        return x, total

    def log_loss(self, x):
        y, determinant = self(x)
        likelihood = -0.5 * ops.sum(ops.square(y), axis=1) + determinant
        return -ops.mean(likelihood)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.log_loss(self.rows(data))
        _apply(tape, self.optimizer, loss, self.trainable_variables)
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}

    def test_step(self, data):
        self.mean_loss.update_state(self.log_loss(self.rows(data)))
        return {"loss": self.mean_loss.result()}


class AdaptiveGan(Gan):
    """Augments by a chance that it adapts: a variable of a layer."""

    def __init__(self):
        super().__init__()
        self.chance = keras.Variable(0.1, trainable=False, name="chance")
        self.real_accuracy = metrics.BinaryAccuracy(name="real", threshold=0.0)

    @property
    def metrics(self):
        return [self.judge_loss, self.maker_loss, self.real_accuracy]

    def augmented(self, rows):
        shape = (ops.shape(rows)[0], 1)
        drawn = random.uniform(shape, seed=self.noise)
        return ops.where(drawn < self.chance, -rows, rows)

    def train_step(self, data):
        real = self.rows(data)
        count = ops.shape(real)[0]
        with tf.GradientTape(persistent=True) as tape:
            drawn = random.normal((count, NOISE), seed=self.noise)
            made = self.augmented(self.maker(drawn, training=True))
            real_logits = self.judge(self.augmented(real), training=True)
            made_logits = self.judge(made, training=True)
            ones, zeros = ops.ones((count, 1)), ops.zeros((count, 1))
            maker_loss = self.loss_fn(ones, made_logits)
            judge_loss = (
                self.loss_fn(ones, real_logits) + self.loss_fn(zeros, made_logits)
            ) / 2
        _apply(tape, self.maker_optimizer, maker_loss, self.maker.trainable_weights)
        _apply(tape, self.judge_optimizer, judge_loss, self.judge.trainable_weights)
        self.maker_loss.update_state(maker_loss)
        self.judge_loss.update_state(judge_loss)
        self.real_accuracy.update_state(ones, real_logits)
        right = ops.mean(ops.cast(real_logits > 0, "float32"))
        self.chance.assign(ops.clip(self.chance + (right - 0.8) / 10, 0.0, 1.0))
        return {each.name: each.result() for each in self.metrics}


class Accumulated(keras.Model):
    """Adds up gradients in variables, and applies them every second step."""

    def __init__(self):
        super().__init__()
        self.network = _network(WIDTH, WIDTH)
        self.done = keras.Variable(0, trainable=False, dtype="int32", name="done")
        self.sums = [
            keras.Variable(ops.zeros(v.shape), trainable=False)
            for v in self.network.trainable_variables
        ]

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        self.done.assign_add(1)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        weights = self.network.trainable_variables
        for total, each in zip(self.sums, tape.gradient(loss, weights), strict=True):
            total.assign_add(each)

        def update():
            self.optimizer.apply([each.value for each in self.sums], weights)
            for each in self.sums:
                each.assign(ops.zeros_like(each))

        tf.cond(tf.equal(self.done.value % 2, 0), update, lambda: None)
        return self.compute_metrics(x, y, predicted, None)


class Graph(keras.Model):
    """Is given numbers of nodes; its step computes the whole graph, and gathers."""

    def __init__(self):
        super().__init__()
        self.nodes = ops.convert_to_tensor(_normal(15, WIDTH, seed=6))
        draw = np.random.default_rng(7)
        self.edges = ops.convert_to_tensor(draw.integers(0, 15, (40, 2)))
        self.first, self.last = layers.Dense(8, "relu"), layers.Dense(CLASSES)

    def call(self, inputs):
        states, edges = inputs
        for layer in self.first, self.last:
            states = layer(states)
            sent = tf.gather(states, edges[:, 1])
            states += tf.math.unsorted_segment_sum(sent, edges[:, 0], 15) / 5
        return states

    def train_step(self, data):
        indices, labels = data
        with tf.GradientTape() as tape:
            outputs = self([self.nodes, self.edges])
            chosen = tf.gather(outputs, indices)
            loss = self.compute_loss(y=labels, y_pred=chosen)
        _apply(tape, self.optimizer, loss, self.trainable_weights)
        return self.compute_metrics(indices, labels, chosen, None)

    def test_step(self, data):
        indices, labels = data
        chosen = tf.gather(self([self.nodes, self.edges]), indices)
        self._loss_tracker.update_state(self.compute_loss(y=labels, y_pred=chosen))
        return self.compute_metrics(indices, labels, chosen, None)


def _nodes():
    draw = np.random.default_rng(8)
    return draw.integers(0, 15, ROWS), draw.integers(0, CLASSES, ROWS)


def _classifier():
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"optimizer": _adam(), "loss": loss, "metrics": ["accuracy"]}


def _only_optimizer():
    return {"optimizer": _adam()}


def _squares():
    return {"optimizer": _adam(), "loss": "mse", "metrics": ["mae"]}


def _centralized():
    return Centralized(_network(WIDTH, CLASSES).layers)


EXAMPLES = {
    "AdaMatch": Example(AdaMatch, _only_optimizer, _two_views),
    "Barlow Twins": Example(BarlowTwins, _only_optimizer, _pairs),
    "conditional GAN": Example(ConditionalGan, _two_optimizers, _labelled),
    "consistency training": Example(Consistency, _classifier, _two_views),
    "CycleGAN": Example(CycleGan, _four_optimizers, _pairs),
    "DCGAN": Example(Gan, _two_optimizers, _rows),
    "DDIM": Example(
        # A loss without a reduction has a gradient that is the sum's.
        *(
            Diffusion,
            lambda: {"optimizer": _adam(), "loss": losses.mean_absolute_error},
        ),
        *(_rows, True),
    ),
    "FGSM": Example(Adversarial, _classifier, _labelled),
    "GAN with adaptive augmentation": Example(AdaptiveGan, _two_optimizers, _rows),
    "gradient accumulation": Example(
        Accumulated, lambda: {**_squares(), "optimizer": _sgd()}, _pairs
    ),
    "gradient centralization": Example(
        _centralized, lambda: {**_classifier(), "optimizer": _sgd()}, _labelled
    ),
    "graph attention": Example(Graph, _classifier, _nodes, True),
    "knowledge distillation": Example(Distiller, _distilled, _labelled),
    "knowledge distillation with an own step": Example(
        Distilled, _distilled, _labelled, True
    ),
    "MAE": Example(MaskedAutoencoder, _squares, _rows, True),
    "NNCLR": Example(Nnclr, _probed, _labelled, True),
    "Real NVP": Example(RealNvp, _only_optimizer, _rows, True),
    "Siamese network": Example(Siamese, _only_optimizer, _triplets, True),
    "SimCLR": Example(SimClr, _probed, _labelled, True),
    "VAE": Example(Vae, _only_optimizer, _rows),
    "VQ-VAE": Example(VqVae, _only_optimizer, _rows),
    "WGAN-GP": Example(WassersteinGan, _wasserstein, _rows),
}
