"""Where stages run, and what travels between them: looked up in what was executed."""

import collections
import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests import executed
from towers import Stages, multi_gpu_model
from towers.builders import pieces
from towers.keras_adapter.graphs import function_definition
from towers.stages import schedule

pytestmark = pytest.mark.quick_one_in(2)

_numbers = itertools.count(5000)
CPU = [f"/device:CPU:{k}" for k in range(4)]
PLACEMENT = {"block_[01]": 0, "block_[23]": 1}
UNITS, ROWS = 8, 12
# What each layer does on the way forward, and what its gradient does.
FORWARD = {"MatMul", "BiasAdd", "Tanh"}
BACKWARD = {"MatMul", "BiasAddGrad", "TanhGrad"}


def blocks():
    sizes = UNITS, UNITS, UNITS, 3
    every = [
        layers.Dense(size, activation="tanh", name=f"block_{k}")
        for k, size in enumerate(sizes)
    ]
    inputs = keras.Input([6])
    return keras.Sequential([inputs, *every], name=f"blocks_{next(_numbers)}")


def batch():
    return np.ones([ROWS, 6], "float32"), np.ones([ROWS, 3], "float32")


def step(**options):
    """Trains once; returns the model, and what ran."""
    model = blocks()
    options |= {"stages": Stages(2, PLACEMENT), "micro_batches": 2}
    parallel = multi_gpu_model(model, **options)
    parallel.compile("adam", "mse")
    run = executed.run(lambda: parallel.train_on_batch(*batch()), model.name)
    return model, run


def called(nodes):
    """Yields what phases do: on which device, by which function, and its operations."""
    for device, found in nodes.items():
        for node in found:
            if "PartitionedCall" in node.op and node.name.startswith("tower_"):
                # TensorFlow makes a copy for each call.
                name = re.sub(r"_specialized_for_.*", "", node.attr["f"].func.name)
                yield device, name, function_definition(name).node_def


WAYS = [
    ("parameter_server", 1, "none"),
    ("parameter_server", 1, "layer"),
    ("replicated", 2, "none"),
]


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(("builder", "towers", "recompute"), WAYS)
def test_each_layer_is_where_its_stage_is(builder, towers, recompute):
    model, nodes = step(gpus=2 * towers, variable_update=builder, recompute=recompute)
    where = collections.defaultdict(lambda: collections.defaultdict(set))
    for device, _, operations in called(nodes):
        for operation in operations:
            if made := re.search(r"block_\d", operation.name):
                # Nothing in a phase is placed anywhere but where it is called.
                assert operation.device == ""
                backward = operation.name.startswith("gradient")
                where[made[0], backward][operation.op].add(device)
    for k in range(4):
        devices = {CPU[2 * tower + k // 2] for tower in range(towers)}
        for backward, wanted in (False, FORWARD), (True, BACKWARD):
            ran = where[f"block_{k}", backward]
            assert wanted <= ran.keys()
            assert all(ran[op] == devices for op in wanted)
    for k, layer in enumerate(model.layers):
        for weight in layer.variables:
            slots = [
                slot
                for slot in model.optimizer.variables
                if slot.path.endswith(
                    (f"block_{k}_{weight.name}_momentum", f"{weight.name}_velocity")
                )
                and f"block_{k}" in slot.path
            ]
            assert len(slots) == 2
            for variable in [weight, *slots]:
                assert variable.value.device.endswith(CPU[k // 2])


@pytest.mark.slow
def test_of_each_micro_batch_one_activation_travels_and_one_gradient():
    _, nodes = step(gpus=2)
    phases = collections.Counter(
        (source, target)
        for source, target, dtype, name in executed.transfers(nodes)
        # Times are float64.
        if re.match("tower_.*PartitionedCall", name) and dtype != tf.float64
    )
    # `test_phases.py` has what they are.
    assert phases == {(CPU[0], CPU[1]): 2, (CPU[1], CPU[0]): 2}


@pytest.mark.slow
def test_a_schedule_is_acted_out_once_for_all_towers(monkeypatch):
    acted_out, act_out = [], schedule._Step.act_out

    def noted(acting):
        acted_out.append((tuple(acting._turns), len(acting._ends)))
        return act_out(acting)

    monkeypatch.setattr(schedule._Step, "act_out", noted)
    schedule._acted_out.cache_clear()
    step(gpus=4, micro_batches=3)
    assert len(acted_out) == len({*acted_out}) > 0


@pytest.mark.slow
def test_a_guard_looks_at_gradients_where_they_are():
    _, nodes = step(gpus=2, check_numerics=True)
    joined = {
        device
        for device, found in nodes.items()
        for node in found
        if node.op == "ConcatV2" and node.name.startswith("check_numerics/")
    }
    assert joined == {*CPU[:2]}


class FailsOnZeros(layers.Layer):
    """As layers are measured on."""

    def call(self, x):
        return tf.debugging.check_numerics(1 / x, "Zeros came.")


def test_what_hinders_measuring_is_said(caplog):
    every = [FailsOnZeros(), layers.Dense(6), layers.Dense(6)]
    model = keras.Sequential([keras.Input([6]), *every])
    parallel = multi_gpu_model(model, 2, stages=2, strict=False)
    parallel.compile("sgd", "mse")
    x = np.ones([4, 6], "float32")
    parallel.train_on_batch(x, x)
    assert "as they cannot be measured: Zeros came." in caplog.text


def test_a_deterministic_run_measures_no_layers(caplog, monkeypatch):
    monkeypatch.setattr(pieces, "is_deterministic", lambda: True)
    parallel = multi_gpu_model(blocks(), 2, stages=2)
    parallel.compile("sgd", "mse")
    parallel.train_on_batch(*batch())
    assert "by their weights, as a deterministic run measures nothing." in caplog.text
    assert "Measured the layers" not in caplog.text


@pytest.mark.quick_one_in(1)
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"run_eagerly": True}, "so one device computes all of each batch"),
        ({"jit_compile": True}, "XLA does not compile model"),
    ],
)
def test_what_stages_leave_out_is_said(capsys, options, line):
    parallel = multi_gpu_model(blocks(), 2, stages=Stages(2, PLACEMENT))
    parallel.compile("sgd", "mse", **options)
    for _ in range(2):
        parallel.train_on_batch(*batch())
    assert capsys.readouterr().err.count(line) == 1


def test_asynchronous_is_refused():
    for options in ({"stages": 2}, {"micro_batches": 2}, {"recompute": "layer"}):
        with pytest.raises(ValueError, match="expected 'parameter_server' or"):
            multi_gpu_model(blocks(), 2, variable_update="asynchronous", **options)


class Looping(keras.Model):
    """Calls a layer in a loop."""

    def __init__(self):
        super().__init__()
        self.first, self.again = (
            layers.Dense(6, name="first"),
            layers.Dense(6, name="b"),
        )

    def call(self, x):
        return tf.while_loop(
            lambda k, _: k < 3, lambda k, x: (k + 1, self.again(x)), (0, self.first(x))
        )[1]


@pytest.mark.slow
def test_layers_in_a_loop_are_said(capsys):
    model = Looping()
    model(np.zeros([1, 6]))
    parallel = multi_gpu_model(model, 2, stages=Stages(2, {"first": 0, "b": 1}))
    parallel.compile("sgd", "mse")
    for rows in (4, 4, 3):
        parallel.train_on_batch(np.ones([rows, 6]), np.ones([rows, 6]))
    assert capsys.readouterr().err.count("calls b in a branch or a loop, of which") == 1
