"""What the house does for models that define a `train_step` themselves."""

import collections
import functools
import json
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import executed, hosts
from tests.towers.builders import own_steps_on_hosts
from tests.variants import slow
from towers import multi_gpu_model
from towers.numerics import NotFiniteStep
from towers.stages import phases
from towers.tower.errors import ModelError

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


@pytest.mark.parametrize("way", ["parameter_server", slow("replicated")])
def test_what_an_optimizer_takes_is_looked_at(way):
    """It once was what a tape gives, and a step was stopped one too late."""

    class Spoilt(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            bad = tf.where(self.optimizer.iterations == 1, np.nan, 0.0)
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients = [gradient + bad for gradient in gradients]
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    inputs = keras.Input([4])
    model = Spoilt(inputs, keras.layers.Dense(1)(inputs))
    parallel = multi_gpu_model(model, 2, variable_update=way, check_numerics=True)
    parallel.compile("sgd")
    with pytest.raises(NotFiniteStep, match=r"^Step 2 "):
        parallel.fit(X, Y, batch_size=2, verbose=0)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


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
    """Asks for XLA where towers do not hear it."""

    @tf.function(jit_compile=True)
    def train_step(self, data):
        """Trains on x and y."""
        return super().train_step(data)


@pytest.mark.slow
def test_what_runs_without_xla_is_said(caplog):
    inputs = keras.Input([4])
    outputs = keras.layers.Dense(1)(inputs)
    parallel = multi_gpu_model(Compiled(inputs, outputs, name="model"), gpus=2)
    parallel.compile("sgd")
    parallel.fit(X, Y, verbose=0)
    assert "without XLA" in caplog.text


def compiled_by_xla(nodes):
    """The parts of a step that XLA compiles, as their names begin, by device."""
    return {
        (device[-5:], node.name.partition("/")[0].rstrip("_0123456789"))
        for device, each in nodes.items()
        for node in each
        if node.attr["_XlaMustCompile"].b
    }


@pytest.mark.parametrize(
    ("way", "updates"),
    [
        ("parameter_server", {("CPU:0", "apply")}),
        slow("replicated", {("CPU:0", "apply"), ("CPU:1", "apply")}),
    ],
)
def test_xla_compiles_what_towers_and_optimizers_do(way, updates):
    """It once compiled nothing of a step that a model defines itself."""
    found = {}
    # The last batch is smaller, and takes no XLA.
    fit = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}
    for xla in (False, True):
        keras.utils.set_random_seed(3)
        inputs = keras.Input([4])
        hidden = keras.layers.Dense(4, "tanh", name="of_xla")(inputs)
        model = Clipped(inputs, keras.layers.Dense(1)(hidden))
        parallel = multi_gpu_model(model, gpus=2, variable_update=way)
        parallel.compile(keras.optimizers.Adam(0.1), jit_compile=xla)
        nodes = executed.run(functools.partial(parallel.fit, X, Y, **fit), "of_xla")
        found[xla] = values(model)
        towers = {("CPU:0", "tower"), ("CPU:1", "tower")}
        assert compiled_by_xla(nodes) == (towers | updates if xla else set())
    for mine, other in zip(found[True], found[False], strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


class AsKeras(keras.Model):
    """Defines the step that Keras has."""

    def train_step(self, data):
        """Trains on x and y."""
        return super().train_step(data)


@pytest.mark.slow
def test_what_xla_draws_is_said(caplog):
    inputs = keras.Input([4])
    model = AsKeras(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.5)(inputs)))
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "mse", jit_compile=True)
    parallel.fit(X, Y, verbose=0)
    assert "draws random numbers by XLA" in caplog.text


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
    assert first["draws"] == second["draws"] and first["drawn"] == second["drawn"]
    np.testing.assert_allclose(first["draws"], own_steps_on_hosts.noisy_losses(), 1e-5)
    for sentence in first["noisy optimizers"] + second["noisy optimizers"]:
        assert sentence.startswith("ModelError: "), sentence
        assert "TensorFlow's own state" in sentence and "optimizer" in sentence
    assert first["continued"] == second["continued"]
    # One device computes each batch; the first host's numbers count.
    plain = own_steps_on_hosts.eager_on_one_device()
    np.testing.assert_allclose(first["eager"], plain, rtol=1e-5)
    assert first["eager"] == second["eager"]
    assert first["noisy"] == second["noisy"] != first["eager"]


def _assert_copies_are_equal(parallel):
    """Asserts that towers have copies, each with the bits of the model's own."""
    kept = parallel.builder.pieces.store
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
        model, devices, variable_update=towers.Replicated("ring")
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


@pytest.mark.parametrize("way", ["parameter_server", slow("replicated")])
def test_all_that_an_optimizer_changes_waits_for_the_check(way):
    """A copy had counted a step that was stopped, now and then."""
    parallel, _ = clipped(check_numerics=True, variable_update=way)
    fit = functools.partial(parallel.fit, X, Y, batch_size=8, verbose=0)
    nodes = executed.run(fit, "home_")
    changes = [
        node
        for each in nodes.values()
        for node in each
        if node.op.startswith("Assign") and node.name.startswith(("apply", "home"))
    ]
    assert len(changes) == (3 if way == "parameter_server" else 6)
    for node in changes:
        before = executed.behind(nodes, node)
        assert any("check_numerics" in name for name in before), node.name


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


REPLICATED = {"variable_update": "replicated"}
IN_SHARDS = {"variable_update": towers.Replicated(shard_optimizer_state=True)}


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batches": 2},
        slow({"gpus": 4, "micro_batches": 3, "recompute": "layer"}),
        slow({"gpus": 4, "micro_batches": 2, **REPLICATED}),
        slow({"gpus": 4, **IN_SHARDS}),
        slow({"gpus": 2, "shard_embeddings": "rows"}),
        slow({"stages": 2, "check_numerics": True}),
    ],
    ids=str,
)
def test_stages(options, capsys):
    """Of two losses, one is a norm of gradients of all layers."""
    random = np.random.default_rng(1)
    x = random.integers(0, 9, [13, 5]).astype("int32")

    class Penalized(keras.Model):
        def train_step(self, data):
            x, y, *_ = data
            with tf.GradientTape() as outer:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(self(x) - y))
                inner = tape.gradient(loss, self.layers[-1].kernel)
                total = loss + 0.1 * tf.norm(inner)
            gradients = outer.gradient(total, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss, "norm": tf.norm(inner)}

    def trained(wrap):
        keras.utils.set_random_seed(3)
        inputs = keras.Input([5], dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(9, 4)(inputs))
        for k in range(3):
            hidden = keras.layers.Dense(4, "tanh", name=f"hidden_{k}")(hidden)
        model = Penalized(inputs, keras.layers.Dense(1)(hidden))
        parallel = wrap(model)
        parallel.compile(keras.optimizers.Adam(0.1, epsilon=1e-4))
        parallel.train_on_batch(x, (x[:, :1] / 9).astype("float32"))
        how = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        logs = parallel.fit(x, x[:, :1] / 9, **how).history
        return [*model.get_weights(), *logs["loss"], *logs["norm"]]

    def wrap(model):
        placement = {"hidden_[12]|dense.*": 1, ".*": 0}
        given = {"gpus": 2, "stages": towers.Stages(2, placement), **options}
        return multi_gpu_model(model, **given)

    for mine, other in zip(trained(wrap), trained(lambda model: model), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-6)
    assert "Stages of model 'penalized" in capsys.readouterr().err


def test_an_optimizer_of_its_own_has_no_stages():
    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.own.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    inputs = keras.Input([4])
    model = Own(inputs, keras.layers.Dense(1)(keras.layers.Dense(4)(inputs)))
    model.own = keras.optimizers.SGD()
    parallel = multi_gpu_model(model, 2, stages=2)
    parallel.compile("sgd")
    with pytest.raises(ModelError, match=r"optimizer of its own.*, stages=1"):
        parallel.fit(X, Y, verbose=0)


class Twice(keras.Model):
    """Applies two gradients of one variable in one call."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        kernel = self.trainable_variables[0]
        gradient = tape.gradient(loss, kernel)
        self.optimizer.apply([gradient, 2 * gradient], [kernel, kernel])
        return {"loss": loss}


def _twice(wrap):
    keras.utils.set_random_seed(3)
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(4)(inputs)
    parallel = wrap(Twice(inputs, keras.layers.Dense(1)(hidden)))
    parallel.compile(keras.optimizers.SGD(0.1))
    parallel.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    return parallel.get_weights()[0]


@pytest.mark.parametrize("way", ["parameter_server", "replicated"])
def test_one_call_may_apply_two_gradients_of_a_variable(way):
    trained = _twice(lambda model: multi_gpu_model(model, 2, variable_update=way))
    np.testing.assert_allclose(trained, _twice(lambda model: model), rtol=1e-5)


@pytest.mark.parametrize("options", [{"variable_update": "sharded"}, {"stages": 2}])
def test_owners_take_one_gradient_of_a_variable_in_a_call(options):
    with pytest.raises(ModelError, match=r"twice in one call.*; expected each"):
        _twice(lambda model: multi_gpu_model(model, 2, **options))


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


class Tied(keras.Model):
    """Looks up rows of a table twice, and multiplies by all of it."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(9, 4)
        self.dense = keras.layers.Dense(4, "tanh")

    def call(self, x):
        """Computes scores of all rows."""
        rows = self.embedding(x) + self.embedding((x * 7) % 9)
        hidden = keras.ops.mean(self.dense(rows), axis=1)
        return hidden @ keras.ops.transpose(self.embedding.embeddings)

    def train_step(self, data):
        """Trains on x and y."""
        x, y = data
        with tf.GradientTape() as tape:
            scores = self(x)
            loss = keras.losses.sparse_categorical_crossentropy(y, scores, True)
            loss = tf.reduce_mean(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [*map(tf.convert_to_tensor, gradients)]
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def looks_up():
    """A model with a table of which rows are looked up, and nothing else."""
    inputs = keras.Input([5], dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(9, 4)(inputs))
    return AsKeras(inputs, keras.layers.Dense(9)(rows))


class Positions(keras.layers.Layer):
    """Adds rows that are the same for each example."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(5, 4)

    def call(self, rows):
        """Adds a row to each of an example's."""
        return rows + self.table(keras.ops.arange(5))


def looks_up_positions():
    """A model with a second table, of positions."""
    inputs = keras.Input([5], dtype="int32")
    rows = Positions()(keras.layers.Embedding(9, 4)(inputs))
    return AsKeras(inputs, keras.layers.Dense(9)(keras.layers.Flatten()(rows)))


def trained_table(make, wrap):
    """What training, evaluation and prediction make of a model with tables.

    Args:
        make: Makes the model.
        wrap: Returns what trains it.
    """
    random = np.random.default_rng(1)
    x = random.integers(-2, 9, [13, 5]).astype("int32")
    y = random.integers(0, 9, [13]).astype("int32")
    keras.utils.set_random_seed(3)
    model = make()
    parallel = wrap(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parallel.compile(keras.optimizers.Adam(0.1, epsilon=1e-4), loss)
    # A table that hosts divide is whole before it is trained, and in parts behind.
    measured = []
    for _ in range(2):
        if make is not Tied:
            measured.append(parallel.evaluate(x, y, batch_size=4, verbose=0))
        parallel.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    predicted = parallel.predict(x, batch_size=4, verbose=0)
    return [*model.get_weights(), *map(np.asarray, measured), predicted]


IN_PARTS = {
    "parameter_server": {},
    "replicated": REPLICATED,
    "columns": {"shard_embeddings": "columns"},
    "auto": {"shard_embeddings": "auto"},
    "more towers than a table has columns": {"gpus": 4, "shard_embeddings": "columns"},
    "state in parts": IN_SHARDS,
    "micro-batches": {"micro_batches": 2},
}


@pytest.mark.parametrize("make", [looks_up, looks_up_positions, Tied])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=() if not k else pytest.mark.slow, id=name)
        for k, (name, options) in enumerate(IN_PARTS.items())
    ],
)
def test_tables_in_parts(make, options):
    def wrap(model):
        options_of_all = {"gpus": 2, "shard_embeddings": "rows", **options}
        return multi_gpu_model(model, **options_of_all)

    ours, theirs = (trained_table(make, how) for how in (wrap, lambda model: model))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1), (1, 2), (2, 2)], ids=str)
def test_tables_that_hosts_divide(layout, tmp_path):
    file = tmp_path / "found.json"
    hosts.run("tests.towers.builders.own_tables_on_hosts", layout, file)
    found = json.loads(file.read_text())
    refused = {name: found.pop(name) for name in [*found] if "assigns" in name}
    for said in refused.values():
        assert (
            "in parts on several devices or hosts; expected no change but an"
            in " ".join(said.split())
        )
    assert len(found) > 16 and len(refused) == 4
    assert {name: said for name, said in found.items() if said != "equal"} == {}


class OwnOptimizer(keras.Model):
    """A step that applies an optimizer of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - tf.cast(y, "float32")))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.own.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def _with_own_optimizer(optimizer):
    keras.utils.set_random_seed(1)
    inputs = keras.Input([5], dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(9, 4)(inputs))
    model = OwnOptimizer(inputs, keras.layers.Dense(1)(rows))
    model.own = keras.optimizers.get(optimizer)
    return model


@pytest.mark.slow
def test_copies_do_not_go_with_an_optimizer_of_its_own_for_a_table_in_parts():
    model = _with_own_optimizer("sgd")
    parallel = multi_gpu_model(model, gpus=2, shard_embeddings="rows", **REPLICATED)
    parallel.compile("sgd")
    said = "an optimizer of its own.*shard_embeddings='none'"
    with pytest.raises(ModelError, match=said):
        parallel.fit(np.zeros([4, 5], "int32"), np.zeros([4, 1]), verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["rows", "columns"])
def test_an_optimizer_that_counts_is_applied_once_to_a_table_in_parts(way):
    ids = np.random.default_rng(0).integers(0, 9, (12, 5))
    targets = np.random.default_rng(1).normal(size=(12, 1))
    trained = []
    for options in ({}, {"shard_embeddings": way}):
        model = _with_own_optimizer("nadam")
        wrapped = multi_gpu_model(model, gpus=2, **options) if options else model
        wrapped.compile("sgd")
        wrapped.fit(ids, targets, batch_size=4, shuffle=False, verbose=0)
        trained.append([v.numpy() for v in [*model.variables, *model.own.variables]])
    for alone, together in zip(*trained, strict=True):
        np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "layer"},
        slow({"recompute": "layer", "micro_batches": 2, **REPLICATED}),
        slow({"recompute": "layer", **IN_SHARDS}),
        slow({"recompute": "layer", "shard_embeddings": "rows"}),
        slow({"recompute": "stage", "check_numerics": True}),
    ],
    ids=str,
)
def test_layers_are_computed_again(options, monkeypatch):
    x = np.random.default_rng(1).integers(0, 9, [13, 5]).astype("int32")
    recomputing = mock.Mock(wraps=phases.recomputing)
    monkeypatch.setattr(phases, "recomputing", recomputing)

    def trained(wrap):
        keras.utils.set_random_seed(3)
        inputs = keras.Input([5], dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(9, 4)(inputs))
        for _ in range(2):
            hidden = keras.layers.Dense(4, "tanh")(keras.layers.Dropout(0.2)(hidden))
        model = AsKeras(inputs, keras.layers.Dense(1)(hidden))
        parallel = wrap(model)
        parallel.compile(keras.optimizers.Adam(0.1, epsilon=1e-4), "mse")
        how = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        parallel.fit(x, x[:, :1] / 9, **how)
        return model.get_weights()

    def wrap(model):
        return multi_gpu_model(model, **{"gpus": 2, **options})

    for mine, other in zip(trained(wrap), trained(lambda model: model), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-6)
    assert recomputing.called


@pytest.mark.slow
def test_rows_are_not_taken_of_the_whole_of_a_table_in_parts():
    """One device has a gradient of these rows, and an optimizer squares each."""

    class Takes(keras.Model):
        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                norm = tf.norm(self.layers[1].embeddings)
                table = tf.convert_to_tensor(self.layers[1].embeddings)
                loss = (
                    0 * norm
                    + tf.reduce_mean(tf.gather(table, x))
                    + tf.reduce_mean(self(x))
                )
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    inputs = keras.Input([5], dtype="int32")
    model = Takes(inputs, keras.layers.Embedding(9, 4)(inputs))
    parallel = multi_gpu_model(model, gpus=2, shard_embeddings="rows")
    parallel.compile("adam")
    with pytest.raises(ModelError, match=r"in the whole value of a table.*call of the"):
        parallel.fit(np.zeros([4, 5], "int32"), np.zeros([4, 1]), verbose=0)
