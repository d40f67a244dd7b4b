"""Copies of the variables on all towers: equal to one another, and to one device."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import executed, oracle
from tests.valued import valued
from tests.variants import slow
from towers import multi_gpu_model
from towers.model import fit_call

pytestmark = pytest.mark.quick_one_in(2)

TOWERS = "/device:CPU:0", "/device:CPU:1", "/device:CPU:2"
FEATURES = 6
_numbers = itertools.count(1000)


def _data(rows=21):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, FEATURES)).astype("float32")
    return x, random.normal(size=(rows, 3)).astype("float32")


@functools.cache
def _batches(rows=21, size=8):
    """The data in order."""
    return tf.data.Dataset.from_tensor_slices(_data(rows)).batch(size)


def _model(name=None):
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers], name=name)


def _sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def _copied(model, towers=2, **options):
    return multi_gpu_model(model, gpus=towers, **valued("replicated", **options))


def _fit(model, callbacks=(), epochs=2, rows=21, batch_size=8, **options):
    # Three batches, the last one of 5 rows.
    data = _batches(rows, batch_size)
    callbacks = list(callbacks)
    options = {"shuffle": False, "verbose": 0} | options
    return model.fit(data, epochs=epochs, callbacks=callbacks, **options)


def _state(model):
    return [v.value.numpy() for v in [*model.variables, *model.optimizer.variables]]


def _assert_copies_are_equal(parallel):
    """Every tower has, on its device, the bits of the model's own variables."""
    builder = parallel.builder
    kept = builder.pieces.store
    assert len(kept._copies) == len(builder.plan.devices) - 1
    originals = kept._originals
    assert len(originals) > len(parallel.trainable_variables)
    for device, copies in zip(builder.plan.devices[1:], kept._copies, strict=True):
        for variable, copy in zip(originals, copies, strict=True):
            assert copy.device.endswith(device)
            assert copy.dtype == variable.value.dtype
            ours, own = copy.numpy(), variable.value.numpy()
            assert ours.tobytes() == own.tobytes(), variable.path


@fit_call.changes_no_variable
class _Looks(keras.callbacks.Callback):
    """Compares the copies, which are not made anew for its sake.

    It does so before the end of training, when some optimizers write averages.
    """

    def __init__(self, trained):
        super().__init__()
        self._trained = trained

    def on_epoch_end(self, epoch, logs=None):
        _assert_copies_are_equal(self._trained)


def _trained(towers, optimizer, make=_model, between=None, fit=None, **options):
    """Trains on towers, or with 0 on one device; returns all numbers."""
    model = make()
    trained = _copied(model, towers) if towers else model
    # Nothing is traced for the one device.
    eager = {"jit_compile": False, "run_eagerly": not towers}
    trained.compile(optimizer(), "mse", **eager, **options)
    history = _fit(trained, **fit() if fit else {}).history
    if between is not None:
        between(model, trained)
    # What has changed since the last step reaches the copies before the next.
    looks = [_Looks(trained)] if towers > 1 else []
    history["last"] = _fit(trained, looks, epochs=1, rows=11).history["loss"]
    return [*history.values(), *_state(model)]


@functools.cache
def _one_device(*args, **options):
    return _trained(0, *args, **options)


def _twice(*args, towers=2, **options):
    """Trains on one device and on towers; returns the largest difference."""
    expected = _one_device(*args, **options)
    return oracle.largest_difference(_trained(towers, *args, **options), expected)


@functools.cache
def _pair(optimizer, steps):
    """One device and two towers, which are traced once for all stories."""
    made = []
    for wrap in (lambda model: model, _copied):
        model = _model()
        trained = wrap(model)
        trained.compile(
            optimizer(), "mse", steps_per_execution=steps, jit_compile=False
        )
        model.optimizer.build(model.trainable_variables)
        made.append((model, trained, _state(model)))
    return made


def _told(story, optimizer=_sgd, steps=1):
    """Tells one device and towers the same; returns the largest difference.

    The story gets the user's model, and what trains it. What has changed since its last
    step has to reach the copies before the next.
    """
    found = []
    for model, trained, start in _pair(optimizer, steps):
        variables = [*model.variables, *model.optimizer.variables]
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        story(model, trained)
        looks = [_Looks(trained)] if trained is not model else []
        losses = _fit(trained, looks, epochs=1, rows=11).history["loss"]
        found.append([*losses, *_state(model)])
    return oracle.largest_difference(found[1], found[0])


# Whatever the optimizer keeps.


@keras.saving.register_keras_serializable("test_replicated")
class SignedMean(keras.optimizers.Optimizer):
    """A user's own: steps by the sign of a moving mean, and counts them."""

    def build(self, variables):
        super().build(variables)
        self._means = [
            self.add_variable_from_reference(v, name="mean") for v in variables
        ]
        self.seen = self.add_variable((), "zeros", "int32", name="seen")

    def update_step(self, gradient, variable, learning_rate):
        mean = self._means[self._get_variable_index(variable)]
        self.assign(mean, 0.9 * mean + 0.1 * gradient)
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * keras.ops.tanh(mean))

    def apply(self, gradients, variables=None):
        super().apply(gradients, variables)
        self.seen.assign_add(1)


def _schedule():
    return keras.optimizers.schedules.CosineDecay(0.1, 12, warmup_steps=3)


def _of_all_kinds():
    optimizer = keras.optimizers.AdamW(
        0.01,
        weight_decay=0.1,
        global_clipnorm=0.1,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=2,
        gradient_accumulation_steps=2,
    )
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=3)


# Others are in the table of exact cases.
OPTIMIZERS = {
    "ema": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4
    ),
    "own": lambda: SignedMean(0.1),
    "of all kinds": _of_all_kinds,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_one_device(name):
    # Adam and its kin divide by the root of what is next to nothing.
    assert _twice(OPTIMIZERS[name]) < 1e-4


@functools.cache
def _expected(sizes=(8,), epochs=2):
    """What plain Keras makes of the model, with batches of each size in turn."""
    model = _model()
    model.compile(_sgd(), "mse", run_eagerly=True)
    for size in sizes:
        _fit(model, epochs=epochs, batch_size=size)
    return _state(model)


# On CPUs, all other tests add on the CPU; the device's sum is looked at below.
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["cpu", "device", "ring"])
def test_all_algorithms_train_alike(algorithm):
    """Also where some towers are idle."""
    model = _model()
    trained = _copied(model, 3, all_reduce=algorithm)
    trained.compile(_sgd(), "mse", jit_compile=False)
    for size in (8, 2):
        _fit(trained, epochs=1, batch_size=size)
        _assert_copies_are_equal(trained)
    expected = _expected((8, 2), epochs=1)
    assert oracle.largest_difference(_state(model), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"steps_per_execution": 2}, {"jit_compile": True}],
    ids=str,
)
def test_however_it_is_compiled(options):
    model = _model()
    trained = _copied(model)
    trained.compile(_sgd(), "mse", **options)
    _fit(trained)
    if "run_eagerly" not in options:
        # There, one device computes all, and nobody needs a copy.
        _assert_copies_are_equal(trained)
    assert oracle.largest_difference(_state(model), _expected()) < 1e-5


def _scaled(scale):
    return keras.optimizers.LossScaleOptimizer(
        _sgd(), initial_scale=scale, dynamic_growth_steps=4
    )


@pytest.mark.slow
def test_overflows_are_those_of_the_parameter_server():
    """Steps are skipped until the scale has come down, on all towers alike."""
    keras.config.set_dtype_policy("mixed_float16")
    found = []
    for builder in ("parameter_server", "replicated"):
        model = _model()
        trained = multi_gpu_model(model, gpus=2, variable_update=builder)
        trained.compile(_scaled(2.0**20), "mse", jit_compile=False)
        _fit(trained)
        found.append(_state(model))
    assert 0 < int(model.optimizer.inner_optimizer.iterations) < 6
    _assert_copies_are_equal(trained)
    assert oracle.largest_difference(found[1], found[0]) < 1e-5


def _normalised(name=None):
    keras.utils.set_random_seed(7)
    body = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization()]
    body.append(keras.layers.Dense(3))
    return keras.Sequential([keras.Input((FEATURES,)), *body], name=name)


@pytest.mark.slow
def test_state_is_that_of_the_parameter_server():
    found = []
    for builder in ("parameter_server", "replicated"):
        model = _normalised()
        trained = multi_gpu_model(model, gpus=2, variable_update=builder)
        trained.compile(_sgd(), "mse")
        _fit(trained)
        found.append(_state(model))
    _assert_copies_are_equal(trained)
    assert oracle.largest_difference(found[1], found[0]) < 1e-5


# Changes from outside.


class _Now(keras.callbacks.Callback):
    """Changes the model at one kind of moment: at the second one, the third, ..."""

    def __init__(self, moment, changes):
        super().__init__()
        setattr(self, f"on_{moment}", self._next)
        self._changes = iter([lambda model: None, *changes])

    def _next(self, *_, logs=None):
        next(self._changes, lambda model: None)(self.model)


def _halve(model):
    model.set_weights([weight / 2 for weight in model.get_weights()])


def _assign_one(model):
    model.layers[0].kernel.assign(keras.ops.ones_like(model.layers[0].kernel))


def _add(model):
    model.layers[0].bias.assign_add(keras.ops.ones(8))
    model.layers[-1].bias.value.assign_sub(tf.ones(3))


def _forget_momenta(model):
    for variable in model.optimizer.variables[2:]:
        variable.assign(keras.ops.zeros_like(variable))


def _slower(model):
    model.optimizer.learning_rate = 0.01


def _count(model):
    model.optimizer.iterations.assign(100)


def _scatter(model):
    # Past Keras and the variable's `assign`, as a checkpoint is restored.
    model.layers[0].bias.value.scatter_nd_update([[1]], [5.0])


CHANGES = [_halve, _assign_one, _add, _scatter, _forget_momenta, _slower]
MOMENTS = ["epoch_begin", "epoch_end", "train_batch_begin", "train_batch_end"]
WHEN = [(moment, CHANGES, 1) for moment in MOMENTS]
WHEN += [slow(moment, [_halve], 2) for moment in MOMENTS[2:]]


def _scheduled():
    """An optimizer that hangs on the count of its steps."""
    return keras.optimizers.SGD(_schedule(), momentum=0.9)


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize(("moment", "changes", "steps"), WHEN)
def test_changes_in_callbacks_reach_all_towers(moment, changes, steps):
    """Each at a moment of its own: a copy that missed one spoils the steps after it."""

    def story(model, trained):
        callbacks = [_Now(moment, changes)]
        if "epoch" in moment:
            _fit(trained, callbacks, epochs=len(changes) + 1, rows=11)
        else:
            _fit(trained, callbacks, epochs=3)

    assert _told(story, steps=steps) < 1e-5


@pytest.mark.parametrize("kind", [keras.callbacks.Callback, keras.callbacks.History])
def test_a_function_of_a_callback_s_own_reaches_all_towers(kind):
    def story(model, trained):
        callback = kind()
        callback.on_train_batch_end = lambda batch, logs: _halve(callback.model)
        _fit(trained, [callback], epochs=1)

    assert _told(story) < 1e-5


def test_a_callback_in_a_list_of_keras_s_reaches_all_towers():
    def story(model, trained):
        callbacks = [_Now("train_batch_end", [_halve])]
        _fit(trained, [keras.callbacks.CallbackList(callbacks)], epochs=1)

    assert _told(story) < 1e-5


def test_changes_between_fits_reach_all_towers():
    def story(model, trained):
        for change in CHANGES:
            _fit(trained, epochs=1, rows=11)
            change(model)

    assert _told(story) < 1e-5


def test_the_count_of_steps_reaches_all_towers():
    def in_a_callback(model, trained):
        _fit(trained, [_Now("train_batch_end", [_count])], epochs=1)

    def between_fits(model, trained):
        _fit(trained, epochs=1)
        _count(model)

    assert _told(in_a_callback, _scheduled) < 1e-5
    assert _told(between_fits, _scheduled) < 1e-5


def test_changes_between_batches_reach_all_towers():
    x, y = _data(11)

    def story(model, trained):
        # At the end of training, and then between steps.
        at_the_end = keras.callbacks.LambdaCallback(
            on_train_end=lambda logs: _halve(model)
        )
        _fit(trained, [at_the_end], epochs=1)
        for change in (_halve, _assign_one, _forget_momenta):
            trained.train_on_batch(x, y)
            change(model)
        trained.train_on_batch(x, y)
        if trained is not model:
            _assert_copies_are_equal(trained)

    assert _told(story) < 1e-5


def test_weights_of_a_file_reach_all_towers(tmp_path):
    path = tmp_path / "other.weights.h5"
    other = _model()
    _halve(other)
    other.save_weights(path)

    def story(model, trained):
        _fit(trained, epochs=1)
        trained.load_weights(path)

    assert _told(story) < 1e-5


def test_restored_weights_reach_all_towers():
    def story(model, trained):
        # It never gets better than at first, and so goes back.
        stop = keras.callbacks.EarlyStopping(
            "loss", patience=1, mode="max", restore_best_weights=True
        )
        assert len(_fit(trained, [stop], epochs=5).epoch) < 5

    assert _told(story) < 1e-5


def test_learning_rate_callbacks():
    def story(model, trained):
        rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=10)
        _fit(trained, [rate, plateau], epochs=3)

    assert _told(story) < 1e-5


@pytest.mark.slow
def test_swapped_weights():
    """It evaluates with the averages, and goes on with the weights."""

    def fit():
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        return {"callbacks": [swap], "epochs": 3, "validation_data": _batches(7)}

    assert _twice(lambda: keras.optimizers.SGD(0.1, use_ema=True), fit=fit) < 1e-5


def test_callbacks_read_current_values():
    seen = []

    def story(model, trained):
        def note(batch, logs):
            seen.extend(v.value.numpy() for v in model.trainable_variables)

        read = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        _fit(trained, [read], epochs=1)

    assert _told(story) < 1e-5
    half = len(seen) // 2
    assert half == 3 * 4  # of three batches
    assert oracle.largest_difference(seen[half:], seen[:half]) < 1e-5


def test_evaluate_and_predict_in_the_middle():
    x, y = _data(11)
    rows = tf.data.Dataset.from_tensor_slices(x).batch(8)

    def story(model, trained):
        _fit(trained, validation_data=_batches(11))
        before = _state(model)[: len(model.variables)]
        loss = trained.evaluate(_batches(11), verbose=0)
        outputs = trained.predict(rows, verbose=0)
        np.testing.assert_allclose(loss, np.mean((outputs - y) ** 2), rtol=1e-5)
        for ours, own in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(ours.value, own)

    assert _told(story) < 1e-5


@pytest.mark.slow
def test_saved_and_loaded(tmp_path):
    path = tmp_path / "model.keras"
    model = _model()
    trained = _copied(model)
    trained.compile(_sgd(), "mse")
    _fit(trained)
    trained.save(path)
    loaded = keras.saving.load_model(path)
    for ours, own in zip(_state(loaded), _state(model), strict=True):
        np.testing.assert_array_equal(ours, own)
    again = _copied(loaded)
    _fit(again)
    _fit(trained)
    _assert_copies_are_equal(again)
    assert oracle.largest_difference(_state(loaded), _state(model)) < 1e-6


@pytest.mark.slow
def test_compiled_again():
    def between(model, trained):
        eager = {"jit_compile": False, "run_eagerly": trained is model}
        trained.compile(keras.optimizers.Adam(0.01), "mae", **eager)

    assert _twice(_sgd, between=between) < 1e-5


def test_the_model_itself_trains_in_between():
    def story(model, trained):
        _fit(trained, epochs=1)
        # On towers, `model` is the plain model that they share.
        _fit(model, epochs=1)

    assert _told(story) < 1e-5


# Where things are.


@functools.cache
def _executed(make=_model, towers=TOWERS[:2], **options):
    name = f"replicated_{next(_numbers)}"
    model = make(name)
    parallel = _copied(model, towers, **options)
    parallel.compile(_sgd(), "mse")
    return executed.run(lambda: parallel.train_on_batch(*_data(8)), name)


@pytest.mark.parametrize("algorithm", ["cpu", "device", "ring"])
def test_only_gradients_travel_and_in_one_piece(algorithm):
    towers = TOWERS[1:]
    nodes = _executed(towers=towers, all_reduce=algorithm)
    sent = executed.transfers(nodes)
    first, second = towers
    between = [(a, b, name) for a, b, _, name in sent if "reduce" in name]
    merge = {"cpu": TOWERS[0], "device": first}.get(algorithm)
    expected = {
        "cpu": {(first, merge): 1, (second, merge): 1, (merge, first): 1},
        "device": {(second, first): 1, (first, second): 1},
        # A chunk there to be added, a sum back.
        "ring": {(second, first): 2, (first, second): 2},
    }[algorithm]
    if algorithm == "cpu":
        expected[merge, second] = 1
    found = {}
    for a, b, _ in between:
        found[a, b] = found.get((a, b), 0) + 1
    assert found == expected
    # Nothing else goes out to the second tower but its rows, and the learning rate.
    rest = [n for _, b, _, n in sent if b == second and "reduce" not in n]
    assert sum("ReadVariableOp" in name for name in rest) == 1
    assert len(rest) <= 4, rest


def test_packed_values_are_those_that_have_no_copy():
    """A tower has the weights; moving averages come from the first one."""
    nodes = _executed(_normalised, packed=True)
    (packed,) = (n for n in nodes[TOWERS[0]] if n.name == "tower_1/read/concat")
    # Each with the zeros behind it.
    assert packed.attr["N"].i == 4


@pytest.mark.slow
def test_one_transfer_for_each_type():
    def half(name):
        keras.utils.set_random_seed(7)
        body = [keras.layers.Dense(8, dtype="float64") for _ in range(2)]
        body += [keras.layers.Dense(3), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((FEATURES,)), *body], name=name)

    nodes = _executed(half, all_reduce="device")
    sent = [each for each in executed.transfers(nodes) if "reduce" in each[3]]
    kinds = sorted(dtype.name for source, _, dtype, _ in sent if source == TOWERS[1])
    assert kinds == ["float32", "float64"]
    kinds = sorted(dtype.name for source, _, dtype, _ in sent if source == TOWERS[0])
    assert kinds == ["float32", "float64"]


def test_every_tower_updates_its_own():
    nodes = _executed(towers=TOWERS[1:], all_reduce="cpu")
    writes = {
        device: sum(
            ("Assign" in n.op or "ResourceApply" in n.op)
            and not n.name.startswith("phases")
            for n in each
        )
        for device, each in nodes.items()
    }
    # Two layers: four variables with their momenta, the step count, the learning rate.
    assert writes[TOWERS[2]] == 6
    # The first has the metric's two, and no learning rate to copy.
    assert writes[TOWERS[1]] == 7
    reads = {
        d: [n for n in each if n.op == "ReadVariableOp"] for d, each in nodes.items()
    }
    assert len(reads[TOWERS[2]]) >= 4


def test_a_home_elsewhere_is_refused():
    with pytest.raises(ValueError, match="expected one of them, so leave cpu_reloc"):
        _copied(_model(), TOWERS[1:], cpu_relocation=True)


def test_home_is_the_first_tower():
    model = _model()
    parallel = _copied(model, TOWERS[1:])
    assert parallel.builder.plan.home == TOWERS[1]
    parallel.compile(_sgd(), "mse")
    parallel.train_on_batch(*_data(8))
    for variable in [*model.variables, *model.optimizer.variables]:
        assert variable.value.device.endswith(TOWERS[1]), variable.path
    _assert_copies_are_equal(parallel)


def test_relocation_to_the_first_tower_is_no_contradiction():
    assert _copied(_model(), TOWERS, cpu_relocation=True).builder.plan.home == TOWERS[0]


def test_a_model_built_elsewhere_is_moved():
    with tf.device("/device:CPU:3"):
        model = _model()
    weights = model.get_weights()
    _copied(model, TOWERS)
    for variable, weight in zip(model.variables, weights, strict=True):
        assert variable.value.device.endswith(TOWERS[0])
        np.testing.assert_array_equal(variable.value, weight)


def test_nccl_is_refused_without_gpus():
    with pytest.raises(ValueError, match="NCCL needs a whole GPU for each tower"):
        _copied(_model(), TOWERS, all_reduce="nccl")


@pytest.mark.parametrize("name", [slow("predict"), "evaluate"])
def test_before_any_training_there_are_no_copies(name):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    parallel = multi_gpu_model(model, TOWERS, variable_update="replicated")
    parallel.compile("sgd", "mse")
    model.compile("sgd", "mse", run_eagerly=True)
    x, y = np.ones((8, 6), "float32"), np.ones((8, 3), "float32")
    arguments = (x,) if name == "predict" else (x, y)
    found = getattr(parallel, name)(*arguments, verbose=0)
    expected = getattr(model, name)(*arguments, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
