"""Parameters in parts, gathered once in a step: what towers have, and what they add.

That no number changes is shown by tests/exact.
"""

import collections

import keras
import numpy as np
import pytest

from tests import executed, oracle
from tests.valued import valued
from tests.variants import slow
from towers import multi_gpu_model
from towers.layers import parameters, sharded
from towers.numerics.errors import NotFiniteStep
from towers.tower.errors import ModelError

pytestmark = pytest.mark.quick_one_in(2)

TOWERS = 4
ROWS, FEATURES = 12, 40


def _model(name=None, units=(32, 24, 3)):
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(n, "tanh") for n in units]
    return keras.Sequential([keras.Input((FEATURES,)), *layers], name=name)


def _data():
    random = np.random.default_rng(0)
    x = random.normal(size=(2 * ROWS, FEATURES)).astype("float32")
    return x, random.normal(size=(2 * ROWS, 3)).astype("float32")


def _adam(**options):
    return keras.optimizers.Adam(0.01, epsilon=1e-3, **options)


def _wrap(model, towers=TOWERS, **options):
    return multi_gpu_model(
        model,
        gpus=towers,
        **valued("replicated", shard_optimizer_state=True, **options),
    )


def _fit(model, epochs=1, **options):
    options = {"batch_size": ROWS, "shuffle": False, "verbose": 0} | options
    return model.fit(*_data(), epochs=epochs, **options)


def _trained(optimizer=_adam, wrap=_wrap, make=_model, **options):
    model = make()
    trained = wrap(model)
    trained.compile(optimizer(), "mse", **options)
    _fit(trained)
    return model, trained


def _state(model):
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def _bytes(model, builder):
    """How many bytes of parameters and optimizer state each device has."""
    found = collections.Counter()
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        for place in sharded.places(variable):
            found[place.device] += place.numpy().nbytes
    for copy in builder.copies():
        found[copy.device] += copy.numpy().nbytes
    return [*found.values()]


@pytest.fixture(autouse=True)
def _no_variable_is_too_small(monkeypatch):
    monkeypatch.setattr(parameters, "MIN_BYTES", 1)


def test_parameters_and_slots_are_a_fourth_on_each_tower():
    units = (512, 256, 3)
    sizes = {}
    for shard in (False, True):
        model = _model(units=units)
        parallel = multi_gpu_model(
            model, TOWERS, **valued("replicated", shard_optimizer_state=shard)
        )
        parallel.compile("adam", "mse")
        parallel.builder.create_variables(tuple(part[:ROWS] for part in _data()))
        sizes[shard] = _bytes(model, parallel.builder)
        assert len(sizes[shard]) == TOWERS
    # Three numbers of a fourth of the parameters, instead of all.
    assert max(sizes[True]) <= 0.252 * min(sizes[False])


@pytest.mark.parametrize("packed", [False, slow(True)])
def test_no_device_adds_more_than_its_part_of_the_gradients(packed):
    name = f"in_parts_{packed}"
    model = _model(name, units=(64, 48, 32, 3))
    parallel = _wrap(model, packed=packed)
    parallel.compile(keras.optimizers.SGD(0.1), "mse")
    parallel.builder.create_variables(_data())
    nodes = executed.run(lambda: parallel.train_on_batch(*_data()), name)
    sizes = executed.sizes(nodes, parallel.builder.graph)
    whole = sum(v.numpy().nbytes for v in model.trainable_variables)
    added = {
        device: sum(
            sizes[node.name]
            for node in each
            if node.name.startswith("reduce/") and node.op in ("AddN", "AddV2")
        )
        for device, each in nodes.items()
    }
    added = [size for size in added.values() if size]
    assert len(added) == TOWERS
    # Of each variable, one device has a row, or a number, more than another one.
    assert max(added) <= whole / TOWERS + 4 * (64 + 48 + 32 + 3 + 4)
    assert sum(added) >= whole


def test_towers_gather_each_parameter_once_in_a_step():
    name = "gathered_once"
    model = _model(name)
    parallel = _wrap(model, packed=False)
    parallel.compile(keras.optimizers.SGD(0.1), "mse")
    data = tuple(part[:ROWS] for part in _data())
    parallel.builder.create_variables(data)
    nodes = executed.run(lambda: parallel.train_on_batch(*data), name)
    kinds = collections.Counter(
        (device, node.op)
        for device, each in nodes.items()
        for node in each
        if "gather" in node.name and node.op.startswith("Concat")
    )
    assert {*kinds.values()} == {len(model.trainable_variables)}
    assert len(kinds) == TOWERS


def _plain(model):
    return model


def _parameter_server(model):
    return multi_gpu_model(model, 2)


def _whole_copies(model):
    return multi_gpu_model(model, 3, variable_update="replicated")


def _two_towers(model):
    return _wrap(model, towers=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "then",
    [
        _two_towers,
        _plain,
        _parameter_server,
        _whole_copies,
        _wrap,
    ],
)
def test_a_saved_model_continues_with_another_number_of_towers_or_without(
    then, tmp_path
):
    def continued(first, second):
        model, _ = _trained(wrap=first)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_equal(_state(loaded), _state(model))
        again = second(loaded)
        _fit(again)
        return _state(loaded)

    ours, theirs = continued(_wrap, then), continued(_plain, _plain)
    assert oracle.largest_difference(ours, theirs) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "then",
    [
        _parameter_server,
        _plain,
        _whole_copies,
        _two_towers,
    ],
)
def test_the_same_model_goes_on_otherwise(then):
    def twice(first, second):
        model, _ = _trained(wrap=first)
        other = second(model)
        _fit(other)
        return _state(model)

    ours, theirs = twice(_wrap, then), twice(_plain, _plain)
    assert oracle.largest_difference(ours, theirs) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_stages_have_parts_of_their_own(micro_batches):
    placement = {"dense": 0, ".*": 1}

    def wrap(model):
        stages = {"stages": 2, "placement": placement, "micro_batches": micro_batches}
        return _wrap(model, **stages)

    model, _ = _trained(wrap=wrap)
    slots = [v for v in model.optimizer.variables if "momentum" in v.path]
    assert len(slots) == len(model.variables)
    for variable in slots:
        stage = int("dense_1" in variable.path or "dense_2" in variable.path)
        places = {place.device[-1] for place in sharded.places(variable)}
        assert places <= {str(stage), str(stage + 2)}


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing():
    model = _model()
    parallel = _wrap(model, check_numerics=True)
    parallel.compile(_adam(), "mse")
    x, y = _data()
    parallel.train_on_batch(x[:ROWS], y[:ROWS])
    before = _state(model)
    # The last tower meets it.
    x[ROWS - 1] = np.inf
    with pytest.raises(NotFiniteStep, match="on tower 3"):
        parallel.train_on_batch(x[:ROWS], y[:ROWS])
    np.testing.assert_equal(_state(model), before)


def _with_tables():
    keras.utils.set_random_seed(7)
    ids = keras.Input((3,), dtype="int32")
    found = [keras.layers.Embedding(n, 8)(ids) for n in (50, 20)]
    x = keras.layers.Flatten()(keras.layers.Concatenate()(found))
    return keras.Model(ids, keras.layers.Dense(3)(keras.layers.Dense(32)(x)))


@pytest.mark.parametrize(("way", "axis"), [("rows", 0), ("columns", 1)])
def test_tables_keep_their_own_shards(way, axis):
    model = _with_tables()
    parallel = _wrap(model, shard_embeddings=way)
    parallel.compile(_adam(), "mse")
    ids = np.zeros((ROWS, 3), "int32")
    parallel.train_on_batch(ids, np.zeros((ROWS, 3), "float32"))
    for variable in [*model.variables, *model.optimizer.variables]:
        if "embeddings" in variable.path:
            assert sharded.of(variable).axis == axis
            assert len(sharded.places(variable)) == TOWERS
    slots = [v for v in model.optimizer.variables if "kernel" in v.path]
    assert any(sharded.of(v) for v in slots)


class Idle(keras.layers.Layer):
    """Has a variable that it does not use."""

    def build(self, shape):
        self.idle = self.add_weight(shape=(FEATURES,), name="idle")

    def call(self, x):
        return x


def test_keras_warns_once_of_a_variable_without_a_gradient():
    model = keras.Sequential(
        [keras.Input((FEATURES,)), Idle(name="layer"), keras.layers.Dense(3)],
        name="warned",
    )
    parallel = _wrap(model)
    parallel.compile(_adam(), "mse")
    with pytest.warns(UserWarning, match=r"variables \['warned/layer/idle'\] when"):
        _fit(parallel)
    assert sharded.of(model.layers[0].idle) is not None


class OfAllVariables(keras.optimizers.SGD):
    """Sees the gradients of all variables."""

    def apply(self, grads, trainable_variables=None):
        return super().apply(grads, trainable_variables)


class WithATotal(keras.optimizers.SGD):
    """Keeps a number that all variables have a part in."""

    def build(self, variables):
        super().build(variables)
        self.total = self.add_variable((), name="total")


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [(OfAllVariables, "a `apply` of its own"), (WithATotal, "a variable 'total'")],
)
def test_optimizers_that_may_look_at_all_variables_are_refused(optimizer, said):
    parallel = _wrap(_model())
    parallel.compile(optimizer(0.1), "mse")
    with pytest.raises(ModelError, match=said):
        _fit(parallel)
