"""Models with a `train_step` of their own: towers against plain Keras."""

import functools
import importlib
import json
import pathlib

import keras
import numpy as np
import pytest

import towers
from tests import hosts
from tests.exact import oracle
from tests.variants import slow

FOLDER = pathlib.Path(__file__).parents[2] / "examples/steps"
NAMES = sorted({path.stem for path in FOLDER.glob("*.py")} - {"common"})
# Ten steps: even ones, uneven ones, and some with fewer examples than towers.
SIZES = 7, 5, 8, 3, 6, 1, 8, 4, 2, 5
LIMIT = 1e-5
# Adam divides a gradient by its size, so with its own epsilon of 1e-7 what is only
# rounding would become a step.
EPSILON = 1e-4
# A gradient of a gradient, and a condition.
QUICK = ("maml", 2), ("accumulate", 3)
# On hosts, also of pairs of rows, and with a teacher.
OFTEN = "accumulate", "dcgan", "distillation", "maml", "simclr"


def run(name, wrap=lambda model: model):
    """Trains and evaluates an example; returns all that has to be equal, by name."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    example = importlib.import_module(f"examples.steps.{name}")
    model, data, logs = example.build(), _batches(example.data()), _Logs()
    for optimizer in _optimizers(model).values():
        if hasattr(optimizer, "epsilon"):
            optimizer.epsilon = EPSILON
    trained = wrap(model)
    trained.fit(data, verbose=0, callbacks=[logs])
    found = logs.found | _variables(model)
    if type(model).test_step is not keras.Model.test_step:
        results = trained.evaluate(data, return_dict=True, verbose=0)
        found |= {f"evaluate {key}": value for key, value in results.items()}
    return {key: np.array(value) for key, value in found.items()}


def _batches(rows):
    ends = np.cumsum(SIZES)
    cuts = [slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    flat = keras.tree.flatten(rows)
    parts = [[each[cut] for each in flat] for cut in cuts]
    return oracle.dataset([keras.tree.pack_sequence_as(rows, part) for part in parts])


class _Logs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.found = {}

    def on_train_batch_end(self, batch, logs=None):
        self.found |= {f"step {batch} {key}": value for key, value in logs.items()}


def _variables(model):
    # Of all networks, with the states of random generators.
    parts = {"model": model.variables}
    for name, optimizer in _optimizers(model).items():
        parts[name] = optimizer.variables
    for metric in model.metrics:
        parts[f"metric {metric.name}"] = metric.variables
    return {
        f"{part} {i} {variable.path}": variable.value
        for part, variables in parts.items()
        for i, variable in enumerate(variables)
    }


def _optimizers(model):
    found = vars(model).items()
    return {name: each for name, each in found if isinstance(each, keras.Optimizer)}


@functools.lru_cache(maxsize=1)
def one_device(name):
    return run(name)


def apart(ours, theirs):
    each = oracle.differences(ours, theirs)
    where = max(each, key=each.get)
    return each[where], where


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        case if case in QUICK else slow(*case)
        for case in [(name, gpus) for name in NAMES for gpus in (2, 3)]
    ],
)
def test_towers_equal_one_device(name, gpus):
    ours = run(name, functools.partial(towers.multi_gpu_model, gpus=gpus))
    difference, where = apart(ours, one_device(name))
    assert difference <= LIMIT, where


@pytest.mark.parametrize(
    "name",
    # SimCLR compares pairs, so its numbers are others.
    [
        name if name == "accumulate" else slow(name)
        for name in NAMES
        if name != "simclr"
    ],
)
def test_loss_placement_changes_only_what_lets_examples_meet(name):
    wrap = functools.partial(towers.multi_gpu_model, gpus=3, loss_placement="tower")
    difference, where = apart(run(name, wrap), one_device(name))
    assert difference <= LIMIT, where


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("name", "gpus", "algorithm"),
    [
        case if case[:2] in QUICK else slow(*case)
        for name in NAMES
        for case in [(name, 2, "ring"), (name, 3, "device")]
    ],
)
def test_copies_on_towers_equal_one_device(name, gpus, algorithm):
    options = {"variable_update": "replicated", "all_reduce_alg": algorithm}
    ours = run(name, functools.partial(towers.multi_gpu_model, gpus=gpus, **options))
    difference, where = apart(ours, one_device(name))
    assert difference <= LIMIT, where


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(
    ("name", "packed"),
    [
        *((name, None) if name in dict(QUICK) else slow(name, None) for name in NAMES),
        # Where home is on another GPU, values travel in one piece.
        ("accumulate", True),
        slow("dcgan", True),
        slow("sam", True),
    ],
)
def test_a_single_asynchronous_tower_equals_one_device(name, packed):
    options = {"gpus": 1, "variable_update": "asynchronous", "packed": packed}
    ours = run(name, functools.partial(towers.multi_gpu_model, **options))
    difference, where = apart(ours, one_device(name))
    assert difference <= LIMIT, where


@pytest.mark.parametrize(
    ("layout", "names", "given", "update"),
    [
        # A condition; rows in blocks, random numbers and two optimizers.
        ((1, 2), ("accumulate",), "whole", "parameter_server"),
        slow((1, 2), ("accumulate", "dcgan"), "whole", "parameter_server"),
        slow((1, 2), ("accumulate", "dcgan"), "whole", "replicated"),
        slow((1, 1), NAMES, "whole", "parameter_server"),
        slow((1, 2), OFTEN, "rows", "parameter_server"),
        slow((1, 2), NAMES, "rows", "parameter_server"),
    ],
    ids=str,
)
def test_hosts_equal_one_device(layout, names, given, update, tmp_path):
    file = tmp_path / "found.json"
    arguments = ",".join(names), given, update, file
    hosts.run("tests.exact.own_steps_on_hosts", layout, *arguments)
    found = json.loads(file.read_text())
    assert found.keys() == {*names}
    for name, apart_by in found.items():
        assert not isinstance(apart_by, str) and apart_by[0] <= LIMIT, (name, apart_by)
