"""A function of a batch, partitioned, does what it does on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.variants import slow
from towers.collectives import batch
from towers.partition.partitioned import Partitioned, judge
from towers.plan import Plan

pytestmark = pytest.mark.quick_one_in(2)

ROWS = np.random.default_rng(0).normal(size=[7, 4]).astype("float32")


def partitioned(function, towers):
    """A function that computes on towers, and what it was made of."""
    devices = [d.name for d in tf.config.list_logical_devices("CPU")[:towers]]
    plan = Plan.of(devices, [1] * towers, devices[0])
    made = Partitioned(judge(function, tf.TensorSpec([None, 4])))

    @tf.function(autograph=False)
    def call(data):
        size = batch.batch_size(data)
        return made(plan, [batch.take(data, *b) for b in plan.bounds(size)], size)

    return call, made


class Functions:
    """Functions of rows, with a variable that some change."""

    def __init__(self):
        start = np.random.default_rng(1).normal(size=[4, 3]).astype("float32")
        self.weights = tf.Variable(start)
        self.total = tf.Variable(0.0)
        self.seeds = keras.random.SeedGenerator(5)
        self.state = tf.Variable([1, 2, 3], dtype=tf.int64)

    def rows(self, x):
        """One row an example."""
        return tf.nn.softmax(x @ self.weights)

    def totals(self, x):
        """Sums, means, largest and smallest, and the number of examples."""
        return {
            "sum": tf.reduce_sum(x, 0),
            "mean": tf.reduce_mean(x, 0),
            "largest": tf.reduce_max(x),
            "smallest": tf.reduce_min(x, 0),
            # A tower without an example has neither zero nor infinity to give.
            "largest of negative": tf.reduce_max(-tf.exp(x), 0),
            "smallest of positive": tf.reduce_min(tf.exp(x)),
            "examples": tf.shape(x)[0],
            "shape": tf.shape(x @ self.weights),
        }

    def centred(self, x):
        """Rows that take a mean over all rows, and are scaled by their deviation."""
        x -= tf.reduce_mean(x, 0)
        return x / tf.sqrt(tf.reduce_mean(x**2, 0))

    def pairs(self, x):
        """Each row with each."""
        return tf.matmul(x, x, transpose_b=True)

    def both(self, x):
        """Rows one behind the other."""
        joined = tf.concat([x, -x], 0)
        return joined, tf.reduce_mean(tf.nn.relu(joined))

    def halves(self, x):
        """Rows one behind the other, weighted at random, and taken apart again."""
        n = tf.shape(x)[0]
        joined = tf.concat([x, -2 * x], 0)
        noise = keras.random.uniform((2 * n, 1), seed=self.seeds)
        more = keras.random.uniform(tf.shape(joined), seed=self.seeds)
        labels = tf.concat([tf.ones((n, 1)), tf.zeros((n, 1))], 0) + noise
        joined = tf.tanh(joined * labels) * tf.ones((2 * n, 4)) + more
        first, second = tf.split(joined, 2)
        return first * second - joined[:n], joined[n:], joined, tf.reduce_mean(joined)

    def three(self, x):
        """Three blocks, of which two are taken, and their gradient."""
        n = tf.shape(x)[0]
        joined = tf.concat([x, x**2, x**3], 0)
        with tf.GradientTape() as tape:
            tape.watch(joined)
            loss = tf.reduce_mean(tf.square(joined @ self.weights)[n:])
        rows, weights = tape.gradient(loss, [joined, self.weights])
        return rows, weights, loss

    def draws(self, x):
        """Random numbers."""
        n = tf.shape(x)[0]
        return (
            keras.random.normal((n, 3), seed=self.seeds),
            keras.random.uniform((2 * n, 5), seed=self.seeds),
            keras.random.randint((n,), 0, 100, seed=self.seeds),
            keras.random.truncated_normal((n, 2), seed=self.seeds),
            keras.random.normal((2, 2), seed=self.seeds),
            keras.random.dropout(x, 0.4, seed=self.seeds),
            keras.random.shuffle(x, seed=self.seeds),
        )

    def step(self, x):
        """A step of descent, with its gradient clipped by hand."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ self.weights))
        gradient = tape.gradient(loss, self.weights)
        self.weights.assign_sub(0.1 * gradient / tf.norm(gradient))
        self.total.assign_add(loss)
        return loss, self.total.read_value(), x @ self.weights

    def root(self, x):
        """The gradient of what is no sum or mean, but the root of one."""
        with tf.GradientTape() as tape:
            loss = tf.sqrt(tf.reduce_mean(tf.square(x @ self.weights)))
        return loss, tape.gradient(loss, self.weights)

    def root_of_images(self, x):
        """The gradient of a root of what convolutions and pools make of images."""
        with tf.GradientTape() as tape:
            tape.watch(x)
            images = tf.reshape(x, [-1, 2, 2, 1])
            kernel = tf.reshape(self.weights, [2, 2, 1, 3])
            found = tf.nn.relu(tf.nn.conv2d(images, kernel, 1, "SAME"))
            found = tf.tanh(tf.nn.max_pool2d(found, 2, 1, "SAME"))
            loss = tf.sqrt(tf.reduce_mean(tf.square(found)))
        return loss, tape.gradient(loss, [x, self.weights])

    def through_a_total(self, x):
        """The gradient of a mean, in which another mean of the weights takes part."""
        with tf.GradientTape() as tape:
            h = x @ self.weights
            loss = tf.reduce_mean(tf.square(h - tf.reduce_mean(h, 0)) ** 2)
        return loss, tape.gradient(loss, self.weights)

    def twice(self, x):
        """The gradient of a gradient of the weights."""
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ self.weights) ** 2)
            fast = self.weights - 0.1 * tape.gradient(loss, self.weights)
            after = tf.reduce_mean(tf.square(x @ fast) ** 2)
        return after, outer.gradient(after, self.weights)

    def norm_of_a_gradient(self, x):
        """The gradient of the norm of a gradient of the weights."""
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ self.weights))
            norm = tf.norm(tape.gradient(loss, self.weights))
        return norm, outer.gradient(norm, self.weights)

    def penalty(self, x):
        """The gradient of a norm of gradients for rows."""
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                score = tf.reduce_sum(tf.tanh(x @ self.weights), 1)
            norms = tf.norm(tape.gradient(score, x), axis=1)
            loss = tf.reduce_mean((norms - 1) ** 2)
        return loss, outer.gradient(loss, self.weights)

    def masked(self, x):
        """The gradient of a mean over some rows: a sum, divided by their number."""
        mask = tf.cast(x[:, 0] > 0, tf.float32)
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(tf.square(x @ self.weights), 1)
            loss = tf.reduce_sum(losses * mask) / (tf.reduce_sum(mask) + 1)
        return loss, tape.gradient(loss, self.weights)

    def weighted(self, x):
        """The same, of a divisor that also has a gradient of its own part."""
        weight = tf.abs(x[:, 0])
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(tf.square(x @ self.weights), 1)
            total, scale = tf.reduce_sum(weight), tf.reduce_sum(self.weights)
            loss = tf.reduce_sum(losses * weight) / total + total * scale
        return loss, tape.gradient(loss, self.weights)

    def softmax_over_rows(self, x):
        """The gradient of rows divided by a total, which the weights do not change."""
        weight = tf.exp(x[:, 0] - tf.reduce_max(x[:, 0]))
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(tf.square(x @ self.weights), 1)
            loss = tf.reduce_sum(losses * (weight / tf.reduce_sum(weight)))
        return loss, tape.gradient(loss, self.weights)

    def made_for_all(self, x):
        """Constants with a row for each example, by forms of their shape."""
        n, one = tf.shape(x)[0], tf.constant([[1.0, 2.0, 3.0, 4.0]])
        several = tf.tile(one, tf.concat([tf.expand_dims(n, -1), [1]], 0))
        repeated = tf.repeat(one, n, axis=0)
        ranged = tf.cast(tf.range(n), tf.float32)[:, None]
        with tf.GradientTape() as tape:
            rows = (x + several * repeated + ranged) @ self.weights
            loss = tf.reduce_mean(rows**2)
        return rows, loss, tape.gradient(loss, self.weights)

    def meta(self, x):
        """A mean in which a gradient of the batch takes part, as learned rates do."""
        rate = tf.constant([0.3, 0.1, 0.2])
        with tf.GradientTape() as outer:
            outer.watch(rate)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ self.weights))
            gradient = tape.gradient(loss, self.weights)
            fast = tf.stop_gradient(self.weights) - rate * gradient
            after = tf.reduce_mean((x @ fast) ** 3)
        return after, outer.gradient(after, rate)

    def weighted_by_a_total(self, x):
        """A gradient that is given one of the target: a total of the batch."""
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(x @ self.weights))
        given = [
            tf.reduce_mean(x),
            tf.reduce_sum(x),
            tf.cast(tf.shape(x)[0], tf.float32),
        ]
        return [tape.gradient(loss, self.weights, each) for each in given]

    def several_targets(self, x):
        """The gradient of a mean, and of the largest of all."""
        with tf.GradientTape() as tape:
            h = x @ self.weights
            targets = [tf.reduce_mean(h), tf.reduce_max(h)]
        return tape.gradient(targets, self.weights)

    def custom(self, x):
        """A gradient of the weights that is clipped on its way."""

        @tf.custom_gradient
        def clipped(weights):
            return tf.identity(weights), lambda dy: tf.clip_by_norm(dy, 0.01)

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ clipped(self.weights)))
        return tape.gradient(loss, self.weights)

    def blocks_reshaped(self, x):
        """Rows of two blocks, of which others are made."""
        joined = tf.concat([x, 2 * x], 0)
        n = tf.shape(x)[0]
        pairs = tf.reduce_sum(tf.reduce_prod(tf.reshape(joined, [-1, 8]), 1))
        return pairs, tf.reshape(joined, [-1, 2])[: 2 * n], tf.reshape(joined, [n, 8])

    def shapes(self, x):
        """Parts of shapes, and shapes one above the other."""
        shape = tf.shape(x)
        return (
            tf.ones(tf.concat([shape[:0], [4]], 0)),
            tf.reduce_sum(x)
            * tf.cast(tf.reduce_prod(tf.shape(x[:, 0])[:-1]), tf.float32),
            tf.stack([shape]),
            tf.stack([shape, [1, 2]])[0],
            tf.cast(100 * shape[0], tf.int8),
        )

    def branch_with_an_effect(self, x):
        """Totals that a branch returns, which also changes something."""

        def counts():
            self.total.assign_add(1.0)
            return tf.reduce_sum(x), tf.shape(x)[0]

        total, size = tf.cond(
            self.total >= 0.0, counts, lambda: (tf.reduce_sum(2 * x), 1)
        )
        return 2 * total, tf.reduce_sum(x) / tf.cast(size, tf.float32)

    def row_of_a_total(self, x):
        """The sparse gradient of a row whose number a total tells."""
        with tf.GradientTape() as tape:
            place = tf.argmax(tf.reduce_mean(x, 0))
            loss = tf.reduce_mean(
                tf.nn.embedding_lookup(self.weights, place) * x[:, :3]
            )
        gradient = tape.gradient(loss, self.weights)
        squares = tf.reduce_sum(gradient.values**2)
        return (
            tf.convert_to_tensor(gradient),
            tf.linalg.global_norm([gradient]),
            squares,
        )

    def drawn_rows(self, x):
        """The sparse gradient of rows that are drawn, some of them several times."""
        places = keras.random.randint((tf.shape(x)[0],), 0, 4, seed=self.seeds)
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(self.weights, places)
            loss = tf.reduce_mean(tf.square(rows * x[:, :3]))
        gradient = tape.gradient(loss, self.weights)
        squares = tf.math.unsorted_segment_sum(gradient.values**2, gradient.indices, 4)
        return loss, tf.convert_to_tensor(gradient), squares

    def alignment(self, x):
        """The gradient of a loss that is a loop over time."""
        labels = tf.ones(tf.stack([tf.shape(x)[0], 1]), tf.int32)
        with tf.GradientTape() as tape:
            logits = tf.reshape(x @ self.weights, [-1, 1, 3])
            loss = keras.losses.CTC()(labels, tf.tile(logits, [1, 2, 1]))
        return loss, tape.gradient(loss, self.weights)

    def sum_of_kinds(self, x):
        """The gradient of a quotient of totals, a mean, a sum and a norm of weights."""
        with tf.GradientTape() as tape:
            rows = tf.square(tf.tanh(x @ self.weights))
            given = tf.nn.sigmoid(x[:, :1])
            masked = tf.reduce_sum(rows * given) / tf.reduce_sum(given)
            others = [tf.reduce_mean(rows), 0.1 * tf.reduce_sum(self.weights**2)]
            loss = masked - 0.5 * (tf.add_n(others) - tf.reduce_sum(rows[:, 0])) / 3
            scaled = loss * (self.total + 8.0) / tf.reduce_sum(given)
        return loss, tape.gradient(scaled, self.weights, tf.constant(2.0))

    def sum_of_kinds_in_another_order(self, x):
        """A mean, to which something is added that was made of totals."""
        with tf.GradientTape() as tape:
            rows = tf.square(tf.tanh(x @ self.weights))
            masked = tf.reduce_sum(rows) / (1 + tf.reduce_sum(x**2))
            loss = 2 * (tf.reduce_mean(rows) + (1.0 - masked))
        return loss, tape.gradient(loss, self.weights)

    def for_a_sum_of_kinds(self, x):
        """The gradient for a sum of kinds, which is a part of another."""
        with tf.GradientTape() as tape:
            rows, given = tf.square(x @ self.weights), tf.nn.sigmoid(x[:, :1])
            masked = tf.reduce_sum(rows * given) / tf.reduce_sum(given)
            between = masked + tf.reduce_mean(rows)
            loss = 2 * (between + masked) - 1
        return loss, tape.gradient(loss, between)

    def sum_that_no_tape_records(self, x):
        """The gradient of a sum of kinds, a part of which is not recorded."""
        with tf.GradientTape() as tape:
            rows, given = tf.square(x @ self.weights), tf.nn.sigmoid(x[:, :1])
            masked = tf.reduce_sum(rows * given) / tf.reduce_sum(given)
            with tape.stop_recording():
                others = masked + tf.reduce_mean(rows)
            loss = others + masked
        return loss, tape.gradient(loss, self.weights)

    def sum_of_kinds_times_a_weight(self, x):
        """The same, but what scales the sum has a gradient of its own."""
        with tf.GradientTape() as tape:
            rows, given = tf.square(x @ self.weights), tf.nn.sigmoid(x[:, :1])
            masked = tf.reduce_sum(rows * given) / tf.reduce_sum(given)
            loss = (masked + tf.reduce_mean(rows)) * tf.reduce_sum(self.weights)
            loss += (masked + tf.reduce_mean(rows)) * tf.reduce_mean(rows)
        return loss, tape.gradient(loss, self.weights)

    def of_a_sum(self, x):
        """The gradient for what the rows add up to."""
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(x, 0)
            tape.watch(total)
            loss = tf.reduce_sum(total * 3)
        return tape.gradient(loss, total)

    def repeated(self, x):
        """Rows that are repeated, behind one another or side by side, and gradients."""
        with tf.GradientTape() as tape:
            tape.watch(x)
            flat = tf.repeat(x, 3, axis=0) @ self.weights
            apart = tf.reshape(flat, [-1, 3, 3]) * tf.constant([[1.0], [2.0], [-1.0]])
            again = tf.reshape(keras.ops.repeat(x, 2, axis=0), [tf.shape(x)[0], 2, 4])
            loss = tf.reduce_mean(apart**2) + tf.reduce_mean(again**3)
        return flat, apart, again, loss, tape.gradient(loss, [x, self.weights])

    def parts(self, x):
        """All rows, by their number, of which some columns are taken."""
        n = tf.shape(x)[0]
        joined = tf.concat([x, -x], 0)
        found = x[:n, 1:]
        sliced = tf.slice(x, [0, 1], [n, 2])
        return found, tf.transpose(found), sliced, joined[: 2 * n, 1:]

    def patches(self, x):
        """Patches of images, and their gradient."""
        ones, squares = [1, 1, 1, 1], [1, 2, 2, 1]
        with tf.GradientTape() as tape:
            tape.watch(x)
            images = tf.reshape(x, [-1, 2, 2, 1])
            found = tf.image.extract_patches(images, squares, ones, ones, "SAME")
            more = keras.ops.image.extract_patches(images, (2, 2))
            loss = tf.reduce_mean(found**2) + tf.reduce_mean(more**3)
        return found, more, loss, tape.gradient(loss, x)

    def products(self, x):
        """Products with weights that have other axes first, and their gradient."""
        with tf.GradientTape() as tape:
            rows = tf.reshape(x, [-1, 2, 2])
            weights = tf.reshape(self.weights, [2, 2, 3])
            found = [
                tf.matmul(rows, weights[:1]),
                tf.matmul(weights[:1], rows, transpose_a=True, transpose_b=True),
                tf.matmul(rows[:, :, None], weights),
                tf.matmul(weights[None], rows[..., None], transpose_a=True),
                tf.transpose(tf.matmul(x, tf.reshape(self.weights, [3, 4, 1]))[..., 0]),
                tf.transpose(tf.matmul(self.weights, x, True, True)),
                tf.einsum("bhi,hij->bhj", rows, weights),
            ]
            loss = tf.add_n([tf.reduce_mean(each**2) for each in found])
        return found, loss, tape.gradient(loss, self.weights)

    def paddings(self, x):
        """Paddings that are made column by column, and add a row."""
        return tf.pad(x, tf.stack([[0, 0], [1, 1]], axis=1))

    def drawn_for_elements(self, x):
        """Numbers that are drawn for all elements, of which a row has several."""
        draw = tf.random.stateless_truncated_normal
        drawn = draw([tf.size(x)], [1, 2])
        several = tf.shape(x)[0] * tf.cast(self.total + 2.0, tf.int32)
        return drawn, tf.reshape(drawn, [-1, 4]) + x, draw([several, 3], [3, 4])

    def of_a_generator(self, x):
        """Numbers whose counter a generator moves on."""
        generator = tf.random.Generator.from_state(self.state, "philox")
        n = tf.shape(x)[0]
        return generator.normal([n, 4]) + x, generator.uniform([2 * n, 3])

    def tangents(self, x):
        """Products with Jacobians and Hessians, by a forward accumulator."""
        forward, ones = tf.autodiff.ForwardAccumulator, tf.ones_like(self.weights)
        with forward([self.weights, x], [ones, x]) as of_both:
            with tf.GradientTape() as tape:
                rows = tf.tanh(x @ self.weights)
                loss = tf.reduce_sum(tf.exp(rows)) + tf.reduce_mean(rows)
            gradient = tape.gradient(loss, self.weights)
        found = rows, loss, gradient
        return found, of_both.jvp(found)

    def both_of_a_call(self, x):
        """Of what a branch returns, one can be added and one cannot."""

        def both():
            return tf.reduce_sum(x), tf.reduce_max(x)

        return tf.cond(self.total >= 0.0, both, lambda: (tf.reduce_sum(-x), 1.0))

    def condition(self, x):
        """A branch on what all rows decide."""
        loss = tf.reduce_mean(x)

        def add():
            return self.total.assign_add(loss)

        return tf.cond(loss > -10.0, add, lambda: self.total.assign(0.0))

    def shape_of_columns(self, x):
        """The number of columns, among others."""
        shape = tf.shape(tf.transpose(x))
        ones = tf.ones([shape[1], shape[0]])
        return shape, tf.reduce_sum(x * ones)

    def inside(self, x):
        """A function that is called, and changes something."""

        @tf.function
        def add(x):
            self.total.assign_add(tf.reduce_sum(x))
            return x * 2

        return add(x), self.total.read_value()


# Examples meet, or it is not read how they do not.
GATHERED = set(
    """alignment blocks_reshaped both_of_a_call branch_with_an_effect
    drawn_for_elements drawn_rows draws made_for_all norm_of_a_gradient paddings
    pairs several_targets shapes sum_of_kinds_times_a_weight
    sum_that_no_tape_records tangents through_a_total twice weighted""".split()
)
NAMES = [name for name in vars(Functions) if not name.startswith("_")]


@pytest.mark.quick_one_in(28)
@pytest.mark.parametrize("towers", [slow(1), slow(2), 3])
@pytest.mark.parametrize("name", NAMES)
def test_towers_compute_what_one_device_does(name, towers):
    theirs, ours = Functions(), Functions()
    call, _ = partitioned(getattr(ours, name), towers)
    one = tf.function(getattr(theirs, name), autograph=False)
    for rows in (ROWS, ROWS[:5], ROWS[:1]):
        found, wanted = call(tf.constant(rows)), one(tf.constant(rows))
        tf.nest.assert_same_structure(found, wanted)
        for mine, other in zip(
            tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True
        ):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    for mine, other in ((ours.weights, theirs.weights), (ours.total, theirs.total)):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("name", NAMES)
def test_only_what_lets_examples_meet_is_computed_on_one_device(name):
    _, made = partitioned(getattr(Functions(), name), 2)
    assert bool(made.lines("It")) == (name in GATHERED)


def test_a_gradient_asks_for_no_shapes_of_equal_rows():
    weights = tf.Variable(np.random.default_rng(1).normal(size=[4, 4]))

    def gradient(x):
        x = tf.cast(x, tf.float64)
        with tf.GradientTape() as tape:
            hidden = tf.sin(x @ weights)
            hidden = (hidden + x) * tf.nn.sigmoid(hidden)
            hidden -= tf.reduce_mean(hidden, 1, keepdims=True)
            loss = tf.reduce_sum(hidden**3)
        return tape.gradient(loss, weights)

    call, made = partitioned(gradient, 2)
    for rows in (ROWS, ROWS[:1]):
        rows = tf.constant(rows)
        np.testing.assert_allclose(call(rows), gradient(rows), rtol=1e-9)
    types = {op.type for op in made.trace.graph.get_operations()}
    assert not types & {"BroadcastGradientArgs", "Prod"}
