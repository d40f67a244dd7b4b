"""Keras's published examples with own steps, in their forms, against plain Keras.

Each is wrapped before it is compiled, and after.
"""

import functools

import keras
import numpy as np
import pytest

import towers
from tests.exact import oracle
from tests.exact.published import EXAMPLES
from tests.variants import slow

# Even parts, uneven ones, and fewer examples than towers.
SIZES = 7, 8, 2, 3
LIMIT = 1e-5
QUICK = "DCGAN", "gradient centralization", "Siamese network"


@functools.lru_cache(maxsize=1)
def _one_device(name):
    return _run(name)


def _run(name, gpus=None, compiled_first=False):
    """Trains an example, and tests it if it can; returns all numbers, by name."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    example = EXAMPLES[name]
    model, arguments = example.make(), example.compile()
    trained = model
    if gpus and not compiled_first:
        trained = towers.multi_gpu_model(model, gpus=gpus)
    trained.compile(**arguments)
    if gpus and compiled_first:
        trained = towers.multi_gpu_model(model, gpus=gpus)
    data = _batches(example.data())
    history = trained.fit(data, epochs=2, verbose=0).history
    found = {f"history {key}": value for key, value in history.items()}
    if example.evaluates:
        results = trained.evaluate(data, return_dict=True, verbose=0)
        found |= {f"evaluate {key}": value for key, value in results.items()}
    parts = {"model": model.variables}
    for key, value in arguments.items():
        for i, each in enumerate(keras.tree.flatten(value)):
            if isinstance(each, keras.Optimizer):
                parts[f"{key} {i}"] = each.variables
    return {key: np.array(value) for key, value in found.items()} | {
        f"{part} {i}": variable.numpy()
        for part, variables in parts.items()
        for i, variable in enumerate(variables)
    }


def _batches(rows):
    ends = np.cumsum(SIZES)
    return oracle.dataset(
        [
            keras.tree.map_structure(lambda a: a[end - size : end], rows)  # noqa: B023
            for size, end in zip(SIZES, ends, strict=True)
        ]
    )


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else slow(name) for name in EXAMPLES]
)
@pytest.mark.parametrize(
    ("gpus", "compiled_first"), [(3, False), (2, True)], ids=["before", "after"]
)
def test_it_equals_one_device(name, gpus, compiled_first):
    apart = oracle.differences(_run(name, gpus, compiled_first), _one_device(name))
    where = max(apart, key=apart.get)
    assert apart[where] <= LIMIT, (where, apart[where])
