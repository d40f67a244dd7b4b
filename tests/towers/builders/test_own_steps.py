"""What the house does for models that define a `train_step` themselves."""

import collections
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import executed, hosts
from towers import multi_gpu_model
from towers.numerics import NotFiniteStep

pytestmark = pytest.mark.quick_one_in(2)

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=[8, 4]).astype("float32")
Y = RANDOM.normal(size=[8, 1]).astype("float32")


class Clipped(keras.Model):
    """Clips the norm of its gradient by hand."""

    def train_step(self, data):
        """Trains on x and y."""
        x, y = data
        with tf.GradientTape() as tape:
            # Of a negative number, the root and its gradient are not finite.
            loss = tf.reduce_mean(tf.sqrt(tf.abs(self(x) - y)) * tf.sqrt(x[:, :1] + 9))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Rivals(keras.Model):
    """Trains two networks in turn, each by an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.of = [keras.layers.Dense(1), keras.layers.Dense(1)]
        self.optimizers = [keras.optimizers.SGD(0.1) for _ in range(2)]

    def call(self, x):
        """Adds up both."""
        return self.of[0](x) + self.of[1](x)

    def train_step(self, data):
        """Trains on x and y."""
        x, y = data
        losses = {}
        for name, layer, optimizer in zip("ab", self.of, self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                errors = tf.square(self(x) - y)
                if name == "b":
                    errors *= tf.sqrt(x + 9)
                loss = tf.reduce_mean(errors)
            weights = layer.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
            losses[name] = loss
        return losses


def clipped(**options):
    """A model on two towers, and the user's own."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input([4])
    model = Clipped(inputs, keras.layers.Dense(1)(inputs))
    parallel = multi_gpu_model(model, gpus=2, **options)
    parallel.compile(keras.optimizers.SGD(0.1))
    return parallel, model


def values(model):
    return [variable.numpy() for variable in model.variables]


@pytest.mark.quick_one_in(1)
@pytest.mark.parametrize(("row", "tower"), [(1, 0), (6, 1)])
def test_a_gradient_that_is_not_finite_is_not_applied(row, tower):
    parallel, model = clipped(check_numerics=True)
    parallel.fit(X, Y, batch_size=8, verbose=0)
    before, bad = values(model), X.copy()
    bad[row, 0] = -10
    said = rf"Step 2 .*a gradient is not finite on tower {tower} of 2;.*did not apply"
    with pytest.raises(NotFiniteStep, match=said):
        parallel.fit(bad, Y, batch_size=8, shuffle=False, verbose=0)
    for mine, other in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(mine, other)
    # It goes on with what is fine.
    parallel.fit(X, Y, batch_size=8, verbose=0)


def test_a_number_of_the_data_is_named():
    parallel, _ = clipped(check_numerics=True)
    bad = X.copy()
    bad[5, 2] = np.nan
    with pytest.raises(NotFiniteStep, match=r"x\[5\] of what `fit` has got"):
        parallel.fit(bad, Y, batch_size=8, shuffle=False, verbose=0)


def test_a_batch_that_is_not_written_is_said(tmp_path):
    file = str(tmp_path / "step.npz")
    parallel, _ = clipped(check_numerics=file)
    bad = X.copy()
    bad[5, 2] = np.nan
    with pytest.raises(NotFiniteStep, match="is not written, as a step of the model's"):
        parallel.fit(bad, Y, batch_size=8, verbose=0)


@pytest.mark.slow
def test_an_optimizer_that_came_before_has_applied_its_own():
    model = Rivals()
    parallel = multi_gpu_model(model, gpus=2, check_numerics=True)
    parallel.compile()
    parallel.fit(X, Y, batch_size=8, verbose=0)
    before, bad = [values(layer) for layer in model.of], X.copy()
    bad[7, 1] = -10
    with pytest.raises(NotFiniteStep, match=r"Step 2 .*on tower 1 of 2"):
        parallel.fit(bad, Y, batch_size=8, shuffle=False, verbose=0)
    first, second = (values(layer) for layer in model.of)
    assert not np.array_equal(first[0], before[0][0])
    np.testing.assert_array_equal(second[0], before[1][0])


class Coupled(Clipped):
    """Its loss is a root of a mean, whose gradient is no sum of parts."""

    def train_step(self, data):
        """Trains on x and y."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.sqrt(tf.reduce_mean(tf.square(self(x) - y)))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.slow
def test_gradients_that_are_not_checked_are_said(caplog):
    inputs = keras.Input([4])
    model = Coupled(inputs, keras.layers.Dense(1)(inputs))
    parallel = multi_gpu_model(model, gpus=2, check_numerics=True)
    parallel.compile("sgd")
    parallel.fit(X, Y, verbose=0)
    assert "gradients that check_numerics does not see" in caplog.text


@pytest.mark.slow
def test_finite_steps_are_those_without_a_check():
    found = []
    for check in (False, True):
        parallel, model = clipped(check_numerics=check)
        parallel.fit(X, Y, batch_size=3, epochs=3, shuffle=False, verbose=0)
        found.append(values(model))
    # TensorFlow multiplies gradient, norm and learning rate in another order if a check
    # lies between.
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)


def test_auto_is_what_such_a_model_needs(caplog):
    parallel, _ = clipped(variable_update="auto")
    assert parallel.builder.name == "parameter_server"
    assert "variable_update='auto' is 'parameter_server'" in caplog.text


class Compiled(Clipped):
    """Asks for XLA, in one of two ways."""

    @tf.function(jit_compile=True)
    def train_step(self, data):
        """Trains on x and y."""
        return super().train_step(data)


@pytest.mark.slow
def test_what_runs_without_xla_is_said(caplog):
    inputs = keras.Input([4])
    outputs = keras.layers.Dense(1)(inputs)
    for kind, options in ((Compiled, {}), (Clipped, {"jit_compile": True})):
        parallel = multi_gpu_model(kind(inputs, outputs, name="model"), gpus=2)
        parallel.compile("sgd", **options)
        caplog.clear()
        parallel.fit(X, Y, verbose=0)
        assert "without XLA" in caplog.text


class Branches(Clipped):
    """Does all of a step in a branch."""

    def train_step(self, data):
        """Trains on x and y, or does nothing."""
        trains = self.optimizer.iterations >= 0
        step = super().train_step
        return tf.cond(trains, lambda: step(data), lambda: {"loss": 0.0})


def test_a_step_in_a_branch_runs_on_one_device_which_is_said(caplog):
    inputs = keras.Input([4])
    model = Branches(inputs, keras.layers.Dense(1)(inputs))
    parallel = multi_gpu_model(model, gpus=2)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    parallel.compile(optimizer)
    parallel.fit(X, Y, verbose=0)
    assert "computes on one device, with the rows of all towers: " in caplog.text
    assert int(optimizer.iterations) == 1


@pytest.mark.slow
def test_towers_preprocess_what_the_step_gets():
    def preprocess(x, y, training):
        scale = 0.5 if training else 0.25
        return tf.cast(x, tf.float32) * scale, y

    whole = np.round(X * 10).astype("int8")
    ours, model = clipped(preprocess=preprocess)
    ours.fit(whole, Y, batch_size=5, epochs=2, shuffle=False, verbose=0)
    predicted = ours.predict(whole, batch_size=5, verbose=0)
    theirs, other = clipped()
    theirs.fit(whole * np.float32(0.5), Y, 5, epochs=2, shuffle=False, verbose=0)
    for mine, wanted in zip(values(model), values(other), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6)
    np.testing.assert_allclose(
        predicted, other(whole * np.float32(0.25)), rtol=1e-5, atol=1e-6
    )


def test_the_time_of_its_steps_is_measured():
    parallel, _ = clipped()
    parallel.fit(X, Y, batch_size=8, epochs=3, verbose=0)
    totals = parallel.builder.timers.totals()
    assert totals.steps == 3
    assert len(totals.towers_s) == 2


@pytest.mark.slow
def test_hosts_say_what_they_cannot_go_on_with(tmp_path):
    module = "tests.towers.builders.own_steps_on_hosts"
    hosts.run(module, (1, 2), tmp_path)
    files = [tmp_path / f"found{rank}.json" for rank in range(2)]
    first, second = (json.loads(file.read_text()) for file in files)
    # The last of three towers has the row; the first host has no part in it.
    assert "a gradient is not finite;" in first["gradient"]
    assert "a gradient is not finite on tower 2 of 3;" in second["gradient"]
    assert "x[6] of the batch" in first["data"]
    assert first["loss"] == second["loss"] > 0
    assert first["shift"] == second["shift"] == 0
    for each in (first, second):
        assert "own state at" in each["draws"]
        assert "own_steps_on_hosts.py" in each["draws"]
        assert "keras.random" in each["draws"]


def _assert_copies_are_equal(parallel):
    """Asserts that towers have copies, each with the bits of the model's own."""
    kept = parallel.builder.pieces.copies
    assert len(kept._originals) > len(parallel.trainable_variables)
    others = parallel.builder.plan.devices[1:]
    for device, copies in zip(others, kept._copies, strict=True):
        for variable, copy in zip(kept._originals, copies, strict=True):
            assert copy.device.endswith(device)
            mine, own = copy.numpy(), variable.value.numpy()
            assert mine.tobytes() == own.tobytes(), variable.path


class _Changes(keras.callbacks.Callback):
    """Changes what copies have to follow, and looks at them before it does."""

    def __init__(self, trained):
        super().__init__()
        self.trained = trained

    def on_epoch_end(self, epoch, logs=None):
        """Changes the learning rate, and a weight."""
        if hasattr(self.trained, "builder"):
            _assert_copies_are_equal(self.trained)
        self.model.optimizer.learning_rate = 0.02 * (epoch + 1)
        weight = self.model.trainable_variables[0]
        weight.assign(weight + 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("towers", [1, 2, 3])
def test_copies_follow_what_is_changed(towers, scaled):
    found = []
    for wrap in (
        lambda model: model,
        lambda model: multi_gpu_model(model, towers, variable_update="replicated"),
    ):
        keras.utils.set_random_seed(1)
        inputs = keras.Input([4])
        hidden = keras.layers.Dense(8, "tanh")(inputs)
        model = Clipped(inputs, keras.layers.Dense(1)(hidden))
        trained, optimizer = wrap(model), keras.optimizers.Adam(0.01)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        trained.compile(optimizer, jit_compile=False)
        for rows in (8, 5, 1):
            data = {"x": X[:rows], "y": Y[:rows], "batch_size": rows}
            trained.fit(**data, epochs=2, verbose=0, callbacks=[_Changes(trained)])
        found.append([*values(model), *map(np.array, optimizer.variables)])
    for mine, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_copies_are_updated_where_they_are_and_no_weight_travels():
    _, *others = devices = [f"/device:CPU:{k}" for k in (1, 2, 3)]
    keras.utils.set_random_seed(1)
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(7)(inputs)
    model = Clipped(inputs, keras.layers.Dense(1)(hidden), name="own_copies")
    parallel = multi_gpu_model(
        model, devices, variable_update="replicated", all_reduce_alg="ring"
    )
    parallel.compile("adam", jit_compile=False)
    nodes = executed.run(lambda: parallel.fit(X, Y, verbose=0), "own_copies")
    assert parallel.builder.graph is not None
    updated = {}
    for device in devices:
        kinds = collections.Counter(node.op for node in nodes[device])
        updated[device] = {k: n for k, n in kinds.items() if "Assign" in k}
    assert all(updated[device] for device in others)
    assert updated[others[0]] == updated[others[1]]
    read = {
        (source, name)
        for source, _, _, name in executed.transfers(nodes)
        if "ReadVariableOp" in name and not name.startswith("learning_rate")
    }
    assert not read


@pytest.mark.slow
@pytest.mark.parametrize(("row", "tower"), [(1, 0), (6, 1)])
def test_a_gradient_that_is_not_finite_reaches_no_copy(row, tower):
    options = {"check_numerics": True, "variable_update": "replicated"}
    parallel, model = clipped(**options)
    parallel.fit(X, Y, batch_size=8, verbose=0)
    before, x = values(model), X.copy()
    x[row, 0] = -10
    with pytest.raises(NotFiniteStep, match=f"tower {tower} of 2"):
        parallel.fit(x, Y, batch_size=8, shuffle=False, verbose=0)
    for mine, kept in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(mine, kept)
    _assert_copies_are_equal(parallel)


def test_a_branch_that_changes_other_variables_has_copies_of_those():
    """As `examples/steps/accumulate.py`, but of what the model does not list."""

    class Beside(Clipped):
        def train_step(self, data):
            def count():
                self.seen.assign_add(1.0)
                self.trainable_variables[0].assign(self.trainable_variables[0] * 0.5)
                return 0.0

            tf.cond(tf.reduce_sum(data[0]) > -1e9, count, lambda: 0.0)
            return super().train_step(data)

    inputs = keras.Input([4])
    model = Beside(inputs, keras.layers.Dense(1)(inputs))
    model.seen = tf.Variable(0.0)
    parallel = multi_gpu_model(model, 2, variable_update="replicated")
    parallel.compile("sgd", jit_compile=False)
    with pytest.raises(ValueError, match="which towers have copies, and others"):
        parallel.fit(X, Y, verbose=0)


def test_what_copies_cannot_have_is_refused():
    inputs = keras.Input([4])
    model = Clipped(inputs, keras.layers.Dense(1)(inputs))
    for option in (
        {"variable_update": "asynchronous", "loss_placement": "gathered"},
        {"variable_update": "replicated", "shard_embeddings": "rows"},
    ):
        with pytest.raises(ValueError, match="Clipped, which defines its own step"):
            multi_gpu_model(model, 2, **option)


class Plain(keras.Model):
    """Does what Keras's own step does."""

    def train_step(self, data):
        """Trains on x and y."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow
def test_sparse_gradients_are_no_news(caplog):
    inputs = keras.Input([4], dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(9, 2)(inputs))
    parallel = multi_gpu_model(Plain(inputs, keras.layers.Dense(1)(rows)), 2)
    parallel.compile("adam", jit_compile=False)
    parallel.fit(np.abs(X).astype("int32"), Y, verbose=0)
    assert "one device" not in caplog.text
