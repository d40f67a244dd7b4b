"""What a whole step of training becomes: decided before it runs, and in few pieces."""

import collections
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import executed
from towers import Replicated, Stages, multi_gpu_model
from towers.analysis import effects
from towers.layers.pipeline import LayerPlacement, Pipeline
from towers.partition.partitioned import Partitioned, judge
from towers.tower.errors import ModelError, PartitionError

ROWS = 1000
IDS = np.random.default_rng(0).integers(0, ROWS, [8, 5]).astype("int32")
Y = np.random.default_rng(1).normal(size=[8, 1]).astype("float32")
SPEC = tf.TensorSpec([None, 5], tf.int32), tf.TensorSpec([None, 1])


def words(kind=keras.Sequential):
    """Returns a model whose table is looked up, compiled if its step is Keras's."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Embedding(ROWS, 4),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
    model = kind([keras.Input((5,), dtype="int32"), *layers])
    if kind is keras.Sequential:
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
    return model


class Own(keras.Sequential):
    """Defines a step, which does what Keras's does."""

    def train_step(self, data):
        """Trains on a batch."""
        return super().train_step(data)


def gradients_of(model, data):
    """Returns the loss of a batch, and its gradients."""
    x, y = data[:2]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    return loss, tape.gradient(loss, model.trainable_variables)


def test_an_optimizer_is_one_operation_whatever_it_updates():
    model = words()
    trace = judge(model.train_step, SPEC).trace
    (update,) = trace.updates.values()
    assert update.optimizer is model.optimizer
    assert update.variables == model.trainable_variables
    assert len(update.gradients) == 3
    # All else that a step changes are the four numbers of two means.
    changes = {each.name for each in effects.of(trace.graph.get_operations())}
    assert len(changes - trace.updates.keys()) == 4


def test_a_step_of_kerass_is_on_the_towers_once():
    made = Partitioned(judge(words().train_step, SPEC))
    on_towers = [phase.place for (phase,) in made.phases if phase.place.on_towers]
    # Rows are looked up where the table is.
    assert [place.on_device for place in on_towers] == [False, True]


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_part_computes_again_what_it_has_not_kept(recomputes):
    inputs = keras.Input([4])
    layers = [keras.layers.Dense(4, "tanh") for _ in range(3)]
    hidden = functools.reduce(lambda h, layer: layer(h), layers, inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse")
    spec = tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])
    parts = {id(layer): k for k, layer in enumerate(layers)}
    recompute = "layer" if recomputes else "none"
    pipeline = Pipeline(
        recompute=recompute, placement=LayerPlacement(model, layers=parts)
    )
    made = Partitioned(judge(model.train_step, spec, pipeline=pipeline))
    (phase,) = [phase for (phase,) in made.phases if phase.place.on_towers]
    specs = [tf.TensorSpec(t.shape, t.dtype) for t, *_ in phase.takes]
    graph = tf.function(phase).get_concrete_function(specs).graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    kinds = collections.Counter(node.op for node in nodes)
    assert kinds["Tanh"] == (6 if recomputes else 3)
    assert kinds["TanhGrad"] == 3


def test_rows_are_looked_up_and_no_table_is_read():
    made = Partitioned(judge(words().train_step, SPEC))
    travels = [
        tensor
        for (phase,) in made.phases
        for tensor in [*(taken.tensor for taken in phase.takes), *phase.makes]
    ]
    assert [t for t in travels if t.shape.rank and t.shape[0] == ROWS] == []


def test_a_verdict_is_there_before_a_step():
    weights = tf.Variable([[1.0]])

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights))
        similar = tf.reduce_mean(tf.exp(tf.matmul(x, x, transpose_b=True)))
        return tape.gradient(loss, weights, similar)

    spec = tf.TensorSpec([None, 1])
    verdict = judge(step, spec, loss_placement="tower")
    assert "loss_placement='tower' asks; use 'auto'" in verdict.refused
    with pytest.raises(PartitionError, match="use 'auto'"):
        Partitioned(verdict)
    assert judge(step, spec).refused is None


@pytest.mark.parametrize("update", ["parameter_server", "replicated"])
def test_micro_batches_are_computed_in_turn(update):
    """The second begins when the first has ended, and their gradients are added."""
    name = f"in_turn_{update}"
    model = words(Own)
    model.name = name
    parallel = multi_gpu_model(model, 2, variable_update=update, micro_batches=2)
    parallel.compile("sgd", "mse")
    nodes = executed.run(lambda: parallel.fit(IDS, Y, batch_size=8, verbose=0), name)
    every = [node for each in nodes.values() for node in each]
    for tower in range(2):
        first, second = (
            {
                node.name
                for node in every
                if f"tower_{tower}/micro_batch_{m}/" in node.name
            }
            for m in range(2)
        )
        assert first and second
        after = [
            node.name
            for node in every
            if node.name in second
            and any(
                source.lstrip("^").partition(":")[0] in first for source in node.input
            )
        ]
        assert after
    plain = words()
    plain.compile("sgd", "mse")
    plain.fit(IDS, Y, batch_size=8, verbose=0)
    for mine, other in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


class Rival(Own):
    """Trains by an optimizer that no `compile` knows."""

    def train_step(self, data):
        """Trains on a batch."""
        loss, gradients = gradients_of(self, data)
        self.rival.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_the_state_of_another_optimizer_is_not_divided():
    model = words(Rival)
    model.rival = keras.optimizers.Adam()
    parallel = multi_gpu_model(
        model, 2, variable_update=Replicated(shard_optimizer_state=True)
    )
    parallel.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"expected `self\.optimizer` for"):
        parallel.fit(IDS, Y, verbose=0)


class Clipped(Own):
    """Gives its optimizer gradients that were made on one device."""

    def train_step(self, data):
        """Trains on a batch."""
        loss, gradients = gradients_of(self, data)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("check", [False, True])
def test_gradients_of_one_device_go_to_those_who_own_their_part(check):
    model, plain = words(Clipped), words(Clipped)
    parallel = multi_gpu_model(
        *(model, 3),
        variable_update=Replicated(shard_optimizer_state=True),
        check_numerics=check,
    )
    for each in (parallel, plain):
        each.compile(keras.optimizers.Adam(0.1, epsilon=1e-4))
        each.fit(IDS, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for mine, other in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


class Rate(keras.optimizers.schedules.LearningRateSchedule):
    """Is read from a variable that no model knows."""

    def __init__(self):
        self.value = tf.Variable(0.05, trainable=False)

    def __call__(self, step):
        return self.value * 1.0


class Fading(keras.optimizers.SGD):
    """Changes a variable that no optimizer lists."""

    def __init__(self):
        super().__init__(0.1)
        self.left = tf.Variable(1.0, trainable=False)

    def update_step(self, gradient, variable, learning_rate):
        """Updates a variable by less than before."""
        super().update_step(gradient * self.left, variable, learning_rate)
        self.left.assign(self.left * 0.9)


class Steps:
    """What a step may do beside computing and applying a gradient."""

    def given_weights(self, model, x, gradients):
        """Calls the model with other values of its weights."""
        three = [variable * 3.0 for variable in model.trainable_variables]
        outputs, _ = model.stateless_call(three, [], x)
        return gradients, {"others": tf.reduce_mean(outputs)}

    def assigned_before(self, model, x, gradients):
        """The optimizer updates what was assigned."""
        for variable in model.trainable_variables:
            variable.assign(variable * 0.5)
        return gradients, {}

    def a_sum(self, model, x, gradients):
        """Something else is added over the towers."""
        return gradients, {"sum": tf.reduce_sum(model(x))}

    def taken_twice(self, model, x, gradients):
        """A gradient changes a variable by hand, too."""
        variable = model.trainable_variables[-1]
        variable.assign_sub(0.1 * gradients[-1])
        return gradients, {}

    def variables(self, model, x, gradients):
        """Gradients are variables."""
        found = []
        for kept, gradient in zip(model.kept, gradients, strict=True):
            kept.assign(tf.convert_to_tensor(gradient) + 0.5 * kept)
            found.append(kept)
        return found, {}

    def jacobian(self, model, x, gradients):
        """Takes the gradient of each output by itself."""
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(model(x)), 0)
        dense = model.trainable_variables[1:]
        found = tape.jacobian(errors, dense, experimental_use_pfor=False)
        return [gradients[0], *(tf.reduce_sum(each, 0) for each in found)], {}

    def unconnected(self, model, x, gradients):
        """Takes a gradient for what it does not depend on, as zeros."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        dense = [*model.trainable_variables[1:], model.kept[1]]
        *found, none = tape.gradient(loss, dense, unconnected_gradients="zero")
        return [gradients[0], *found], {"none": tf.reduce_sum(none)}

    def values_of_variables(self, model, x, gradients):
        """Takes a gradient for what stands behind Keras's variables."""
        values = [variable.value for variable in model.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        return tape.gradient(loss, values), {}

    def sorted_rows(self, model, x, gradients):
        """The values of a sparse gradient are made on one device."""
        first, *others = gradients
        values = tf.sort(first.values, 0)
        first = tf.IndexedSlices(values, first.indices, first.dense_shape)
        return [first, *others], {}


STEPS = [name for name in vars(Steps) if not name.startswith("_")]
WAYS = {
    "parameter_server": {"variable_update": "parameter_server", "micro_batches": 2},
    "replicated": {"variable_update": "replicated"},
    "shards": {"variable_update": Replicated(shard_optimizer_state=True)},
    "tables": {"shard_embeddings": "rows"},
}


def stepping(step, optimizer, **options):
    """Trains a model whose step does something; returns its logs and weights."""

    class Does(Own):
        def train_step(self, data):
            loss, gradients = gradients_of(self, data)
            gradients, logs = step(self, data[0], gradients)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss, **logs}

    model = words(Does)
    model.kept = [tf.Variable(tf.zeros(v.shape)) for v in model.trainable_variables]
    parallel = multi_gpu_model(model, 3, **options) if options else model
    parallel.compile(optimizer)
    logs = [parallel.train_on_batch(IDS, Y, return_dict=True) for _ in range(3)]
    return logs, model.get_weights()


# Rows of a gradient stand in another order if they were looked up in shards.
ROWS_OF_STEPS = [
    pair for pair in itertools.product(STEPS, WAYS) if pair != ("sorted_rows", "tables")
]


@pytest.mark.parametrize(("name", "way"), ROWS_OF_STEPS)
def test_steps_are_those_of_one_device(name, way):
    step = getattr(Steps(), name)
    found, weights = stepping(step, keras.optimizers.SGD(0.1), **WAYS[way])
    wanted, others = stepping(step, keras.optimizers.SGD(0.1))
    for mine, other in zip(found, wanted, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
    for mine, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


@pytest.mark.parametrize("way", ["parameter_server", "replicated"])
@pytest.mark.parametrize(
    "optimizer", [lambda: keras.optimizers.Adam(Rate(), epsilon=1e-3), Fading]
)
def test_optimizers_may_have_variables_that_nobody_lists(optimizer, way, caplog):
    def step(model, x, gradients):
        return gradients, {}

    _, weights = stepping(step, optimizer(), **WAYS[way])
    _, others = stepping(step, optimizer())
    for mine, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    # What is only read is in no checkpoint's way.
    assert ("checkpoints do not contain it" in caplog.text) == (optimizer is Fading)


class Checked(keras.layers.Layer):
    """Hands on its inputs once they were found to be small."""

    def call(self, x):
        small = tf.debugging.assert_less(tf.abs(x), 100.0, "Too large.")
        with tf.control_dependencies([small]):
            return tf.identity(x)


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 1},
        {"gpus": 2},
        {"gpus": 2, "variable_update": "replicated"},
        {"gpus": 2, "stages": Stages(2, {"last": 1, ".*": 0})},
        {"gpus": 2, "variable_update": Replicated(shard_optimizer_state=True)},
    ],
    ids=str,
)
def test_nothing_is_updated_before_a_check_has_passed(options):
    inputs = keras.Input([4])
    hidden = keras.layers.Dense(4)(Checked()(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, name="last")(hidden))
    parallel = multi_gpu_model(model, **options)
    parallel.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    before, x = model.get_weights(), np.ones([8, 4], "float32")
    x[5] = 1000
    with pytest.raises(Exception, match="Too large"):
        parallel.train_on_batch(x, x[:, :1])
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
