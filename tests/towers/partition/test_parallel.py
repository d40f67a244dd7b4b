"""Functions and loops of one's own, on towers."""

import functools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.utils import ag_logging as autograph_logging
from tensorflow.python.platform import tf_logging

import towers
from tests import hosts
from tests.towers.partition import parallel_on_hosts
from towers.plan import Plan

pytestmark = pytest.mark.quick_one_in(2)

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=[7, 4]).astype("float32")
Y = RANDOM.normal(size=[7, 1]).astype("float32")


def _close(ours, theirs):
    tf.nest.assert_same_structure(ours, theirs)
    for mine, other in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_tensors_of_several_ranks():
    add = towers.parallelize(tf.add, gpus=2)
    for x in (X[:, 0], X, X[:5, None], X[:3, 0]):
        _close(add(x, x), 2 * x)


@pytest.mark.parametrize("rows", [7, 2, 1])
def test_a_plain_function(rows):
    add = towers.parallelize(tf.add, gpus=3)
    _close(add(X[:rows], X[:rows]), 2 * X[:rows])


@pytest.mark.parametrize("rows", [2, 1])
def test_a_number_of_rows_that_is_given_is_the_batchs(rows):
    """Each of two towers has one row, which alone could become two."""

    def widened(x):
        return tf.reduce_sum(tf.broadcast_to(x, [2, 3]))

    call = towers.parallelize(widened, gpus=2)
    _close(call(Y[:rows]), widened(Y[:rows]))


def test_a_vector_that_is_given_chooses_rows_of_the_batch():
    def chosen(x):
        return tf.compat.v1.where(tf.constant(3 * [True] + 4 * [False]), x, -x)

    _close(towers.parallelize(chosen, gpus=2)(X), chosen(tf.constant(X)))


@pytest.mark.parametrize("gpus", [1, 2])
def test_what_a_generator_leaves_out_is_left_out(gpus):
    def drawn(generator, x):
        generator.skip(tf.shape(x)[0])
        generator.normal([3])
        tf.cond(x[0, 0] > 9.0, lambda: 0.0, lambda: generator.uniform([2])[0] * 0.0)
        return generator.normal(tf.shape(x)) + x

    found = []
    for wrap in (tf.function, functools.partial(towers.parallelize, gpus=gpus)):
        generator = tf.random.Generator.from_seed(7)
        call = wrap(functools.partial(drawn, generator))
        found.append([call(tf.constant(X)), generator.state.read_value()])
    _close(*found)


def test_nests_and_scalars():
    def scaled(batch, factor):
        return {"rows": batch["x"] * factor, "sum": tf.reduce_sum(batch["x"])}

    found = towers.parallelize(scaled, gpus=2)({"x": X}, 3.0)
    _close(found, {"rows": tf.constant(3 * X), "sum": tf.constant(X.sum())})


def test_a_scalar_may_come_first():
    scaled = towers.parallelize(lambda factor, x: factor * x, gpus=2)
    _close(scaled(3.0, X), tf.constant(3 * X))
    with pytest.raises(ValueError, match="with scalars only; expected inputs with one"):
        scaled(3.0, 2.0)


def test_autograph_converts_functions_that_are_called():
    @tf.function
    def doubled_if_large(x):
        if tf.reduce_mean(x) > 1.0:
            return 2 * x
        return x

    ours = towers.parallelize(lambda x: doubled_if_large(x), gpus=2)
    _close(ours(X + 2), tf.constant(2 * (X + 2)))
    _close(ours(X), tf.constant(X))


def test_rows_of_different_number_are_refused():
    with pytest.raises(ValueError, match=r"7 examples in which .* has 6 rows"):
        towers.parallelize(tf.matmul, gpus=2)(X, X[:6])


@pytest.mark.parametrize("inside", [True, False])
def test_it_can_be_differentiated(inside):
    weights = tf.Variable(RANDOM.normal(size=[4, 3]).astype("float32"))

    def layer(x):
        return tf.nn.silu(x @ weights)

    def gradients(function, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x) ** 2)
        return tape.gradient(loss, [x, weights])

    ours = towers.parallelize(layer, gpus=2)
    differentiate = tf.function(gradients, autograph=False) if inside else gradients
    _close(differentiate(ours, tf.constant(X)), gradients(layer, tf.constant(X)))


def _tangents(function, x, variable):
    with tf.autodiff.ForwardAccumulator(variable, tf.ones_like(variable)) as forward:
        found = tf.nest.flatten(function(x))
    return [forward.jvp(each) for each in found]


@pytest.mark.slow
def test_an_accumulator_around_it_follows_what_tensorflow_can():
    weights = tf.Variable(RANDOM.normal(size=[4, 3]).astype("float32"))

    def loss(x):
        return tf.reduce_mean((x @ weights) ** 2)

    ours, x = towers.parallelize(loss, gpus=2), tf.constant(X)
    of_rows = tf.function(lambda x: _tangents(ours, x, x), autograph=False)
    of_weights = tf.function(lambda x: _tangents(ours, x, weights), autograph=False)
    _close(_tangents(ours, x, weights), _tangents(loss, x, weights))
    _close(_tangents(ours, x, x), _tangents(loss, x, x))
    _close(of_rows(x), _tangents(loss, x, x))
    # It would be 0.
    with pytest.raises(ValueError, match=r"'loss' within a tf.*inside of the function"):
        of_weights(x)


@pytest.mark.parametrize("inside", [True, False])
def test_an_accumulator_around_gradients_is_refused(inside):
    scale = tf.Variable(2.0)

    def cost(x):
        return tf.reduce_mean((x * scale) ** 2)

    step = towers.GradientTowers(cost, [scale], gpus=2)
    follow = tf.function(_tangents, autograph=False) if inside else _tangents
    with pytest.raises(ValueError, match=r"'cost' within a tf.autodiff.Forward"):
        follow(step, tf.constant(X), scale)


def test_an_accumulator_in_a_loss():
    scale = tf.Variable(2.0)

    def cost(x):
        with tf.autodiff.ForwardAccumulator(scale, tf.constant(1.0)) as forward:
            loss = tf.reduce_mean(tf.exp(x * scale))
        return loss + forward.jvp(loss)

    with tf.GradientTape() as tape:
        loss = cost(tf.constant(X))
    found = towers.GradientTowers(cost, [scale], gpus=3)(X)
    _close([found.loss, *found.gradients], [loss, tape.gradient(loss, scale)])


def test_several_rows_of_an_example_are_not_differentiated_from_outside():
    twice = towers.parallelize(lambda x: tf.concat([x, 2 * x], 0), gpus=2)
    x = tf.constant(X)
    with tf.GradientTape() as tape, pytest.raises(ValueError, match="several rows"):
        tape.watch(x)
        tape.gradient(tf.reduce_sum(twice(x) ** 2), x)


@pytest.mark.parametrize("inside", [True, False])
def test_what_would_happen_twice_is_not_differentiated_from_outside(inside):
    """A gradient computes forward again; it would be of other random numbers."""
    seed = keras.random.SeedGenerator(0)
    count = tf.Variable(0.0, trainable=False)

    def counted(x):
        count.assign_add(1.0)
        return x * count

    def gradient(function, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            returned = function(x)
        return tape.gradient(returned, x)

    differentiate = tf.function(gradient, autograph=False) if inside else gradient
    for function in (counted, lambda x: keras.random.dropout(x, 0.5, seed=seed)):
        ours = towers.parallelize(function, gpus=2)
        with pytest.raises(ValueError, match="to differentiate, which assigns"):
            differentiate(ours, tf.constant(X))
        assert ours(X).shape == X.shape


def _loop(optimizer, step, apply):
    for end in (7, 4, 1):
        for _ in range(3):
            loss, gradients, *_ = step(X[:end], Y[:end])
            apply(optimizer, gradients)
    return loss


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_a_loop_of_ones_own(gpus):
    weights, losses = [], []
    for on_towers in (True, False):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])

        def loss_fn(x, y, model=model):
            error = model(x) - y
            return tf.reduce_mean(error**2), error

        def plain(x, y, model=model, loss_fn=loss_fn):
            with tf.GradientTape() as tape:
                loss, _ = loss_fn(x, y)
            return loss, tape.gradient(loss, model.trainable_variables)

        optimizer, step, apply = keras.optimizers.Adam(0.01), plain, None
        if on_towers:
            step = towers.GradientTowers(loss_fn, model.trainable_variables, gpus)
            apply = step.apply
        else:

            def apply(optimizer, gradients, model=model):
                optimizer.apply(gradients, model.trainable_variables)

        losses.append(_loop(optimizer, step, apply))
        weights.append([variable.numpy() for variable in model.variables])
    _close(losses[0], losses[1])
    _close(*weights)


@pytest.mark.parametrize("placement", ["auto", "tower"])
def test_a_loss_over_pairs(placement):
    """On one device, or the mean of the devices' losses by their numbers of rows."""
    weights = tf.Variable(tf.ones([4, 2]) + tf.constant([0.0, 0.1]))

    def loss_fn(x, y):
        h = tf.nn.l2_normalize(x @ weights, 1)
        pairs = tf.matmul(h, h, transpose_b=True) - 5 * tf.eye(tf.shape(x)[0])
        return tf.reduce_mean(tf.reduce_logsumexp(pairs, 1)), y

    def plain(x, y):
        with tf.GradientTape() as tape:
            loss, _ = loss_fn(x, y)
        return loss, tape.gradient(loss, weights)

    step = towers.GradientTowers(loss_fn, [weights], 3, loss_placement=placement)
    plan = Plan.of(["/cpu:0", "/cpu:1", "/cpu:2"], [1] * 3, "/cpu:0")
    for size in (7, 5, 2, 1):
        loss, (gradient,), aux = step(X[:size], Y[:size])
        cuts = [(0, size)]
        if placement == "tower":
            cuts = [(b, e) for b, e in plan.bounds(size) if e > b]
        parts = [plain(X[b:e], Y[b:e]) for b, e in cuts]
        shares = [(e - b) / size for b, e in cuts]
        wanted = [
            sum(share * part for share, part in zip(shares, each, strict=True))
            for each in zip(*parts, strict=True)
        ]
        _close([loss, gradient, aux], [*wanted, tf.constant(Y[:size])])


def test_an_unknown_loss_placement_is_refused():
    with pytest.raises(ValueError, match="loss_placement='gathered'; expected 'auto'"):
        towers.GradientTowers(
            tf.reduce_mean, [tf.Variable(1.0)], 2, loss_placement="gathered"
        )


@pytest.mark.parametrize(
    "batch", [tf.ragged.constant([[1.0], [], [2.0, 3.0]]), tf.sparse.from_dense(X)]
)
def test_values_of_ragged_and_sparse_tensors_are_computed_on_one_device(batch, caplog):
    found = towers.parallelize(lambda rows: rows * 2.0, gpus=2)(batch)
    _close(tf.nest.flatten(found, True), tf.nest.flatten(batch * 2.0, True))
    assert "computes on one device, with the rows of all towers: '" in caplog.text


def test_a_sparse_batch_that_was_placed_is_refused():
    loss = towers.GradientTowers(
        lambda rows: tf.reduce_sum((rows * 2.0).values), [tf.Variable(1.0)], gpus=2
    )
    (batch,) = next(loss.prefetch([(tf.sparse.from_dense(X),)], 0))
    with pytest.raises(ValueError, match="a ragged or sparse tensor in a batch that"):
        loss(batch)


def test_what_is_beside_the_loss():
    scale = tf.Variable(2.0)
    step = towers.GradientTowers(
        lambda x: (tf.reduce_mean(x * scale), {"rows": x + 1}), [scale], gpus=2
    )
    found = step(X)
    _close(found.aux, {"rows": tf.constant(X + 1)})
    _close(found.gradients, [tf.constant(X.mean())])


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("count", [0, 2, 9])
def test_batches_are_placed_ahead(count, inside):
    scale = tf.Variable(2.0)
    step = towers.GradientTowers(
        lambda x, y: tf.reduce_mean(x * scale - y), [scale], gpus=3
    )
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(3)
    call = tf.function(step) if inside else step
    placed = [*step.prefetch(batches, count)]
    assert len(placed) == 3
    for (one,), (x, y) in zip(placed, batches, strict=True):
        devices = [local[0].device for local in one.local_batches]
        assert [each[-6:] for each in devices] == [":CPU:0", ":CPU:1", ":CPU:2"]
        _close(list(call(one)[:2]), list(step(x, y)[:2]))


def test_each_batch_is_read_when_it_is_needed():
    read = []

    def batches():
        for k in range(5):
            read.append(k)
            yield X[: k + 1]

    scale = tf.Variable(2.0)
    step = towers.GradientTowers(lambda x: tf.reduce_mean(x * scale), [scale], gpus=2)
    ahead = step.prefetch(batches(), count=1)
    _close(step(*next(ahead)).loss, tf.constant(2 * X[:1].mean()))
    assert read == [0, 1]


def test_a_loss_for_each_example_is_refused():
    scale = tf.Variable(2.0)
    step = towers.GradientTowers(lambda x: x[:, 0] * scale, [scale], gpus=2)
    with pytest.raises(ValueError, match="expected a scalar"):
        step(X)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (3.0, "a float from loss_fn; expected the loss, a scalar tensor"),
        ((1, 2, 3), "a tuple from loss_fn"),
        ([tf.constant(1.0), 2], "a list from loss_fn"),
        (None, "a NoneType from loss_fn"),
    ],
)
def test_what_is_no_loss_is_refused(returned, said):
    step = towers.GradientTowers(lambda x: returned, [tf.Variable(2.0)], gpus=2)
    with pytest.raises(ValueError, match=said):
        step(X)


def test_sparse_gradients_of_any_number_of_rows_are_applied_by_one_function():
    table = keras.layers.Embedding(50, 3)
    table.build(None)
    optimizer, traced = keras.optimizers.SGD(0.1), []
    apply = optimizer.apply
    optimizer.apply = lambda *given: [traced.append(1), apply(*given)]
    step = towers.GradientTowers(
        lambda ids: tf.reduce_mean(table(ids) ** 2), table.trainable_variables, gpus=2
    )
    for count in range(4, 12):
        step.apply(optimizer, step(np.arange(count)).gradients)
    assert len(traced) < 4


def test_autograph_leaves_it_alone(monkeypatch):
    """In a user's `tf.function`, it tried to convert our code, and warned."""
    warned = []
    monkeypatch.setattr(autograph_logging, "warning", lambda *text: warned.append(text))
    scale = tf.Variable(2.0)
    step = towers.GradientTowers(lambda x: tf.reduce_mean(x * scale), [scale], gpus=2)
    twice = towers.parallelize(lambda x: 2 * x, gpus=2)
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def train(x):
        step.apply(optimizer, step(x).gradients)
        return twice(x)

    _close(train(X), tf.constant(2 * X))
    assert not warned


def test_no_variables_or_no_list_of_some_are_refused():
    with pytest.raises(ValueError, match="no variables"):
        towers.GradientTowers(tf.reduce_mean, [], gpus=2)
    with pytest.raises(ValueError, match="EagerTensor among the variables; expected a"):
        towers.GradientTowers(tf.reduce_mean, tf.Variable([1.0, 2.0]), gpus=2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 2), (1, 1, 1)], ids=str)
def test_hosts_equal_one_device(layout, tmp_path):
    module = "tests.towers.partition.parallel_on_hosts"
    hosts.run(module, layout, tmp_path)

    def make(model, optimizer):
        loss_fn = parallel_on_hosts.loss_of(model)

        def step(*batch):
            with tf.GradientTape() as tape:
                loss = loss_fn(*batch)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        return step

    wanted = parallel_on_hosts.trained(make)
    x = tf.constant(parallel_on_hosts.X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        rows, largest = parallel_on_hosts.centred(x)
        total = tf.reduce_sum(rows**2) + largest
    gradient = tape.gradient(total, x).numpy().tolist()
    tf.random.set_seed(1)
    np.random.seed(1)
    drawn = parallel_on_hosts.drawn(tf.function)
    for rank in range(len(layout)):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        for way in ("trained", "prefetched", "replicated"):
            _close(found[way], [*wanted])
        _close(found["rows"], rows.numpy().tolist())
        _close(found["scaled"], (2 * parallel_on_hosts.X).tolist())
        _close(found["gradient"], gradient)
        assert found["largest"] == float(largest)
        assert "Hosts have different batches; give all hosts" in found["differ"]
        for name, values in drawn.items():
            np.testing.assert_allclose(
                found["drawn"][name], values, rtol=1e-6, atol=1e-6, err_msg=name
            )
        for sentence in found["draws"]:
            assert "own state at" in sentence and "keras.random" in sentence


def test_gradients_of_another_number_are_refused():
    scale = tf.Variable(2.0)
    step = towers.GradientTowers(lambda x: tf.reduce_mean(x * scale), [scale], gpus=2)
    gradients = step(X).gradients
    for wrong in ([], gradients * 2):
        with pytest.raises(ValueError, match=f"Received {len(wrong)} gradients for 1"):
            step.apply(keras.optimizers.SGD(0.1), wrong)


def test_arguments_by_name():
    def scaled(x, y, *, factor=None):
        return (x - y) * (1.0 if factor is None else factor)

    found = towers.parallelize(scaled, gpus=2)
    _close(found(y=Y, x=X[:, :1]), tf.constant(X[:, :1] - Y))
    with pytest.raises(ValueError, match=r"Received \['factor'\] by name"):
        found(X[:, :1], Y, factor=2.0)


def test_a_tensor_of_the_function_around_it():
    """A function that is called in two others, and takes what they have made."""

    def caller(parallel, x):
        factor = tf.reduce_mean(x) + 1

        def scaled(rows):
            return rows * factor

        return (towers.parallelize(scaled, gpus=2) if parallel else scaled)(x)

    kept = {}

    def again(x):
        kept["factor"] = tf.reduce_mean(x) + 1
        return made(x)

    made = towers.parallelize(lambda rows: rows * kept["factor"], gpus=2)
    for function in (lambda x: caller(True, x), again, again):
        found = tf.function(function, autograph=False)(tf.constant(X))
        _close(found, caller(False, tf.constant(X)))


def test_many_functions_are_not_one_that_is_traced_again(monkeypatch):
    """TensorFlow would warn of it."""
    warned = []
    monkeypatch.setattr(tf_logging, "warning", lambda *text: warned.append(text))
    for k in range(8):
        found = towers.parallelize(functools.partial(tf.add, k + 1.0), gpus=2)
        _close(found(X), tf.constant(X + k + 1))
    assert not warned


@pytest.mark.parametrize("size", [7, 4, 1])
def test_synchronized_batch_normalization(size):
    """It was normalised by the statistics of each device's rows."""
    layer = keras.layers.BatchNormalization(synchronized=True)
    layer.build((None, 4))
    found = towers.parallelize(functools.partial(layer, training=True), gpus=3)(
        X[:size]
    )
    found, statistics = found.numpy(), layer.moving_variance.numpy()
    layer.moving_mean.assign(tf.zeros([4]))
    layer.moving_variance.assign(tf.ones([4]))
    _close([found, statistics], [layer(X[:size], training=True), layer.moving_variance])
