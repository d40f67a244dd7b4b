"""Where examples meet, each tower takes its own rows, if `loss_placement` asks for it.

What is wanted is computed by plain TensorFlow, once for the rows of each tower.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.towers.partition.own_losses import Losses, similar
from tests.variants import slow
from towers.collectives import batch
from towers.partition.partitioned import Partitioned, judge
from towers.plan import Plan
from towers.tower.errors import PartitionError

pytestmark = pytest.mark.quick_one_in(2)

X = np.random.default_rng(0).normal(size=[9, 4]).astype("float32")
W = np.random.default_rng(1).normal(size=[4, 3]).astype("float32")


def plan_of(towers, ratios=None):
    devices = [d.name for d in tf.config.list_logical_devices("CPU")[:towers]]
    return Plan.of(devices, ratios or [1] * towers, devices[0])


def partitioned(function, plan, loss_placement="tower"):
    spec = tf.TensorSpec([None, 4])
    made = Partitioned(judge(function, spec, loss_placement=loss_placement))

    @tf.function(autograph=False)
    def call(data):
        size = batch.batch_size(data)
        return made(plan, [batch.take(data, *b) for b in plan.bounds(size)], size)

    return call, made


def step_of(loss, weights):
    def step(x):
        with tf.GradientTape() as tape:
            found = loss(x, tf.convert_to_tensor(weights))
        return found, tape.gradient(found, weights)

    return step


def of_each_tower(step, plan, x):
    """What a step makes of each tower's rows alone, weighted by their number."""
    found = []
    for begin, end in plan.bounds(len(x)):
        if end > begin:
            made = step(tf.constant(x[begin:end]))
            found.append([(end - begin) / len(x) * each.numpy() for each in made])
    return [sum(each) for each in zip(*found, strict=True)]


NAMES = [name for name in vars(Losses) if not name.startswith("_")]


@pytest.mark.quick_one_in(12)
@pytest.mark.parametrize(("towers", "ratios"), [(2, (2, 1)), slow(3, None)])
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_is_the_mean_of_the_towers_losses(name, towers, ratios):
    weights, plan = tf.Variable(W), plan_of(towers, ratios)
    step = step_of(getattr(Losses(), name), weights)
    call, made = partitioned(step, plan)
    for rows in (X, X[:5], X[:1]):
        for mine, other in zip(
            call(tf.constant(rows)), of_each_tower(step, plan, rows), strict=True
        ):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    (line,) = made.lines("It")
    assert "as loss_placement='tower' asks: " in line
    assert "own_losses.py:" in line


def same_as_one_device(function, towers=3, rows=(X, X[:5], X[:1])):
    call, made = partitioned(function, plan_of(towers))
    for each in rows:
        for mine, other in zip(
            tf.nest.flatten(call(tf.constant(each))),
            tf.nest.flatten(function(tf.constant(each))),
            strict=True,
        ):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    return made


def test_what_does_not_meet_stays_exact():
    weights = tf.Variable(W)

    def function(x):
        mask, h = tf.cast(x[:, 0] > 0, tf.float32), x @ weights
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(tf.square(x @ weights), 1)
            loss = tf.reduce_sum(losses * mask) / (tf.reduce_sum(mask) + 1)
        return loss, tape.gradient(loss, weights), tf.sqrt(tf.reduce_mean(h**2))

    assert not same_as_one_device(function).lines("It")


def test_beside_what_meets_totals_stay_exact():
    weights = tf.Variable(W)

    def exact(x):
        mask = tf.cast(x[:, 0] > 0, tf.float32)
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(tf.square(x @ weights), 1)
            loss = tf.reduce_sum(losses * mask) / (tf.reduce_sum(mask) + 1)
        return loss, tape.gradient(loss, weights)

    def both(x):
        mask = tf.cast(x[:, 0] > 0, tf.float32)
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(tf.square(x @ weights), 1)
            loss = tf.reduce_sum(losses * mask) / (tf.reduce_sum(mask) + 1)
            loss += Losses().barlow(x, tf.convert_to_tensor(weights))
        return loss, tape.gradient(loss, weights)

    own = step_of(Losses().barlow, weights)
    plan = plan_of(3, (2, 1, 3))
    call, _ = partitioned(lambda x: (exact(x), own(x), both(x)), plan)
    found, meeting, sums = call(tf.constant(X))
    for each in zip(sums, found, meeting, strict=True):
        np.testing.assert_allclose(each[0], each[1] + each[2], rtol=1e-5, atol=1e-6)
    for mine, other in zip(found, exact(tf.constant(X)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    for mine, other in zip(meeting, of_each_tower(own, plan, X), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_metrics_count_what_towers_find():
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    of_labels = keras.metrics.CategoricalAccuracy()
    largest = keras.metrics.Mean()

    def function(x):
        n = tf.shape(x)[0]
        matrix, labels = similar(x, x + 2 * tf.reverse(x, [1])), tf.range(n)
        accuracy.update_state(labels, matrix)
        accuracy.update_state(labels, tf.transpose(matrix))
        of_labels.update_state(tf.one_hot(labels, n), matrix)
        largest.update_state(tf.reduce_max(matrix, 1))
        return tf.argmax(matrix, 1), tf.reduce_mean(matrix)

    plan, found = plan_of(3, (1, 2, 2)), []
    call, _ = partitioned(function, plan)
    for each in (call, lambda x: of_rows(x, plan, function)):
        for metric in (accuracy, of_labels, largest):
            metric.reset_state()
        for rows in (X[:4], X[:1], X):
            nearest, mean = each(tf.constant(rows))
        found.append([nearest, mean, *(m.result() for m in (accuracy, of_labels))])
        found[-1].append(largest.result())
    assert 0.1 < found[0][2] < 0.9
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)


def of_rows(x, plan, function):
    """Rows, and a mean, of what each tower finds in its rows."""
    bounds = [each for each in plan.bounds(len(x)) if each[1] > each[0]]
    rows, means = zip(*(function(x[b:e]) for b, e in bounds), strict=True)
    shares = [(e - b) / len(x) for b, e in bounds]
    return np.concatenate(rows), np.dot(shares, means)


def test_what_is_needed_whole_is_computed_whole():
    queue = tf.Variable(np.random.default_rng(3).normal(size=[6, 4]), dtype=tf.float32)
    start = queue.numpy()

    def function(x):
        """Keeps the newest rows; says how alike all are, which is no row for each."""
        queue.assign(tf.concat([x, queue], 0)[:6])
        return similar(x, x), tf.tile(x, [2, 1])

    call, made = partitioned(function, plan_of(3))
    found, kept = call(tf.constant(X)), queue.numpy()
    queue.assign(start)
    for mine, other in zip(
        [*found, kept], [*function(tf.constant(X)), queue], strict=True
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    (line,) = made.lines("It")
    assert "computes on one device, with the rows of all towers" in line


def test_gradients_of_what_is_own_may_go_through_rows():
    """Adversarial rows: the gradient of what meets is taken for rows, too."""
    weights, plan = tf.Variable(W), plan_of(3, (1, 2, 1))
    loss_of = Losses().contrastive

    def step(x, share=1.0):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(x, tf.convert_to_tensor(weights))
        x += 0.1 * tf.sign(tape.gradient(loss, x))
        with tf.GradientTape() as tape:
            loss = loss_of(x, tf.convert_to_tensor(weights))
        return loss, tape.gradient(loss, weights)

    call, _ = partitioned(step, plan)
    for mine, other in zip(
        call(tf.constant(X)), of_each_tower(step, plan, X), strict=True
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


class Whole:
    """Losses whose gradients are no towers' own."""

    def custom(self, x, w):
        """It has a gradient of the user's."""

        @tf.custom_gradient
        def clipped(h):
            return tf.identity(h), lambda dy: tf.clip_by_norm(dy, 0.01)

        return Losses().contrastive(x, clipped(w))

    def of_a_gradient(self, x, w):
        """It goes through the norm of another."""
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = Losses().contrastive(x, w)
        return loss + tf.norm(tape.gradient(loss, w))

    def of_a_vector(self, x, w):
        """It is of something that is neither a scalar nor a row for each example."""
        return tf.reduce_sum(similar(x @ w, x @ w) ** 2, 0)


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize("name", [n for n in vars(Whole) if not n.startswith("_")])
def test_gradients_that_are_read_one_by_one_are_those_of_one_device(name):
    made = same_as_one_device(step_of(getattr(Whole(), name), tf.Variable(W)))
    (line,) = made.lines("It")
    assert "computes on one device, with the rows of all towers" in line


def test_a_gradient_weighted_by_what_is_own_is_refused():
    weights = tf.Variable(W)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights))
        return tape.gradient(loss, weights, Losses().contrastive(x, W))

    with pytest.raises(PartitionError, match="loss_placement='tower' asks; use 'auto'"):
        partitioned(step, plan_of(2))


@pytest.mark.parametrize("towers", [2, 3])
def test_the_order_of_a_sum_does_not_matter(towers):
    """What is made of proved totals stays exact, wherever it is added."""
    weights, found = tf.Variable(W), []

    def parts(x):
        outputs = x @ weights
        squares = tf.reduce_sum(tf.square(outputs - x[:, :3]))
        varies = 1 + tf.reduce_sum(tf.square(x - tf.reduce_mean(x, 0)))
        similar_rows = tf.matmul(outputs, outputs, transpose_b=True)
        return tf.reduce_mean(similar_rows), squares / varies

    def first(x):
        pairs, ratio = parts(x)
        return (pairs + 1) - ratio

    def second(x):
        pairs, ratio = parts(x)
        return pairs + (1 - ratio)

    def exact(x):
        return 1 - parts(x)[1]

    for loss in (first, second):
        call, _ = partitioned(
            step_of(lambda x, _, f=loss: f(x), weights), plan_of(towers)
        )
        found.append([each.numpy() for each in call(tf.constant(X))])
    pairs = step_of(lambda x, _: parts(x)[0], weights)
    own = of_each_tower(pairs, plan_of(towers), X)
    whole = step_of(lambda x, _: exact(x), weights)(tf.constant(X))
    for one, other, mine, rest in zip(*found, own, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one, mine + rest.numpy(), rtol=1e-5, atol=1e-6)
